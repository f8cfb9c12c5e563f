"""The compilation cache that workers of a host share."""

import subprocess
import sys

HALF_WRITTEN = """
import os
import warnings

import jax

from rollmill.execution import enable_compilation_cache
from rollmill.execution.program.cache import cache_directory

warnings.simplefilter("error")
enable_compilation_cache()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


@jax.jit
def doubled(x):
    return 2 * x


assert doubled(21) == 42
entries = list(cache_directory().glob("*-cache"))
assert entries
for entry in entries:
    os.truncate(entry, entry.stat().st_size // 2)
jax.clear_caches()
assert doubled(21) == 42
"""


def test_an_entry_that_is_half_written_is_compiled_once_more(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    subprocess.run([sys.executable, "-c", HALF_WRITTEN], check=True, timeout=120)
