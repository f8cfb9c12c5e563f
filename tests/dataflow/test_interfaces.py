"""The edges' shapes and bytes, by value; and nothing is computed."""

import time

import jax
import jax.numpy as jnp
import pytest
from counting_graph import counting_graph

import rollmill
from rollmill.dataflow import EDGES, interfaces


def shapes(tree):
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]


def test_every_edge_of_the_counting_graph():
    found = interfaces(counting_graph(num_envs=8, num_steps=5, epochs=3, num_minibatches=2))
    assert tuple(found) == ("timestep", "action", "trajectory", "gradients", "parameters", "weights")
    assert [interface.edge for interface in found.values()] == list(EDGES)
    # observation, mask, reward and two flags of each environment; of its info the final observation, and
    # length, return and noise
    timestep = [((8, 2), "float32"), ((8, 2), "bool"), ((8,), "float32"), ((8,), "bool"), ((8,), "bool")]
    info = [((8,), "int32"), ((8,), "float32"), ((8, 2), "float32"), ((8,), "float32")]
    assert shapes(found["timestep"].shapes) == timestep + info
    # an environment's key and its action
    assert shapes(found["action"].shapes) == [((8, 2), "uint32"), ((8,), "int32")]
    assert shapes(found["gradients"].shapes) == [((), "float32")]
    # the gradients read the count of updates, the policy reads the weight; both are written by the update
    assert shapes(found["parameters"].shapes) == [((), "int32"), ((), "float32")]
    assert shapes(found["weights"].shapes) == [((), "float32")]
    steps = found["trajectory"].shapes.steps
    assert {shape[:2] for shape, _ in shapes(steps)} == {(5, 8)}
    # Of a step: observations 2 x 8, mask 2, action 4, extras 2 x 4, reward 4, flags 2, memory 4, info 4 x 3
    # Of a rollout, beside: two memories and an observation.
    assert {name: interface.bytes_per_message for name, interface in found.items()} == {
        "timestep": 8 * (8 + 2 + 4 + 2 + 8 + 3 * 4),
        "action": 8 * (8 + 4),
        "trajectory": 5 * 8 * (16 + 2 + 4 + 8 + 4 + 2 + 4 + 12) + 8 * (4 + 4 + 8),
        "gradients": 4,
        "parameters": 8,
        "weights": 4,
    }
    assert {name: interface.messages_per_iteration for name, interface in found.items()} == {
        "timestep": 5,
        "action": 5,
        "trajectory": 1,
        "gradients": 6,
        "parameters": 6,
        "weights": 1,
    }


@pytest.mark.parametrize("torso", ["mlp", "gru"])
def test_edges_of_ppo(torso):
    memory = {"recurrent_size": 3} if torso == "gru" else {}
    network = rollmill.NetworkConfig(torso=torso, hidden_sizes=(5,), **memory)
    config = rollmill.PPOConfig(num_envs=8, num_steps=4, network=network, normalize_values=False)
    found = interfaces(rollmill.ppo(rollmill.make("CartPole-v1"), config))
    # Two torsos; a GRU of 3 on 5 inputs has 5 x 9 and 3 x 9 weights, 9 biases and 3 more of the candidate.
    torso_size, features = (25, 5) if torso == "mlp" else (25 + 45 + 27 + 9 + 3, 3)
    weights = 2 * torso_size + 2 * (features + 1) + features + 1
    assert found["weights"].bytes_per_message == found["gradients"].bytes_per_message == 4 * weights
    assert found["timestep"].bytes_per_message == 8 * (16 + 4 + 1 + 1 + 16 + 4 + 4)
    assert found["action"].bytes_per_message == 8 * (8 + 4)
    # Observation twice, action, log-probability, reward, flags, return and length; of a recurrent policy its
    # value and its memory (of the actor's torso and the critic's) too.
    step, beside = 2 * 16 + 4 + 4 + 4 + 2 + 8, 16
    memory = 2 * 3 * 4
    step, beside = (step, beside) if torso == "mlp" else (step + 4 + memory, beside + 2 * memory)
    assert found["trajectory"].bytes_per_message == 4 * 8 * step + 8 * beside
    assert found["gradients"].messages_per_iteration == 16


def test_statistics_travel_with_the_weights_and_not_with_the_gradients():
    plain, normalised = (
        interfaces(rollmill.ppo(rollmill.make("CartPole-v1"), num_envs=8, normalize_observations=flag))
        for flag in (False, True)
    )
    assert normalised["gradients"].bytes_per_message == plain["gradients"].bytes_per_message
    assert normalised["weights"].bytes_per_message == plain["weights"].bytes_per_message + 4 * (4 + 4 + 1)


@pytest.mark.parametrize("items", ["samples", "sequences"])
def test_nothing_is_computed(items):
    """A rollout of 42 GB costs no memory and no time."""
    began = time.perf_counter()
    graph = counting_graph(num_envs=2**24, num_steps=48, minibatch_items=items)
    if items == "sequences":
        graph = graph._replace(gradients=_of_sequences)
    found = interfaces(graph)
    assert found["trajectory"].bytes_per_message == 48 * 2**24 * 52 + 2**24 * 16 > 40e9
    assert time.perf_counter() - began < 20


def _of_sequences(learner, minibatch):
    assert minibatch.samples["observation"].shape == (2**23, 48, 2)
    assert minibatch.sequences.shape == (2**23,)
    return {"weight": jnp.mean(minibatch.samples["observation"])}, {}
