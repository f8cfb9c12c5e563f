"""The computations of fragments in straightforward code, with weights and comparisons to try them.

Shape letters: `T` steps, `E` environments.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rollmill.dataflow import collect, identity, init_state

LOOSE = {"rtol": 2e-4, "atol": 1e-5}


class NetworkOutputs(NamedTuple):
    """The outputs of a network for each step `[T, E]`."""

    log_prob: jax.Array
    entropy: jax.Array
    value: jax.Array
    final_value: jax.Array


def unroll_by_hand(policy, weights, observation, action, final_observation, done, memory):
    """Step by step in Python, the memory set back after each end of an episode; ONE environment."""
    outputs = []
    for t in range(len(done)):
        output = policy.forward(weights, memory, observation[t], ())
        distribution, memory = output.distribution, output.memory
        final_value = policy.forward(weights, memory, final_observation[t], ()).value
        outputs.append(
            NetworkOutputs(distribution.log_prob(action[t]), distribution.entropy(), output.value, final_value)
        )
        memory = jax.tree.map(lambda m, d=done[t]: jnp.where(d, jnp.zeros_like(m), m), memory)
    last_memory = memory
    return jax.tree.map(lambda *x: jnp.stack(x), *outputs), last_memory


def normalise_by_hand(statistics, x):
    x = np.asarray(x, np.float64)
    return np.clip((x - np.asarray(statistics.mean)) / np.sqrt(np.asarray(statistics.variance) + 1e-8), -10, 10)


def after_a_rollout(graph, key):
    """The state after one rollout, with its statistics. Nothing is learned, which would take long to compile."""
    state = init_state(graph, key, jnp.arange(graph.loops.num_envs, dtype=jnp.int32))
    weights, seed = graph.weights(state.learner), jax.random.fold_in(key, 1)
    collector, trajectory = collect(graph, weights, state.collector, seed)
    learner, _ = graph.prepare(state.learner, trajectory, reduce=identity, replicas=1)
    return replace(state, collector=collector, learner=learner)


def disturbed_network(network, seed=1):
    """Weights far from the start, where the policy would be nearly uniform."""
    leaves, treedef = jax.tree.flatten(network)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    moved = [leaf + 0.5 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(treedef, moved)


def assert_close(ours, theirs, **tolerance):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, **(tolerance or LOOSE))
