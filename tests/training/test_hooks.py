"""Hooks of a training: what they are called with, what they can request, and what happens where they fail."""

import json
import sys
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import pytest

import rollmill
from rollmill.core.errors import NonFiniteError, UsageError
from rollmill.hooks import (
    CheckpointSaved,
    FailureReported,
    MetricsLogged,
    TrainingFinished,
    TrainingStarted,
    stop_at_return,
)
from rollmill.record.metrics import read_metrics
from rollmill.training.hook_calls import HookCalls, HookFailed, check_hooks
from small_ppo import SIZES
from wordings import raises

QUIET = {"quiet": True, "tensorboard": False}
THREADS = {"distribution": "single-learner-coarse", "place": "threads"}


def small(env="CartPole-v1", *, iterations=12, **config):
    return rollmill.ppo(env, total_timesteps=64 * iterations, **(SIZES | config))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run without hooks."""
    return rollmill.train(small(), run_dir=tmp_path_factory.mktemp("whole") / "run", **QUIET)


def weights_of(run):
    return run.summary["weights_sha256"]


def stop_after(iteration):
    def stopping(event):
        if isinstance(event, MetricsLogged) and event.iteration >= iteration:
            return rollmill.Stop(f"iteration {iteration} is done")
        return None

    return stopping


# --- events ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", [{}, THREADS], ids=["program", "threads"])
@pytest.mark.slow_beyond(1)
def test_events_say_what_the_run_directory_says(tmp_path, whole, placement):
    events = []
    run = rollmill.train(small(), run_dir=tmp_path / "run", hooks=[events.append], **QUIET, **placement)
    first, last = events[0], events[-1]
    assert isinstance(first, TrainingStarted) and isinstance(last, TrainingFinished)
    assert (first.iteration, first.env_steps, first.total_env_steps, first.seeds) == (0, 0, 64 * 12, (0,))
    assert first.directory == run.directory
    written = json.loads((run.directory / "config.json").read_text())
    if placement:  # workers choose their kernels after the start
        assert first.config["launches"] is None and written["launches"]["groups"].keys() == {"actor", "learner"}
        written["launches"] = None
    assert first.config == written
    logged = [event for event in events if isinstance(event, MetricsLogged)]
    assert [event.row for event in logged] == read_metrics(run.directory / "metrics.jsonl")
    assert [event.iteration for event in logged] == list(range(1, 13))
    assert all(event.env_steps == 64 * event.iteration == event.row["env_steps"] for event in logged)
    ended = sum(event.row["episode/ended"] for event in logged)
    assert 0 < logged[-1].episodes == ended < 100
    saved = [event for event in events if isinstance(event, CheckpointSaved)]
    assert saved[0].iteration == 0 and saved[-1].iteration == 12 and saved[-1].path.is_dir()
    assert last.status == "finished" and last.summary == run.summary
    if not placement:
        assert weights_of(run) == weights_of(whole)


@pytest.mark.slow
def test_events_of_a_run_that_goes_on_begin_where_it_stopped(tmp_path):
    run = rollmill.train(small(), run_dir=tmp_path / "run", hooks=[stop_after(3)], **QUIET)
    events = []
    rollmill.resume(run.directory, hooks=[events.append], quiet=True)
    assert isinstance(events[0], TrainingStarted) and events[0].iteration == run.summary["iterations"] >= 3
    assert events[-1].status == "finished" and events[-1].iteration == 12


@pytest.mark.slow
def test_a_number_that_is_not_finite_is_reported_and_ends_the_training(tmp_path):
    env = rollmill.make("CartPole-v1")
    broken = env._replace(
        step=lambda key, state, action, params: env.step(key, state, action, params)._replace(
            reward=jnp.float32(jnp.nan)
        )
    )
    events = []
    with pytest.raises(NonFiniteError):
        rollmill.train(small(broken, iterations=2), run_dir=tmp_path / "run", hooks=[events.append], **QUIET)
    reports = [event for event in events if isinstance(event, FailureReported)]
    assert [(event.kind, event.ends) for event in reports] == [("number", True)]
    assert "'environment'" in reports[0].message and events[-1] is reports[0]


# --- requests -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", [{}, THREADS], ids=["program", "threads"])
@pytest.mark.slow_beyond(1)
def test_a_stop_ends_the_run_and_it_goes_on_exactly(tmp_path, whole, placement):
    graph = small(iterations=200) if placement else small()  # workers go on for some iterations
    run = rollmill.train(graph, run_dir=tmp_path / "run", hooks=[stop_after(3)], **QUIET, **placement)
    summary = json.loads((run.directory / "summary.json").read_text())
    assert summary["status"] == "stopped" and run.exit_code == 0
    assert (summary["stopped_by"], summary["stop_reason"]) == ("stop_after.stopping", "iteration 3 is done")
    done = summary["iterations"]
    assert 3 <= done < graph.loops.iterations and (run.directory / f"checkpoints/{done}").is_dir()
    if not placement:
        again = rollmill.resume(run.directory, quiet=True)
        assert again.summary["status"] == "finished" and weights_of(again) == weights_of(whole)
        assert "stopped_by" not in again.summary


def test_a_checkpoint_is_saved_on_request(tmp_path):
    saved = []

    def hook(event):
        if isinstance(event, CheckpointSaved):
            saved.append(event.iteration)
        return rollmill.Checkpoint() if isinstance(event, MetricsLogged) and event.iteration == 3 else None

    rollmill.train(small(), run_dir=tmp_path / "run", hooks=[hook], checkpoint_seconds=1e6, **QUIET)
    assert saved[0] == 0 and saved[-1] == 12 and len(saved) == 3 and 3 <= saved[1] < 12


def test_a_stop_needs_a_reason():
    for reason in ("", " "):
        with raises("stop-needs-reason-in-words"):
            rollmill.Stop(reason)


# --- failures -------------------------------------------------------------------------------------------


def failing(event):
    if isinstance(event, MetricsLogged) and event.iteration >= 2:
        raise KeyError("no such tracker")


@pytest.mark.parametrize("placement", [{}, THREADS], ids=["program", "threads"])
@pytest.mark.slow
def test_a_hook_that_raises_stops_the_run_with_its_state_saved(tmp_path, whole, placement):
    others, graph = [], small(iterations=200) if placement else small()
    with raises("hook-failed-at", "failing", "MetricsLogged", "KeyError: 'no such tracker'"):
        rollmill.train(graph, run_dir=tmp_path / "run", hooks=[failing, others.append], **QUIET, **placement)
    assert HookFailed.exit_code == 1
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "stopped" and "KeyError" in summary["error"]
    done = summary["iterations"]
    assert 2 <= done < graph.loops.iterations and (tmp_path / f"run/checkpoints/{done}").is_dir()
    assert isinstance(others[-1], FailureReported) and others[-1].kind == "hook" and others[-1].ends
    assert "test_hooks.py" in others[-1].message
    if not placement:
        assert weights_of(rollmill.resume(tmp_path / "run", quiet=True)) == weights_of(whole)


def test_a_hook_that_exits_leaves_the_state_and_the_summary(tmp_path):
    def exits(event):
        if isinstance(event, MetricsLogged):
            sys.exit(3)

    with pytest.raises(SystemExit) as ended:
        rollmill.train(small(), run_dir=tmp_path / "run", hooks=[exits], **QUIET)
    assert ended.value.code == 3
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    done = summary["iterations"]
    assert summary["status"] == "stopped" and 1 <= done < 12 and (tmp_path / f"run/checkpoints/{done}").is_dir()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            "stop",
            (
                "hook-failed-at",
                "the hook returned 'stop' of type str. A hook must return None, rollmill.Stop(\"reason\") or",
            ),
        ),
        (True, ("hook-failed-at", "the hook returned True of type bool")),
        (
            len,
            (
                "hook-failed-at",
                "the result of calling it, hooks=[test_an_answer_that_is_no_request_is_refused.<lambda>(...)]",
            ),
        ),
    ],
)
def test_an_answer_that_is_no_request_is_refused(answer, message):
    calls = HookCalls([lambda event: answer], print)
    calls.emit(TrainingStarted(0, 0, Path(), {}, 0, (0,)))
    assert calls.stopping
    with raises(*message):
        raise calls.failure


def test_a_hook_that_failed_is_not_called_again_and_others_are():
    counts = {"failing": 0, "other": 0}

    def failing(event):
        counts["failing"] += 1
        raise ValueError("once")

    def other(event):
        counts["other"] += 1

    calls = HookCalls([failing, other], print)
    for _ in range(2):
        calls.emit(TrainingStarted(0, 0, Path(), {}, 0, (0,)))
    assert counts == {"failing": 1, "other": 2}


@pytest.mark.slow
def test_a_hook_that_fails_at_the_end_leaves_a_finished_run(tmp_path):
    def hook(event):
        if isinstance(event, TrainingFinished):
            raise OSError("the network is down")

    with raises("hook-failed-at", "TrainingFinished", "OSError: the network is down"):
        rollmill.train(small(iterations=2), run_dir=tmp_path / "run", hooks=[hook], **QUIET)
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "finished"


@pytest.mark.parametrize("hooks", [print, "print", [3], [HookCalls]], ids=repr)
def test_what_is_no_list_of_functions_is_refused(hooks):
    with pytest.raises(UsageError, match=r"hint: pass hooks=\[my_hook\]"):
        check_hooks(hooks)


def test_functions_with_arguments_of_their_own_are_hooks():
    assert check_hooks([partial(print, "event")])


# --- the option -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_return_to_stop_at_is_kept_when_the_run_goes_on(tmp_path):
    graph = small(iterations=60)
    run = rollmill.train(graph, run_dir=tmp_path / "run", stop_at_return=5.0, checkpoint_iterations=5, **QUIET)
    assert run.summary["stopped_by"] == "stop_at_return" and run.exit_code == 0
    assert "which reaches the goal of 5" in run.summary["stop_reason"]
    row = next(row for row in read_metrics(run.directory / "metrics.jsonl") if _episodes(run, row) >= 100)
    assert row["iteration"] <= run.summary["iterations"] < 60
    again = rollmill.resume(run.directory, quiet=True)
    assert again.summary["stopped_by"] == "stop_at_return"
    last = rollmill.resume(run.directory, stop_at_return="never", quiet=True)
    assert last.summary["status"] == "finished"
    assert json.loads((run.directory / "config.json").read_text())["options"]["stop_at_return"] is None


def _episodes(run, row):
    """Episodes that had ended by a line."""
    rows = read_metrics(run.directory / "metrics.jsonl")
    return sum(other["episode/ended"] for other in rows if other["iteration"] <= row["iteration"])


def test_a_return_that_is_no_number_is_refused():
    with raises("must-be-finite", "stop_at_return", "inf"):
        rollmill.RunOptions(stop_at_return=float("inf"))
    with raises("must-be-finite", "value", "nan"):
        stop_at_return(float("nan"))
