"""Collects experience: steps of policy and environment, lifted from one environment to all.

Shape letters: `T` steps, `E` environments of this replica.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from rollmill.core.operations import operation_scope
from rollmill.core.types import OVERFLOW, UNSTABLE, Key
from rollmill.dataflow.fragment_results import check_action
from rollmill.dataflow.graph import Collector, Graph, Hyperparameters, Metrics, Step, Trajectory, Weights
from rollmill.dataflow.minibatch_loop import all_finite

START, COLLECT, LEARN = 0, 1, 2
"""Uses for which random keys are derived: starting environments, collecting a rollout, and learning."""


def iteration_key(key: Key, iteration: Int[Array | np.ndarray, ""] | int, use: int) -> Key:
    """Derives the random key of one loop of an iteration from the root key."""
    return jax.random.fold_in(jax.random.fold_in(key, use), iteration)


def start_collector(
    graph: Graph, key: Key, index: Int[Array, " E"], parameters: Hyperparameters | None = None
) -> Collector:
    """Starts the environments with the given global indices. `parameters` replaces the graph's parameters."""
    _, env_key = jax.random.split(jax.random.fold_in(key, START))
    begin = lambda key, index: start_one(graph, key, index, parameters)
    return jax.vmap(begin, in_axes=(None, 0))(env_key, index)


def start_one(
    graph: Graph, key: Key, index: Int[Array, ""], parameters: Hyperparameters | None = None
) -> Collector:
    """Starts ONE environment. Its random key derives from its global index."""
    held = (parameters,) if parameters else ()
    state, observation = graph.start_environment(jax.random.fold_in(key, index), index, *held)
    return Collector(index, state, observation, graph.action_mask(state), graph.start_memory())


def collect(
    graph: Graph, weights: Weights, collector: Collector, key: Key, *, unroll: int = 1
) -> tuple[Collector, Trajectory]:
    """Runs policy and environment for `num_steps` steps in every environment.

    Random keys derive from the global indices of environments, so placement does not change the result.
    """
    if graph.compact_step is not None:
        return _collect_compacted(graph, weights, collector, key, unroll=unroll)
    rollout = partial(rollout_one, graph, weights, unroll=unroll)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, collector.index)
    after, steps = jax.vmap(rollout, out_axes=(0, 1))(collector, keys)
    return after, Trajectory(steps, collector.memory, after.observation, after.memory)


def _collect_compacted(
    graph: Graph, weights: Weights, collector: Collector, key: Key, *, unroll: int
) -> tuple[Collector, Trajectory]:
    """Collects in all environments at once, and compacts each step before the next."""
    step = lambda now, t: step_all(graph, weights, now, key, t)
    after, steps = jax.lax.scan(step, collector, jnp.arange(graph.loops.num_steps), unroll=unroll)
    return after, Trajectory(steps, collector.memory, after.observation, after.memory)


def rollout_one(
    graph: Graph, weights: Weights, collector: Collector, key: Key, *, unroll: int = 1
) -> tuple[Collector, Step]:
    """Runs `num_steps` steps of ONE environment under fixed weights. Leaves of the steps are `[T, ...]`."""

    def step(carry: Collector, t: Int[Array, ""]) -> tuple[Collector, Step]:
        return step_one(graph, weights, carry, key, t)

    return jax.lax.scan(step, collector, jnp.arange(graph.loops.num_steps), unroll=unroll)


def step_all(
    graph: Graph, weights: Weights, collector: Collector, key: Key, t: Int[Array, ""]
) -> tuple[Collector, Step]:
    """Runs step `t` of a rollout in every environment."""

    def step(collector: Collector) -> tuple[Collector, Step]:
        return step_one(graph, weights, collector, jax.random.fold_in(key, collector.index), t)

    after, steps = jax.vmap(step)(collector)
    if graph.compact_step is None:
        return after, steps
    with operation_scope("policy"):
        return after, graph.compact_step(weights, steps)


def step_one(
    graph: Graph, weights: Weights, collector: Collector, key: Key, t: Int[Array, ""] | int
) -> tuple[Collector, Step]:
    """Runs step `t` of ONE environment's rollout: the policy decides, then the environment steps.

    Args:
        graph: graph to collect for.
        weights: weights of the policy.
        collector: state of the environment before the step.
        key: key of this environment's rollout. The keys of the two fragments derive from it and from `t`.
        t: index of the step, below 2^31.
    """
    policy_key, env_key = (jax.random.fold_in(key, 2 * jnp.uint32(t) + fragment) for fragment in (0, 1))
    with operation_scope("policy"):
        decision = graph.policy(
            weights, policy_key, collector.memory, collector.observation, collector.action_mask
        )
        check_action(decision.action, graph.action_space, "policy")
    with operation_scope("environment"):
        timestep = graph.environment(env_key, collector.environment, decision.action)
        action_mask = graph.action_mask(timestep.state)
    info = dict(timestep.info)
    final_observation = info.pop("final_observation")
    done = timestep.terminated | timestep.truncated
    memory = jax.tree.map(partial(jnp.where, done), graph.start_memory(), decision.memory)
    after = Collector(collector.index, timestep.state, timestep.observation, action_mask, memory)
    return after, Step(
        observation=collector.observation,
        action_mask=collector.action_mask,
        action=decision.action,
        extras=decision.extras,
        reward=timestep.reward,
        terminated=timestep.terminated,
        truncated=timestep.truncated,
        final_observation=final_observation,
        final_memory=decision.memory,
        info=info,
    )


def collection_metrics(graph: Graph, trajectory: Trajectory, weights: Weights, index: Int[Array, " E"]) -> Metrics:
    """Computes the metrics of this replica's environments. Their mean over replicas is the run's metric."""
    replicas = graph.loops.num_envs // index.size
    return {**_episodes(trajectory.steps, replicas), **_finite(trajectory.steps, weights)}


def _episodes(steps: Step, replicas: int) -> Metrics:
    """Sums returns and lengths of the episodes that ended, scaled so that the mean over replicas is the total."""
    ended = (steps.terminated | steps.truncated).astype(jnp.float32)
    scale = jnp.float32(replicas)
    sums = {
        "episodes/ended": scale * ended.sum(),
        "episodes/return_sum": scale * (ended * steps.info["episode_return"]).sum(),
        "episodes/length_sum": scale * (ended * steps.info["episode_length"].astype(jnp.float32)).sum(),
    }
    of_kinds: Any = steps.info.get("agent_returns", {})
    for kind, returns in of_kinds.items():
        sums[f"episodes/return_sum/{kind}"] = scale * (ended * returns).sum()
    for name, flag in (("episodes/unstable", UNSTABLE), ("episodes/overflows", OVERFLOW)):
        if flag in steps.info:
            sums[name] = scale * steps.info[flag].astype(jnp.float32).sum()
    return sums


def _finite(steps: Step, weights: Weights) -> Metrics:
    """Returns a flag for each fragment: 1 if its outputs were finite in every step, otherwise less."""
    return {
        "finite/environment": all_finite((steps.observation, steps.final_observation, steps.reward)),
        "finite/policy": all_finite((steps.action, steps.extras)),
        "finite/update": all_finite(weights),
    }
