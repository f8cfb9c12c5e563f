"""Gradients of a minibatch as one kernel: forward, loss and backward, sample after sample, sums kept on the chip.

It computes what an algorithm's fragment `gradients` computes, from the same loss of one sample. Samples are read
where they lie in the batch, in the order of the shuffle: no shuffled batch is written.

Shape letters: `R` samples of a batch, `N` of a minibatch, `P` programs of a kernel.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree, UInt32

from rollmill.core.types import Key
from rollmill.dataflow import (
    Batch,
    Graph,
    Learner,
    MeanGradients,
    Metrics,
    Packed,
    Reduce,
    State,
    Weights,
    collect,
    flat_samples,
    pack,
    prepare,
    start,
)
from rollmill.fusion.errors import CannotFuse
from rollmill.fusion.ir import evaluate
from rollmill.fusion.kernels.leaves import Leaf, each_struct, input_leaves
from rollmill.fusion.kernels.sums import Sum, mean_of, sums_of
from rollmill.fusion.kernels.tracing import trace_abstractly
from rollmill.fusion.kernels.vector import Vector
from rollmill.fusion.lower.scalarise import Scalarised, scalarise


class GradientStep(NamedTuple):
    """Gradients and metrics of ONE sample as a program."""

    scalarised: Scalarised
    sample: list[Leaf]
    """The sample's leaves, with their places among the inputs."""
    sums: list[Sum]
    """Results that are summed over samples: gradients, then metrics."""


class Shuffled(NamedTuple):
    """The rows of an epoch's minibatches, and the leaves that depend on a whole minibatch."""

    rows: UInt32[Array, "*epochs M N"]
    """Rows of each minibatch."""
    own: dict[int, Array]
    """Leaves `[*epochs, M, N, ...]` that were changed with regard to a whole minibatch, by their number."""


class Minibatch(NamedTuple):
    """One of the minibatches of an epoch."""

    number: Int[Array, ""]
    packed: Packed
    """All samples."""
    shuffled: Shuffled
    """The shuffled rows of the epoch."""
    vector: Vector | None = None
    """The network, where it is held as one vector."""

    @property
    def num_samples(self) -> int:
        """Samples of each minibatch."""
        return self.shuffled.rows.shape[-1]


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


def check_gradients(graph: Graph) -> None:
    """Whether the gradients of a graph can be one kernel; nothing is computed.

    Raises:
        CannotFuse: if not, with the line where it stands.
    """
    index = jax.ShapeDtypeStruct((graph.loops.num_envs,), jnp.int32)

    def step(key: Key, index: Int[Array, " E"]) -> GradientStep:
        learner, batch = first_batch(graph, start(graph, key, index))
        return gradient_step(graph, learner, each_struct(flat_samples(batch)))

    trace_abstractly(step, jax.random.key(0), index)


def first_batch(graph: Graph, state: State) -> tuple[Learner, Batch]:
    """The learner and the batch of the first iteration."""
    collector = state.collector
    _, trajectory = collect(graph, graph.weights(state.learner), collector, state.key)
    return prepare(graph, state.learner, trajectory, collector.index)


Run: TypeAlias = Callable[[GradientStep, Minibatch], Float[Array, " size"]]
"""The means over a minibatch of a step's results that are computed, one after the other."""


class BatchSamples:
    """The samples of a batch, prepared for all epochs."""

    def __init__(self, graph: Graph, batch: Batch, reduce: Reduce) -> None:
        self._graph, self._reduce = graph, reduce
        self._samples = flat_samples(batch)
        self._packed = pack(self._samples)
        self._sample = each_struct(self._samples)

    def shuffled(self, rows: UInt32[Array, "epochs M N"]) -> Shuffled:
        """The rows of all epochs, with the leaves that conditioning a minibatch changes."""
        own_of = partial(_own_leaves, self._graph, self._samples, reduce=self._reduce)
        return Shuffled(rows, jax.vmap(jax.vmap(own_of))(rows))

    def task(
        self, learner: Learner, shuffled: Shuffled, number: Int[Array, ""], vector: Vector | None = None
    ) -> tuple[GradientStep, Minibatch]:
        """What is to be computed for a minibatch of an epoch; `vector` is what the network is cut from."""
        step = gradient_step(self._graph, learner, self._sample)
        return step, Minibatch(number, self._packed, shuffled, vector)

    def results(
        self, learner: Learner, step: GradientStep, means: Float[Array, " size"]
    ) -> tuple[Weights, Metrics]:
        """Gradients and metrics from the means of what was computed."""
        shapes = jax.eval_shape(self._graph.gradients.function.of_one, learner, self._sample)
        return jax.tree.unflatten(jax.tree.structure(shapes), _pieces(step, means))


def fused_gradients(
    graph: Graph, batch: Batch, reduce: Reduce, *, run: Run
) -> Callable[[Learner, UInt32[Array, " N"]], tuple[Weights, Metrics]]:
    """Computes `dataflow.gradients_of_rows` by `run`."""
    samples = BatchSamples(graph, batch, reduce)

    def gradients(learner: Learner, rows: UInt32[Array, " N"]) -> tuple[Weights, Metrics]:
        only = jax.tree.map(lambda leaf: leaf[0], samples.shuffled(rows[None, None]))
        step, minibatch = samples.task(learner, only, jnp.int32(0))
        return samples.results(learner, step, run(step, minibatch))

    return gradients


def _pieces(step: GradientStep, means: Float[Array, " size"]) -> list[Array]:
    """The results one by one, with those that need no computing."""
    found, first = [], 0
    for each in step.sums:
        if each.is_computed:
            found.append(means[first : first + each.size].reshape(each.shape).astype(each.left.dtype))
            first += each.size
        else:
            found.append(jnp.asarray(each.left.same, each.left.dtype))
    return found


def _own_leaves(graph: Graph, samples: PyTree[Array], rows: Array, *, reduce: Reduce) -> dict[int, Array]:
    """The leaves that conditioning a minibatch changes; the others are not even read for it."""
    taken = jax.tree.map(lambda leaf: leaf[rows], samples)
    conditioned = graph.condition(Batch(taken), reduce).samples
    pairs = zip(jax.tree.leaves(taken), jax.tree.leaves(conditioned), strict=True)
    return {place: after for place, (before, after) in enumerate(pairs) if after is not before}


def run_gradients_reference(
    step: GradientStep, minibatch: Minibatch, *, precision: Any = None
) -> Float[Array, " size"]:
    """All samples at once, by JAX's own functions."""
    rows, own = minibatch.shuffled.rows[minibatch.number], minibatch.shuffled.own
    leaves = jax.tree.leaves(minibatch.packed.take(rows))
    for place, leaf in own.items():
        leaves[place] = leaf[minibatch.number]
    inputs = [x for leaf, array in zip(step.sample, leaves, strict=True) for x in leaf.split(array)]
    found = evaluate(
        step.scalarised.program, inputs, step.scalarised.uniforms, block=len(rows), precision=precision
    )
    means = [mean_of(each, found, len(rows), precision) for each in step.sums if each.is_computed]
    return jnp.concatenate([mean.reshape(-1).astype(jnp.float32) for mean in means])
