"""Gradients of a minibatch as one kernel.

The kernel computes forward pass, loss and backward pass sample by sample, and keeps the sums on the chip. It
returns the results of the algorithm's `gradients` fragment, from the same loss of one sample. Samples are read in
place, in shuffled order, so no shuffled batch is written.

Losses of sequences are sums over steps. Memories of a recurrent policy, and constants such as V-trace targets, are
computed before the kernel, forward in time. Without a memory, each step is then an ordinary sample. With a memory,
steps are processed from the last to the first, carrying the gradient with respect to the memory.

Shape letters: `R` samples of a batch, `E` sequences of a batch, `T` steps of a sequence, `N` samples or sequences
of a minibatch, `M` minibatches of an epoch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree, UInt32

from rollmill.core.contracts import type_of
from rollmill.core.errors import CannotFuse
from rollmill.core.types import Key, is_key
from rollmill.dataflow import (
    Batch,
    Graph,
    Learner,
    MeanGradients,
    Metrics,
    PackedSamples,
    Reduce,
    SequenceGradients,
    State,
    Weights,
    collect,
    evaluate_schedules,
    flat_samples,
    identity,
    init_state,
    pack,
    prepare,
)
from rollmill.fusion.ir import Node, Program, evaluate
from rollmill.fusion.kernels.leaves import Leaf, each_struct, input_leaves, leaves_of_outputs, to_raw
from rollmill.fusion.kernels.sums import Sum, mean_of, sums_of
from rollmill.fusion.kernels.vector import Vector
from rollmill.fusion.lower.function import LoweredFunction, lower_function
from rollmill.fusion.lower.prologue import Prologue, UniformArrays
from rollmill.fusion.lower.values import Output, is_output


@dataclass(frozen=True, eq=False, repr=False)
class GradientStep:
    """Program for the gradients and metrics of ONE sample. It is lowered once for all kernels of a run."""

    lowered: LoweredFunction
    sample_leaves: list[Leaf]
    """Leaves of the sample, with their positions among the program's inputs. For sequences they include constants
    and the policy's memory."""
    sums: list[Sum]
    """Results that are summed over samples, the gradients first and then the metrics."""
    results: PyTree[Output]
    """The summed results as the pytree that the algorithm returns."""
    carried_leaves: list[Leaf]
    """Leaves that the following step of a sequence hands back, with their positions among the inputs. They are
    zero for the last step."""
    returned_leaves: list[Leaf]
    """The leaves of `carried_leaves` for the preceding step, with their positions among the outputs."""

    def __repr__(self) -> str:
        return f"GradientStep({self.lowered})"

    @property
    def program(self) -> Program:
        """The program that computes gradients and metrics of one sample."""
        return self.lowered.program

    @property
    def forwarded_outputs(self) -> dict[int, Node]:
        """The outputs that become inputs of the step processed next, by input position."""
        pairs = zip(self.carried_leaves, self.returned_leaves, strict=True)
        places = [pair for one, other in pairs for pair in zip(one.places, other.places, strict=True)]
        return {place: self.program.outputs[output] for place, output in places}

    @property
    def prologue(self) -> Prologue:
        """The prologue of the program, which computes the program's uniform arrays from the learner state."""
        return self.lowered.prologue


class Shuffled(NamedTuple):
    """Shuffled rows of an epoch, and leaves computed from a whole minibatch, such as standardised advantages."""

    rows: UInt32[Array, "*epochs M N"]
    """Indices of the samples of each minibatch."""
    conditioned: dict[int, Array]
    """Leaves that were rescaled using a whole minibatch (the graph's `condition`), `[*epochs, M, N, ...]`, by leaf
    number. Those of sequences are `[*epochs, M, T, N, ...]`."""


class PackedBatch(NamedTuple):
    """A batch in the layout that kernels read."""

    packed: PackedSamples
    """All samples, packed into a table of 32-bit words where possible."""
    sequences: PyTree[Array]
    """Leaves `[E, ...]` with one value per sequence."""


