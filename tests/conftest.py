"""Strict JAX while testing: no silent promotion, shapes checked at public boundaries."""

import argparse
import atexit
import ctypes
import gc
import os
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from emitters import FAST_COMPILATION

# Small programs that run for a moment cost less where XLA does not optimise them, in the tests' own processes too.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count=2 {FAST_COMPILATION}")
# Hundreds of processes import Rollmill in a test run: without bytecode each of them would compile its sources.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
if "ROLLMILL_STATE_DIR" not in os.environ:  # not the user's own; one for all processes of a test run
    OWN = tempfile.mkdtemp(prefix="rollmill-tests-")
    os.environ |= {"ROLLMILL_STATE_DIR": OWN, "ROLLMILL_CACHE_DIR": f"{OWN}/cache"}
    atexit.register(shutil.rmtree, OWN, ignore_errors=True)

import jax  # noqa: E402
import pytest  # noqa: E402


def distributes_only() -> bool:
    """Whether this process runs no test, but hands all of them to others, as `pytest -n 2` does."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-n", "--numprocesses", default="0")
    return "PYTEST_XDIST_WORKER" not in os.environ and parser.parse_known_args()[0].numprocesses != "0"


def prepare() -> None:
    """Makes JAX strict, and checks types and shapes; before anything of Rollmill is imported."""
    from jaxtyping import install_import_hook

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    if os.environ.get("ROLLMILL_TYPE_CHECKS", "1") != "0":  # they double the time of tests that train
        install_import_hook("rollmill", "type_checker.check_when_called")

    from rollmill.programs.cache import enable_compilation_cache

    enable_compilation_cache()  # tests compile many of the same programs, in several processes


if not distributes_only():  # the imports take a process half a minute of checks
    prepare()


MAX_RESIDENT_BYTES = 2 * 2**30
"""Memory of one process above which programs that earlier modules compiled are let go."""


@pytest.fixture(scope="module", autouse=True)
def bounded_memory():
    """Compiled programs would add up to several gigabytes for each process of a test run."""
    yield
    if sys.platform == "linux" and resident_bytes() > MAX_RESIDENT_BYTES:
        jax.clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items):
    """Marks the parameters of a test beyond the first ones as slow, where it is `slow_beyond` them."""
    seen = Counter()
    for item in items:
        if mark := item.get_closest_marker("slow_beyond"):
            test = item.nodeid.partition("[")[0]
            seen[test] += 1
            if seen[test] > mark.args[0]:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    """Spares the garbage collector the modules and the tests, through which it would walk again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_unconfigure():
    """Lets the interpreter free the modules when it ends: nanobind would name all that is left."""
    gc.unfreeze()


def resident_bytes() -> int:
    """Memory that this process holds; Linux only."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
