"""Starting Ray on a machine that is too slow for Ray's own limits."""

import os
import types

import pytest

from rollmill.processes.cluster import joining
from wordings import raises


class FakeRay(types.SimpleNamespace):
    """Fails to start as often as it is told, each time as late as it is told."""

    def __init__(self, clock, failures, seconds):
        super().__init__(clock=clock, failures=failures, seconds=seconds, started=0, shut_down=0)

    def init(self, **_):
        self.clock.now += self.seconds
        if self.failures:
            self.failures -= 1
            raise Exception("The current node timed out during startup.")
        self.started += 1

    def shutdown(self):
        self.shut_down += 1


@pytest.fixture
def clock(monkeypatch):
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(joining, "time", types.SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_a_start_that_was_too_slow_is_tried_again(clock):
    ray = FakeRay(clock, failures=2, seconds=30.0)
    joining._start_alone(ray, 2, "mark")
    assert (ray.started, ray.shut_down) == (1, 2)


@pytest.mark.parametrize(("theirs", "niceness"), [(None, "0"), ("7", "7")])
def test_workers_do_not_give_way_to_everything_else_unless_the_user_says_so(clock, monkeypatch, theirs, niceness):
    monkeypatch.setenv(joining.NICENESS, theirs or "to be put back")
    if theirs is None:
        monkeypatch.delenv(joining.NICENESS)
    joining._start_alone(FakeRay(clock, failures=0, seconds=1.0), 2, "mark")
    assert os.environ[joining.NICENESS] == niceness


@pytest.mark.parametrize(("seconds", "starts"), [(30.0, joining.STARTS), (1.0, 1)])
def test_one_that_fails_at_once_or_each_time_is_an_error(clock, seconds, starts):
    ray = FakeRay(clock, failures=100, seconds=seconds)
    with raises("cluster-ray-ray-cannot-be", "timed out during startup."):
        joining._start_alone(ray, 2, "mark")
    assert 100 - ray.failures == starts and ray.started == 0
