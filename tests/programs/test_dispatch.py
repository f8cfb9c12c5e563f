"""Windows of iterations: where they end, and how far a program runs ahead of them."""

from types import SimpleNamespace

import numpy as np
import pytest

from rollmill.programs import dispatch
from rollmill.programs.compiled import CompiledProgram
from rollmill.programs.dispatch import FAR_TOO_LONG, Pauses, dispatch_ahead


class Counting:
    """Stands for a compiled program: its state is the number of iterations done."""

    metric_names = ("count",)

    def __init__(self, *, loses_state=False, iterations_per_call=1):
        self.loses_state = self.sums_iterations = loses_state
        self.iterations_per_call = iterations_per_call
        self.done = 0

    def to_be_overwritten(self, state):
        return state

    def advance(self, state, count=1):
        assert self.sums_iterations or count <= self.iterations_per_call
        self.done = state + count
        rows = self.iterations_per_call
        return self.done, np.float32([count]) if rows == 1 else state + np.arange(1.0, rows + 1)[:, None]

    def metrics_of_each(self, metrics, count):
        return CompiledProgram.metrics_of_each(self, metrics, count)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """A clock that shows how long metrics and their readers take; all else takes no time."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(dispatch, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def windows(program, **options):
    """The end of each window, and how many iterations had been dispatched when it was read."""
    return [
        (window.last, program.done) for window in dispatch_ahead(program, 0, first=0, **{"until": 40, **options})
    ]


def test_the_next_window_is_dispatched_before_one_is_read():
    ends = windows(Counting())
    assert ends[-1] == (40, 40)
    assert all(done > last for last, done in ends[:-1])


@pytest.mark.parametrize("strides", [(), (10,), (3, 7)])
def test_metrics_of_several_iterations_per_call_are_those_of_each(strides):
    program = Counting(iterations_per_call=4)
    ahead = list(dispatch_ahead(program, 0, first=0, until=41, strides=strides))
    assert [float(row["count"]) for window in ahead for row in window.metrics] == list(range(1, 42))
    assert all(window.counts == [1] * len(window.metrics) for window in ahead)
    assert {at for at in range(1, 42) if any(at % every == 0 for every in strides)} <= {w.last for w in ahead}


def test_windows_end_at_strides_and_are_run_ahead_of():
    ends = windows(Counting(), strides=(6, 10))
    assert {6, 10, 12, 18, 20, 24, 30, 36, 40} <= {last for last, _ in ends}
    assert all(done > last for last, done in ends[:-1])


@pytest.mark.parametrize("every", [10, 6])
def test_nothing_is_computed_while_a_program_pauses(every):
    program, paused = Counting(), []
    run = lambda window: paused.append((window.last, window.after, program.done))
    ends = windows(program, pauses=Pauses(every, run))
    assert paused == [(at, at, at) for at in range(every, 41, every)]
    assert all(done > last for last, done in ends[:-1])  # and it goes on before the window of the pause is read


def test_a_program_that_reuses_its_state_pauses_too():
    paused = []
    windows(Counting(loses_state=True), pauses=Pauses(8, lambda window: paused.append(window.after)))
    assert paused == [8, 16, 24, 32, 40]


def test_a_program_that_reuses_its_state_is_never_run_ahead():
    assert all(done == last for last, done in windows(Counting(loses_state=True)))


def test_windows_do_not_grow_while_their_consumer_is_busy(clock):
    counts = []
    for number, window in enumerate(dispatch_ahead(Counting(), 0, first=0, until=40, window_seconds=0.01)):
        counts.append(sum(window.counts))
        if number % 2 == 0:
            clock.now += 0.02  # the next window is there at once
    assert set(counts) == {1}


class Learning(Counting):
    """Its iterations take long from one of them on."""

    def __init__(self, clock, slow_from, **options):
        super().__init__(**options)
        self.clock, self.slow_from = clock, slow_from

    def advance(self, state, count=1):
        slow = max(0, state + count - max(state, self.slow_from))
        return super().advance(state, count)[0], Slow(self.clock, 0.001 * slow, count)


class Slow:
    """A metric that is there after some time."""

    def __init__(self, clock, seconds, count):
        self.clock, self.seconds, self.count = clock, seconds, count

    def __array__(self, dtype=None, copy=None):
        self.clock.now += self.seconds
        return np.float32([self.count])


def lengths(program, until, **options):
    return [sum(window.counts) for window in dispatch_ahead(program, 0, first=0, until=until, **options)]


def test_windows_grow_anew_where_iterations_take_longer(clock):
    counts = lengths(Learning(clock, 300, loses_state=True), 600, slower_from=300, window_seconds=0.005)
    begun = next(number for number in range(len(counts)) if sum(counts[:number]) == 300)
    assert counts[begun : begun + 2] == [1, 1] and max(counts[begun:]) <= 16
    assert max(counts[:begun]) >= 16


@pytest.mark.parametrize("loses_state", [True, False])
def test_windows_that_are_waited_for_too_long_make_the_next_ones_smaller(clock, loses_state):
    counts = lengths(Learning(clock, 400, loses_state=loses_state), 1600, window_seconds=0.02)
    most = FAR_TOO_LONG * 0.02 / 0.001  # iterations that take no longer
    assert max(counts) > most >= max(counts[-5:])


def test_windows_grow_until_they_take_long_enough():
    counts = [sum(window.counts) for window in dispatch_ahead(Counting(), 0, first=0, until=400)]
    assert counts[:4] == [1, 1, 2, 4]
    assert max(counts) > 64
