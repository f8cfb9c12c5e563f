"""Gradients of a minibatch as one kernel: forward, loss and backward, sample after sample, sums kept on the chip.

It computes what an algorithm's fragment `gradients` computes, from the same loss of one sample. Samples are read
where they lie in the batch, in the order of the shuffle: no shuffled batch is written.

Shape letters: `R` samples of a batch, `N` of a minibatch, `P` programs of a kernel.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, UInt32

from rollmill.dataflow import (
    Batch,
    Graph,
    Learner,
    MeanGradients,
    Metrics,
    Packed,
    Reduce,
    Weights,
    flat_samples,
    pack,
)
from rollmill.fusion.evaluate import evaluate
from rollmill.fusion.leaves import Leaf, input_leaves
from rollmill.fusion.refusals import CannotFuse
from rollmill.fusion.scalarise import Scalarised, scalarise
from rollmill.fusion.sums import Sum, mean_of, sums_of


class GradientStep(NamedTuple):
    """Gradients and metrics of ONE sample as a program."""

    scalarised: Scalarised
    sample: list[Leaf]
    """Where the sample's leaves are among the inputs."""
    sums: list[Sum]
    """What is summed over samples: gradients, then metrics."""


class Minibatch(NamedTuple):
    """Samples of a batch, and what of them belongs to this minibatch alone."""

    packed: Packed
    rows: UInt32[Array, " N"]
    own: dict[int, Array]
    """Leaves `[N, ...]` that were changed with regard to the whole minibatch, by their number."""


def gradient_step(graph: Graph, learner: Learner, sample: PyTree[jax.ShapeDtypeStruct]) -> GradientStep:
    """The program of one sample.

    Raises:
        CannotFuse: what no kernel can compute, with the line where it stands.
    """
    gradients = graph.gradients.function
    if not isinstance(gradients, MeanGradients):
        raise CannotFuse(f"the gradients of {graph.settings['algorithm']} are no mean over samples.")
    if graph.loops.cut != "samples":
        raise CannotFuse("whole sequences are learned from, as recurrent networks do.")
    scalarised = scalarise(gradients.of_one, (sample,), (learner,), summed=True)
    return GradientStep(scalarised, input_leaves(scalarised.program, sample), sums_of(scalarised))


Run = Callable[[GradientStep, Minibatch], list[Array]]
"""The means over a minibatch of a step's results."""


def fused_gradients(
    graph: Graph, batch: Batch, *, reduce: Reduce, run: Run
) -> Callable[[Learner, UInt32[Array, " N"]], tuple[Weights, Metrics]]:
    """What `dataflow.gradients_of_rows` returns, by `run`."""
    samples = flat_samples(batch)
    packed = pack(samples)
    sample = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), samples)

    def gradients(learner: Learner, rows: UInt32[Array, " N"]) -> tuple[Weights, Metrics]:
        step = gradient_step(graph, learner, sample)
        found = run(step, Minibatch(packed, rows, _own_leaves(graph, samples, rows, reduce)))
        return jax.tree.unflatten(_structure(graph, learner, sample), found)

    return gradients


def _own_leaves(graph: Graph, samples: PyTree[Array], rows: Array, reduce: Reduce) -> dict[int, Array]:
    """The leaves that conditioning a minibatch changes; the others are not even read for it."""
    taken = jax.tree.map(lambda leaf: leaf[rows], samples)
    conditioned = graph.condition(Batch(taken), reduce).samples
    pairs = zip(jax.tree.leaves(taken), jax.tree.leaves(conditioned), strict=True)
    return {place: after for place, (before, after) in enumerate(pairs) if after is not before}


def _structure(graph: Graph, learner: Learner, sample: PyTree) -> Any:
    return jax.tree.structure(jax.eval_shape(graph.gradients.function.of_one, learner, sample))


def run_gradients_reference(step: GradientStep, minibatch: Minibatch, *, precision: Any = None) -> list[Array]:
    """All samples at once, by JAX's own functions."""
    leaves = jax.tree.leaves(minibatch.packed.take(minibatch.rows))
    leaves = [minibatch.own.get(place, leaf) for place, leaf in enumerate(leaves)]
    inputs = [x for leaf, array in zip(step.sample, leaves, strict=True) for x in leaf.split(array)]
    num_samples = len(minibatch.rows)
    found = evaluate(
        step.scalarised.program, inputs, step.scalarised.uniforms, block=num_samples, precision=precision
    )
    return [jnp.asarray(mean_of(each, found, num_samples, precision)) for each in step.sums]