class Minibatch(NamedTuple):
    """A minibatch as kernels read it: its number within the epoch, and the data of the whole epoch."""

    number: Int[Array, ""]
    packed: PackedSamples
    """All samples of the batch."""
    shuffled: Shuffled
    """The shuffled rows of the epoch."""
    uniforms: UniformArrays
    """Arrays that the program of a sample reads, such as the weights."""
    vector: Vector | None = None
    """The network as one vector, if it is held that way."""
    turns: int = 1
    """Number of steps in each row: 1 for a sample, more for a sequence, whose steps are computed in order."""

    @property
    def num_rows(self) -> int:
        """Number of rows of a minibatch: samples, or sequences of a recurrent policy."""
        return self.shuffled.rows.shape[-1]

    @property
    def num_samples(self) -> int:
        """Number of samples of a minibatch."""
        return self.num_rows * self.turns

    @property
    def stride(self) -> int:
        """Number of table rows between consecutive steps of a sequence."""
        return len(self.packed.table) // self.turns


def lower_gradients(graph: Graph) -> GradientStep:
    """Lowers a graph's loss and gradients for one sample to a program, without computing anything.

    Raises:
        CannotFuse: an operation is not supported. The message gives its source line.
    """
    kernel_gradients(graph)  # raises an error if the graph has no batch
    index = jax.ShapeDtypeStruct((graph.loops.num_envs,), jnp.int32)
    begin = lambda key, index: first_batch(graph, init_state(graph, key, index))
    learner, batch = jax.eval_shape(begin, jax.eval_shape(jax.random.key, 0), index)
    jax.eval_shape(partial(_condition_one, graph), batch)  # raises an error if kernels cannot read its results
    return gradient_step(
        graph, learner, each_struct(jax.eval_shape(flat_samples, batch)), each_struct(batch.sequences)
    )


def gradient_step(
    graph: Graph,
    learner: PyTree[Any],
    sample: PyTree[jax.ShapeDtypeStruct],
    sequence: PyTree[jax.ShapeDtypeStruct] = (),
) -> GradientStep:
    """Lowers the gradients of one sample, or of one step of a sequence, to a program.

    Args:
        graph: the training graph.
        learner: the learner state, or its shapes.
        sample: shapes of ONE sample.
        sequence: shapes of the values that belong to ONE whole sequence.

    Raises:
        CannotFuse: an operation is not supported. The message gives its source line.
    """
    gradients, learner = kernel_gradients(graph), jax.eval_shape(partial(evaluate_schedules, graph), learner)
    if isinstance(gradients, SequenceGradients):
        return _sequence_step(gradients, learner, sample, sequence)
    lowered = lower_function(gradients.sample_gradients, (sample,), (learner,), summed=True)
    leaves = input_leaves(lowered, to_raw(sample))
    return GradientStep(lowered, leaves, sums_of(lowered.outputs), lowered.outputs, [], [])


def _sequence_step(
    gradients: SequenceGradients, learner: PyTree[Any], sample: PyTree[Any], sequence: PyTree[Any]
) -> GradientStep:
    one = lambda tree: jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, 1, *leaf.shape), leaf.dtype), tree)
    each = Batch(
        one(sample), jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), sequence)
    )
    constants, memory = jax.eval_shape(partial(_ahead, gradients), learner, each)
    inside = each_struct(each_struct((constants, memory)))
    slope = inside[1]
    if not all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(slope)):
        raise CannotFuse(
            "the memory of the policy must be float32, because gradients cannot pass through other types."
        )
    step = lambda learner, slope, sample, ahead: gradients.sample_gradients(learner, slope, sample, *ahead)
    lowered = lower_function(step, (slope, sample, inside), (learner,), carried=True, summed=True)
    carried = len(jax.tree.leaves(slope))
    leaves = input_leaves(lowered, to_raw((slope, sample, inside)))
    back, results = lowered.outputs
    handed_back = leaves_of_outputs(back)
    sums = sums_of(results, first=sum(len(leaf.places) for leaf in handed_back))
    return GradientStep(lowered, leaves[carried:], sums, results, leaves[:carried], handed_back)


