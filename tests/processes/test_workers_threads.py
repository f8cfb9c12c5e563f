"""The same functions as threads of one process."""

import re
import threading
import time

import numpy as np
import pytest
import worker_jobs
from worker_jobs import all_events, assert_answered, assert_newest_and_oldest, job, until

from rollmill.processes.events import Finished, Hung, Received, Started
from rollmill.processes.jobs import Job
from rollmill.processes.supervision import ALL
from rollmill.processes.threads import ThreadSupervisor, WorkerFailed
from wordings import raises


@pytest.fixture
def supervise():
    supervisors = []

    def start(*jobs, **options):
        supervisors.append(ThreadSupervisor(jobs, **options))
        supervisors[-1].start()
        return supervisors[-1]

    yield start
    for supervisor in supervisors:
        supervisor.close(grace_seconds=2.0)


def test_a_thread_starts_speaks_and_finishes_in_order(supervise):
    todo = job(worker_jobs.greet, settings={"sizes": (1, 2)})
    events = all_events(supervise(todo))
    assert [type(event) for event in events] == [Started, Received, Finished]
    assert events[1].message.fields["settings"] == {"sizes": [1, 2]}  # as a process would see them


def test_messages_keep_their_order(supervise):
    events = all_events(supervise(job(worker_jobs.sends_many, settings={"count": 50})))
    numbers = [event.message.fields["number"] for event in events if isinstance(event, Received)]
    assert numbers == list(range(50))


def test_arrays_are_never_shared(supervise):
    supervisor = supervise(job(worker_jobs.echo))
    array = np.zeros(3)
    supervisor.send(ALL, "numbers", {}, {"x": array})
    array += 1
    np.testing.assert_array_equal(until(supervisor, "back").arrays["x"], np.zeros(3))


def test_latest_and_wait_are_those_of_processes(supervise):
    assert_newest_and_oldest(supervise(job(worker_jobs.last_of_many)))


def test_questions_are_answered_whatever_the_main_thread_does(supervise):
    assert_answered(supervise(job(worker_jobs.answers_while_busy, settings={"questions": 2})))


def test_an_error_in_one_thread_stops_all_and_is_raised_with_its_name(supervise):
    supervisor = supervise(job(worker_jobs.obeys), job(worker_jobs.waits, 1), job(worker_jobs.fails, 2))
    with pytest.raises(
        WorkerFailed, match=r"actor/2 \(group actor, replica 2\) raised ValueError: no such"
    ) as caught:
        all_events(supervisor)
    assert isinstance(caught.value.__cause__, ValueError)
    assert re.search(r"worker_jobs\.py:\d+: raise ValueError", str(caught.value))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("actor/")]


def test_a_missing_function_is_raised_too(supervise):
    with pytest.raises(WorkerFailed, match="has no function nowhere"):
        all_events(supervise(Job("actor/0", "actor", 0, "worker_jobs:nowhere")))


def test_a_thread_that_waits_without_progress_is_hung(supervise):
    begin = time.monotonic()
    hung = until(supervise(job(worker_jobs.sleeps_briefly), job(worker_jobs.waits, 1), hang_seconds=0.3), Hung)
    assert hung.job.name == "actor/0"
    assert 0.3 < hung.seconds <= time.monotonic() - begin
    assert re.search(r"waiting for weights; .*worker_jobs\.py:\d+ in sleeps_briefly: time\.sleep", hung.where)


def test_stopping_ends_a_thread_without_an_event_and_it_can_be_started_anew(supervise):
    supervisor = supervise(job(worker_jobs.obeys), job(worker_jobs.obeys, 1))
    with raises("worker-is-thread-nobody-can"):
        supervisor.replace("actor/0")
    supervisor.stop("actor/0")
    assert {event.job.name for event in supervisor.events(0)} <= {"actor/1"}
    assert supervisor.replace("actor/0").attempt == 1
    assert until(supervisor, Started).job.attempt == 1
    supervisor.stop(ALL)
    assert supervisor.events() == []


def test_threads_have_no_environment_of_their_own():
    with raises("job-sets-and-threads-share", "'actor/0'", "A"):
        ThreadSupervisor([job(worker_jobs.obeys, environment={"A": "1"})])
    with raises("jobs-have-only-names-give", "2", "1"):
        ThreadSupervisor([job(worker_jobs.obeys), job(worker_jobs.obeys)])
