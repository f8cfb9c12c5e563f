"""A training command that is started again goes on with its run, or says what is another one."""

import dataclasses
import json
import os
import shutil
import signal

import pytest

import rollmill
from rollmill.hooks import CheckpointSaved, MetricsLogged, Stop
from rollmill.record.run_directory import RunDirectory
from rollmill.runs.creation import UNRECORDED
from rollmill.runs.earlier_versions import note_of_versions
from rollmill.runs.options import RunOptions
from rollmill.runs.saved_run import read_options
from rollmill.training.requeueing import run_to_go_on
from small_ppo import STEPS, small_ppo
from wordings import raises

QUIET = {"quiet": True, "tensorboard": False, "fusion": "off"}
ITERATIONS = 6
WIDER = rollmill.NetworkConfig(hidden_sizes=(3,))


def small(**config):
    return small_ppo(ITERATIONS, **config)


def stop_after(iterations):
    def hook(event):
        return Stop("enough") if isinstance(event, MetricsLogged) and event.iteration >= iterations else None

    return hook


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return rollmill.train(small(), run_dir=tmp_path_factory.mktemp("whole") / "run", **QUIET)


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory):
    options = {"resume_if_exists": True, "checkpoint_iterations": 1, **QUIET}
    run_dir = tmp_path_factory.mktemp("stopped") / "run"
    run = rollmill.train(small(), hooks=[stop_after(2)], run_dir=run_dir, **options)
    assert run.summary["status"] == "stopped" and 2 <= run.summary["iterations"] < ITERATIONS
    return run_dir


@pytest.fixture
def stopped(stopped_run, tmp_path):
    """A run after its first iterations, as a job leaves it whose time is over, and the options of its command."""
    shutil.copytree(stopped_run, tmp_path / "run")
    return {"run_dir": tmp_path / "run", "resume_if_exists": True, "checkpoint_iterations": 1}


def test_the_same_call_trains_then_goes_on_then_is_finished(stopped, undisturbed):
    second = rollmill.train(small(), **stopped, **QUIET)
    assert second.summary["status"] == "finished" and second.exit_code == 0
    assert second.summary["weights_sha256"] == undisturbed.summary["weights_sha256"]
    before = (second.directory / "summary.json").read_bytes()
    third = rollmill.train(small(), **stopped, **QUIET)
    assert third.summary == second.summary and (third.directory / "summary.json").read_bytes() == before


@pytest.mark.slow
def test_an_empty_directory_is_trained_in(tmp_path):
    run = rollmill.train(small(), run_dir=tmp_path, resume_if_exists=True, **QUIET)
    assert run.directory == tmp_path and run.summary["status"] == "finished"
    assert "resume_if_exists" not in json.loads((tmp_path / "config.json").read_text())["options"]


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        ({"gamma": 0.5}, {}, ["gamma is 0.5 here and 0.99 in the run"]),
        ({"total_timesteps": 320}, {"seed": 3}, ["total_timesteps is 320 here and 384", "seed is 3 here and 0"]),
        ({"network": WIDER}, {}, ["network.hidden_sizes is [3] here and [8] in the run"]),
        ({}, {"checkpoint_iterations": 2}, ["checkpoint_iterations is 2 here and 1 in the run"]),
        ({}, {"distribution": "central"}, ['distribution is "central" here and "gpu-only" in the run']),
    ],
)  # fmt: skip
def test_a_run_of_another_configuration_is_refused(stopped, config, options, said):
    config_file, summary = (stopped["run_dir"] / name for name in ("config.json", "summary.json"))
    before = config_file.read_bytes(), summary.read_bytes()
    with raises("holds-run-another-configuration-hint") as caught:
        rollmill.train(small(**config), **{**stopped, **options}, **QUIET)
    assert all(part in str(caught.value) for part in said), str(caught.value)
    assert str(caught.value).count(" in the run") == len(said)
    assert (config_file.read_bytes(), summary.read_bytes()) == before


def test_every_option_that_a_run_records_is_compared(stopped):
    """Each field of `RunOptions` that config.json has, given another value in the run's own file."""
    file = RunDirectory(stopped["run_dir"]).config_file
    config, graph = json.loads(file.read_text()), small()
    names = {field.name for field in dataclasses.fields(RunOptions)}
    assert names - config["options"].keys() == {*UNRECORDED}
    for name in sorted(config["options"].keys() - {"reduction"}):  # which is found by timing
        value = config["options"][name]
        other = (not value) if isinstance(value, bool) else 7 if not isinstance(value, str) else f"{value}-other"
        file.write_text(json.dumps({**config, "options": {**config["options"], name: other}}))
        with raises("holds-run-another-configuration-hint", f"{name} is"):
            rollmill.train(graph, **stopped, **QUIET)
    file.write_text(json.dumps(config))
    options = RunOptions(**stopped, **QUIET)
    assert run_to_go_on(graph, options) == RunDirectory(stopped["run_dir"])


