"""Gradients of a minibatch as one kernel: forward, loss and backward, sample after sample, sums kept on the chip.

It computes what an algorithm's fragment `gradients` computes, from the same loss of one sample. Samples are read
where they lie in the batch, in the order of the shuffle: no shuffled batch is written.

Shape letters: `R` samples of a batch, `N` of a minibatch, `P` programs of a kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree, UInt32

from rollmill.core.errors import CannotFuse
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
from rollmill.fusion.ir import Program, evaluate
from rollmill.fusion.kernels.leaves import Leaf, each_struct, input_leaves, to_raw
from rollmill.fusion.kernels.sums import Sum, mean_of, sums_of
from rollmill.fusion.kernels.vector import Vector
from rollmill.fusion.lower.function import LoweredFunction, lower_function
from rollmill.fusion.lower.prologue import Prologue, UniformArrays
from rollmill.fusion.lower.values import is_output


@dataclass(frozen=True, eq=False, repr=False)
class GradientStep:
    """Gradients and metrics of ONE sample as a program: lowered once, for any number of kernels."""

    lowered: LoweredFunction
    sample: list[Leaf]
    """The sample's leaves, with their places among the inputs."""
    sums: list[Sum]
    """Results that are summed over samples: gradients, then metrics."""

    def __repr__(self) -> str:
        return f"GradientStep({self.lowered})"

    @property
    def program(self) -> Program:
        """The program of one sample."""
        return self.lowered.program

    @property
    def prologue(self) -> Prologue:
        """From the learner to the arrays that the program reads."""
        return self.lowered.prologue


class Shuffled(NamedTuple):
    """The rows of an epoch's minibatches, and the leaves that depend on a whole minibatch."""

    rows: UInt32[Array, "*epochs M N"]
    """Rows of each minibatch."""
    conditioned: dict[int, Array]
    """Leaves `[*epochs, M, N, ...]` that were changed with regard to a whole minibatch, by their number."""


class Minibatch(NamedTuple):
    """One of the minibatches of an epoch."""

    number: Int[Array, ""]
    packed: Packed
    """All samples."""
    shuffled: Shuffled
    """The shuffled rows of the epoch."""
    uniforms: UniformArrays
    """Arrays that the program of a sample reads."""
    vector: Vector | None = None
    """The network, where it is held as one vector."""

    @property
    def num_samples(self) -> int:
        """Samples of each minibatch."""
        return self.shuffled.rows.shape[-1]


def lower_gradients(graph: Graph) -> GradientStep:
    """The program of one sample, for the shapes with which a graph starts; nothing is computed.

    Raises:
        CannotFuse: what no kernel can compute, with the line where it stands.
    """
    mean_gradients(graph)  # refuses what has no batch
    index = jax.ShapeDtypeStruct((graph.loops.num_envs,), jnp.int32)
    begin = lambda key, index: first_batch(graph, start(graph, key, index))
    learner, batch = jax.eval_shape(begin, jax.random.key(0), index)
    return gradient_step(graph, learner, each_struct(jax.eval_shape(flat_samples, batch)))


def gradient_step(graph: Graph, learner: PyTree[Any], sample: PyTree[jax.ShapeDtypeStruct]) -> GradientStep:
    """The program of one sample.

    Args:
        graph: what is trained.
        learner: shapes of the learner, or arrays of these shapes.
        sample: shapes of ONE sample.

    Raises:
        CannotFuse: what no kernel can compute, with the line where it stands.
    """
    gradients = mean_gradients(graph)
    if graph.loops.cut != "samples":
        raise CannotFuse("whole sequences are learned from, as recurrent networks do.")
    lowered = lower_function(gradients.of_one, (sample,), (learner,), summed=True)
    return GradientStep(lowered, input_leaves(lowered.program, to_raw(sample)), sums_of(lowered))


def mean_gradients(graph: Graph) -> MeanGradients:
    """The graph's gradients, where they are a mean over samples.

    Raises:
        CannotFuse: they are none.
    """
    if not isinstance(graph.gradients, MeanGradients):
        raise CannotFuse(
            f"{graph.settings['algorithm']} gives the gradients of a whole minibatch, and kernels are made of "
            "those of one sample (rollmill.dataflow.MeanGradients)."
        )
    return graph.gradients


def first_batch(graph: Graph, state: State) -> tuple[Learner, Batch]:
    """The learner and the batch of the first iteration; with a replay memory, a minibatch of its shapes."""
    collector = state.collector
    _, trajectory = collect(graph, graph.weights(state.learner), collector, state.key)
    learner, batch = prepare(graph, state.learner, trajectory, collector.index)
    return learner, batch if graph.replay is None else _made_up(graph, learner, state.key, collector.index)


