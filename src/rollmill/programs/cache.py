"""The persistent compilation cache, which lets compiled programs start at once."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from rollmill.core.installation import cache_root

UNREADABLE_ENTRY = "Error reading persistent compilation cache entry"
"""How JAX's warning begins."""
WITH_NAMES = "jax_compilation_cache_include_metadata_in_key"
"""JAX's setting by which programs that differ in names alone are different ones, and in capitals its variable."""


def cache_directory() -> Path:
    """`$ROLLMILL_CACHE_DIR`, or `rollmill/` in the user's cache folder. There is one folder for each JAX
    version.
    """
    return cache_root() / f"jax-{jax.__version__}"


def enable_compilation_cache() -> None:
    """Enables the cache, unless the user has configured another in JAX.

    Workers and instances that start together share it. An entry that is half written, by a running or a killed
    process, cannot be read. JAX then compiles the program again, which deserves no warning.
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
def names_in_cache() -> Iterator[None]:
    """Makes names part of a cached program's key in this process and in workers that start in the context.

    Otherwise the cache takes programs that differ in names only for the same, and returns one with the names that
    it was compiled with.
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
