"""The persistent JAX compilation cache, from which programs of earlier processes are loaded instead
of compiled.
"""

import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import jax
from jax._src.config import persistent_cache_min_compile_time_secs  # holds for one thread, unlike the public one

from rollmill.core.installation import cache_root

UNREADABLE_ENTRY = "Error reading persistent compilation cache entry"
"""Beginning of the warning that JAX prints for a cache entry that it cannot read."""
WITH_NAMES = "jax_compilation_cache_include_metadata_in_key"
"""JAX setting that makes names part of a cached program's key. In capitals, it is an environment variable."""


def cache_directory() -> Path:
    """Returns the compilation cache folder: `$ROLLMILL_CACHE_DIR`, or `rollmill/` in the user's cache folder.

    The folder has one subfolder for each JAX version.
    """
    return cache_root() / f"jax-{jax.__version__}"


def enable_compilation_cache() -> None:
    """Enables the JAX compilation cache in Rollmill's cache folder, unless the user has configured another folder.

    Processes that run at the same time share the folder. If JAX cannot read an entry, because another process is
    writing it or was killed while writing, it compiles the program again. The warning about this is suppressed.
    """
    warnings.filterwarnings("ignore", UNREADABLE_ENTRY, UserWarning)
    if os.environ.get(WITH_NAMES.upper()):
        jax.config.update(WITH_NAMES, True)
    if jax.config.values.get("jax_compilation_cache_dir"):
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_directory()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@contextmanager
def kept_out_of_cache() -> Iterator[None]:
    """Context manager in which programs that this thread compiles are not written to the JAX cache.

    Serialising a program twice takes time, so programs that Rollmill stores itself are compiled in this context.
    A JAX cache in another folder, which the user may share with other hosts, still receives them.
    """
    is_own = jax.config.values["jax_compilation_cache_dir"] == str(cache_directory())
    with persistent_cache_min_compile_time_secs(math.inf) if is_own else nullcontext():
        yield


@contextmanager
def names_in_cache() -> Iterator[None]:
    """Makes operation names part of the key of cached programs, here and in workers started in the context.

    Without this, programs that differ only in names have the same key, and the cache may return a program with the
    names of another program.
    """
    variable = WITH_NAMES.upper()
    before, configured = os.environ.get(variable), jax.config.values[WITH_NAMES]
    os.environ[variable] = "1"
    jax.config.update(WITH_NAMES, True)
    try:
        yield
    finally:
        jax.config.update(WITH_NAMES, configured)
        del os.environ[variable]
        os.environ.update({} if before is None else {variable: before})
