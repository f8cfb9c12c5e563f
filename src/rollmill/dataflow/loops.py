"""The two loops of every graph, lifted from one environment and one minibatch to all of them.

Pure functions over whatever share of the environments is held here. `reduce` is the mean over the
places that hold the other shares; it is an argument, and the identity by default.

Shape letters: `T` steps, `E` environments held here.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from rollmill.core.types import Key
from rollmill.dataflow.graph import (
    Batch,
    Collector,
    Graph,
    Learner,
    Metrics,
    Reduce,
    State,
    Step,
    Trajectory,
    Weights,
)
from rollmill.dataflow.minibatch_loop import MakeMinibatchLoop, all_finite, identity, plain_minibatch_loop
from rollmill.dataflow.minibatches import shuffled_rows

START, COLLECT, LEARN = 0, 1, 2  # what a key derived from the training's root key is used for


def start(graph: Graph, key: Key, index: Int[Array, " E"]) -> State:
    """The training state before the first iteration, for the environments with these global indices."""
    return State(start_collector(graph, key, index), start_learner(graph, key), key, jnp.int32(0))


def start_learner(graph: Graph, key: Key) -> Learner:
    """The learner before the first iteration; `key` is the training's root key."""
    learner_key, _ = jax.random.split(jax.random.fold_in(key, START))
    return graph.start_learner(learner_key)


def start_collector(graph: Graph, key: Key, index: Int[Array, " E"]) -> Collector:
    """The environments with these global indices before their first step."""
    _, env_key = jax.random.split(jax.random.fold_in(key, START))
    return jax.vmap(partial(start_one, graph), in_axes=(None, 0))(env_key, index)


def start_one(graph: Graph, key: Key, index: Int[Array, ""]) -> Collector:
    """ONE environment before its first step; its key belongs to its global index."""
    state, observation = graph.start_environment(jax.random.fold_in(key, index), index)
    return Collector(index, state, observation, graph.action_mask(state), graph.start_memory())


def iterate(
    graph: Graph,
    state: State,
    *,
    reduce: Reduce = identity,
    collect_with: Callable[..., tuple[Collector, Trajectory]] | None = None,
    make_minibatch_loop: MakeMinibatchLoop | None = None,
) -> tuple[State, Metrics]:
    """One iteration of training: collect, then learn.

    Args:
        graph: what is trained.
        state: before the iteration.
        reduce: the mean over replicas.
        collect_with: `collect` or an equivalent function.
        make_minibatch_loop: `plain_minibatch_loop` or an equivalent function.

    Returns:
        The next state, and metrics that are already reduced over replicas.
    """
    collect_key = iteration_key(state.key, state.iteration, COLLECT)
    learn_key = iteration_key(state.key, state.iteration, LEARN)
    weights = graph.weights(state.learner)
    collector, trajectory = (collect_with or collect)(graph, weights, state.collector, collect_key)
    learner, metrics = learn_from(
        graph,
        state.learner,
        trajectory,
        learn_key,
        collector.index,
        reduce=reduce,
        make_minibatch_loop=make_minibatch_loop,
    )
    return State(collector, learner, state.key, state.iteration + 1), metrics


def iteration_key(key: Key, iteration: Int[Array, ""] | int, use: int) -> Key:
    """The key of one loop of an iteration; `key` is the training's root key."""
    return jax.random.fold_in(jax.random.fold_in(key, use), iteration)


# --- collect -----------------------------------------------------------------------------------------


def collect(
    graph: Graph, weights: Weights, collector: Collector, key: Key, *, unroll: int = 1
) -> tuple[Collector, Trajectory]:
    """`num_steps` of policy and environment in every environment; keys belong to the global index."""
    rollout = partial(rollout_one, graph, weights, unroll=unroll)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, collector.index)
    after, steps = jax.vmap(rollout, out_axes=(0, 1))(collector, keys)
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

    return jax.vmap(step)(now)


def step_one(
    graph: Graph, weights: Weights, now: Collector, key: Key, t: Int[Array, ""] | int
) -> tuple[Collector, Step]:
    """Step `t` of ONE environment's rollout: the policy decides and the environment follows.

    Args:
        graph: what is trained.
        weights: of the policy.
        now: the environment before the step.
        key: the environment's own, of the whole rollout; from it and `t` come the keys of the two fragments.
        t: below 2^31.
    """
    policy_key, env_key = (jax.random.fold_in(key, 2 * jnp.uint32(t) + fragment) for fragment in (0, 1))
    with jax.named_scope("policy"):
        decision = graph.policy(weights, policy_key, now.memory, now.observation, now.action_mask)
    with jax.named_scope("environment"):
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


