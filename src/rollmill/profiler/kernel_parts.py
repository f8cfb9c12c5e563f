"""Divides the time of a rollout kernel into policy and environment, by timing kernels without one of them.

A kernel overlaps its computations, so the times of its parts cannot be measured directly. The time of the
environment is the difference from a kernel without the environment. The time of the policy is measured in the same
way, and the remainder is reported separately.
"""

from collections.abc import Mapping
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rollmill.core.types import Timestep
from rollmill.dataflow import Decision, Graph, init_state
from rollmill.fusion import Backend, fused_collect, time_call

TURNS = 3
"""Number of times that kernels are measured in turns, so that a slower machine affects all of them."""


class KernelParts(NamedTuple):
    """Shares of policy, environment and remainder in the time of a rollout kernel. They sum to 1."""

    environment: float
    policy: float
    rest: float


def rollout_parts(graph: Graph, backend: Backend, launch: tuple[int, ...], num_envs: int) -> KernelParts:
    """Estimates the shares of policy and environment in the time of a rollout kernel.

    Times the whole kernel, the kernel without the environment, and the kernel without the policy.

    Raises `CannotFuse` if a kernel cannot be made.
    """
    state = jax.jit(lambda: init_state(graph, jax.random.key(0), jnp.arange(num_envs, dtype=jnp.int32)))()
    weights = graph.weights(state.learner)
    variants = {
        "whole": graph,
        "without environment": without_environment(graph),
        "without policy": without_policy(graph),
    }
    run = backend.rollouts.run(launch)
    arguments = weights, state.collector, state.key
    collects = {
        name: jax.jit(partial(fused_collect, variant, run=run)).lower(*arguments).compile()
        for name, variant in variants.items()
    }
    times: dict[str, list[float]] = {name: [] for name in collects}
    for _ in range(TURNS):
        for name, collect in collects.items():
            times[name].append(time_call(collect, arguments))
    return parts_of({name: median(found) for name, found in times.items()})


def parts_of(seconds: Mapping[str, float]) -> KernelParts:
    """Computes the shares of policy and environment from the times of the three kernels."""
    whole = seconds["whole"]
    environment = max(0.0, whole - seconds["without environment"])
    policy = max(0.0, whole - seconds["without policy"])
    rest = max(0.0, whole - environment - policy)
    total = environment + policy + rest
    return KernelParts(environment / total, policy / total, rest / total)


def without_environment(graph: Graph) -> Graph:
    """Returns the graph with an environment whose state never changes.

    Its observations follow from the actions. If they were constant, the policy could be computed in advance.
    """

    def environment(key: Any, state: Any, action: Any) -> Timestep:
        blank = jax.tree.map(_zeros, jax.eval_shape(graph.environment, key, state, action))
        signal = _signal(action)
        observation = jax.tree.map(lambda leaf: leaf + signal.astype(leaf.dtype), blank.observation)
        return blank._replace(state=state, observation=observation)

    return graph._replace(environment=environment)


def without_policy(graph: Graph) -> Graph:
    """Returns the graph with a trivial policy, whose action is the sign of the sum of the observation."""

    def policy(weights: Any, key: Any, memory: Any, observation: Any, mask: Any) -> Decision:
        blank = jax.tree.map(_zeros, jax.eval_shape(graph.policy, weights, key, memory, observation, mask))
        signal = _signal(observation) > 0
        action = jax.tree.map(lambda leaf: leaf + signal.astype(leaf.dtype), blank.action)
        return Decision(action, memory, blank.extras)

    return graph._replace(policy=policy)


def _zeros(leaf: jax.ShapeDtypeStruct) -> Array:
    return jnp.zeros(leaf.shape, leaf.dtype)


def _signal(tree: Any) -> Array:
    """Computes a number that depends on all values of a tree."""
    return sum((jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(tree)), start=jnp.float32(0))
