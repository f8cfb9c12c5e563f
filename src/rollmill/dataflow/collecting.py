"""The loop that collects: steps of policy and environment, lifted from one environment to all of them.

Shape letters: `T` steps, `E` environments held here.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from rollmill.core.operations import traced
from rollmill.core.types import Key
from rollmill.dataflow.graph import Collector, Graph, Metrics, Step, Trajectory, Weights
from rollmill.dataflow.keys import START
from rollmill.dataflow.minibatch_loop import all_finite


def start_collector(graph: Graph, key: Key, index: Int[Array, " E"]) -> Collector:
    """The environments with these global indices before their first step."""
    _, env_key = jax.random.split(jax.random.fold_in(key, START))
    return jax.vmap(partial(start_one, graph), in_axes=(None, 0))(env_key, index)


def start_one(graph: Graph, key: Key, index: Int[Array, ""]) -> Collector:
    """ONE environment before its first step; its key belongs to its global index."""
    state, observation = graph.start_environment(jax.random.fold_in(key, index), index)
    return Collector(index, state, observation, graph.action_mask(state), graph.start_memory())


def collect(
    graph: Graph, weights: Weights, collector: Collector, key: Key, *, unroll: int = 1
) -> tuple[Collector, Trajectory]:
    """`num_steps` of policy and environment in every environment; keys belong to the global index."""
    if graph.condense is not None:
        return _collect_condensed(graph, weights, collector, key, unroll=unroll)
    rollout = partial(rollout_one, graph, weights, unroll=unroll)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, collector.index)
    after, steps = jax.vmap(rollout, out_axes=(0, 1))(collector, keys)
    return after, Trajectory(steps, collector.memory, after.observation, after.memory)


def _collect_condensed(
    graph: Graph, weights: Weights, collector: Collector, key: Key, *, unroll: int
) -> tuple[Collector, Trajectory]:
    """Collects step by step in all environments at once, so that each step is condensed before the next one."""
    step = lambda now, t: step_all(graph, weights, now, key, t)
    after, steps = jax.lax.scan(step, collector, jnp.arange(graph.loops.num_steps), unroll=unroll)
    return after, Trajectory(steps, collector.memory, after.observation, after.memory)


def rollout_one(
    graph: Graph, weights: Weights, collector: Collector, key: Key, *, unroll: int = 1
) -> tuple[Collector, Step]:
    """`num_steps` of policy and environment in ONE environment; leaves of the steps are `[T, ...]`."""

    def step(carry: Collector, t: Int[Array, ""]) -> tuple[Collector, Step]:
        return step_one(graph, weights, carry, key, t)

    return jax.lax.scan(step, collector, jnp.arange(graph.loops.num_steps), unroll=unroll)


def step_all(
    graph: Graph, weights: Weights, now: Collector, key: Key, t: Int[Array, ""]
) -> tuple[Collector, Step]:
    """Step `t` of a rollout in every environment; what `collect` does, one step at a time."""

    def step(now: Collector) -> tuple[Collector, Step]:
        return step_one(graph, weights, now, jax.random.fold_in(key, now.index), t)

    after, steps = jax.vmap(step)(now)
    if graph.condense is None:
        return after, steps
    with traced("policy"):
        return after, graph.condense(weights, steps)


def step_one(
    graph: Graph, weights: Weights, now: Collector, key: Key, t: Int[Array, ""] | int
) -> tuple[Collector, Step]:
    """Step `t` of ONE environment's rollout: the policy decides and the environment follows.

    Args:
        graph: what is trained.
        weights: weights of the policy.
        now: the environment before the step.
        key: the environment's own, of the whole rollout; from it and `t` come the keys of the two fragments.
        t: below 2^31.
    """
    policy_key, env_key = (jax.random.fold_in(key, 2 * jnp.uint32(t) + fragment) for fragment in (0, 1))
    with traced("policy"):
        decision = graph.policy(weights, policy_key, now.memory, now.observation, now.action_mask)
    with traced("environment"):
        timestep = graph.environment(env_key, now.environment, decision.action)
        action_mask = graph.action_mask(timestep.state)
    info = dict(timestep.info)
    final_observation = info.pop("final_observation")
    done = timestep.terminated | timestep.truncated
    memory = jax.tree.map(partial(jnp.where, done), graph.start_memory(), decision.memory)
    after = Collector(now.index, timestep.state, timestep.observation, action_mask, memory)
    return after, Step(
        observation=now.observation,
        action_mask=now.action_mask,
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
    """Metrics of the environments held here, such that the mean over replicas is that of all."""
    replicas = graph.loops.num_envs // index.size
    return {**_episodes(trajectory.steps, replicas), **_finite(trajectory.steps, weights)}


def _episodes(steps: Step, replicas: int) -> Metrics:
    """Sums over the episodes that ended; scaled so that the mean over replicas is the total."""
    ended = (steps.terminated | steps.truncated).astype(jnp.float32)
    scale = jnp.float32(replicas)
    return {
        "episodes/ended": scale * ended.sum(),
        "episodes/return_sum": scale * (ended * steps.info["episode_return"]).sum(),
        "episodes/length_sum": scale * (ended * steps.info["episode_length"].astype(jnp.float32)).sum(),
    }


def _finite(steps: Step, weights: Weights) -> Metrics:
    """One for each fragment whose outputs were finite throughout the iteration, less otherwise."""
    return {
        "finite/environment": all_finite((steps.observation, steps.final_observation, steps.reward)),
        "finite/policy": all_finite((steps.action, steps.extras)),
        "finite/update": all_finite(weights),
    }
