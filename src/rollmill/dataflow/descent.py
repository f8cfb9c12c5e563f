"""How the minibatches of an epoch change what is learned: gradients, their mean over replicas, and updates.

Shape letters: `M` minibatches of an epoch, `N` rows of each.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree, UInt32

from rollmill.dataflow.graph import Batch, Graph, Learner, Metrics, Reduce, Weights
from rollmill.dataflow.minibatches import minibatch_gather


class MinibatchLoop(NamedTuple):
    """A way through the epochs of a batch."""

    begin: Callable[[Learner], Any]
    """What is carried from epoch to epoch, of a learner."""
    shuffled: Callable[[UInt32[Array, "epochs M N"]], PyTree[Array]]
    """What each epoch needs of its rows, for all epochs at once; leaves `[epochs, ...]`."""
    epoch: Callable[[Any, PyTree[Array]], tuple[Any, Metrics]]
    """What is carried after an epoch, of what it needs of its rows; and metrics `[M]`."""
    end: Callable[[Any], Learner]
    """The learner, of what is carried."""


MakeMinibatchLoop: TypeAlias = Callable[[Graph, Batch, Reduce], MinibatchLoop]
"""What `plain_minibatch_loop` is."""

MakeGradients: TypeAlias = Callable[[Graph, Batch, Reduce], Callable[..., tuple[Weights, Metrics]]]
"""What `gradients_of_rows` is."""


def identity(tree: PyTree[Array]) -> PyTree[Array]:
    """The reduction over a single replica."""
    return tree


def plain_minibatch_loop(
    graph: Graph, batch: Batch, reduce: Reduce, *, gradients: MakeGradients | None = None
) -> MinibatchLoop:
    """The learner is carried as it is; `gradients` is `gradients_of_rows`, or another way to the same."""
    gradients_of = (gradients or gradients_of_rows)(graph, batch, reduce)

    def minibatch_step(learner: Learner, rows: UInt32[Array, " N"]) -> tuple[Learner, Metrics]:
        with jax.named_scope("gradients"):
            found = reduce(gradients_of(learner, rows))
        return _descended(graph, learner, *found)

    unchanged = lambda tree: tree
    epoch = lambda learner, rows: jax.lax.scan(minibatch_step, learner, rows)
    return MinibatchLoop(unchanged, unchanged, epoch, unchanged)


def learn_minibatch(
    graph: Graph, learner: Learner, minibatch: Batch, *, reduce: Reduce = identity
) -> tuple[Learner, Metrics]:
    """Gradients of one minibatch, reduced over replicas, and the update with them."""
    with jax.named_scope("gradients"):
        found = reduce(graph.gradients(learner, graph.condition(minibatch, reduce)))
    return _descended(graph, learner, *found)


def gradients_of_rows(graph: Graph, batch: Batch, reduce: Reduce) -> Callable[..., tuple[Weights, Metrics]]:
    """The function from a learner and the rows of a minibatch to its gradients and metrics."""
    take = minibatch_gather(batch, graph.loops)
    return lambda learner, rows: graph.gradients(learner, graph.condition(take(rows), reduce))


def _descended(graph: Graph, learner: Learner, gradients: Weights, metrics: Metrics) -> tuple[Learner, Metrics]:
    with jax.named_scope("update"):
        advanced = graph.update(learner, gradients)
    return advanced, {**metrics, **gradient_metrics(gradients, metrics)}


def gradient_metrics(gradients: Weights, metrics: Metrics) -> Metrics:
    """Metrics of a minibatch beside its own: the norm of its gradients, and whether all is finite."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(gradients)]
    norm = jnp.sqrt(sum(squares, start=jnp.float32(0)))
    return {"losses/gradient_norm": norm, "finite/gradients": all_finite((gradients, metrics))}


def all_finite(tree: PyTree[Array]) -> Float[Array, ""]:
    """One where every number of the tree is finite, zero otherwise."""
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    finite = [jnp.all(jnp.isfinite(leaf)) for leaf in floats]
    return jnp.all(jnp.stack(finite)).astype(jnp.float32) if finite else jnp.float32(1)
