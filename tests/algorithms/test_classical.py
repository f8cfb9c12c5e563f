"""A2C and DDPG: their classical settings, and DDPG's gradients against NumPy."""

from dataclasses import asdict, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_networks import assert_slopes, dense, in_float64

import rollmill
from one_time import run_once
from rollmill.dataflow import Batch, Transitions
from rollmill.dataflow.fingerprint import fingerprint
from wordings import raises

TINY = rollmill.NetworkConfig(hidden_sizes=(4,), activation="relu")
REPLAY = {"num_envs": 4, "buffer_size": 400, "batch_size": 8, "learning_starts": 16, "total_timesteps": 400}


def ddpg_graph(**options):
    return rollmill.ddpg("Pendulum-v1", network=TINY, **REPLAY | options)


def transitions(count=6):
    keys = iter(jax.random.split(jax.random.key(1), 8))
    normal = lambda *shape: jax.random.normal(next(keys), (count, *shape))
    return Transitions(
        observation=normal(3),
        action_mask=(),
        action=normal(1),
        reward=normal(),
        discount=jnp.asarray([0.9, 0.0] * (count // 2)),
        next_observation=normal(3),
        next_action_mask=(),
        weight=jnp.ones(count),
        key=jax.random.split(jax.random.key(0), count),
    )


def test_a2c_is_a3c_with_other_settings():
    settings = {"num_envs": 8, "num_steps": 5, "learning_rate": 7e-4, "norm_adv": False, "normalize_values": False}
    differ = {
        name for name, value in asdict(rollmill.A2CConfig()).items() if value != asdict(rollmill.A3CConfig())[name]
    }
    assert {name: getattr(rollmill.A2CConfig(), name) for name in settings} == settings and differ >= {*settings}
    a2c, a3c = rollmill.a2c("CartPole-v1"), rollmill.a3c("CartPole-v1", **settings)
    assert a2c.settings == {**a3c.settings, "algorithm": "a2c"} and fingerprint(a2c) == fingerprint(a3c)


def test_gradients_of_ddpg_are_those_of_both_losses():
    """The critic's squared error to the targets' value, and minus the critic's value of the actor's action."""
    graph, sample = ddpg_graph(), transitions()
    learner = run_once(graph.start_learner, jax.random.key(0))
    moved = lambda tree, by: jax.tree.map(
        lambda x: x + np.float32(by * np.cos(np.arange(x.size)).reshape(x.shape)), tree
    )
    learner = replace(learner, networks=moved(learner.networks, 0.5), targets=moved(learner.targets, 0.8))
    gradients, metrics = jax.jit(lambda learner: graph.gradients(learner, Batch(sample)))(learner)
    (networks, targets), data = map(in_float64, (learner.networks, learner.targets)), sample
    seen, after, action = (
        np.asarray(x, np.float64) for x in (data.observation, data.next_observation, data.action)
    )
    act = lambda weights, x: 2 * np.tanh(dense(weights, x))
    value = lambda weights, x, action: dense(weights, np.concatenate([action, x], axis=1))[:, 0]
    next_value = value(targets[4:], after, act(targets[:4], after))
    target = np.asarray(data.reward) + np.asarray(data.discount) * next_value
    critic_loss = lambda weights: np.mean(0.5 * (value(weights, seen, action) - target) ** 2)
    actor_loss = lambda weights: -np.mean(value(networks[4:], seen, act(weights, seen)))
    assert_slopes(gradients.critics, critic_loss, networks[4:])
    assert_slopes(gradients.actor, actor_loss, networks[:4])
    np.testing.assert_allclose(metrics["losses/critic"], critic_loss(networks[4:]), rtol=1e-5)
    np.testing.assert_allclose(metrics["losses/policy"], actor_loss(networks[:4]), rtol=1e-5)


def test_all_networks_of_ddpg_move_at_every_update():
    graph = ddpg_graph(tau=0.25)
    learner, update = run_once(graph.start_learner, jax.random.key(0)), jax.jit(graph.update)
    for _ in range(2):
        before, learner = learner, update(learner, jax.tree.map(np.ones_like, learner.networks))
        for mine, old, fast in zip(
            *map(jax.tree.leaves, (learner.targets, before.targets, learner.networks)), strict=True
        ):
            assert not np.array_equal(mine, old)
            np.testing.assert_allclose(mine, old + 0.25 * (fast - old), rtol=1e-5, atol=1e-7)
    assert len(learner.networks.critics) == 1
    rates = [
        float(jnp.abs(a - b).max())
        for a, b in zip(*map(jax.tree.leaves, (before.networks, learner.networks)), strict=True)
    ]
    np.testing.assert_allclose(rates, [3e-4] * 4 + [1e-3] * 4, rtol=1e-2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env": "CartPole-v1"}, ("needs-box-continuous-actions-this", "ddpg", "dqn")),
        ({"critic_learning_rate": 0.0}, ("out-of-bounds", "critic_learning_rate", "0")),
        ({"network": "gru"}, ("torso-needs-whole-sequences-algorithms",)),
    ],
)
def test_what_ddpg_cannot_train_is_refused(options, message):
    with raises(*message):
        rollmill.ddpg(**{"env": "Pendulum-v1", "network": TINY, **REPLAY, **options})