# --- learn -------------------------------------------------------------------------------------------


class _Progress(NamedTuple):
    carried: PyTree[Array]
    """The carry of the minibatch loop."""
    learning: Bool[Array, ""]


def learn_from(
    graph: Graph,
    learner: Learner,
    trajectory: Trajectory,
    key: Key,
    index: Int[Array, " E"],
    *,
    reduce: Reduce = identity,
    make_minibatch_loop: MakeMinibatchLoop | None = None,
) -> tuple[Learner, Metrics]:
    """The learning half of an iteration: prepare once, then learn; metrics are those of the whole iteration."""
    with jax.named_scope("prepare"):
        learner, batch = prepare(graph, learner, trajectory, index, reduce=reduce)
        reported = report(graph, learner, batch)
    learner, learned = learn(
        graph, learner, batch, key, index, reduce=reduce, make_minibatch_loop=make_minibatch_loop
    )
    collected = collection_metrics(graph, trajectory, graph.weights(learner), index)
    return learner, {**reduce({**collected, **reported}), **learned}


def prepare(
    graph: Graph, learner: Learner, trajectory: Trajectory, index: Int[Array, " E"], *, reduce: Reduce = identity
) -> tuple[Learner, Batch]:
    """The trajectory of the environments held here as a batch to learn from."""
    return graph.prepare(learner, trajectory, reduce=reduce, replicas=graph.loops.num_envs // index.size)


def report(graph: Graph, learner: Learner, batch: Batch) -> Metrics:
    """The algorithm's own metrics of the learner and the batch that `prepare` returned, not yet reduced."""
    return {} if graph.report is None else graph.report(learner, batch)


def learn(
    graph: Graph,
    learner: Learner,
    batch: Batch,
    key: Key,
    index: Int[Array, " E"],
    *,
    reduce: Reduce = identity,
    make_minibatch_loop: MakeMinibatchLoop | None = None,
) -> tuple[Learner, Metrics]:
    """`epochs` passes over the batch in shuffled minibatches; metrics are means over minibatches.

    The rows of all epochs are shuffled at once: 4 bytes for each sample and epoch.
    """
    loop = (make_minibatch_loop or plain_minibatch_loop)(graph, batch, reduce)

    def epoch_step(progress: _Progress, shuffled) -> tuple[_Progress, tuple[Metrics, Float[Array, ""]]]:
        after, metrics = loop.epoch(progress.carried, shuffled)
        return _after_epoch(graph, progress, after, metrics), (metrics, progress.learning.astype(jnp.float32))

    begin = _Progress(loop.begin(learner), jnp.asarray(True))
    rows_of = lambda epoch: shuffled_rows(jax.random.fold_in(key, epoch), index, graph.loops)
    rows = jax.vmap(rows_of)(jnp.arange(graph.loops.epochs))
    end, (metrics, learned) = jax.lax.scan(epoch_step, begin, loop.shuffled(rows))
    return loop.end(end.carried), over_epochs(metrics, learned)


def _after_epoch(graph: Graph, before: _Progress, after: PyTree[Array], metrics: Metrics) -> _Progress:
    """The progress after an epoch; unchanged if learning had ended before."""
    if graph.keep_learning is None:
        return _Progress(after, before.learning)
    kept = jax.tree.map(partial(jnp.where, before.learning), after, before.carried)
    goes_on = graph.keep_learning(jax.tree.map(lambda m: m[-1], metrics))
    return _Progress(kept, before.learning & goes_on)


def over_epochs(metrics: Metrics, learned: Float[Array, " epochs"]) -> Metrics:
    """Metrics `[epochs, minibatches]` as means over the epochs in which there was learning."""
    means = {name: _over_epochs(name, metric, learned) for name, metric in metrics.items()}
    return {**means, "epochs": learned.sum()}


def _over_epochs(
    name: str, metric: Float[Array, "epochs minibatches"], learned: Float[Array, " epochs"]
) -> Float[Array, ""]:
    """The mean over the epochs that were learned; of a flag, whether it was up in all of them."""
    counts = learned[:, None] > 0
    if name.startswith("finite/"):
        return jnp.min(jnp.where(counts, metric, 1))
    return jnp.sum(jnp.where(counts, metric, 0)) / (learned.sum() * metric.shape[1])


# --- metrics -----------------------------------------------------------------------------------------


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
