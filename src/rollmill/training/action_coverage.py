"""Warns about action spaces that the initial policy of a new run hardly covers."""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from rollmill.dataflow import Graph
from rollmill.envs.box_coverage import far_boxes
from rollmill.networks import DiagonalGaussian


def notes_on_far_actions(graph: Graph) -> list[str]:
    """Returns notes that name the actions whose bounds are far from the Gaussian of the initial policy.

    There are no notes for squashed policies and for policies that are not Gaussian.
    """
    std = _first_std(graph)
    if not far_boxes(graph.action_space, std=std):  # true for nearly all runs, and known without a trace
        return []
    distribution = _distribution(graph)
    if isinstance(distribution, DiagonalGaussian):
        gaussian = [""]
    elif isinstance(distribution, dict):
        gaussian = [f"[{kind!r}]" for kind, part in distribution.items() if isinstance(part, DiagonalGaussian)]
    else:
        return []
    return [f"note: {far}" for far in far_boxes(graph.action_space, std=std) if far.where in gaussian]


def _first_std(graph: Graph) -> float:
    """Returns the standard deviation that the network's settings give, if there are any."""
    network = graph.settings["config"].get("network")
    return math.exp(network.get("initial_log_std", 0.0)) if isinstance(network, Mapping) else 1.0


def _distribution(graph: Graph) -> PyTree:
    """Returns the action distribution of the graph's policy with types as leaves, or None without one."""
    of_policy = graph.outputs.distribution
    if of_policy is None or graph.outputs.searches:
        return None

    def first(key: jax.Array) -> PyTree:
        _, state_key, learner_key = jax.random.split(key, 3)
        weights = graph.weights(graph.start_learner(learner_key))
        state, observation = graph.start_environment(state_key, jnp.int32(0))
        return of_policy(weights, graph.start_memory(), observation, graph.action_mask(state))

    return jax.eval_shape(first, jax.random.key(0))
