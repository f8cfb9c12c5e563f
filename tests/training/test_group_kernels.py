"""Kernels in every group of every distribution policy: the numbers are those of XLA, whoever is killed.

The cases are made of the distribution policies that there are, and the table of docs/distribution.md has them all.
"""

import functools
import itertools
import os
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import rollmill
from rollmill.core.errors import CannotFuse, UsageError
from rollmill.hooks import MetricsLogged
from rollmill.planning.distribution import list_distributions
from rollmill.policies.loading import load_weights
from rollmill.programs.kernels import kernel_parts, sought_parts
from rollmill.record.run_directory import RunDirectory
from rollmill.runs.options import RunOptions
from rollmill.training.placing import choose_plan
from rollmill.training.preparing import check_group_kernels
from wordings import raises

pytest.importorskip("llvmlite", reason="llvmlite is not installed: pip install 'rollmill[fusion]'")

PAGE = (Path(__file__).parents[2] / "docs/distribution.md").read_text()
ENVS, STEPS, ITERATIONS = 8, 8, 6
SIZES = {"num_envs": ENVS, "num_steps": STEPS, "num_shards": ENVS}
GRU = rollmill.NetworkConfig(torso="gru", hidden_sizes=(8,), recurrent_size=8)
ALGORITHMS = {
    "ppo": (rollmill.ppo, {"num_minibatches": 2, "update_epochs": 2, "normalize_observations": True}),
    "a3c": (rollmill.a3c, {}),
    "gru": (rollmill.ppo, {"num_minibatches": 2, "num_shards": 4, "network": GRU}),
    "impala": (rollmill.impala, {"num_minibatches": 2, "num_shards": 4}),
    "dqn": (rollmill.dqn, {"batch_size": 32, "learning_starts": 128, "buffer_size": 1_600, "gradient_steps": 3}),
}
COUNTS = {
    "central": {"actors": 2},
    "environments": {"actors": 2, "learners": 2},
    "gpu-only": {"learners": 2},
    "multi-learner": {"learners": 2},
    "single-learner-coarse": {"actors": 2},
    "single-learner-fine": {},
}
OPTIONS = {"tensorboard": False, "quiet": True}


@functools.cache
def graph_of(algorithm, iterations=ITERATIONS):
    make, settings = ALGORITHMS[algorithm]
    chosen = {**SIZES, "network": rollmill.NetworkConfig(hidden_sizes=(16,)), **settings}
    return make("CartPole-v1", **chosen, total_timesteps=ENVS * STEPS * iterations)


def placed(policy, fusion, place="threads"):
    return {"distribution": policy, "place": place, **COUNTS[policy], "fusion": fusion}


def partition_of(policy, fusion):
    """The partition; None where the depth is refused."""
    try:
        return choose_plan(graph_of("ppo"), RunOptions(**placed(policy, fusion))).partition
    except UsageError as refused:
        assert f"fusion={fusion} needs environment and policy in the same group" in str(refused)
        return None


def launches_of(directory):
    return RunDirectory.open(directory).read_config()["launches"]


def fused_parts(directory):
    """The parts that are kernels, by group."""
    groups = launches_of(directory)["groups"]
    return {
        name: {part for part in ("rollouts", "gradients") if launches[part]} for name, launches in groups.items()
    }


@pytest.fixture(scope="module")
def by_xla(tmp_path_factory):
    """Weights by XLA under a policy."""

    @functools.cache
    def train(algorithm, policy):
        folder = tmp_path_factory.mktemp("xla") / "run"
        options = {**placed(policy, "off"), **OPTIONS}
        return load_weights(rollmill.train(graph_of(algorithm), run_dir=folder, **options).directory).weights

    return train


EVERYWHERE = itertools.product(("ppo", "a3c"), list_distributions(), ("rollout", "full"))
MINIBATCHES = itertools.product(
    ("gru", "impala", "dqn"), ("single-learner-coarse", "central", "multi-learner"), ("full",)
)
CASES = [case for case in (*EVERYWHERE, *MINIBATCHES) if partition_of(*case[1:]) is not None]


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "policy", "fusion"), CASES)
def test_groups_with_kernels_learn_what_they_learn_without(algorithm, policy, fusion, by_xla, tmp_path):
    run = rollmill.train(graph_of(algorithm), run_dir=tmp_path / "run", **placed(policy, fusion), **OPTIONS)
    sought = {
        group.name: {part for part in kernel_parts(group) if part in sought_parts(fusion)}
        for group in partition_of(policy, fusion).groups
    }
    assert fused_parts(run.directory) == {name: parts for name, parts in sought.items() if parts}
    mine, right = load_weights(run.directory).weights, by_xla(algorithm, policy)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), mine, right)


def test_the_page_has_every_policy_and_what_is_refused():
    section = PAGE.partition("## Kernels in groups")[2].partition("\n## ")[0]
    rows = [row.split(" | ") for row in re.findall(r"^\| (`.+?) \|$", section, re.M)]
    cells = {policy: row[1:] for row in rows for policy in re.findall(r"`([\w-]+)`", row[0])}
    assert cells.keys() == list_distributions().keys()
    for policy, (rollout, full, _) in cells.items():
        assert rollout.startswith("rejected") == (partition_of(policy, "rollout") is None)
        assert not full.startswith("rejected") and partition_of(policy, "full") is not None


