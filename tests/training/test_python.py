"""The Python way: train, load, call, evaluate, resume; and what is recorded of parts that have no name."""

import json
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rollmill
from rollmill.core.errors import CheckpointError
from rollmill.dataflow import fingerprint
from rollmill.policies.evaluation import evaluate_run
from rollmill.policies.loading import load_weights
from rollmill.runs.specification import describe
from small_ppo import SIZES, STEPS
from wordings import raises

QUIET = {"quiet": True, "tensorboard": False}


def small(env="CartPole-v1", **config):
    env = rollmill.make(env) if isinstance(env, str) else env
    return rollmill.ppo(env, **({"total_timesteps": 4 * STEPS, **SIZES} | config))


def test_a_loaded_policy_is_the_greedy_policy_of_the_last_state(tmp_path):
    algorithm = small()
    run = rollmill.train(algorithm, run_dir=tmp_path / "run", **QUIET)
    policy = rollmill.load(run.directory)
    loaded = load_weights(run.directory)
    for seed in range(5):
        observation = np.random.default_rng(seed).normal(size=4)  # 64-bit, as Gymnasium's are
        decision = algorithm.greedy(
            loaded.weights, jax.random.key(0), (), jnp.asarray(observation, jnp.float32), ()
        )
        assert policy(observation) == decision.action
    assert policy([0.0, 0.1, 0.0, -0.1]).shape == ()


@pytest.mark.slow
def test_actions_lie_inside_the_bounds(tmp_path):
    network = rollmill.NetworkConfig(initial_log_std=3.0)
    run = rollmill.train(small("Pendulum-v1", network=network), run_dir=tmp_path / "run", **QUIET)
    policy = rollmill.load(run.directory)
    actions = np.stack([policy(np.zeros(3), stochastic=True) for _ in range(50)])
    assert actions.shape == (50, 1) and np.abs(actions).max() == 2.0 and len(np.unique(actions)) > 2


@pytest.mark.slow
def test_a_recurrent_policy_remembers_until_reset(tmp_path):
    run = rollmill.train(
        small("TMaze-v0", network=rollmill.NetworkConfig(torso="gru"), ent_coef=0.0),
        run_dir=tmp_path / "run",
        **QUIET,
    )
    policy = rollmill.load(run.directory)
    observation = rollmill.make("TMaze-v0").observation_space.sample()
    before = jax.device_get(policy.memory)
    policy(observation)
    after = jax.device_get(policy.memory)
    assert any(not np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True))
    policy.reset()
    again = jax.device_get(policy.memory)
    assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (before, again)), strict=True))


def test_evaluation_counts_every_environment_once(tmp_path):
    run = rollmill.train(small(), run_dir=tmp_path / "run", **QUIET)
    episodes = evaluate_run(load_weights(run.directory), episodes=7)
    assert episodes.returns.shape == (7,)
    np.testing.assert_array_equal(episodes.returns, episodes.lengths)
    twice = evaluate_run(load_weights(run.directory), episodes=7)
    np.testing.assert_array_equal(episodes.returns, twice.returns)
    other = evaluate_run(load_weights(run.directory), episodes=7, seed=1)
    assert not np.array_equal(episodes.returns, other.returns)


def test_evaluation_refuses_other_spaces(tmp_path):
    run = rollmill.train(small(), run_dir=tmp_path / "run", **QUIET)
    with raises("has-other-than-policy-trained", "Acrobot-v1", "observations"):
        evaluate_run(load_weights(run.directory), env="Acrobot-v1")


@pytest.mark.slow
def test_the_best_checkpoint_can_be_loaded(tmp_path):
    run = rollmill.train(
        small(num_envs=64, num_steps=32, total_timesteps=64 * 32 * 8),
        run_dir=tmp_path / "run",
        checkpoint_iterations=1,
        **QUIET,
    )
    best = load_weights(run.directory, checkpoint="best")  # among windows of 100 episodes or more
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    returns = {row["iteration"]: row["episode/return"] for row in rows if row["episode/return"] is not None}
    assert best.iteration == max(returns, key=lambda i: (returns[i], i))


@pytest.mark.slow
def test_an_environment_that_was_changed_is_not_taken_for_its_name(tmp_path):
    plain = small()
    shorter = small(rollmill.time_limit(rollmill.make("CartPole-v1"), 20))
    assert fingerprint(plain) == fingerprint(small()) != fingerprint(shorter)
    assert describe(plain)["custom"] == [] and describe(shorter)["custom"] == ["environment"]
    run = rollmill.train(shorter, run_dir=tmp_path / "run", **QUIET)
    with pytest.raises(CheckpointError, match="created in Python with its own environment"):
        rollmill.load(run.directory)
    assert rollmill.load(run.directory, algorithm=shorter)(np.zeros(4)) in (0, 1)


def test_a_custom_network_must_be_passed_again(tmp_path):
    class Tiny(eqx.Module):
        scale: jax.Array

        def initial_memory(self):
            return ()

        def __call__(self, observation, memory, action_mask=None):
            logits = self.scale * observation[:2]
            return rollmill.Output(rollmill.networks.Categorical(logits), self.value(observation, memory), memory)

        def value(self, observation, memory):
            return jnp.sum(self.scale * observation[:2])

    algorithm = small(network=lambda key, observations, actions: Tiny(jnp.ones(2)))
    run = rollmill.train(algorithm, run_dir=tmp_path / "run", **QUIET)
    with raises("this-run-was-made-in", "network"):
        rollmill.resume(run.directory, quiet=True)
    assert (
        rollmill.resume(run.directory, algorithm=algorithm, quiet=True).summary["weights_sha256"]
        == (run.summary["weights_sha256"])
    )


@pytest.mark.slow
def test_a_full_disk_stops_with_a_clear_error_and_can_be_resumed(tmp_path, monkeypatch):
    algorithm = small(total_timesteps=8 * 8 * 40)
    whole = rollmill.train(algorithm, run_dir=tmp_path / "whole", checkpoint_iterations=2, **QUIET)
    from rollmill.record import checkpoints

    room = iter([10**9] * 6 + [1000] * 100)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "_free_bytes", lambda directory: next(room))
        with raises("disk-is-full-checkpoint-needs", "resume from iteration"):
            rollmill.train(algorithm, run_dir=tmp_path / "full", checkpoint_iterations=2, **QUIET)
    resumed = rollmill.resume(tmp_path / "full", quiet=True)
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]


def test_options_that_make_no_sense():
    with raises("must-be-at-least-1", "keep_last", "0"):
        rollmill.RunOptions(keep_last=0)
    with raises("seed-with-num-seeds-exceeds", "4294967295", "2"):
        rollmill.RunOptions(seed=2**32 - 1, num_seeds=2)


@pytest.mark.slow
def test_the_example_trains(tmp_path):
    example = Path(__file__).parents[2] / "examples/custom_environment.py"
    assert len(example.read_text().splitlines()) < 60
    done = subprocess.run(
        [sys.executable, str(example), str(tmp_path / "run")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["final_return"] > -3  # an untrained policy gets about -13
    assert "action at (-0.5, 0.5): [" in done.stdout
