"""Workers as processes: what becomes of them, and what passes between them and their coordinator."""

import os
import re
import signal
import time

import numpy as np
import pytest
import worker_jobs
from worker_jobs import all_events, assert_answered, assert_newest_and_oldest, gone_within, job, until

from busy_machine import scaled
from rollmill.processes.events import Finished, Hung, Lost, Received, Started
from rollmill.processes.handshake import connect_as
from rollmill.processes.jobs import Job
from rollmill.processes.local_launcher import LocalLauncher
from rollmill.processes.supervision import ALL
from rollmill.processes.supervisor import Supervisor
from wordings import raises


@pytest.fixture(scope="module")
def launcher():
    with pytest.MonkeyPatch.context() as patch, LocalLauncher() as launcher:
        patch.delenv("PYTHONUNBUFFERED", raising=False)  # workers are told to hand out each line at once
        yield launcher


@pytest.fixture
def supervise(launcher):
    """Starts a supervisor of some jobs, which is closed at the end."""
    supervisors = []

    def start(*jobs, **options):
        options = {"launcher": launcher, "display": lambda line: None, "heartbeat_seconds": 0.2} | options
        supervisors.append(Supervisor(jobs, **options))
        supervisors[-1].start()
        return supervisors[-1]

    yield start
    for supervisor in supervisors:
        supervisor.close(grace_seconds=0.0)


def test_a_worker_starts_speaks_and_finishes_in_order(supervise):
    todo = job(worker_jobs.greet, settings={"rate": 0.5})
    events = all_events(supervise(todo))
    assert [type(event) for event in events] == [Started, Received, Finished]
    assert {event.job for event in events} == {todo}
    fields = events[1].message.fields
    assert (fields["attempt"], fields["settings"]) == (0, {"rate": 0.5})
    assert gone_within([fields["pid"]], 0.0)


def test_workers_are_forked_off_a_process_with_one_thread(supervise, launcher):
    until(supervise(job(worker_jobs.obeys)), Started)
    (server,) = launcher.servers
    assert server.ready == {"ready": True, "forks": True, "threads": 1}
    assert len(os.listdir(f"/proc/{server.pid}/task")) == 1


def test_messages_keep_their_order_and_none_is_lost(supervise):
    jobs = [job(worker_jobs.sends_many, replica, settings={"count": 300}) for replica in range(2)]
    events = all_events(supervise(*jobs))
    for todo in jobs:
        messages = [event.message for event in events if isinstance(event, Received) and event.job == todo]
        assert [message.fields["number"] for message in messages] == list(range(300))
        assert all((message.arrays["array"] == message.fields["number"]).all() for message in messages)


def test_an_error_in_the_function_is_told_with_its_line_and_traceback(supervise):
    lost = until(supervise(job(worker_jobs.fails)), Lost)
    assert lost.raised
    assert lost.exit_status == 1
    assert re.search(r"ValueError: no such reward \(.*worker_jobs\.py:\d+: raise ValueError", lost.reason)
    assert "Traceback" in lost.details


def test_a_crash_is_told_with_its_line(supervise):
    lost = until(supervise(job(worker_jobs.crashes)), Lost)
    assert lost.exit_status == -signal.SIGSEGV
    assert re.search(r'killed by SIGSEGV \(File ".*worker_jobs.py", line \d+ in crashes\)', lost.reason)


def test_a_missing_function_is_told(supervise):
    lost = until(supervise(Job("actor/0", "actor", 0, "worker_jobs:nowhere")), Lost)
    assert lost.raised
    assert "module worker_jobs has no function nowhere" in lost.reason


def test_a_process_that_exits_is_lost_with_its_last_lines(supervise):
    lost = until(supervise(job(worker_jobs.dies)), Lost)
    assert (lost.exit_status, lost.raised) == (7, False)
    assert "exit code 7" in lost.reason
    assert "last words" in lost.details


def test_a_killed_worker_is_lost_within_a_second_and_can_be_replaced(supervise):
    supervisor = supervise(job(worker_jobs.has_children), job(worker_jobs.obeys, 1))
    children = until(supervisor, "children").fields
    killed_at = time.monotonic()
    os.kill(children["pid"], signal.SIGKILL)
    lost = until(supervisor, Lost)
    assert time.monotonic() - killed_at < scaled(1.0)
    assert (lost.job.name, lost.exit_status) == ("actor/0", -signal.SIGKILL)
    assert "SIGKILL" in lost.reason
    assert gone_within(children["pids"], 0.0)

    again = supervisor.replace(lost.job)
    assert again.attempt == 1
    assert supervisor.jobs == (again, job(worker_jobs.obeys, 1))
    started = until(supervisor, Started)
    while started.job != again:  # the other worker's start may come late
        started = until(supervisor, Started)
    assert started.seconds < scaled(3.0)


