"""The compilation cache that workers of a host share."""

import subprocess
import sys

READ_WHILE_WRITTEN = """
from concurrent.futures import ThreadPoolExecutor

import jax
from jax._src.compilation_cache import _get_cache

from rollmill.execution import enable_compilation_cache

enable_compilation_cache()
cache = _get_cache(jax.devices()[0].client)
entry = b"x" * 2**24


def first_read(key):
    while (read := cache.get(key)) is None:
        pass
    return len(read)


with ThreadPoolExecutor(8) as pool:
    for key in map(str, range(10)):
        reads = [pool.submit(first_read, key) for _ in range(4)]
        cache.put(key, entry)
        assert [read.result() for read in reads] == [len(entry)] * 4
"""


def test_no_worker_reads_what_another_has_half_written(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    subprocess.run([sys.executable, "-c", READ_WHILE_WRITTEN], check=True, timeout=120)
