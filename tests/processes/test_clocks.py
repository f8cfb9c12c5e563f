"""The clocks of workers on other hosts: measured at the connection, and used for the windows of profiles."""

import contextlib
import threading
import time
from types import SimpleNamespace

import pytest
import worker_jobs
from worker_jobs import job

from rollmill.processes import clocks, worker
from rollmill.processes.clocks import ROUND_TRIPS, Clock, ClockWatch
from rollmill.processes.events import Started
from rollmill.processes.launchers import Exit
from rollmill.processes.local_launcher import LocalLauncher
from rollmill.processes.supervisor import Supervisor
from rollmill.workers.coordination.coordinator import Coordinator
from wordings import raises

AHEAD = 100_000 * 10**9
"""Nanoseconds: a host that was started a day before the other."""


@pytest.fixture
def at(monkeypatch):
    """Sets this process's clocks."""
    now = SimpleNamespace(monotonic=0, wall=0)
    fake = SimpleNamespace(monotonic_ns=lambda: now.monotonic, time_ns=lambda: now.wall)
    monkeypatch.setattr(clocks, "time", fake)

    def set_clocks(monotonic, wall=0):
        now.monotonic, now.wall = monotonic, wall

    return set_clocks


def test_of_several_round_trips_the_shortest_counts(at):
    """Asked at 1,000 and answered at 1,400, the worker's clock belongs to 1,200: it is AHEAD + 30 there."""
    watch = ClockWatch()
    at(0)
    question = watch.begin()
    assert watch.begin() is None  # one series at a time
    trips = [4_000] * (ROUND_TRIPS - 2) + [400, 9_000]
    for trip in trips:
        asked = 1_000 if trip == 400 else 0
        at(asked + trip, wall=10_000 + asked + trip)
        monotonic, wall = asked + trip // 2 + AHEAD + 30, 10_000 + asked + trip // 2 + 50
        question = watch.take({"asked": asked, "monotonic": monotonic, "wall": wall})
    assert question is None
    assert watch.clock == Clock(AHEAD + 30, 0, 400)  # 50 are within what a trip of 400 can tell
    assert watch.begin() is not None


def test_clocks_that_cannot_be_told_apart_are_one(at):
    watch = ClockWatch()
    at(0)
    watch.begin()
    for _ in range(ROUND_TRIPS):
        at(300, wall=300)
        watch.take({"asked": 0, "monotonic": 450, "wall": -149})
    assert watch.clock == Clock(0, 0, 300)


@pytest.mark.parametrize("fields", [{}, {"asked": "x", "monotonic": 1, "wall": 1}, {"asked": 1}])
def test_an_answer_without_times_is_damaged(fields):
    with raises("answer-to-question-for-workers"):
        ClockWatch().take(fields)


def test_the_clock_of_a_worker_that_comes_by_tcp_is_measured_and_again_when_asked(monkeypatch):
    answer = clocks.answer

    def later(question):
        told = answer(question)
        told.fields["monotonic"] += AHEAD
        return told

    monkeypatch.setattr(worker.clocks, "answer", later)
    with _in_this_process() as (launcher, supervisor):
        supervisor.start()
        assert _until(lambda: supervisor.clock("actor/0").ahead_ns)
        first = supervisor.clock("actor/0")
        assert abs(first.ahead_ns - AHEAD) <= first.round_trip_ns < 10**9
        assert first.wall_ahead_ns == 0
        monkeypatch.setattr(worker.clocks, "answer", answer)
        supervisor.measure_clocks()
        assert _until(lambda: supervisor.clock("actor/0").ahead_ns == 0)
        launcher.end.set()


def test_workers_of_this_host_have_its_clock():
    with (
        LocalLauncher() as launcher,
        Supervisor([job(worker_jobs.obeys)], launcher=launcher, display=lambda line: None) as supervisor,
    ):
        supervisor.start()
        worker_jobs.until(supervisor, Started)
        assert supervisor.clock("actor/0") == Clock()


def test_a_window_is_asked_for_on_each_worker_s_own_clock():
    sent = []
    near, far = job(worker_jobs.obeys), job(worker_jobs.obeys, 1)
    workers = SimpleNamespace(
        jobs=(near, far),
        clock=lambda each: Clock(AHEAD) if each is far else Clock(),
        send=lambda to, kind, fields, arrays: sent.append((to.name, kind, fields)),
    )
    coordinator = SimpleNamespace(_workers=workers)
    Coordinator.stop_recording(coordinator, 3, 1_000, 5_000)
    assert sent == [
        ("actor/0", "StopRecording", {"number": 3, "begin": 1_000, "end": 5_000}),
        ("actor/1", "StopRecording", {"number": 3, "begin": 1_000 + AHEAD, "end": 5_000 + AHEAD}),
    ]


class ThreadLauncher:
    """Serves a job in a thread of this process, through TCP."""

    def __init__(self):
        self.end = threading.Event()

    def start(self, job, address, token):
        def serve():
            peer, _ = worker.connect_as(address, token, job)
            control = worker.SocketControl(peer)
            control._hung_up = True  # this process goes on when its supervisor is gone
            threading.Thread(target=control.listen, daemon=True).start()
            self.end.wait(30.0)
            control.hang_up()  # tells the supervisor that nothing more comes
            peer.close()

        threading.Thread(target=serve, daemon=True).start()
        return job.name

    def output(self, handle):
        return None

    def exit(self, handle):
        return Exit(0) if self.end.is_set() else None

    def kill(self, handle, *, at_once=True):
        self.end.set()

    abandon = kill

    def leaving(self, handle):
        return ""

    def condition(self, handle):
        return ""

    def close(self):
        pass


@contextlib.contextmanager
def _in_this_process():
    launcher, jobs = ThreadLauncher(), [job(worker_jobs.obeys)]
    address = "tcp:127.0.0.1:0"
    with Supervisor(jobs, launcher=launcher, address=address, display=lambda line: None) as supervisor:
        yield launcher, supervisor


def _until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()
