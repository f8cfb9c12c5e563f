"""The loop over minibatches: gradients, their mean over replicas, and updates.

Shape letters: `M` minibatches of an epoch, `N` rows of a minibatch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree, UInt32

from rollmill.core.operations import operation_scope
from rollmill.dataflow.fragment_results import check_metrics
from rollmill.dataflow.graph import Batch, Graph, Learner, Metrics, Reduce, Weights
from rollmill.dataflow.minibatches import MinibatchGather, minibatch_gather


class MinibatchLoop(NamedTuple):
    """Functions of the loop over a batch's epochs and minibatches.

    The carry, the samples and the inputs may have any structure. The functions contain no arrays, so that each can
    be compiled separately. Replicas that reduce over channels run minibatches one by one, whereas a single program
    runs whole epochs.
    """

    begin: Callable[[Learner], Any]
    """Maps the learner to the initial carry."""
    prepare_samples: Callable[[Batch], Any]
    """Maps the batch to what all of its minibatches read."""
    shuffle: Callable[[Any, UInt32[Array, "epochs M N"]], PyTree[Array]]
    """Maps the samples and the shuffled rows of all epochs to the epochs' inputs, with leaves `[epochs, ...]`."""
    run_minibatch: Callable[[Any, Any, PyTree[Array], Int[Array, ""]], tuple[Any, Metrics]]
    """Maps the carry, the samples, an epoch's input and a minibatch's number to the next carry and metrics."""
    run_epoch: Callable[[Any, Any, PyTree[Array]], tuple[Any, Metrics]]
    """Maps the carry, the samples and an epoch's input to the next carry and metrics `[M]`."""
    run_drawn: Callable[[Any, Batch], tuple[Any, Metrics]]
    """Maps the carry and a minibatch, drawn from an experience store, to the next carry and metrics."""
    end: Callable[[Any], Learner]
    """Maps a carry to the learner."""
    unroll: int = 1
    """Minibatches that may be compiled as one turn of the loop over epochs."""


MakeMinibatchLoop: TypeAlias = Callable[[Graph, Reduce], MinibatchLoop]
"""Makes the loop for a mean over replicas, like `plain_minibatch_loop`."""


def identity(tree: PyTree[Array]) -> PyTree[Array]:
    """Returns the tree unchanged: the mean over a single replica."""
    return tree


def evaluate_schedules(graph: Graph, learner: Learner) -> Learner:
    """Evaluates a learner's schedules for one iteration. Doing so again changes nothing."""
    return learner if graph.evaluate_schedules is None else graph.evaluate_schedules(learner)


def plain_minibatch_loop(graph: Graph, reduce: Reduce) -> MinibatchLoop:
    """Returns the standard loop over minibatches, which carries the learner and gathers each minibatch."""

    def of_rows(learner: Learner, take: MinibatchGather, rows: UInt32[Array, " N"]) -> tuple[Learner, Metrics]:
        return learn_minibatch(graph, learner, take(rows), reduce=reduce)

    return MinibatchLoop(
        begin=identity,
        prepare_samples=lambda batch: minibatch_gather(batch, graph.loops),
        shuffle=lambda take, rows: rows,
        run_minibatch=lambda learner, take, rows, number: of_rows(learner, take, rows[number]),
        run_epoch=lambda learner, take, rows: jax.lax.scan(
            lambda now, some: of_rows(now, take, some), learner, rows
        ),
        run_drawn=partial(learn_minibatch, graph, reduce=reduce),
        end=identity,
    )


def learn_minibatch(
    graph: Graph, learner: Learner, minibatch: Batch, *, reduce: Reduce = identity
) -> tuple[Learner, Metrics]:
    """Computes the gradients of one minibatch, reduces them over replicas, and updates the learner."""
    with operation_scope("gradients"):
        gradients, metrics = graph.gradients(learner, graph.condition(minibatch, reduce))
        check_metrics(metrics)
        gradients, metrics = reduce((gradients, metrics))
    return _update(graph, learner, gradients, metrics)


def row_gradients(graph: Graph, batch: Batch, reduce: Reduce) -> Callable[..., tuple[Weights, Metrics]]:
    """Returns a function that computes gradients and metrics, given a learner and the rows of a minibatch."""
    take = minibatch_gather(batch, graph.loops)
    return lambda learner, rows: graph.gradients(learner, graph.condition(take(rows), reduce))


def _update(graph: Graph, learner: Learner, gradients: Weights, metrics: Metrics) -> tuple[Learner, Metrics]:
    with operation_scope("update"):
        advanced = graph.update(adapt_hyperparameters(graph, learner, metrics), gradients)
    return advanced, {**metrics, **gradient_metrics(gradients, metrics)}


def adapt_hyperparameters(graph: Graph, learner: Learner, metrics: Metrics) -> Learner:
    """Returns the learner with its hyperparameters adapted to the metrics of a minibatch, before the update."""
    return learner if graph.adapt is None else graph.adapt(learner, metrics)


COMPUTED = "computed/"
"""Prefix of the metric that counts computations of another: 1 for an update that computes it, otherwise 0.

The mean of a metric divided by the mean of its count is its mean over the updates that computed it.
"""


def gradient_metrics(gradients: Weights, metrics: Metrics) -> Metrics:
    """Adds the gradient norm, and a flag for finite gradients, to the metrics of a minibatch.

    Gradients count as finite if their norm is finite, which saves a second pass over the gradients.
    """
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(gradients)]
    norm = jnp.sqrt(sum(squares, start=jnp.float32(0)))
    whole = {**metrics, "losses/gradient_norm": norm}
    shared = {name: whole[name] * metrics[COMPUTED + name] for name in whole if COMPUTED + name in metrics}
    return {"losses/gradient_norm": norm, **shared, "finite/gradients": all_finite((norm, metrics))}


def is_flag(name: str) -> bool:
    """Returns whether a metric is a flag for finite outputs rather than a mean."""
    return name.startswith("finite/")


def all_finite(tree: PyTree[Array]) -> Float[Array, ""]:
    """Returns 1 if every number in a tree is finite, and otherwise 0."""
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    finite = [jnp.all(jnp.isfinite(leaf)) for leaf in floats]
    return jnp.all(jnp.stack(finite)).astype(jnp.float32) if finite else jnp.float32(1)