def _ahead(
    gradients: SequenceGradients, learner: Learner, minibatch: Batch
) -> tuple[PyTree[Array], PyTree[Array]]:
    """Constants and memories of all steps, `[N, T, ...]`, computed forward along time."""
    unrolled = gradients.unroll(gradients.network(learner), learner, minibatch)
    return gradients.constants(learner, minibatch, unrolled), unrolled.memory_before if gradients.recurrent else ()


def kernel_gradients(graph: Graph) -> MeanGradients | SequenceGradients:
    """Returns the graph's `gradients` fragment if a kernel can compute it: a mean over samples or steps.

    Raises:
        CannotFuse: the gradients need a whole minibatch or another kind of sequence.
    """
    if isinstance(graph.gradients, SequenceGradients) and graph.replay is None:
        if graph.gradients.unfused_reason is not None:
            raise CannotFuse(graph.gradients.unfused_reason)
        return graph.gradients
    if graph.loops.minibatch_items != "samples":
        raise CannotFuse(
            "kernels can train on whole sequences only if these come from a rollout and the gradients are "
            "rollmill.dataflow.SequenceGradients."
        )
    if not isinstance(graph.gradients, MeanGradients):
        raise CannotFuse(
            f"{graph.settings['algorithm']} computes the gradients of a whole minibatch, but kernels need the "
            "gradients of one sample (rollmill.dataflow.MeanGradients)."
        )
    return graph.gradients


def first_batch(graph: Graph, state: State) -> tuple[Learner, Batch]:
    """Returns the learner state and the batch of the first iteration.

    With an experience store, the batch is a random minibatch of the right shapes.
    """
    collector = state.collector
    _, trajectory = collect(graph, graph.weights(state.learner), collector, state.key)
    learner, batch = prepare(graph, state.learner, trajectory, collector.index)
    return learner, batch if graph.replay is None else _make_up(graph, learner, state.key, collector.index)


def _make_up(graph: Graph, learner: Learner, key: Key, index: Int[Array, " E"]) -> Batch:
    """Makes a random minibatch with the shapes `[1, N, ...]` of one drawn from the experience store."""
    store = graph.replay
    assert store is not None
    draw = lambda: store.sample(graph, store.empty(graph, index), learner, key, index).minibatch
    leaves, structure = jax.tree.flatten(jax.eval_shape(draw))
    keys = jax.random.split(key, len(leaves))
    made = [_make_up_leaf(*pair)[None] for pair in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, made)


def _make_up_leaf(key: Key, like: jax.ShapeDtypeStruct) -> Array:
    if is_key(like.dtype):
        return jax.random.split(key, like.shape)
    if jnp.issubdtype(like.dtype, jnp.floating):
        return jax.random.normal(key, like.shape, like.dtype)
    return jnp.ones(like.shape, like.dtype)  # for a mask, all actions are legal


Run: TypeAlias = Callable[[GradientStep, Minibatch], Float[Array, " size"]]
"""Function that computes the means of a step's results over a minibatch, concatenated into one vector."""


def pack_batch(batch: Batch) -> PackedBatch:
    """Converts a batch to the layout that kernels read."""
    return PackedBatch(pack(flat_samples(batch)), batch.sequences)


def shuffle_samples(
    graph: Graph, batch: PackedBatch, rows: UInt32[Array, "epochs M N"], reduce: Reduce
) -> Shuffled:
    """Applies the graph's `condition` to each minibatch of `rows`, and returns `rows` with the rescaled leaves."""
    condition = partial(_conditioned_leaves, graph, batch, reduce=reduce)
    return Shuffled(rows, jax.vmap(jax.vmap(condition))(rows))


