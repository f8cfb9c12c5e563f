"""The persistent compilation cache: a program that was compiled once starts at once the next time."""

import warnings
from pathlib import Path

import jax

from rollmill.core.installation import cache_root

UNREADABLE_ENTRY = "Error reading persistent compilation cache entry"
"""How JAX's warning begins."""


def cache_directory() -> Path:
    """`$ROLLMILL_CACHE_DIR`, or `rollmill/` in the user's cache folder; one folder a JAX version."""
    return cache_root() / f"jax-{jax.__version__}"


def enable_compilation_cache() -> None:
    """Turns the cache on, unless the user has chosen another one through JAX's own setting.

    Workers and instances that start together share it. What one of them has half written, or was killed while it
    wrote, another cannot read; JAX then compiles the program once more, which is nothing to warn of.
    """
    warnings.filterwarnings("ignore", UNREADABLE_ENTRY, UserWarning)
    if jax.config.values.get("jax_compilation_cache_dir"):
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_directory()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
