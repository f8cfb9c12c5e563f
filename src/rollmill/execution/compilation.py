"""The persistent compilation cache: a program that was compiled once starts at once the next time."""

import os
from pathlib import Path

import jax

#: Bytes; what was used longest ago makes room. A bounded cache is also one that JAX locks (by `filelock`):
#: processes that start together, as workers and instances do, never read what another has half written.
LARGEST_CACHE = 8 * 2**30


def cache_directory() -> Path:
    """`$ROLLMILL_CACHE_DIR`, or `rollmill/` in the user's cache folder; one folder a JAX version."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    root = Path(os.environ.get("ROLLMILL_CACHE_DIR", cache_home / "rollmill"))
    return root / f"jax-{jax.__version__}"


def enable_compilation_cache() -> None:
    """Turns the cache on, unless the user has chosen another one through JAX's own setting."""
    if jax.config.values.get("jax_compilation_cache_dir"):
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_directory()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_compilation_cache_max_size", LARGEST_CACHE)
