"""A replica's work, its waiting, and how long either may last."""

import pytest

from rollmill.processes.messages import WorkerMessage
from rollmill.workers.replica import progress
from rollmill.workers.replica.progress import MAX_LENGTHENING, ReplicaControl


class Line:
    """A `Control` that remembers what was noted."""

    def __init__(self):
        self.noted = []
        self.send = self.latest = self.check = self.answer = lambda *arguments, **more: None

    def at(self, note, *, expect=0.0):
        self.noted.append((note, expect))

    def wait(self, kind, timeout=None):
        now[0] += 1000.0
        return WorkerMessage(kind, {}, {})

    def stopping(self):
        return False


now = [0.0]


@pytest.fixture
def control(monkeypatch):
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return ReplicaControl(Line(), start_seconds=600.0)


def pass_time(seconds):
    now[0] += seconds


def expected(control):
    return control._control.noted[-1]


def test_before_the_first_iteration_is_over_work_may_take_as_long_as_a_start(control):
    control.work("collecting")
    assert expected(control) == ("collecting", 600.0)
    pass_time(50.0)  # compiles
    control.started()
    control.work("collecting")
    assert expected(control) == ("collecting", 0.0)


def test_afterwards_it_may_take_ten_times_the_longest_work(control):
    control.started()
    control.work("collecting")
    pass_time(3.0)
    control.work("learning")
    pass_time(2.0)
    control.work("collecting")
    assert expected(control) == ("collecting", MAX_LENGTHENING * 3.0)


def test_waiting_for_one_that_hangs_is_no_work(control):
    """Else the limit would grow tenfold with each hang of another replica."""
    control.started()
    control.at("waiting for weights")
    for _ in range(300):
        pass_time(0.1)
        control.stopping()
    control.wait("end")
    control.work("collecting")
    assert expected(control) == ("collecting", pytest.approx(MAX_LENGTHENING * 0.1))


def test_environments_have_the_limit_of_the_user_from_their_first_step_on(control):
    control.work("collecting")
    with control.stepping("stepping environments"):
        assert expected(control) == ("stepping environments", 0.0)
    assert expected(control) == ("collecting", 600.0)
    with control.stepping("making environments", starts=True):
        assert expected(control) == ("making environments", 600.0)


@pytest.mark.parametrize(
    ("note", "operation"),
    [
        ("waiting for space to send a trajectory", ("space to send a trajectory", "channel")),
        ("waiting for weights", ("waiting for weights", "waiting")),
        ("learning", ("learn", "python")),
    ],
)
def test_notes_belong_to_operations_of_the_profiler(note, operation):
    assert progress._operation_of(note) == operation
