"""Searches for fast kernels: what compiles in the background ends with them."""

import contextlib
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import pytest

from rollmill.fusion import Search, Tuned
from rollmill.fusion.tune import timing
from rollmill.programs.tuning import Tuner


@contextlib.contextmanager
def compiling_for_an_hour(processes):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    processes.append(process)
    try:
        yield process.wait
    finally:
        process.kill()
        process.wait()


def search_in(folder, compile_ahead, traced=lambda: None):
    def fused(launch):
        def function(x):
            traced()
            return x * launch[0]

        return function

    shapes = [jax.ShapeDtypeStruct((8,), jnp.float32)]
    return Search(folder / "launch.json", [(1,), (2,)], fused, lambda x: x, shapes, compile_ahead)


def no_wait():
    return contextlib.nullcontext(lambda: None)


def test_a_search_that_is_interrupted_ends_its_processes_and_compiles_nothing_more(tmp_path):
    processes, traced = [], []
    search = search_in(tmp_path, lambda: compiling_for_an_hour(processes), lambda: traced.append(1))
    with pytest.raises(KeyboardInterrupt), Tuner(jax.devices()[0]) as tuner:
        tuner.start(search, lambda: lambda: [jnp.ones(8)])
        raise KeyboardInterrupt
    assert [process.poll() is not None for process in processes] == [True]
    for thread in threading.enumerate():
        if thread.name.startswith("rollmill-compile"):
            thread.join(30)
            assert not thread.is_alive()
    assert not traced and not search.file.exists()


def test_candidates_are_timed_once_and_their_result_is_stored(tmp_path):
    search, prepared = search_in(tmp_path, no_wait), []

    def prepare():
        prepared.append(1)
        return lambda: [jnp.ones(8)]

    for is_stored in (False, True):
        with Tuner(jax.devices()[0]) as tuner:
            tuned = tuner.start(search, prepare)()
            assert isinstance(tuned, Tuned) and tuned.launch in search.launches
            assert (tuner.seconds == 0) == is_stored
    assert prepared == [1]


@pytest.mark.parametrize(("times", "chosen"), [((1.0, 0.98), (1,)), ((0.98, 1.0), (1,)), ((1.0, 0.9), (2,))])
def test_of_launches_that_are_as_fast_the_first_is_taken(times, chosen, tmp_path, monkeypatch):
    """So that searches on the same machine choose the same."""
    search = search_in(tmp_path, no_wait)
    monkeypatch.setattr(timing, "seconds_of_call", lambda function, arguments: function)
    candidates = [lambda time=time: time for time in (*times, 2.0)]
    assert timing.fastest(search, candidates, ()) == Tuned(chosen, times[chosen[0] - 1], 2.0)
