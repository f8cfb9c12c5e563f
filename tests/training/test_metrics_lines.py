"""Lines of metrics: what stands in them, and of how many iterations each is."""

import json
import shlex
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rollmill
from rollmill.algorithms.reports import value_moments
from rollmill.record.aggregates import RowSums, SavedSums
from rollmill.record.metrics import read_metrics
from rollmill.training import recorded_progress, recorder
from small_ppo import SIZES
from wordings import raises

SLOW = pytest.mark.slow

QUIET = {"quiet": True, "tensorboard": False}


def trained(tmp_path, name, *, iterations=6, algorithm="ppo", env="CartPole-v1", config=None, **options):
    graph = getattr(rollmill, algorithm)(env, total_timesteps=64 * iterations, **(SIZES | (config or {})))
    run = rollmill.train(graph, run_dir=tmp_path / name, **QUIET, **options)
    return read_metrics(run.directory / "metrics.jsonl")


@pytest.mark.slow
def test_a_line_of_several_iterations_has_their_means_and_counts_their_episodes(tmp_path):
    each = trained(tmp_path, "each")
    some = trained(tmp_path, "some", log_every=4)
    assert [line["iteration"] for line in each] == [1, 2, 3, 4, 5, 6]
    assert [line["iteration"] for line in some] == [4, 6]
    for line, own in zip(some, (each[:4], each[4:]), strict=True):
        assert line["episode/ended"] == sum(row["episode/ended"] for row in own)
        assert line["episode/return"] == own[-1]["episode/return"]
        for name in ("losses/policy", "losses/gradient_norm", "learning_rate"):
            assert line[name] == pytest.approx(np.mean([row[name] for row in own]), rel=1e-6)


def test_iterations_that_are_reported_together_lasted_equally_long(tmp_path):
    seconds = [line["seconds"] for line in trained(tmp_path, "run", iterations=64)]
    # Windows grow to 32 iterations at the least, so that the last ones are of one report.
    last = np.diff(seconds)[-8:]
    assert last == pytest.approx([last[0]] * 8, rel=1e-3)
    assert np.all(np.diff(seconds) > 0)


@pytest.mark.slow
def test_long_trainings_write_a_limited_number_of_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "MAX_LINES", 3)
    assert [line["iteration"] for line in trained(tmp_path, "run", iterations=7)] == [3, 6, 7]


