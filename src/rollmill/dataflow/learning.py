"""Learns from a trajectory or an experience store, minibatch by minibatch.

The functions are pure, and work on the environments of one replica. `reduce` computes the mean over all replicas.
By default, it is the identity.

Shape letters: `T` steps, `E` environments of this replica, `M` minibatches of an epoch.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from rollmill.core.operations import operation_scope
from rollmill.core.types import Key
from rollmill.dataflow.collecting import collection_metrics
from rollmill.dataflow.experience import FILL
from rollmill.dataflow.fragment_results import check_batch, check_distinct, check_metrics
from rollmill.dataflow.graph import Batch, Graph, Learner, Metrics, Reduce, Trajectory
from rollmill.dataflow.minibatch_loop import (
    MakeMinibatchLoop,
    MinibatchLoop,
    evaluate_schedules,
    identity,
    is_flag,
    plain_minibatch_loop,
)
from rollmill.dataflow.minibatches import epoch_rows


class _Progress(NamedTuple):
    carried: PyTree[Array]
    """The carry of the minibatch loop."""
    learning: Bool[Array, ""]


def learn_from_trajectory(
    graph: Graph,
    learner: Learner,
    rings: PyTree[Array],
    trajectory: Trajectory,
    key: Key,
    index: Int[Array, " E"],
    *,
    reduce: Reduce = identity,
    make_minibatch_loop: MakeMinibatchLoop | None = None,
) -> tuple[Learner, PyTree[Array], Metrics]:
    """Performs the learning half of an iteration: prepares a batch once, then learns from minibatches.

    Args:
        graph: graph to train.
        learner: learner before the iteration.
        rings: contents of the experience store for this replica's environments, or `()` without a store.
        trajectory: rollout of these environments.
        key: random key of the iteration's learning.
        index: global indices of these environments.
        reduce: mean over replicas.
        make_minibatch_loop: `plain_minibatch_loop` or an equivalent function.

    Returns:
        The learner, the contents of the experience store, and the metrics of the iteration.
    """
    with operation_scope("prepare"):
        learner, batch = prepare(graph, learner, trajectory, index, reduce=reduce)
        reported = report(graph, learner, batch)
    if graph.replay is None:
        learner, learned = learn(
            graph, learner, batch, key, index, reduce=reduce, make_minibatch_loop=make_minibatch_loop
        )
    else:
        with operation_scope("store"):
            rings = graph.replay.add(graph, rings, trajectory)
        learner, rings, learned = learn_from_replay(
            graph, learner, rings, key, index, reduce=reduce, make_minibatch_loop=make_minibatch_loop
        )
    check_distinct(reported, learned)
    with operation_scope("metrics"):
        collected = reduce({**collection_metrics(graph, trajectory, graph.weights(learner), index), **reported})
    return learner, rings, {**collected, **learned}


def prepare(
    graph: Graph, learner: Learner, trajectory: Trajectory, index: Int[Array, " E"], *, reduce: Reduce = identity
) -> tuple[Learner, Batch]:
    """Converts the trajectory of a replica's environments to a batch."""
    prepared = graph.prepare(learner, trajectory, reduce=reduce, replicas=graph.loops.num_envs // index.size)
    match prepared:
        case (_, Batch() as batch) if graph.replay is None:
            check_batch(graph, batch, trajectory)
    return prepared


def report(graph: Graph, learner: Learner, batch: Batch) -> Metrics:
    """Returns the algorithm's own metrics of the learner and the prepared batch, before reduction."""
    if graph.report is None:
        return {}
    metrics = graph.report(learner, batch)
    check_metrics(metrics, "report")
    return metrics


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
    """Learns from a batch for `epochs` epochs of shuffled minibatches. Metrics are means over minibatches.

    Rows of all epochs are shuffled at once, which takes 4 bytes for each sample and epoch.
    """
    loop = (make_minibatch_loop or plain_minibatch_loop)(graph, reduce)
    samples = loop.prepare_samples(batch)

    def epoch_step(progress: _Progress, shuffled) -> tuple[_Progress, tuple[Metrics, Float[Array, ""]]]:
        after, metrics = loop.run_epoch(progress.carried, samples, shuffled)
        return _after_epoch(graph, progress, after, metrics), (metrics, progress.learning.astype(jnp.float32))

    begin = _Progress(loop.begin(evaluate_schedules(graph, learner)), jnp.asarray(True))
    with operation_scope("shuffle"):
        shuffled = loop.shuffle(samples, epoch_rows(key, index, graph.loops))
    unroll = min(graph.loops.epochs, max(1, loop.unroll // graph.loops.num_minibatches))
    end, (metrics, learned) = jax.lax.scan(epoch_step, begin, shuffled, unroll=unroll)
    return end_iteration(graph, restore_schedules(graph, loop.end(end.carried), learner)), mean_over_epochs(
        metrics, learned
    )


def restore_schedules(graph: Graph, learner: Learner, before: Learner) -> Learner:
    """Replaces a learner's evaluated schedules by the schedules themselves, after an iteration."""
    if graph.evaluate_schedules is None:
        return learner
    return eqx.tree_at(lambda learner: learner.hyperparameters, learner, before.hyperparameters)  # pyright: ignore


def end_iteration(graph: Graph, learner: Learner) -> Learner:
    """Advances a learner's schedules past the updates that `keep_learning` skipped."""
    if graph.keep_learning is None or graph.end_iteration is None:
        return learner
    return graph.end_iteration(learner)


def learn_from_replay(
    graph: Graph,
    learner: Learner,
    rings: PyTree[Array],
    key: Key,
    index: Int[Array, " E"],
    *,
    reduce: Reduce = identity,
    make_minibatch_loop: MakeMinibatchLoop | None = None,
) -> tuple[Learner, PyTree[Array], Metrics]:
    """Makes `num_minibatches` updates, each with a sample of the experience store. Metrics are their means.

    Until enough steps are stored, no updates are made. The metric `epochs` is then 0, and so are the metrics of
    learning.
    """
    assert graph.replay is not None
    store, loop = graph.replay, (make_minibatch_loop or plain_minibatch_loop)(graph, reduce)

    def one_update(carried: Any, mutable: Any, n: Int[Array, ""]) -> tuple[Any, Any, Metrics]:
        now = store.with_mutable_part(rings, mutable)
        carried, now, metrics = learn_sample(graph, loop, carried, now, jax.random.fold_in(key, n), index)
        return carried, store.mutable_part(now), metrics

    def again(n: Int[Array, ""], carry: tuple[Any, Any, Metrics]) -> tuple[Any, Any, Metrics]:
        carried, mutable, sums = carry
        carried, mutable, metrics = one_update(carried, mutable, n)
        return carried, mutable, add_metrics(sums, metrics)

    def all_updates(_: Int[Array, ""], carry: tuple[Any, Any, Metrics]) -> tuple[Any, Any, Metrics]:
        # A device runs a loop with a fixed number of turns without asking the host before each turn.
        return jax.lax.fori_loop(0, updates, again, carry)

    # A loop with 0 or 1 turns decides whether to learn, because a branch would copy all of its operands.
    learns, updates = store.is_ready(rings, graph.loops), graph.loops.num_minibatches
    begin = loop.begin(evaluate_schedules(graph, learner)), store.mutable_part(rings)
    sums = metrics_without_updates(jax.eval_shape(one_update, *begin, jnp.int32(0))[2])
    carried, mutable, sums = jax.lax.fori_loop(0, learns.astype(jnp.int32), all_updates, (*begin, sums))
    many = jnp.where(learns, updates, 1).astype(jnp.float32)
    means = {name: total if is_flag(name) else total / many for name, total in sums.items()}
    metrics = {**means, "epochs": learns.astype(jnp.float32), FILL: reduce(store.fill_fraction(rings))}
    return restore_schedules(graph, loop.end(carried), learner), store.with_mutable_part(rings, mutable), metrics


def learn_sample(
    graph: Graph, loop: MinibatchLoop, carry: Any, rings: PyTree[Array], key: Key, index: Int[Array, " E"]
) -> tuple[Any, PyTree[Array], Metrics]:
    """Makes one update with a sample of the experience store, then updates the store.

    Returns the next carry of the loop, the contents of the store, and metrics.
    """
    assert graph.replay is not None
    learner = loop.end(carry)
    with operation_scope("draw"):
        sample = graph.replay.sample(graph, rings, learner, key, index)
    advanced, metrics = loop.run_drawn(carry, sample.minibatch)
    return advanced, graph.replay.update(graph, rings, learner, sample), metrics


def metrics_without_updates(metrics: Mapping[str, Any]) -> Metrics:
    """Returns metrics for an iteration without updates: flags of finite values are 1, and all other metrics are 0.

    The metric `epochs` is also 0. Means over several iterations exclude such iterations.
    """
    return {name: jnp.full(m.shape, float(is_flag(name)), m.dtype) for name, m in metrics.items()}


def add_metrics(sums: Metrics, metrics: Metrics) -> Metrics:
    """Adds two sets of metrics. For flags, it takes the minimum."""
    return {
        name: jnp.minimum(s, metrics[name]) if is_flag(name) else s + metrics[name] for name, s in sums.items()
    }


def _after_epoch(graph: Graph, before: _Progress, after: PyTree[Array], metrics: Metrics) -> _Progress:
    """Returns the progress after an epoch, or the previous progress if learning had ended."""
    if graph.keep_learning is None:
        return _Progress(after, before.learning)
    kept = jax.tree.map(partial(jnp.where, before.learning), after, before.carried)
    goes_on = graph.keep_learning(jax.tree.map(lambda m: m[-1], metrics))
    return _Progress(kept, before.learning & goes_on)


def mean_over_epochs(metrics: Metrics, learned: Float[Array, " epochs"]) -> Metrics:
    """Averages metrics `[epochs, minibatches]` to scalars, over all minibatches of the epochs with updates.

    `learned` is 1 for epochs with updates, and 0 for others. A flag is 1 if all of these minibatches set it.
    The metric `epochs`, the number of epochs with updates, is added.
    """
    means = {name: _mean_over_epochs(name, metric, learned) for name, metric in metrics.items()}
    return {**means, "epochs": learned.sum()}


def _mean_over_epochs(
    name: str, metric: Float[Array, "epochs minibatches"], learned: Float[Array, " epochs"]
) -> Float[Array, ""]:
    """Averages one metric. For a flag, returns whether it was set in every epoch with updates."""
    counts = learned[:, None] > 0
    if is_flag(name):
        return jnp.min(jnp.where(counts, metric, 1))
    return jnp.sum(jnp.where(counts, metric, 0)) / (learned.sum() * metric.shape[1])
