"""Workers on the hosts of a job: processes of other ranks start them, vanish and come again."""

import contextlib
import threading
import time

import pytest
import worker_jobs
from worker_jobs import all_events, job, until

from rollmill.channels.transport.addresses import listen
from rollmill.core.membership import Membership
from rollmill.processes.events import Finished, Lost, Received, Started
from rollmill.processes.hosts import agent
from rollmill.processes.hosts.agent import NobodyCame, serve_host
from rollmill.processes.hosts.launcher import HostsLauncher
from rollmill.processes.supervisor import Supervisor

TOKEN = b"t" * 32


@pytest.fixture(autouse=True)
def in_threads(monkeypatch):
    """Agents of these tests are threads, which cannot change how signals are handled."""
    monkeypatch.setattr(agent, "leave_signals_to_coordinator", lambda: None)
    monkeypatch.setattr(agent, "AGAIN_SECONDS", 0.1)


@pytest.fixture
def first():
    sock, address = listen("tcp:127.0.0.1:0")
    sock.close()
    return Membership(0, 2, "127.0.0.1", int(address.rpartition(":")[2]), TOKEN)


def host(first, told=None):
    """Starts the process of the second host, and returns what it returned in the end."""
    ended = []
    show = (told if told is not None else []).append
    thread = threading.Thread(target=lambda: ended.append(serve_host(first._replace(rank=1), show)), daemon=True)
    thread.start()
    return thread, ended


@contextlib.contextmanager
def supervised(first, *jobs, told=None):
    show = (told if told is not None else []).append
    with (
        HostsLauncher(first, show) as launcher,
        Supervisor(jobs, launcher=launcher, display=show, address="tcp:127.0.0.1:0") as workers,
    ):
        workers.start()
        yield workers, launcher


def test_each_host_starts_its_own_worker_and_ends_with_the_training(first, capfd):
    thread, ended = host(first)  # before the first one listens
    with supervised(first, *(job(worker_jobs.greet, rank) for rank in (0, 1))) as (workers, _):
        events = all_events(workers)
    thread.join(60)
    assert ended == [0]
    assert {event.job.name for event in events if isinstance(event, Received)} == {"actor/0", "actor/1"}
    assert sum(isinstance(event, Finished) for event in events) == 2
    assert "[actor/1] hello from actor/1" in capfd.readouterr().err


def test_a_host_that_vanishes_and_comes_back_works_again(first):
    told = []
    with supervised(first, job(worker_jobs.waits, 1), told=told) as (workers, launcher):
        host(first)
        until(workers, Started)
        launcher._hosts[1].close()  # as if the link was cut; the process of that host looks for it again
        lost = until(workers, Lost)
        assert "can no longer be reached" in str(lost)
        workers.replace("actor/1")
        assert until(workers, Started).job.attempt == 1
    assert sum("rank 1 is 127.0.0.1" in line for line in told) == 2


def test_a_host_that_does_not_come_is_told_of(first, monkeypatch):
    monkeypatch.setattr("rollmill.processes.hosts.launcher.WAITING_SECONDS", 0.1)
    told = []
    with supervised(first, job(worker_jobs.greet, 1), told=told) as (workers, _):
        deadline = time.monotonic() + 60
        while not any("has been waiting" in line for line in told) and time.monotonic() < deadline:
            workers.events(0.1)
    assert any("has been waiting" in line and "rank 1" in line for line in told)
    monkeypatch.setattr(agent, "PATIENCE_SECONDS", 0.3)
    with pytest.raises(NobodyCame):
        serve_host(first._replace(rank=1), told.append)
