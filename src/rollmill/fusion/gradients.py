"""Gradients of a minibatch as one kernel: forward, loss and backward, sample after sample, sums kept on the chip.

It computes what an algorithm's fragment `gradients` computes, from the same loss of one sample. Samples are read
where they lie in the batch, in the order of the shuffle: no shuffled batch is written.

Shape letters: `R` samples of a batch, `N` of a minibatch, `P` programs of a kernel.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree, UInt32

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
from rollmill.fusion.evaluate import evaluate
from rollmill.fusion.gradient_source import Place, gradient_source
from rollmill.fusion.kernels import Kernel, call
from rollmill.fusion.leaves import Leaf, each_struct, input_leaves
from rollmill.fusion.refusals import CannotFuse
from rollmill.fusion.scalarise import Scalarised, scalarise
from rollmill.fusion.sums import Sum, mean_of, sums_of
from rollmill.fusion.tracing import traced
from rollmill.fusion.triton_source import Numerics


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


def check_gradients(graph: Graph) -> None:
    """Whether the gradients of a graph can be one kernel; nothing is computed.

    Raises:
        CannotFuse: if not, with the line where it stands.
    """
    index = jax.ShapeDtypeStruct((graph.loops.num_envs,), jnp.int32)

    def step(key: Key, index: Int[Array, " E"]) -> GradientStep:
        learner, batch = first_batch(graph, start(graph, key, index))
        return gradient_step(graph, learner, each_struct(flat_samples(batch)))

    traced(step, jax.random.key(0), index)


def first_batch(graph: Graph, state: State) -> tuple[Learner, Batch]:
    """What is learned from first."""
    collector = state.collector
    _, trajectory = collect(graph, graph.weights(state.learner), collector, state.key)
    return prepare(graph, state.learner, trajectory, collector.index)


Run: TypeAlias = Callable[[GradientStep, Minibatch], list[Array]]
"""The means over a minibatch of a step's results."""


def fused_gradients(
    graph: Graph, batch: Batch, reduce: Reduce, *, run: Run
) -> Callable[[Learner, UInt32[Array, " N"]], tuple[Weights, Metrics]]:
    """What `dataflow.gradients_of_rows` returns, by `run`."""
    prepared = _Prepared(graph, batch, reduce)

    def gradients(learner: Learner, rows: UInt32[Array, " N"]) -> tuple[Weights, Metrics]:
        found = run(*prepared.task(learner, rows))
        structure = jax.tree.structure(jax.eval_shape(graph.gradients.function.of_one, learner, prepared.sample))
        return jax.tree.unflatten(structure, found)

    return gradients


def gradient_task(
    graph: Graph, batch: Batch, reduce: Reduce, learner: Learner, rows: UInt32[Array, " N"]
) -> tuple[GradientStep, Minibatch]:
    """What is to be computed for one minibatch, and its samples."""
    return _Prepared(graph, batch, reduce).task(learner, rows)


class _Prepared:
    """A batch, packed for all of its minibatches."""

    def __init__(self, graph: Graph, batch: Batch, reduce: Reduce) -> None:
        self._graph, self._reduce = graph, reduce
        self._samples = flat_samples(batch)
        self._packed = pack(self._samples)
        self.sample = each_struct(self._samples)

    def task(self, learner: Learner, rows: UInt32[Array, " N"]) -> tuple[GradientStep, Minibatch]:
        step = gradient_step(self._graph, learner, self.sample)
        return step, Minibatch(self._packed, rows, _own_leaves(self._graph, self._samples, rows, self._reduce))


def _own_leaves(graph: Graph, samples: PyTree[Array], rows: Array, reduce: Reduce) -> dict[int, Array]:
    """The leaves that conditioning a minibatch changes; the others are not even read for it."""
    taken = jax.tree.map(lambda leaf: leaf[rows], samples)
    conditioned = graph.condition(Batch(taken), reduce).samples
    pairs = zip(jax.tree.leaves(taken), jax.tree.leaves(conditioned), strict=True)
    return {place: after for place, (before, after) in enumerate(pairs) if after is not before}


def run_gradients_reference(step: GradientStep, minibatch: Minibatch, *, precision: Any = None) -> list[Array]:
    """All samples at once, by JAX's own functions."""
    leaves = jax.tree.leaves(minibatch.packed.take(minibatch.rows))
    for place, leaf in minibatch.own.items():
        leaves[place] = leaf
    inputs = [x for leaf, array in zip(step.sample, leaves, strict=True) for x in leaf.split(array)]
    num_samples = len(minibatch.rows)
    found = evaluate(
        step.scalarised.program, inputs, step.scalarised.uniforms, block=num_samples, precision=precision
    )
    return [jnp.asarray(mean_of(each, found, num_samples, precision)) for each in step.sums]


# --- the kernel ------------------------------------------------------------------------------------------


class GradientLaunch(NamedTuple):
    """How the kernel of a minibatch's gradients is launched."""

    programs: int
    """Each goes through its part of the minibatch block by block."""
    block: int = 64
    """Samples of a block; a power of two, at least 16."""
    num_warps: int = 4


def run_gradients_kernel(
    step: GradientStep, minibatch: Minibatch, *, launch: GradientLaunch, numerics: Numerics
) -> list[Array]:
    """All samples in one kernel on a GPU, and the sum over its programs, always in the same order."""
    kernel, arrays = gradient_kernel(step, minibatch, launch=launch, numerics=numerics)
    (sums,) = call(kernel, arrays)
    means = jnp.sum(sums, axis=0) / len(minibatch.rows)
    found, first = [], 0
    for each in step.sums:
        if each.is_computed:
            found.append(means[first : first + each.size].reshape(each.shape).astype(each.left.dtype))
            first += each.size
        else:
            found.append(jnp.asarray(each.left.same, each.left.dtype))
    return found


def gradient_kernel(
    step: GradientStep, minibatch: Minibatch, *, launch: GradientLaunch, numerics: Numerics
) -> tuple[Kernel, list[Any]]:
    """The kernel of a minibatch, and the arrays that it takes."""
    packed, num_samples = minibatch.packed, minibatch.rows.shape[0]
    places, own = [], []
    for number, (leaf, first) in enumerate(zip(packed.leaves, packed.columns, strict=True)):
        if number in minibatch.own:
            places.append(Place(f"own{len(own)}", None, shuffled=False))
            own.append(minibatch.own[number])
        elif first is None:
            places.append(Place(f"own{len(own)}", None, shuffled=True))
            own.append(leaf)
        else:
            places.append(Place("table", first, shuffled=True))
    whole_blocks = num_samples % launch.block == 0
    source = gradient_source(step, places, whole_blocks=whole_blocks, numerics=numerics)
    size = sum(each.size for each in step.sums if each.is_computed)
    programs = min(launch.programs, -(-num_samples // launch.block))
    sums = jax.ShapeDtypeStruct((programs, size), jnp.dtype(jnp.float32))
    sizes = {"N": num_samples, "W": packed.table.shape[1], "SIZE": size, "PROGRAMS": programs}
    arrays = [packed.table, minibatch.rows, *own, *step.scalarised.uniforms]
    return Kernel(source, programs, (sums,), {**sizes, "BLOCK": launch.block}, launch.num_warps), arrays