def minibatch_of(
    graph: Graph,
    step: GradientStep,
    learner: Learner,
    batch: PackedBatch,
    shuffled: Shuffled,
    number: Int[Array, ""],
    vector: Vector | None = None,
) -> Minibatch:
    """Returns a minibatch as kernels read it. For sequences, computes everything that must precede the kernel."""
    learner = evaluate_schedules(graph, learner)
    gradients, uniforms = kernel_gradients(graph), step.prologue(learner)
    if not isinstance(gradients, SequenceGradients):
        return Minibatch(number, batch.packed, shuffled, uniforms, vector)
    num_steps, packed, rows = graph.loops.num_steps, batch.packed, shuffled.rows[number]
    width = len(packed.table) // num_steps
    places = rows[None] + jnp.arange(num_steps, dtype=jnp.uint32)[:, None] * jnp.uint32(width)
    leaves = {n: leaf[number] for n, leaf in shuffled.conditioned.items()}
    by_step, structure = jax.tree.flatten(packed.take(places.reshape(-1)))
    by_step = [leaf.reshape(num_steps, len(rows), *leaf.shape[1:]) for leaf in by_step]
    samples = jax.tree.unflatten(structure, [leaves.get(n, leaf) for n, leaf in enumerate(by_step)])
    sequences = jax.tree.map(lambda leaf: leaf[rows], batch.sequences)
    ahead = _ahead(gradients, learner, Batch(_swap_axes(samples), sequences))
    leaves |= dict(enumerate(jax.tree.leaves(_swap_axes(ahead)), start=len(packed.leaves)))
    if gradients.recurrent:
        own = Shuffled(rows[None], {n: leaf[None] for n, leaf in leaves.items()})
        return Minibatch(jnp.int32(0), packed, own, uniforms, vector, turns=num_steps)
    flat = {n: leaf.reshape(1, leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]) for n, leaf in leaves.items()}
    return Minibatch(jnp.int32(0), packed, Shuffled(places.reshape(1, -1), flat), uniforms, vector)


def _swap_axes(tree: PyTree[Array]) -> PyTree[Array]:
    return jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), tree)


def fused_gradients(
    graph: Graph, batch: Batch, reduce: Reduce, *, run: Run, step: GradientStep | None = None
) -> Callable[[Learner, UInt32[Array, " N"]], tuple[Weights, Metrics]]:
    """Returns a function that computes `dataflow.row_gradients` with a kernel.

    `run` calls the kernel. `step` is the graph's lowered program, lowered here by default.
    """
    own = pack_batch(batch)

    def gradients(learner: Learner, rows: UInt32[Array, " N"]) -> tuple[Weights, Metrics]:
        structs = each_struct(own.packed.samples), each_struct(own.sequences)
        known = step or gradient_step(graph, learner, *structs)
        only = jax.tree.map(lambda leaf: leaf[0], shuffle_samples(graph, own, rows[None, None], reduce))
        minibatch = minibatch_of(graph, known, learner, own, only, jnp.int32(0))
        return results_of(known, minibatch.uniforms, run(known, minibatch))

    return gradients


def results_of(
    step: GradientStep, uniforms: UniformArrays, means: Float[Array, " size"]
) -> tuple[Weights, Metrics]:
    """Splits the vector of means that a kernel computes into gradients and metrics."""
    results, first = [], 0
    for each in step.sums:
        if each.is_computed:
            results.append(means[first : first + each.size].reshape(each.shape).astype(each.dtype))
            first += each.size
        else:
            results.append(each.leaves[0].repeated(uniforms))
    # Outputs have the structure of the function's results, so it need not be traced again.
    structure = jax.tree.structure(step.results, is_leaf=is_output)
    return jax.tree.unflatten(structure, results)


def in_one_vector(step: GradientStep, gradients: Weights, means: Float[Array, " size"]) -> PyTree[Array]:
    """Returns all gradients as one flat vector, a slice of the kernel's results.

    Returns `gradients` unchanged if the kernel computes only some of the gradients.
    """
    sums = step.sums[: len(jax.tree.leaves(gradients))]
    if not all(each.is_computed and each.dtype == np.float32 for each in sums):
        return gradients
    return means[: sum(each.size for each in sums)]


