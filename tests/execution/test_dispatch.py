"""Windows of iterations: where they end, and how far a program runs ahead of them."""

import numpy as np
import pytest

from rollmill.execution import dispatch_ahead


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


@pytest.mark.parametrize("pauses", [(10,), (6, 10)])
def test_no_window_is_dispatched_before_one_is_read_that_ends_at_a_pause(pauses):
    for last, done in windows(Counting(), pauses=pauses):
        assert (done == last) == any(last % pause == 0 for pause in pauses)


def test_a_program_that_reuses_its_state_is_never_run_ahead():
    assert all(done == last for last, done in windows(Counting(reuses_state=True)))