def _made_up(graph: Graph, learner: Learner, key: Key, index: Int[Array, " E"]) -> Batch:
    """A minibatch as the experience store draws it, `[1, N, ...]`, of random numbers: nothing is stored for it."""
    store = graph.replay
    assert store is not None
    draw = lambda: store.sample(graph, store.empty(graph, index), learner, key, index).minibatch
    leaves, structure = jax.tree.flatten(jax.eval_shape(draw))
    keys = jax.random.split(key, len(leaves))
    made = [_made_up_leaf(*pair)[None] for pair in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, made)


def _made_up_leaf(key: Key, like: jax.ShapeDtypeStruct) -> Array:
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.split(key, like.shape)
    if jnp.issubdtype(like.dtype, jnp.floating):
        return jax.random.normal(key, like.shape, like.dtype)
    return jnp.ones(like.shape, like.dtype)  # legal actions, where it is a mask


Run: TypeAlias = Callable[[GradientStep, Minibatch], Float[Array, " size"]]
"""The means over a minibatch of a step's results that are computed, one after the other."""


def shuffle_samples(graph: Graph, packed: Packed, rows: UInt32[Array, "epochs M N"], reduce: Reduce) -> Shuffled:
    """Returns the rows of all epochs, with the leaves that conditioning a minibatch changes."""
    condition = partial(_conditioned_leaves, graph, packed.samples, reduce=reduce)
    return Shuffled(rows, jax.vmap(jax.vmap(condition))(rows))


def fused_gradients(
    graph: Graph, batch: Batch, reduce: Reduce, *, run: Run, step: GradientStep | None = None
) -> Callable[[Learner, UInt32[Array, " N"]], tuple[Weights, Metrics]]:
    """Computes `dataflow.gradients_of_rows` by `run`; the graph's `step` is lowered here where it is left out."""
    packed = pack(flat_samples(batch))

    def gradients(learner: Learner, rows: UInt32[Array, " N"]) -> tuple[Weights, Metrics]:
        known = step or gradient_step(graph, learner, each_struct(packed.samples))
        only = jax.tree.map(lambda leaf: leaf[0], shuffle_samples(graph, packed, rows[None, None], reduce))
        uniforms = known.prologue(learner)
        return results_of(known, uniforms, run(known, Minibatch(jnp.int32(0), packed, only, uniforms)))

    return gradients


def results_of(
    step: GradientStep, uniforms: UniformArrays, means: Float[Array, " size"]
) -> tuple[Weights, Metrics]:
    """Gradients and metrics, from the means of those that a kernel computes."""
    results, first = [], 0
    for each in step.sums:
        if each.is_computed:
            results.append(means[first : first + each.size].reshape(each.shape).astype(each.dtype))
            first += each.size
        elif each.leaf is not None:
            results.append(each.leaf.repeated(uniforms))
    # Outputs are in the structure of the function's results, so that it need not be traced again for it.
    structure = jax.tree.structure(step.lowered.outputs, is_leaf=is_output)
    return jax.tree.unflatten(structure, results)


def _conditioned_leaves(graph: Graph, samples: PyTree[Array], rows: Array, *, reduce: Reduce) -> dict[int, Array]:
    """The leaves that conditioning a minibatch changes; the others are not even read for it."""
    taken = jax.tree.map(lambda leaf: leaf[rows], samples)
    conditioned = graph.condition(Batch(taken), reduce).samples
    pairs = zip(jax.tree.leaves(taken), jax.tree.leaves(conditioned), strict=True)
    # By identity: conditioning hands on the leaves that it does not change as they are. What was gathered for
    # those is dead code, and never computed.
    return {place: after for place, (before, after) in enumerate(pairs) if after is not before}


def run_gradients_reference(
    step: GradientStep, minibatch: Minibatch, *, precision: Any = None
) -> Float[Array, " size"]:
    """All samples at once, by JAX's own functions."""
    rows, uniforms = minibatch.shuffled.rows[minibatch.number], minibatch.uniforms
    leaves = to_raw(minibatch.packed.take(rows))
    for place, leaf in minibatch.shuffled.conditioned.items():
        leaves[place] = leaf[minibatch.number]
    inputs = [x for leaf, array in zip(step.sample, leaves, strict=True) for x in leaf.split(array)]
    outputs = evaluate(step.program, inputs, uniforms.slots, block=len(rows), precision=precision)
    computed = [each for each in step.sums if each.is_computed]
    means = [mean_of(each, outputs, uniforms, len(rows), precision) for each in computed]
    return jnp.concatenate([mean.reshape(-1).astype(jnp.float32) for mean in means])