def killed_midway(run, folder, last):
    """The run as a kill leaves it before its last checkpoint."""
    shutil.copytree(run.directory, folder)
    shutil.rmtree(folder / f"checkpoints/{last}")
    (folder / "summary.json").unlink()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["single-learner-coarse", "multi-learner", "central", "gpu-only"])
def test_a_killed_training_goes_on_with_its_kernels(policy, tmp_path):
    options = {**OPTIONS, "checkpoint_iterations": 3, "keep_last": ITERATIONS}
    run = rollmill.train(graph_of("ppo"), run_dir=tmp_path / "run", **placed(policy, "full"), **options)
    again = rollmill.resume(killed_midway(run, tmp_path / "killed", ITERATIONS), quiet=True)
    assert again.summary["weights_sha256"] == run.summary["weights_sha256"]
    assert launches_of(again.directory) == launches_of(run.directory)


LOST = {"single-learner-coarse": "learner/0", "central": "actor/1"}


@pytest.mark.slow
@pytest.mark.parametrize("policy", LOST)
def test_workers_that_begin_again_compute_with_the_same_kernels(policy, tmp_path, capsys):
    """All begin again after the loss of one of these, from a state that holds everything."""
    iterations = 64
    graph = graph_of("ppo", iterations)
    options = {**placed(policy, "full", "processes"), **OPTIONS, "checkpoint_iterations": 8, "log_every": 1}
    right, said, killed = rollmill.train(graph, run_dir=tmp_path / "whole", **options), [], []

    def kill_one(event):
        said.append(capsys.readouterr().err)
        if isinstance(event, MetricsLogged) and event.iteration > iterations // 2 and not killed:
            killed.append(int(re.findall(rf"{LOST[policy]} is process (\d+)", "".join(said))[-1]))
            os.kill(killed[0], signal.SIGKILL)

    run = rollmill.train(graph, run_dir=tmp_path / "lost", hooks=[kill_one], **{**options, "quiet": False})
    said.append(capsys.readouterr().err)
    assert killed and "all workers restart after iteration" in "".join(said)
    assert "".join(said).count("gradients are one kernel") == 1
    assert run.summary["weights_sha256"] == right.summary["weights_sha256"]
    assert launches_of(run.directory) == launches_of(right.directory)


@pytest.mark.slow
def test_a_replaced_actor_goes_on_with_the_kernels_of_its_group(tmp_path, capsys):
    iterations = 64
    options = {**placed("single-learner-coarse", "full", "processes"), **OPTIONS, "quiet": False, "log_every": 1}
    said, killed = [], []

    def kill_one(event):
        said.append(capsys.readouterr().err)
        if isinstance(event, MetricsLogged) and event.iteration > iterations // 2 and not killed:
            killed.append(int(re.findall(r"actor/0 is process (\d+)", "".join(said))[-1]))
            os.kill(killed[0], signal.SIGKILL)

    run = rollmill.train(graph_of("ppo", iterations), run_dir=tmp_path / "run", hooks=[kill_one], **options)
    said.append(capsys.readouterr().err)
    assert killed and "actor/0 was replaced; training continues" in "".join(said)
    assert "".join(said).count("rollouts are one kernel") == 1
    assert run.summary["status"] == "finished" and fused_parts(run.directory)["actor"] == {"rollouts"}


@pytest.mark.slow
def test_actors_that_nobody_waits_for_have_kernels(tmp_path):
    graph = rollmill.impala("CartPole-v1", **SIZES, total_timesteps=ENVS * STEPS * 8)
    options = {**placed("single-learner-coarse", "rollout"), "asynchronous": True, **OPTIONS}
    run = rollmill.train(graph, run_dir=tmp_path / "run", **options)
    assert run.summary["status"] == "finished"
    assert fused_parts(run.directory) == {"actor": {"rollouts"}}


def test_what_no_kernel_can_compute_is_refused_before_workers_start(tmp_path, monkeypatch):
    def refuse(graph):
        raise CannotFuse("a part of it is none.")

    monkeypatch.setattr("rollmill.programs.fused_kernels.lower_gradients", refuse)
    graph = rollmill.impala("CartPole-v1", **SIZES, total_timesteps=ENVS * STEPS * 8)
    with raises("fusion-is-not-possible-auto", "full"):
        rollmill.train(graph, run_dir=tmp_path / "run", **placed("single-learner-coarse", "full"), **OPTIONS)
    assert not (tmp_path / "run").exists()


def test_environments_on_the_host_have_no_kernels_and_long_trainings_say_so(monkeypatch):
    pytest.importorskip("gymnasium")
    graph = rollmill.ppo("gymnasium:CartPole-v1", **SIZES, total_timesteps=ENVS * STEPS)
    options, said = RunOptions(**placed("single-learner-coarse", "auto")), []
    check = functools.partial(check_group_kernels, graph, choose_plan(graph, options), options)
    check(SimpleNamespace(note=said.append))
    assert not said
    monkeypatch.setattr("rollmill.programs.kernels.MIN_STEPS_TO_TUNE", {"cpu": 0})
    check(SimpleNamespace(note=said.append))
    assert len(said) == 1 and said[0].startswith("fusion is not supported for environments that Python steps")
