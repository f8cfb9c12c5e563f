"""How long building and compiling takes, put together over workers."""

import threading
import time

import jax
import jax.numpy as jnp
import pytest

from rollmill.programs.compile_clock import CompileClock, CompileTimes, union
from rollmill.workers.coordination import starts
from rollmill.workers.coordination.starts import StartUp


def test_a_union_joins_what_overlaps_or_lies_close():
    assert list(union([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0), (1.0, 1.5)])) == [(0.0, 2.0), (3.0, 4.0)]
    assert list(union([(0.0, 1.0), (1.04, 2.0), (2.2, 3.0)], close=0.05)) == [(0.0, 2.0), (2.2, 3.0)]


def test_a_clock_hears_what_its_own_thread_compiles():
    def heard(function):
        with CompileClock() as clock:
            thread = threading.Thread(target=function)
            thread.start()
            thread.join()
            (function if own else lambda: None)()
            return clock.report(time.monotonic()).compiled

    def compiles():
        jax.jit(lambda x: jnp.sin(x) * number)(jnp.float32(1))

    own, number = False, 3.0
    assert heard(compiles) == []
    own, number = True, 4.0
    intervals = heard(compiles)
    assert intervals and all(begin > end >= 0 for begin, end in intervals)
    assert heard(lambda: None) == []


def test_compiling_side_by_side_counts_once_and_building_before_it_is_part_of_the_start(monkeypatch):
    monkeypatch.setattr(starts.time, "monotonic", lambda: 100.0)
    together = StartUp(began=80.0)
    # One worker built until 85 and compiled from 86 to 90; another built until 88 and compiled from 89 to 95.
    first = together.add(CompileTimes([(14.0, 10.0)], 15.0))
    assert (first.compiling, first.total) == pytest.approx((4.0, 5.0 + 4.0))
    second = together.add(CompileTimes([(11.0, 5.0)], 12.0))
    assert (second.compiling, second.total) == pytest.approx((9.0, 15.0))
