"""Torsos of one's own, by name: in actor-critics, and in the networks of algorithms with a replay memory."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import rollmill
from registries import restored
from rollmill.core.errors import ContractError, UsageError
from rollmill.networks import (
    NetworkConfig,
    action_critic,
    action_values,
    actor_critic,
    register_network,
    registry,
    stochastic_actor,
)

SET = spaces.Box(-1.0, 1.0, (5, 3), np.float32)
"""Five elements of three numbers, in any order."""
BOX, CHOICE = spaces.Box(-2.0, 2.0, (2,), np.float32), spaces.Discrete(4)
KEY = jax.random.key(0)


class Pooled(eqx.Module):
    weight: jax.Array

    def __call__(self, observation):
        return jnp.tanh(observation @ self.weight).sum(axis=0)


def pooled(key, space):
    """The sum over elements of a layer."""
    return Pooled(jax.random.normal(key, (space.shape[1], 7)))


@pytest.fixture
def named(monkeypatch):
    monkeypatch.setattr(registry, "_torsos", set())
    with restored(registry.NETWORKS):
        register_network("pooled", pooled, torso=True)
        yield NetworkConfig(name="pooled", hidden_sizes=(6,), activation="relu")


def layers_by_hand(torso, features):
    (layer,) = torso.mlp.layers
    return jax.nn.relu(layer(features))


def drawn(*shape):
    return jnp.asarray(np.random.default_rng(1).uniform(-1, 1, shape), jnp.float32)


def test_values_of_actions_are_those_of_the_torso_and_its_layers(named):
    network = action_values(KEY, SET, CHOICE, named, duelling=False)
    x = drawn(5, 3)
    expected = network.head(layers_by_hand(network.torso, jnp.tanh(x @ network.torso.own.weight).sum(axis=0)))
    np.testing.assert_allclose(network(x), expected, rtol=1e-5)
    np.testing.assert_allclose(network(x[::-1]), expected, rtol=1e-4)  # a set has no order


def test_a_critic_of_actions_reads_the_action_beside_the_features(named):
    network, x, action = action_critic(KEY, SET, BOX, named), drawn(5, 3), drawn(2)
    features = jnp.concatenate([jnp.tanh(x @ network.torso.own.weight).sum(axis=0), action])
    expected = network.head(layers_by_hand(network.torso, features))[0]
    assert network.torso.mlp.layers[0].weight.size == (7 + 2) * 6
    np.testing.assert_allclose(network(x, action), expected, rtol=1e-5)


def test_actors_and_actor_critics_have_it_too(named):
    x = drawn(5, 3)
    actor = stochastic_actor(KEY, SET, BOX, named)
    assert actor(x).mode().shape == (2,)
    network = actor_critic(KEY, SET, CHOICE, named)
    hidden = layers_by_hand(network.critic_torso, jnp.tanh(x @ network.critic_torso.own.weight).sum(axis=0))
    np.testing.assert_allclose(network.value(x, ()), network.critic(hidden)[0], rtol=1e-5)
    recurrent = actor_critic(KEY, SET, CHOICE, NetworkConfig(name="pooled", torso="gru", recurrent_size=9))
    assert jax.tree.leaves(recurrent.initial_memory())[0].shape == (9,)


@pytest.mark.parametrize(
    ("algorithm", "env"),
    [(rollmill.dqn, "CartPole-v1"), (rollmill.sac, "Pendulum-v1"), (rollmill.td3, "Pendulum-v1")],
)
def test_algorithms_with_a_replay_memory_take_it_by_name(algorithm, env, named):
    register_network("flat", lambda key, space: lambda observation: 2 * observation, torso=True)
    graph = algorithm(env, network="flat", num_envs=4)
    assert graph.settings["config"]["network"]["name"] == "flat" and graph.settings["custom"] == []
    assert jax.tree.leaves(jax.eval_shape(graph.start_learner, KEY))


def test_the_layout_of_images_is_no_setting_that_a_whole_network_refuses(named):
    """Algorithms resolve it by the observation space before they make the network."""
    register_network("whole", lambda key, observation_space, action_space: "made")
    config = NetworkConfig(name="whole", image_layout="channels_last")
    assert actor_critic(KEY, spaces.Box(0, 255, (8, 8, 3), np.uint8), CHOICE, config) == "made"


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"convolutions": ((8, 3, 1),)}, UsageError, "convolutions has no effect with the network 'pooled'"),
        ({"torso": "mlp"}, UsageError, "torso has no effect with the network 'pooled'"),
        ({"name": "scalar"}, ContractError, "the torso scalar must return one float32 vector, got"),
        ({"name": "broken"}, ContractError, r"the torso broken raised ZeroDivisionError"),
        ({"name": "whole"}, UsageError, r"hint: register a torso.*torso=True"),
    ],
)
def test_what_does_not_go_together_is_named(config, error, message, named):
    register_network("scalar", lambda key, space: lambda observation: observation.sum(), torso=True)
    register_network("broken", lambda key, space: 1 // 0, torso=True)
    register_network("whole", lambda key, observation_space, action_space: None)
    with pytest.raises(error, match=message):
        action_values(KEY, SET, CHOICE, NetworkConfig(**({"name": "pooled"} | config)), duelling=True)
