"""The loop over minibatches: gradients, their mean over replicas, and updates.

Shape letters: `M` minibatches of an epoch, `N` rows of each.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree, UInt32

from rollmill.core.operations import traced
from rollmill.dataflow.graph import Batch, Graph, Learner, Metrics, Reduce, Weights
from rollmill.dataflow.minibatches import minibatch_gather


class MinibatchLoop(NamedTuple):
    """The functions of a loop over the epochs of a batch, with a carry of any structure."""

    begin: Callable[[Learner], Any]
    """From the learner to the initial carry."""
    shuffled: Callable[[UInt32[Array, "epochs M N"]], PyTree[Array]]
    """From the shuffled rows of all epochs to the input of `epoch`; leaves `[epochs, ...]`."""
    epoch: Callable[[Any, PyTree[Array]], tuple[Any, Metrics]]
    """From the carry and the input of one epoch to the next carry and metrics `[M]`."""
    end: Callable[[Any], Learner]
    """From the last carry to the learner."""


MakeMinibatchLoop: TypeAlias = Callable[[Graph, Batch, Reduce], MinibatchLoop]
"""Makes the loop for a batch, with the mean over replicas; for example `plain_minibatch_loop`."""

MakeGradients: TypeAlias = Callable[[Graph, Batch, Reduce], Callable[..., tuple[Weights, Metrics]]]
"""Makes the function from a learner and rows of a batch to gradients and metrics; for example
`gradients_of_rows`."""


def identity(tree: PyTree[Array]) -> PyTree[Array]:
    """The reduction over a single replica."""
    return tree


def plain_minibatch_loop(
    graph: Graph, batch: Batch, reduce: Reduce, *, gradients: MakeGradients | None = None
) -> MinibatchLoop:
    """The loop whose carry is the learner; `gradients` is `gradients_of_rows` or an equivalent."""
    gradients_of = (gradients or gradients_of_rows)(graph, batch, reduce)

    def minibatch_step(learner: Learner, rows: UInt32[Array, " N"]) -> tuple[Learner, Metrics]:
        with traced("gradients"):
            found = reduce(gradients_of(learner, rows))
        return _updated(graph, learner, *found)

    unchanged = lambda tree: tree
    epoch = lambda learner, rows: jax.lax.scan(minibatch_step, learner, rows)
    return MinibatchLoop(unchanged, unchanged, epoch, unchanged)


def learn_minibatch(
    graph: Graph, learner: Learner, minibatch: Batch, *, reduce: Reduce = identity
) -> tuple[Learner, Metrics]:
    """Gradients of one minibatch, reduced over replicas, and the update with them."""
    with traced("gradients"):
        found = reduce(graph.gradients(learner, graph.condition(minibatch, reduce)))
    return _updated(graph, learner, *found)


def gradients_of_rows(graph: Graph, batch: Batch, reduce: Reduce) -> Callable[..., tuple[Weights, Metrics]]:
    """The function from a learner and the rows of a minibatch to its gradients and metrics."""
    take = minibatch_gather(batch, graph.loops)
    return lambda learner, rows: graph.gradients(learner, graph.condition(take(rows), reduce))


def _updated(graph: Graph, learner: Learner, gradients: Weights, metrics: Metrics) -> tuple[Learner, Metrics]:
    with traced("update"):
        advanced = graph.update(learner, gradients)
    return advanced, {**metrics, **gradient_metrics(gradients, metrics)}


COMPUTED = "computed/"
"""Prefix of a metric's share: 1 for an update that computes the metric, 0 for one that leaves it at 0.

The ratio of the means of a metric and of its share, over whatever updates and replicas, is the metric's mean over
the updates that computed it.
"""


def gradient_metrics(gradients: Weights, metrics: Metrics) -> Metrics:
    """Metrics of a minibatch beside its own: the norm of its gradients, and whether all is finite."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(gradients)]
    norm = jnp.sqrt(sum(squares, start=jnp.float32(0)))
    whole = {**metrics, "losses/gradient_norm": norm}
    shared = {name: whole[name] * metrics[COMPUTED + name] for name in whole if COMPUTED + name in metrics}
    return {"losses/gradient_norm": norm, **shared, "finite/gradients": all_finite((gradients, metrics))}


def is_flag(name: str) -> bool:
    """Whether a metric tells by 1 or 0 whether a fragment's outputs were finite, and so is no mean."""
    return name.startswith("finite/")


def all_finite(tree: PyTree[Array]) -> Float[Array, ""]:
    """One where every number of the tree is finite, zero otherwise."""
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    finite = [jnp.all(jnp.isfinite(leaf)) for leaf in floats]
    return jnp.all(jnp.stack(finite)).astype(jnp.float32) if finite else jnp.float32(1)
