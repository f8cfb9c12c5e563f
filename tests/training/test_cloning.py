"""Recorded episodes, and trainings that begin by imitating them."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rollmill
from rollmill.policies.evaluation import evaluate_rule
from rollmill.policies.loading import load_weights
from rollmill.training.cloning import clone, demonstrations, discounted_returns
from wordings import raises

SIZES: dict[str, Any] = {"num_envs": 4, "num_steps": 8, "total_timesteps": 32}


def push(key, observation, legal):
    """Solves MountainCar: pushes in the direction of the motion."""
    return jnp.where(observation[1] >= 0, 2, 0)


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    file = tmp_path_factory.mktemp("recording") / "push.npz"
    return evaluate_rule(push, env="MountainCar-v0", episodes=4, record=file), file


def test_a_recording_has_whole_episodes_in_order(recording):
    played, file = recording
    plain = evaluate_rule(push, env="MountainCar-v0", episodes=4)
    np.testing.assert_array_equal(played.returns, plain.returns)
    np.testing.assert_array_equal(played.lengths, plain.lengths)
    rows = dict(np.load(file))
    ends = np.flatnonzero(rows["terminated"] | rows["truncated"])
    np.testing.assert_array_equal(np.diff(ends, prepend=-1), played.lengths)
    np.testing.assert_array_equal(rows["reward"], -1)
    np.testing.assert_array_equal(rows["action"], np.where(rows["observation"][:, 1] >= 0, 2, 0))
    # Within an episode each observation follows from the one before by the rules of the game.
    position, velocity = rows["observation"].T
    moved = np.clip(velocity + (rows["action"] - 1) * 0.001 - 0.0025 * np.cos(3 * position), -0.07, 0.07)
    inner = np.setdiff1d(np.arange(len(ends) and len(position) - 1), ends)
    np.testing.assert_allclose(position[inner + 1], np.clip(position + moved, -1.2, 0.6)[inner], atol=1e-5)


def test_host_environments_are_recorded_as_they_are(tmp_path):
    file = tmp_path / "host.npz"
    played = evaluate_rule("random", env="gymnasium:CartPole-v1", episodes=3, record=file)
    rows = dict(np.load(file))
    assert len(rows["reward"]) == rows["reward"].sum() == played.lengths.sum()
    assert (rows["terminated"] | rows["truncated"]).sum() == 3
    position, speed = rows["observation"][:, 0], rows["observation"][:, 1]
    inner = ~(rows["terminated"] | rows["truncated"])[:-1]
    np.testing.assert_allclose(position[1:][inner], (position + 0.02 * speed)[:-1][inner], atol=1e-6)


def test_returns_end_with_their_episode():
    rewards, ends = np.array([1, 2, 3, 4], np.float32), np.array([False, True, False, False])
    np.testing.assert_allclose(discounted_returns(rewards, ends, 0.5), [2, 2, 5, 4])


def test_a_clone_imitates_actions_and_values_what_it_saw(recording):
    _, file = recording
    graph = rollmill.ppo("MountainCar-v0", **SIZES, normalize_observations=True)
    cloned, shown = clone(graph, file, seed=0, updates=300), demonstrations(graph, file)
    weights = cloned.learner.weights
    outputs: Any = graph.outputs
    likely = jax.jit(jax.vmap(lambda row: outputs.distribution(weights, (), row, ()).mode()))(shown.observation)
    share = float(np.mean(np.asarray(likely) == shown.action))
    assert share == pytest.approx(cloned.agreement) and share > 0.95
    value = jax.jit(jax.vmap(lambda row: outputs.value(weights, (), row)))(shown.observation)
    assert np.corrcoef(value, shown.target)[0, 1] > 0.9
    np.testing.assert_allclose(float(weights.values.mean), shown.target.mean(), rtol=1e-3)
    np.testing.assert_allclose(weights.observations.mean, np.mean(shown.observation, axis=0), atol=1e-3)
    again = clone(graph, file, seed=0, updates=300).learner
    jax.tree.map(np.testing.assert_array_equal, again, cloned.learner)


def test_values_of_truncated_episodes_bootstrap(tmp_path):
    """Each step of these episodes pays 1, so all states are worth 10, however near to the time limit they are."""
    random, steps = np.random.default_rng(0), 6
    truncated = np.tile(np.arange(steps) == steps - 1, 50)
    truncated[-1] = False  # the last episode of a file need not have an end
    rows = {"observation": random.uniform(-1, 1, (300, 4)), "action": random.integers(0, 2, 300)}
    rows |= {"reward": np.ones(300), "terminated": np.zeros(300, bool), "truncated": truncated}
    np.savez(tmp_path / "cut.npz", **rows)
    graph = rollmill.ppo("CartPole-v1", **SIZES, gamma=0.9)
    shown = demonstrations(graph, tmp_path / "cut.npz")
    np.testing.assert_array_equal(shown.last, np.repeat(np.arange(steps - 1, 300, steps), steps))
    np.testing.assert_allclose(shown.target[:steps], [4.0951, 3.439, 2.71, 1.9, 1, 0], rtol=1e-5)
    np.testing.assert_allclose(shown.bootstrap[-steps:], 0.9 ** np.arange(steps - 1, -1, -1), rtol=1e-5)
    weights = clone(graph, tmp_path / "cut.npz", seed=0, updates=1000).learner.weights
    outputs: Any = graph.outputs
    value = jax.jit(jax.vmap(lambda row: outputs.value(weights, (), row)))(shown.observation)
    np.testing.assert_allclose(value, 10, atol=1)
    # An episode that terminates on its last step, although it is truncated there too, is worth its rewards.
    np.savez(tmp_path / "ended.npz", **{**rows, "terminated": np.arange(300) % steps == steps - 1})
    shown = demonstrations(graph, tmp_path / "ended.npz")
    np.testing.assert_allclose(shown.target[:2], [4.68559, 4.0951], rtol=1e-5)
    np.testing.assert_array_equal(shown.bootstrap, 0)


@pytest.mark.parametrize(
    "settings",
    [{"gamma": 0.9}, {"gamma": "linear:0.9:0.99"}, {"gamma": 0.9, "normalize_rewards": True}],
    ids=str,
)
def test_values_are_discounted_by_the_factor_of_the_training(recording, settings):
    shown = demonstrations(rollmill.ppo("MountainCar-v0", **SIZES, **settings), recording[1])
    np.testing.assert_allclose(shown.target.min(), -1 / (1 - 0.9), rtol=1e-2)


def test_a_clone_values_rewards_as_the_training_normalises_them(recording):
    rows = dict(np.load(recording[1]))
    ends, sums, total = rows["terminated"] | rows["truncated"], [], 0.0
    for reward, end in zip(rows["reward"], ends, strict=True):
        sums.append(total := reward + 0.9 * total)
        total *= not end
    deviation = np.std(sums)
    graph = rollmill.ppo("MountainCar-v0", **SIZES, normalize_rewards=True, gamma=0.9)
    learner = clone(graph, recording[1], seed=0, updates=300).learner
    np.testing.assert_allclose(np.sqrt(learner.returns.variance), deviation, rtol=1e-3)
    expected = discounted_returns(rows["reward"], ends, 0.9) / deviation
    np.testing.assert_allclose(learner.weights.values.mean, expected.mean(), rtol=1e-3)
    outputs: Any = graph.outputs
    value = jax.jit(jax.vmap(lambda row: outputs.value(learner.weights, (), row)))(rows["observation"])
    assert np.mean((value - expected) ** 2) < 0.5 * np.var(expected)


def test_a_training_begins_with_the_clone_in_every_seed(recording, tmp_path):
    graph = rollmill.ppo("MountainCar-v0", **SIZES, learning_rate=0.0)
    options = {"clone": recording[1], "clone_updates": 10, "num_seeds": 2, "quiet": True, "tensorboard": False}
    run = rollmill.train(graph, run_dir=tmp_path / "run", **options).directory
    expected = clone(graph, recording[1], seed=0, updates=10).learner.weights.network
    for seed in (0, 1):
        weights = load_weights(run, seed=seed).weights.network
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-6), weights, expected)
    begun = json.loads((run / "config.json").read_text())["started_from"]
    assert begun["transitions"] == int(recording[0].lengths.sum()) and len(begun["sha256"]) == 64


def test_illegal_actions_are_named(recording, tmp_path):
    legal = lambda state, params: jnp.stack([state.inner.velocity < 0, jnp.bool_(True), state.inner.velocity >= 0])
    env: Any = rollmill.make("MountainCar-v0")
    rows = dict(np.load(recording[1]))
    mask = np.stack([rows["action"] == 0, np.ones(len(rows["action"]), bool), rows["action"] == 2], axis=1)
    np.savez(tmp_path / "legal.npz", **rows, action_mask=mask)
    graph = rollmill.ppo(env._replace(action_mask=legal), **SIZES)
    assert clone(graph, tmp_path / "legal.npz", seed=0, updates=1).transitions == len(mask)
    np.savez(tmp_path / "illegal.npz", **rows, action_mask=np.roll(mask, 1, axis=1))
    with raises("action-transition-is-illegal-by"):
        clone(graph, tmp_path / "illegal.npz", seed=0, updates=1)


def test_what_cannot_be_cloned_is_refused(recording, tmp_path):
    _, file = recording
    with raises("clone-is-for-ppo-a2c"):
        clone(rollmill.dqn("MountainCar-v0"), file, seed=0, updates=1)
    with raises("clone-is-for-policies-without"):
        clone(rollmill.ppo("MountainCar-v0", network="gru"), file, seed=0, updates=1)
    with raises("has-shape-expected-with-one", "observation"):
        clone(rollmill.ppo("CartPole-v1"), file, seed=0, updates=1)
    rows = dict(np.load(file))
    np.savez(tmp_path / "wrong.npz", **{**rows, "action": rows["action"] + 2})
    with raises("action-transition-is-not-one"):
        clone(rollmill.ppo("MountainCar-v0"), tmp_path / "wrong.npz", seed=0, updates=1)
    np.savez(tmp_path / "none.npz", reward=rows["reward"])
    with raises("has-no-there", "observation"):
        clone(rollmill.ppo("MountainCar-v0"), tmp_path / "none.npz", seed=0, updates=1)
    (tmp_path / "text.npz").write_text("no archive")
    with raises("is-no-archive-numpy-arrays"):
        clone(rollmill.ppo("MountainCar-v0"), tmp_path / "text.npz", seed=0, updates=1)
    with raises("clone-and-start-from-both"):
        rollmill.RunOptions(clone=file, start_from=str(tmp_path))
    with raises("clone-updates-has-no-effect"):
        rollmill.RunOptions(clone_updates=5)
    with raises("record-has-to-end-in"):
        evaluate_rule("random", env="MountainCar-v0", record=tmp_path / "text.txt")
    with raises("exists-already-hint"):
        evaluate_rule("random", env="MountainCar-v0", record=file)