def test_replacing_a_running_worker_ends_it_first(supervise):
    supervisor = supervise(job(worker_jobs.has_children))
    first = until(supervisor, "children").fields
    supervisor.replace("actor/0")
    assert gone_within([first["pid"], *first["pids"]], 0.0)
    second = until(supervisor, "children").fields
    assert second["pid"] != first["pid"]


def test_a_stopped_process_is_hung_and_names_its_line(supervise):
    supervisor = supervise(job(worker_jobs.obeys))
    until(supervisor, Started)
    time.sleep(0.6)  # until it has been seen at work
    (worker,) = supervisor._workers.values()
    os.kill(worker.handle.pid, signal.SIGSTOP)
    hung = until(supervisor, Hung)
    assert 1.0 < hung.seconds < scaled(4.0)
    assert re.search(r"stopped by a signal; last seen at: working; .*worker_jobs\.py:\d+ in obeys: ", hung.where)
    assert supervisor.events(0.5) == []  # told once


@pytest.mark.parametrize(
    ("function", "where"),
    [
        (worker_jobs.sleeps, r"waiting for weights; .*worker_jobs\.py:\d+ in sleeps: time\.sleep\(1000\)"),
        (worker_jobs.locks, r"running; .*worker_jobs\.py:\d+ in locks: lock\.acquire\(\)  # it deadlocks here"),
    ],
)
def test_a_worker_without_progress_is_hung_and_names_its_line(supervise, function, where):
    limit = scaled(0.5)
    hung = until(supervise(job(function), hang_seconds=limit), Hung)
    assert limit < hung.seconds < limit + scaled(3.0)
    assert re.search(where, hung.where)


def test_a_call_that_holds_the_interpreter_is_hung_and_names_its_line(supervise):
    hung = until(supervise(job(worker_jobs.holds_the_interpreter), hang_seconds=3.0), Hung)
    assert hung.seconds > 3.0
    assert "prevents all of its threads from running" in hung.where
    assert re.search(r'worker_jobs\.py", line \d+ in holds_the_interpreter', hung.where)


def test_a_call_that_holds_the_interpreter_for_a_while_is_no_hang(supervise):
    """However many heartbeats it takes: a simulator may load its assets in C."""
    supervisor = supervise(job(worker_jobs.holds_the_interpreter_briefly), heartbeat_seconds=0.1)
    events = all_events(supervisor)
    assert [type(event) for event in events] == [Started, Received, Finished]
    assert events[1].message.fields["seconds"] > 20 * 0.1


@pytest.mark.parametrize("function", [worker_jobs.expects, worker_jobs.waits, worker_jobs.obeys])
def test_what_is_long_but_declared_idle_or_busy_is_not_hung(supervise, function):
    limit = scaled(0.3)
    supervisor = supervise(job(function), hang_seconds=limit, heartbeat_seconds=1.3 * limit)
    until(supervisor, Started)
    assert supervisor.events(4 * limit) == []


def test_a_worker_that_does_not_start_in_time_is_lost(supervise):
    lost = until(supervise(job(worker_jobs.greet), start_seconds=0.0), Lost)
    assert "did not start within 0 s" in lost.reason


def test_large_arrays_go_both_ways_and_keep_their_types(supervise):
    import ml_dtypes

    arrays = {
        "large": np.random.default_rng(0).standard_normal((5, 1_310_720)),  # 50 MiB
        "half": np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3),
        "scalar": np.array(3.5, np.float32),
        "none": np.empty((0, 4), np.int8),
        "strided": np.arange(12).reshape(3, 4).T,
    }
    supervisor = supervise(job(worker_jobs.echo))
    supervisor.send("actor/0", "numbers", {"unit": "m", "limit": float("inf")}, arrays)
    back = until(supervisor, "back")
    assert back.fields == {"unit": "m", "limit": float("inf")}
    for name, array in arrays.items():
        assert (back.arrays[name].dtype, back.arrays[name].shape) == (np.asarray(array).dtype, np.shape(array))
        np.testing.assert_array_equal(back.arrays[name], array)


def test_latest_takes_the_newest_and_wait_the_oldest(supervise):
    assert_newest_and_oldest(supervise(job(worker_jobs.last_of_many)))


def test_questions_are_answered_whatever_the_main_thread_does(supervise):
    assert_answered(supervise(job(worker_jobs.answers_while_busy, settings={"questions": 2})))


