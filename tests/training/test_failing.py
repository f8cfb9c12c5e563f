"""Trainings on environments that fail in every episode: they end by a rule, and name what failed."""

import contextlib
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import failing  # noqa: F401
import pytest

import rollmill
from rollmill.core.errors import EnvironmentFailed, NonFiniteError
from rollmill.policies.loading import load_weights
from rollmill.record.metrics import read_metrics
from rollmill.training.driver import StopOverdue, _is_stopping
from rollmill.workers.reports import LostWorker
from wordings import raises

SIZES = {"num_envs": 2, "num_steps": 8, "num_minibatches": 1, "update_epochs": 1}
TINY = rollmill.NetworkConfig(hidden_sizes=(4,))


def train(folder, kind, *, iterations=100, **options):
    env = rollmill.make(f"gymnasium:Failing-{kind}-v0")
    graph = rollmill.ppo(env, **SIZES, network=TINY, total_timesteps=16 * iterations)
    options = {"distribution": "single-learner-coarse", "actors": 1, "tensorboard": False, "quiet": True} | options
    return rollmill.train(graph, run_dir=folder / "run", imports=["failing"], **options)


def test_one_that_raises_in_every_episode_ends_the_run(tmp_path):
    message = (
        r"actor/0: environment \d failed 4 times without a complete .*the arm fell off\n.*failing\.py:\d+: raise"
    )
    with pytest.raises(EnvironmentFailed, match=message) as caught:
        train(tmp_path, "Raising", place="threads", max_failures=3)
    assert caught.value.exit_code == 1


PLACES = [
    pytest.param({"place": "threads"}, marks=pytest.mark.slow),
    {"distribution": "gpu-only", "actors": None},
    pytest.param({"place": "processes"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("where", PLACES, ids=["thread", "this process", "process"])
def test_one_that_exits_the_program_ends_the_run_in_a_sentence_with_its_checkpoint(tmp_path, where):
    """In the ninth episode of an environment, which is in the eleventh iteration."""
    seen = []
    message = (
        r"gymnasium:Failing-Leaving-v0: environment \d, whose seed is \d+, exited in its step, by sys.exit\(7\)\n"
        r".*failing\.py:\d+: sys\.exit\(7\)"
    )
    with pytest.raises(EnvironmentFailed, match=message) as caught:
        train(tmp_path, "Leaving", hooks=[seen.append], checkpoint_iterations=1, **where)
    assert caught.value.exit_code == 1
    assert [event.kind for event in seen if isinstance(event, rollmill.hooks.FailureReported)] == ["environment"]
    least = 0 if "place" in where else 1  # replicas of their own end at once
    assert least <= load_weights(tmp_path / "run", imports=["failing"]).iteration <= 10


def test_a_run_in_which_every_episode_failed_does_not_succeed(tmp_path):
    """Though it comes to its end, because as many failures are allowed."""
    run = train(tmp_path, "Raising", iterations=4, place="threads", max_failures=100)
    assert (run.summary["status"], run.exit_code) == ("finished", 1)
    failed = [line["episode/failed"] for line in read_metrics(run.directory / "metrics.jsonl")]
    ended = [line["episode/ended"] for line in read_metrics(run.directory / "metrics.jsonl")]
    assert run.summary["failures"] == sum(failed) == sum(ended) > 0


def test_a_number_that_is_not_finite_is_named_and_the_doctor_repeats_it(tmp_path):
    name = r"actor/0: gymnasium:Failing-Dividing-v0: environment 0 returned observation\[0\] = nan at step 3 of"
    with pytest.raises(NonFiniteError, match=name):
        train(tmp_path, "Dividing", place="threads")
    with raises("stopped-at-number-is-not", name.replace("\\", "")):
        rollmill.replay(tmp_path / "run", imports=["failing"])


def test_a_run_without_failures_counts_none(tmp_path):
    run = train(tmp_path, "Walk", iterations=4, place="threads")
    assert (run.exit_code, run.summary["failures"]) == (0, 0)
    lines = read_metrics(run.directory / "metrics.jsonl")
    assert [line["episode/failed"] for line in lines] == [0.0] * 4
    assert run.summary["compile_seconds"] > 0
    assert 0 <= lines[0]["seconds"] <= lines[-1]["seconds"] == pytest.approx(run.summary["seconds"], abs=60)


@pytest.mark.slow
def test_one_that_hangs_in_a_thread_ends_the_run_by_the_limit_of_the_user_from_the_first_iteration_on(tmp_path):
    began = time.monotonic()
    with pytest.raises(LostWorker, match=r"stepping environments; .*failing\.py:\d+ in fail: time\.sleep"):
        train(tmp_path, "Hanging", place="threads", hang_seconds=1.0)
    assert time.monotonic() - began < 300  # and not ten minutes


@pytest.mark.slow
def test_sigterm_ends_a_run_whose_environment_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr("rollmill.training.driver.TERMINATE_SECONDS", 1.0)
    monkeypatch.setattr("rollmill.workers.coordination.coordinator.SLOW_STOP_SECONDS", 0.0)
    before = count_hanging()  # threads of other tests, which nobody can end

    def terminate():
        while count_hanging() == before:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=terminate, daemon=True).start()
    message = (
        r"SIGTERM arrived \d+ s ago, and these workers are still busy: actor/0 "
        r"\(stepping environments; .*failing\.py"
    )
    with pytest.raises(StopOverdue, match=message) as caught:
        train(tmp_path, "Hanging", place="threads")
    assert caught.value.exit_code == 143


@pytest.mark.parametrize(
    ("name", "seconds", "host", "ends"),
    [
        ("SIGTERM", 0.5, "actor/1 on 10.0.0.2", True),
        ("SIGTERM", 0.5, "", False),
        ("SIGINT", 0.5, "actor/1", False),
    ],
)
def test_sigterm_waits_for_no_host_out_of_reach(tmp_path, name, seconds, host, ends):
    stop = SimpleNamespace(signal_name=name, seconds=seconds, requested=True)
    training = SimpleNamespace(unreachable_workers=host, waited_for="actor/1 (collecting)")
    run = SimpleNamespace(command=lambda verb: f"rollmill {verb} run")
    message = r"arrived 0 s ago, and there is no response from actor/1 on 10.0.0.2\n.*\n  rollmill resume run"
    with pytest.raises(StopOverdue, match=message) if ends else contextlib.nullcontext():
        assert _is_stopping(stop, SimpleNamespace(stopping=False), training, run)


def count_hanging():
    return sum(frame.f_code.co_name == "fail" for frame in sys._current_frames().values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how"), [("Exiting", "exit code 0"), ("Hanging", r"it hung stepping .*failing\.py")]
)
def test_one_that_ends_its_process_or_hangs_each_time_ends_the_run(tmp_path, kind, how):
    message = rf"actor/0 was lost 3 times in a row: {how}(.|\n)*environments 0 to 1 of gymnasium:Failing-{kind}-v0"
    with pytest.raises(LostWorker, match=message):
        train(tmp_path, kind, max_failures=2, hang_seconds=2.0)