@pytest.mark.slow
def test_a_run_that_goes_on_writes_the_lines_of_one_that_never_stopped(tmp_path):
    whole = trained(tmp_path, "whole", log_every=4)
    graph = rollmill.ppo("CartPole-v1", total_timesteps=64 * 6, **SIZES)
    run = rollmill.train(graph, run_dir=tmp_path / "cut", log_every=4, checkpoint_iterations=3, **QUIET)
    for newest in ("4", "5", "6"):
        for path in sorted((run.directory / "checkpoints").glob(newest + "*")):
            path.rename(tmp_path / f"away-{path.name}")
    (run.directory / "summary.json").unlink()
    again = rollmill.resume(run.directory, quiet=True)
    lines = read_metrics(again.directory / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == [4, 6]
    for ours, theirs in zip(lines, whole, strict=True):
        for name in ("episode/ended", "losses/policy", "losses/explained_variance"):
            assert ours[name] == theirs[name]


@pytest.mark.slow
def test_the_learning_rate_is_that_of_the_iteration(tmp_path):
    lines = trained(tmp_path, "run", config={"learning_rate": 0.01})
    assert [line["learning_rate"] for line in lines] == pytest.approx([0.01 * (1 - i / 6) for i in range(6)])
    fixed = trained(tmp_path, "fixed", config={"learning_rate": 0.01, "anneal_lr": False}, iterations=2)
    assert [line["learning_rate"] for line in fixed] == pytest.approx([0.01, 0.01])


@pytest.mark.parametrize(
    ("algorithm", "env", "config"),
    [
        ("impala", "CartPole-v1", {}),
        pytest.param("a3c", "CartPole-v1", {"num_minibatches": None, "update_epochs": None}, marks=SLOW),
        pytest.param("mappo", "TagGridWorld-v0", {}, marks=SLOW),
    ],
)
@pytest.mark.slow
def test_every_algorithm_reports_its_rate_its_gradients_and_its_critic(tmp_path, algorithm, env, config):
    sizes = {name: value for name, value in (SIZES | config).items() if value is not None}
    graph = getattr(rollmill, algorithm)(env, total_timesteps=64 * 2, **sizes)
    run = rollmill.train(graph, run_dir=tmp_path / "run", num_seeds=2, **QUIET)
    for line in read_metrics(run.directory / "metrics.jsonl"):
        assert line["learning_rate"] > 0 and line["losses/gradient_norm"] > 0
        assert line["losses/explained_variance"] < 1
        assert not [name for name in line if name.startswith("values/")]


@pytest.mark.slow
def test_a_process_reports_what_one_program_reports(tmp_path):
    names = ("learning_rate", "losses/gradient_norm", "losses/explained_variance")
    one = trained(tmp_path, "one", iterations=2)
    apart = trained(tmp_path, "apart", iterations=2, distribution="single-learner-coarse", place="threads")
    for ours, theirs in zip(one, apart, strict=True):
        assert [ours[name] for name in names] == pytest.approx([theirs[name] for name in names], rel=1e-3)


def test_explained_variance_of_parts_is_that_of_the_whole():
    value, target = np.random.default_rng(0).normal(size=(2, 4, 50)) * [[[3.0]], [[5.0]]] + 10.0
    weight = (np.random.default_rng(1).random((4, 50)) < 0.7).astype(np.float32)
    counted = weight > 0
    expected = 1 - np.var((target - value)[counted]) / np.var(target[counted])
    parts = [jax.device_get(moments(*part)) for part in zip(value, target, weight, strict=True)]
    row = {name: np.mean([part[name] for part in parts]) for name in parts[0]}
    assert recorder.explained_variance(row) == pytest.approx(expected, abs=1e-4)
    assert recorder.explained_variance({}) is None
    for level in (0.0, 1.0, 1234.5678):
        flat = jax.device_get(moments(np.zeros(5), np.full(5, level), np.ones(5)))
        assert recorder.explained_variance(flat) is None


def moments(*arrays):
    return value_moments(*(jnp.asarray(array, jnp.float32) for array in arrays))


def test_damaged_sums_of_a_checkpoint_are_named(tmp_path):
    with raises("metadata-unwritten-sums-is-seeds", "'x'", "3", "2"):
        recorded_progress.check_sums(SavedSums(1, {"x": (1.0, 2.0, 3.0)}), where="checkpoint 1", seeds=2)
    with raises("metadata-unwritten-sums-are-seeds", "1 and 2"):
        recorded_progress.check_sums(SavedSums(1, {"x": (1.0,), "y": (1.0, 2.0)}), where="checkpoint 1", seeds=2)
    with raises("metadata-unwritten-iterations-must-be", "-1"):
        recorded_progress.check_sums(SavedSums(-1), where="checkpoint 1", seeds=2)
    sums = RowSums(SavedSums(2, {"x": (1.0, 3.0)}))
    sums.add({"x": np.array([2.0, 3.0])})
    assert sums.means()["x"].tolist() == [1.0, 2.0] and sums.totals() == {"x": 9.0}


def test_sums_of_an_older_version_with_other_metrics_go_on():
    sums = RowSums(SavedSums(1, {"gone": (1.0,), "x": (2.0,)}))
    sums.add({"x": 3.0, "new": 4.0})
    assert sums.totals() == {"x": 5.0, "new": 4.0, "gone": 1.0}
    saved = json.loads(json.dumps(sums.to_json()))
    again = RowSums(SavedSums(2, {name: tuple(each) for name, each in saved["sums"].items()}, saved["absent"]))
    again.add({"x": 1.0, "new": 6.0})
    means = {name: float(mean[0]) for name, mean in again.means().items()}
    assert means == {"x": 2.0, "new": 5.0, "gone": 1.0}  # each over the iterations in which it was there


def test_trainings_of_one_process_write_as_many_lines_together_as_one():
    graph = rollmill.ppo("CartPole-v1", total_timesteps=2_000 * 64, **SIZES)
    iterations = graph.loops.iterations
    assert recorder.default_log_every(graph) == 1
    each = recorder.default_log_every(graph, num_runs=24)
    assert iterations * 24 / each <= recorder.MAX_LINES < iterations * 24 / (each - 1)


@pytest.mark.slow
def test_a_run_knows_its_command_its_recipe_and_whose_commit_is_whose(tmp_path, monkeypatch):
    command = ["rollmill", "train", "ppo", "CartPole-v1", "--run-dir", str(tmp_path / "my run")]
    monkeypatch.setattr(sys, "argv", command)
    graph = rollmill.ppo("CartPole-v1", total_timesteps=64, **SIZES)
    rollmill.train(graph, run_dir=tmp_path / "run", recipe="cartpole-two-cores", **QUIET)
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert shlex.join(config["command"]).endswith(f"--run-dir '{tmp_path}/my run'")
    assert config["recipe"] == "cartpole-two-cores"
    commits = json.loads((tmp_path / "run/versions.json").read_text())["commits"]
    assert commits.keys() == {"rollmill", "working_directory"}