def _condition_one(graph: Graph, batch: Batch) -> dict[int, Array]:
    """Conditions one minibatch of a batch, to check the results."""
    own = pack_batch(batch)
    by_sequence = graph.loops.minibatch_items == "sequences"
    count = graph.loops.num_envs if by_sequence else len(own.packed.table)
    minibatches = graph.loops.num_minibatches if graph.replay is None else 1
    rows = jnp.zeros(count // minibatches, jnp.uint32)
    return _conditioned_leaves(graph, own, rows, reduce=identity)


def _conditioned_leaves(graph: Graph, batch: PackedBatch, rows: Array, *, reduce: Reduce) -> dict[int, Array]:
    """Returns the leaves that conditioning a minibatch changes, without reading the others."""
    by_sequence = graph.loops.minibatch_items == "sequences"
    of_steps = lambda leaf: leaf.reshape(graph.loops.num_steps, -1, *leaf.shape[1:])[:, rows].swapaxes(0, 1)
    taken = jax.tree.map(of_steps if by_sequence else lambda leaf: leaf[rows], batch.packed.samples)
    sequences = jax.tree.map(lambda leaf: leaf[rows], batch.sequences) if by_sequence else ()
    conditioned, of_sequences = graph.condition(Batch(taken, sequences), reduce)
    if [*map(id, jax.tree.leaves(sequences))] != [*map(id, jax.tree.leaves(of_sequences))]:
        raise CannotFuse(
            "conditioning a minibatch changes leaves of whole sequences, which kernels can only read from the "
            "batch."
        )
    _check_conditioned(taken, conditioned)
    pairs = zip(jax.tree.leaves(taken), jax.tree.leaves(conditioned), strict=True)
    # Compares identities, because `condition` returns unchanged leaves as the same objects. Gathers of those are
    # dead code, and never computed.
    changed = {place: after for place, (before, after) in enumerate(pairs) if after is not before}
    return _swap_axes(changed) if by_sequence else changed


def _check_conditioned(before: PyTree[Array], after: PyTree[Array]) -> None:
    """Raises a `CannotFuse` unless conditioning changed only values, because kernels know the types of a batch."""
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise CannotFuse(
            "conditioning a minibatch adds or removes leaves of its samples, but kernels read the samples that "
            "`prepare` returns. Return all leaves from `prepare`."
        )
    for (path, one), other in zip(jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            raise CannotFuse(
                f"conditioning a minibatch turns samples{jax.tree_util.keystr(path)} from {type_of(one)} into "
                f"{type_of(other)}, but kernels need the shapes and dtypes that `prepare` returns."
            )


def run_gradients_reference(
    step: GradientStep, minibatch: Minibatch, *, precision: Any = None
) -> Float[Array, " size"]:
    """Computes the gradients of a minibatch with JAX functions, as the reference for kernels.

    All samples are computed at once, and sequences step by step from the last.
    """
    count, turns, uniforms = minibatch.num_rows, minibatch.turns, minibatch.uniforms
    rows = minibatch.shuffled.rows[minibatch.number]
    computed = [each for each in step.sums if each.is_computed]

    def take(turn: Int[Array, ""]) -> list[Array]:
        leaves = dict(
            enumerate(to_raw(minibatch.packed.take(rows + (turn * minibatch.stride).astype(rows.dtype))))
        )
        for place, leaf in minibatch.shuffled.conditioned.items():
            own = leaf[minibatch.number]
            leaves[place] = own[turn] if step.carried_leaves else own
        return [leaves[place] for place in range(len(leaves))]

    def again(back: list[Array], turn: Int[Array, ""]) -> tuple[list[Array], Array]:
        pairs = zip([*step.carried_leaves, *step.sample_leaves], [*back, *take(turn)], strict=True)
        inputs = [x for leaf, array in pairs for x in leaf.split(array)]
        outputs = evaluate(step.program, inputs, uniforms.slots, block=count, precision=precision)
        means = [mean_of(each, outputs, uniforms, count, precision) for each in computed]
        back = [leaf.join(outputs, uniforms, count) for leaf in step.returned_leaves]
        return back, jnp.concatenate([mean.reshape(-1).astype(jnp.float32) for mean in means])

    zeros = [jnp.zeros((count, *leaf.shape), leaf.dtype) for leaf in step.carried_leaves]
    if turns == 1:
        return again(zeros, jnp.int32(0))[1]
    return jnp.mean(jax.lax.scan(again, zeros, jnp.arange(turns), reverse=True)[1], axis=0)
