"""Trackers by name: found before a training, called in a thread of their own, and given up once they fail."""

import sys
import threading
import time
from types import ModuleType

import pytest

import rollmill
from rollmill.core.errors import UsageError
from rollmill.hooks import FailureReported, MetricsLogged, TrainingFinished, TrainingStarted, tracking
from rollmill.hooks.tracking import check_trackers, trackers
from rollmill.record.display import Quiet
from rollmill.sweeps.shared_programs import needs_own_process
from rollmill.training.driver import warnings_of
from rollmill.training.request import TrainingRequest, named_by
from wordings import raises


def started(directory):
    return TrainingStarted(0, 0, directory, {}, 640, (3,))


def logged(iteration):
    row = {"iteration": iteration, "env_steps": 64 * iteration}
    return MetricsLogged(iteration, 64 * iteration, seconds=0.5, row=row, episodes=0.0)


FINISHED = TrainingFinished(2, 128, "finished", {})


@pytest.fixture
def own(monkeypatch):
    """A module whose function `keep` keeps what it is called with."""
    module = ModuleType("own_tracker")
    module.lines, module.threads = [], set()

    def keep(directory, line):
        module.threads.add(threading.current_thread().name)
        module.lines.append((directory, line))

    module.keep = keep
    monkeypatch.setitem(sys.modules, "own_tracker", module)
    return module


def test_a_function_gets_the_directory_and_each_line_in_a_thread_of_its_own(own, tmp_path):
    notes = []
    (hook,) = trackers(["own_tracker:keep"], notes.append)
    for event in (started(tmp_path), logged(1), logged(2), FINISHED):
        assert hook(event) is None
    assert own.lines == [(tmp_path, {"iteration": i, "env_steps": 64 * i}) for i in (1, 2)]
    assert own.threads == {"rollmill-track-own_tracker:keep"} and not notes


@pytest.mark.parametrize("failure", [ValueError("no disk"), SystemExit(3)])
def test_a_tracker_that_fails_is_named_once_and_called_no_more(own, tmp_path, failure):
    calls, notes = [], []

    def fail(directory, line):
        calls.append(line)
        raise failure

    own.keep = fail
    (hook,) = trackers(["own_tracker:keep"], notes.append)
    for event in (started(tmp_path), logged(1), logged(2), FINISHED):
        hook(event)
    (note,) = notes
    assert f"own_tracker:keep receives no more lines, because {type(failure).__name__}" in note and len(calls) == 1


def test_the_end_of_a_training_does_not_wait_for_ever(own, tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "MAX_SECONDS", 0.05)
    notes, ended = [], threading.Event()
    own.keep = lambda directory, line: ended.wait(60)
    (hook,) = trackers(["own_tracker:keep"], notes.append)
    began = time.monotonic()
    for event in (started(tmp_path), logged(1), FailureReported(1, 64, "number", "NaN", ends=True)):
        hook(event)
    ended.set()
    assert time.monotonic() - began < 30 and "did not write everything" in notes[0]


def test_a_tracker_that_falls_behind_is_given_up(own, tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "MAX_WAITING", 3)
    notes, ended = [], threading.Event()
    own.keep = lambda directory, line: ended.wait(60)
    (hook,) = trackers(["own_tracker:keep"], notes.append)
    hook(started(tmp_path))
    for iteration in range(1, 9):
        hook(logged(iteration))
    ended.set()
    assert len(notes) == 1 and "is 3 lines behind" in notes[0]


def test_warnings_are_printed_even_if_a_training_is_quiet(capsys):
    warnings_of(rollmill.RunOptions(quiet=True), Quiet())("the store fails")
    assert capsys.readouterr().err == "the store fails\n"


def test_unknown_trackers_and_functions_are_refused(own):
    with pytest.raises(UsageError, match="unknown tracker 'csw'.*csv.*module:function"):
        check_trackers(["csw"])
    with raises("track-module-has-no-function", "own_tracker:none", "own_tracker", "none", "none"):
        check_trackers(["own_tracker:none"])
    with pytest.raises(UsageError, match="cannot import 'no_such_module'"):
        check_trackers(["no_such_module:f"])


def test_sweeps_may_import_trackers_and_give_wandb_a_process_for_each_trial():
    request = TrainingRequest("ppo", "CartPole-v1", {"track": ["own_tracker:keep", "csv"]})
    assert named_by([request]).modules == {"own_tracker"}
    assert not needs_own_process(request.options)
    assert needs_own_process(rollmill.RunOptions(track=("csv", "wandb")))


def test_a_training_passes_its_lines_on_and_outlives_a_tracker(own, tmp_path, capsys):
    sizes = {"num_envs": 8, "num_steps": 8, "num_minibatches": 2, "update_epochs": 1, "total_timesteps": 256}
    algorithm = rollmill.ppo("CartPole-v1", network=rollmill.NetworkConfig(hidden_sizes=(8,)), **sizes)
    own.broken = lambda directory, line: 1 / 0
    track = ("csv", "own_tracker:keep", "own_tracker:broken")
    run = rollmill.train(algorithm, run_dir=tmp_path / "run", quiet=True, tensorboard=False, track=track)
    assert run.summary["status"] == "finished"
    assert [line["iteration"] for _, line in own.lines] == [1, 2, 3, 4]
    assert (tmp_path / "run/metrics.csv").read_text().count("\n") == 5
    assert capsys.readouterr().err.count("own_tracker:broken receives no more lines") == 1
