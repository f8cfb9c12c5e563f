"""Checkpoints of a run that are evaluated as they appear."""

import shutil

import numpy as np
import pytest

import rollmill
from rollmill.cli.evaluate import run as evaluate
from rollmill.core.errors import StorageError
from rollmill.policies import watching
from rollmill.policies.watching import watch
from rollmill.record.run_directory import RunDirectory
from small_ppo import small_ppo
from wordings import raises


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "run"
    algorithm = small_ppo(4)
    rollmill.train(
        algorithm, run_dir=directory, checkpoint_iterations=1, keep_last=9, quiet=True, tensorboard=False
    )
    return directory


@pytest.fixture
def growing(finished, tmp_path, monkeypatch):
    """A run whose checkpoints appear at each look; the first is deleted before it is read."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    hidden = tmp_path / "hidden"
    (run / "checkpoints").rename(hidden)
    (run / "checkpoints").mkdir()
    waiting = sorted(int(path.name) for path in hidden.iterdir())
    read = watching.Checkpoints.restore

    def look(self):
        if waiting:
            number = waiting.pop(0)
            shutil.copytree(hidden / str(number), run / "checkpoints" / str(number))
            return True
        return False

    def restore(self, *arguments, iteration, **options):
        if iteration == 1:
            shutil.rmtree(run / "checkpoints/1")
        return read(self, *arguments, iteration=iteration, **options)

    monkeypatch.setattr(RunDirectory, "is_locked", look)
    monkeypatch.setattr(watching.Checkpoints, "restore", restore)
    monkeypatch.setattr(watching, "LOOK_SECONDS", 0.01)
    return run


@pytest.mark.slow
def test_each_new_checkpoint_is_evaluated_by_one_program(growing, finished, monkeypatch):
    compiled, make = [], watching.evaluator_on
    monkeypatch.setattr(watching, "evaluator_on", lambda *a, **k: compiled.append(1) or make(*a, **k))
    found = list(watch(growing, episodes=3, seed=5))
    assert [one.iteration for one in found] == [0, 2, 3, 4] and compiled == [1]
    asked = rollmill.evaluate(finished, episodes=3, seed=5, checkpoint=3)
    np.testing.assert_array_equal(found[2].episodes.returns, asked.returns)


def test_a_run_that_nobody_trains_is_evaluated_and_left(finished, monkeypatch):
    monkeypatch.setattr(watching, "LOOK_SECONDS", 0.01)
    assert [one.iteration for one in watch(finished, episodes=1)] == [0, 1, 2, 3, 4]
    with raises("seed-was-not-trained-in", "7"):
        list(watch(finished, episodes=1, train_seed=7))


def test_a_result_is_printed_though_it_cannot_be_recorded(finished, monkeypatch, capsys):
    def fail(*_):
        raise StorageError("evaluations.jsonl cannot be written: Read-only file system.")

    monkeypatch.setattr(RunDirectory, "append_evaluation", fail)
    with pytest.raises(StorageError, match="Read-only"):
        evaluate([str(finished), "--watch", "--episodes", "1"])
    assert "CartPole-v1, 1 episode, iteration 0: mean return " in capsys.readouterr().out