def test_workers_come_over_tcp_too_and_only_once(supervise):
    supervisor = supervise(job(worker_jobs.obeys), address="tcp:127.0.0.1:0")
    until(supervisor, Started)
    with raises("coordinator-refused-this-worker", "it is already connected"):
        connect_as(supervisor.address, supervisor._token, job(worker_jobs.obeys))


def test_messages_that_cannot_be_sent_are_refused_at_once(supervise):
    supervisor = supervise(job(worker_jobs.waits))
    with raises("message-has-field-json-does"):
        supervisor.send(ALL, "numbers", {"value": np.float32(1)})
    with raises("array-is-messages-carry-numbers", "'names'", "<U1"):
        supervisor.send(ALL, "numbers", {}, {"names": np.array(["a"])})
    with raises("message-has-kind-kinds-start"):
        supervisor.send(ALL, ".stop")
    with raises("unknown-name", "worker", "or group 'actr'", "Did you mean actor"):
        supervisor.send("actr", "numbers")
    with raises("unknown-name", "worker", "'actor'"):
        supervisor.replace("actor")


def test_stopping_ends_the_obedient_and_the_deaf_without_an_event(supervise):
    supervisor = supervise(job(worker_jobs.obeys), job(worker_jobs.refuses_to_stop, 1))
    pid = until(supervisor, "deaf").fields["pid"]
    supervisor.stop("actor/0", grace_seconds=10.0)
    assert supervisor.events(0.2) == []
    begin = time.monotonic()
    supervisor.stop("actor/1", grace_seconds=0.2)
    assert 2.0 < time.monotonic() - begin < scaled(4.0)  # SIGTERM had its two seconds, then came SIGKILL
    assert gone_within([pid], 0.0)
    assert supervisor.events() == []


def test_a_worker_that_sends_garbage_is_dropped(supervise):
    lost = until(supervise(job(worker_jobs.sends_garbage)), Lost)
    assert not lost.raised


def test_lines_are_marked_cleaned_and_kept(supervise, tmp_path):
    lines = []
    events = all_events(supervise(job(worker_jobs.writes), display=lines.append, log_folder=tmp_path / "workers"))
    assert isinstance(events[-1], Finished)
    text = "\n".join(lines)
    assert "[actor/0] red\n" in text
    assert "[actor/0] 100%\n" in text
    assert "[actor/0] \ufffd\ufffd\ufffdbinary\ufffd\n" in text
    assert "[actor/0] to stderr" in text
    assert "[actor/0] no newline" in text
    assert sum(line.count("x") for line in lines) == 10_000
    assert max(map(len, lines)) < 5000
    kept = (tmp_path / "workers" / "actor-0.log").read_text().splitlines()
    assert kept[0] == "--- attempt 0 ---"
    assert [f"[actor/0] {line}" for line in kept[1:]] == lines


def test_a_display_that_fails_stops_nobody(supervise):
    def display(line):
        raise BrokenPipeError

    assert isinstance(all_events(supervise(job(worker_jobs.writes), display=display))[-1], Finished)


def test_each_worker_has_its_own_environment_before_jax_starts(supervise, launcher):
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=3", "ROLLMILL_TEST": "yes"}
    wide = {"XLA_FLAGS": "", "JAX_ENABLE_X64": "1"}
    supervisor = supervise(
        job(worker_jobs.tells_environment, environment=devices),
        job(worker_jobs.tells_environment, group="learner", environment=wide),
    )
    events = all_events(supervisor)
    told = {event.job.group: event.message.fields for event in events if isinstance(event, Received)}
    assert set(told) == {"actor", "learner"}, events
    assert (told["actor"]["devices"], told["actor"]["x64"], told["actor"]["ROLLMILL_TEST"]) == (3, False, "yes")
    assert (told["learner"]["devices"], told["learner"]["x64"], told["learner"]["ROLLMILL_TEST"]) == (
        1,
        True,
        None,
    )
    assert told["actor"]["OPENBLAS_NUM_THREADS"] == "1"
    assert len(launcher.servers) == 2  # JAX reads its own variables while it is imported


def test_forked_workers_draw_different_numbers(supervise):
    jobs = [job(worker_jobs.tells_environment, replica) for replica in range(2)]
    drawn = [e.message.fields["drawn"] for e in all_events(supervise(*jobs)) if isinstance(e, Received)]
    assert drawn[0] != drawn[1]


def test_a_job_must_be_importable_and_hold_json():
    with raises("job-has-entry-write-module"):
        Job("actor/0", "actor", 0, "__main__:act")
    with raises("job-has-settings-json-does"):
        Job("actor/0", "actor", 0, "worker_jobs:greet", {"function": print})