@pytest.mark.slow
def test_a_run_that_was_changed_on_purpose_goes_on_with_the_change(stopped):
    longer = {"total_timesteps": STEPS * (ITERATIONS + 2)}
    rollmill.resume(stopped["run_dir"], changes=longer, hooks=[stop_after(3)], quiet=True)
    run = rollmill.train(small(), **stopped, **QUIET)  # the command that the job has had from the beginning
    assert run.summary["iterations"] == ITERATIONS + 2
    assert rollmill.train(small(**longer), **stopped, **QUIET).summary == run.summary


@pytest.mark.slow
def test_parts_of_ones_own_go_on_as_they_are_passed(tmp_path, undisturbed):
    env = rollmill.make("CartPole-v1")
    mine = env._replace(step=lambda *arguments: env.step(*arguments))
    graph = small()._replace(settings={**small().settings, "custom": ["environment"]})
    assert mine is not env
    again = {"run_dir": tmp_path / "run", "resume_if_exists": True, "checkpoint_iterations": 1}
    rollmill.train(graph, hooks=[stop_after(2)], **again, **QUIET)
    run = rollmill.train(graph, **again, **QUIET)
    assert run.summary["weights_sha256"] == undisturbed.summary["weights_sha256"]


def test_without_the_option_a_run_is_not_touched(stopped):
    with raises("already-holds-run-or-choose"):
        rollmill.train(small(), **{**stopped, "resume_if_exists": False}, **QUIET)
    assert not read_options(RunDirectory(stopped["run_dir"])).resume_if_exists


def test_it_needs_a_directory_to_find():
    with raises("resume-if-exists-needs-run"):
        RunOptions(resume_if_exists=True)


def signals(event_of_second, iteration):
    """A hook that sends SIGUSR1 after the first iteration, then SIGUSR2 at an event from `iteration` on."""
    to_come = [(MetricsLogged, 1, signal.SIGUSR1), (event_of_second, iteration, signal.SIGUSR2)]

    def hook(event):
        if to_come and isinstance(event, to_come[0][0]) and event.iteration >= to_come[0][1]:
            os.kill(os.getpid(), to_come.pop(0)[2])

    return hook


THREADS = {"distribution": "single-learner-coarse", "place": "threads"}
LONG = {"num_envs": 64, "num_steps": 512, "total_timesteps": 40 * 64 * 512}
"""40 iterations, each long enough: workers in threads go on while signals are on their way."""


@pytest.mark.parametrize(
    ("place", "config", "second"),
    [
        ({}, {}, (MetricsLogged, 3)),
        pytest.param(THREADS, LONG, (CheckpointSaved, 1), marks=pytest.mark.slow),
    ],
)
def test_signals_of_a_batch_system_save_then_stop_and_change_no_number(tmp_path, place, config, second, capfd):
    """SIGUSR1 after the first iteration, SIGUSR2 after the third or the checkpoint, and the same call again."""
    undisturbed = rollmill.train(small(**config), run_dir=tmp_path / "whole", **QUIET)
    again = {"run_dir": tmp_path / "run", "resume_if_exists": True, "log_every": 1, "checkpoint_iterations": 100}
    first = rollmill.train(
        small(**config), hooks=[signals(*second)], **again, **place, **{**QUIET, "quiet": False}
    )
    assert "SIGUSR1: saving a checkpoint" in capfd.readouterr().err
    ended = first.summary["iterations"]
    assert (first.summary["status"], first.exit_code) == ("stopped", 140)
    assert ended < undisturbed.summary["iterations"]
    assert first.summary["stopped_by"] == "SIGUSR2"
    saved = sorted(int(entry.name) for entry in (first.directory / "checkpoints").iterdir() if entry.is_dir())
    assert (saved[0], saved[-1], len(saved)) == (0, ended, 3) and 1 <= saved[1] < ended
    second = rollmill.train(small(**config), **again, **place, **QUIET)
    assert second.summary["weights_sha256"] == undisturbed.summary["weights_sha256"]


# --- versions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({"rollmill": "99.0.0"}, "note: this run was made with rollmill 99.0.0 (now "),
        ({"jax": "0.1.7", "numpy": "1.99.0"}, "made with jax 0.1.7 (now "),
        ({"rollmill": "\x1b[31m2.0"}, None),
        ({"rollmill": 3, "jax": None}, None),
        ({}, None),
    ],
)
def test_other_major_versions_are_noticed(stopped, versions, said):
    file = stopped["run_dir"] / "versions.json"
    recorded = json.loads(file.read_text())
    assert note_of_versions(RunDirectory(stopped["run_dir"])) is None
    file.write_text(json.dumps({**recorded, "versions": {**recorded["versions"], **versions}}))
    note = note_of_versions(RunDirectory(stopped["run_dir"]))
    assert note is None if said is None else said in note


@pytest.mark.slow
def test_a_run_of_another_major_version_goes_on_with_a_word(stopped, capsys, undisturbed):
    file = stopped["run_dir"] / "versions.json"
    recorded = json.loads(file.read_text())
    file.write_text(json.dumps({**recorded, "versions": {**recorded["versions"], "rollmill": "99.0.0"}}))
    run = rollmill.resume(stopped["run_dir"])
    assert "note: this run was made with rollmill 99.0.0 (now " in capsys.readouterr().err
    assert run.summary["weights_sha256"] == undisturbed.summary["weights_sha256"]
