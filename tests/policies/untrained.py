"""Policies of random weights."""

import jax

import rollmill
from rollmill.policies.policy import LoadedRun, Policy

SMALL = {"num_envs": 4, "num_steps": 8, "total_timesteps": 64}
REPLAY = {"buffer_size": 200, "batch_size": 8, "learning_starts": 32}
TINY = rollmill.NetworkConfig(hidden_sizes=(8,))


def untrained(graph, seed=0, *, spread=1.0):
    """A policy of random weights, whose head is not near zero as at the start of a training."""
    key = jax.random.key(seed)
    weights = graph.weights(graph.start_learner(key))
    leaves, structure = jax.tree.flatten(weights)
    keys = jax.random.split(key, len(leaves))
    is_weight = lambda leaf: leaf.ndim == 2
    moved = [
        leaf + spread * jax.random.normal(k, leaf.shape, leaf.dtype) if is_weight(leaf) else leaf
        for k, leaf in zip(keys, leaves, strict=True)
    ]
    return Policy(LoadedRun(graph, jax.tree.unflatten(structure, moved), 0, "untrained"))
