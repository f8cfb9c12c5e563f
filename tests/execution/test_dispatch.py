"""Windows of iterations: where they end, and how far a program runs ahead of them."""

import time

import numpy as np
import pytest

from rollmill.execution import Pauses, dispatch_ahead


class Counting:
    """Stands for a compiled program: its state is the number of iterations done."""

    metric_names = ("count",)

    def __init__(self, *, reuses_state=False):
        self.reuses_state, self.done = reuses_state, 0

    def advance(self, state, count=1):
        self.done = state + count
        return self.done, np.float32([count])


def windows(program, **options):
    """The end of each window, and how many iterations had been dispatched when it was read."""
    return [
        (window.last, program.done) for window in dispatch_ahead(program, 0, first=0, **{"until": 40, **options})
    ]


def test_the_next_window_is_dispatched_before_one_is_read():
    ends = windows(Counting())
    assert ends[-1] == (40, 40)
    assert all(done > last for last, done in ends[:-1])


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
    windows(Counting(reuses_state=True), pauses=Pauses(8, lambda window: paused.append(window.after)))
    assert paused == [8, 16, 24, 32, 40]


def test_a_program_that_reuses_its_state_is_never_run_ahead():
    assert all(done == last for last, done in windows(Counting(reuses_state=True)))


def test_windows_do_not_grow_while_their_consumer_is_busy():
    counts = []
    for number, window in enumerate(dispatch_ahead(Counting(), 0, first=0, until=40, window_seconds=0.01)):
        counts.append(sum(window.counts))
        if number % 2 == 0:
            time.sleep(0.02)  # the next window is there at once
    assert set(counts) == {1}


def test_windows_grow_until_they_take_long_enough():
    counts = [sum(window.counts) for window in dispatch_ahead(Counting(), 0, first=0, until=400)]
    assert counts[:4] == [1, 1, 2, 4]
    assert max(counts) > 64
