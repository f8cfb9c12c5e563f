"""Computes the gradients of a minibatch in one GPU kernel."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rollmill.core.machine import Numerics
from rollmill.core.operations import GRADIENTS_KERNEL
from rollmill.fusion.backends.triton.codegen import TritonWriter
from rollmill.fusion.backends.triton.compile import Kernel, call, call_in_lanes, entry
from rollmill.fusion.backends.triton.control import Names
from rollmill.fusion.backends.triton.hoist import NOTHING_KEPT, KeptMatrices, columns
from rollmill.fusion.backends.triton.memory import BY_INSTRUCTIONS, BY_TRITON, Memory
from rollmill.fusion.backends.triton.registers import ONE
from rollmill.fusion.backends.triton.reloading import FAR, matrices_fit, read_where_used, slots_read_again
from rollmill.fusion.backends.triton.sample_prefetch import SamplePlace, SamplePrefetch
from rollmill.fusion.backends.triton.source import KernelSource
from rollmill.fusion.backends.triton.stored_rows import TiledLoops, row_tile_stores, stored_arrays, stored_names
from rollmill.fusion.ir import Node, Program
from rollmill.fusion.kernels.accumulators import Side, Tile, TilePart, TileTerm, accumulators_of, is_row
from rollmill.fusion.kernels.gradients import GradientStep, Minibatch
from rollmill.fusion.kernels.leaves import KernelArguments
from rollmill.fusion.kernels.loop_fission import FissionPlan, SampleLoop, plan_sample_loops
from rollmill.fusion.kernels.rerolling import reroll
from rollmill.fusion.kernels.vector import Vector
from rollmill.fusion.kernels.wide_gradients import StoredRow, wide_gradients
from rollmill.fusion.opt.schedule import schedule_of

EARLIER_LENGTHS = (5, 7)
"""Lengths of launches that earlier versions recorded. Their fifth number chose kernels for optimiser steps."""


class GradientLaunch(NamedTuple):
    """Launch configuration of a gradient kernel on a GPU."""

    num_programs: int
    """Number of programs. Each computes a share of the minibatch, block by block."""
    block: int = 64
    """Samples per block, a power of two of at least 16."""
    num_warps: int = 4
    reloads_weights: int = 0
    """1 to reload weight matrices in every step of a sequence, which saves shared memory."""
    tile: int = 0
    """Columns of the tiles that wide rows and matrices are divided into, or 0 to leave them whole. Gradients of
    matrices larger than a tile are then products after the kernel."""
    kept_kilobytes: int = 0
    """Kilobytes of matrix tiles that stay on the chip. Others are reloaded for every block. Only with `tile`."""

    @classmethod
    def read(cls, numbers: Sequence[int]) -> "GradientLaunch":
        """Returns the launch with these numbers, which an earlier version may have recorded in a run."""
        return cls(*cls.numbers(numbers))

    @staticmethod
    def numbers(recorded: Sequence[int]) -> Sequence[int]:
        """Returns the numbers of a launch from those that this version or an earlier one recorded."""
        return [*recorded[:4], *recorded[5:]] if len(recorded) in EARLIER_LENGTHS else recorded


def run_gradients_kernel(
    step: GradientStep, minibatch: Minibatch, *, launch: GradientLaunch, numerics: Numerics, lanes: int = 1
) -> Float[Array, " size"]:
    """Computes the mean gradients of a minibatch in one GPU kernel, adding partial sums in a fixed order.

    With several `lanes`, call it inside `jax.vmap`.
    """
    kernel, arrays = gradient_kernel(step, minibatch, launch=launch, numerics=numerics)
    sums, *rows = (call if lanes == 1 else call_in_lanes)(kernel, arrays)
    means = jnp.sum(sums, axis=0) / minibatch.num_samples
    return wide_gradients(step, launch.tile).assembled(means, rows, numerics) if rows else means


def gradient_kernel(
    step: GradientStep, minibatch: Minibatch, *, launch: GradientLaunch, numerics: Numerics
) -> tuple[Kernel, list[Any]]:
    """Returns the gradient kernel of a minibatch, and the arrays that it takes."""
    stored: Sequence[StoredRow] = ()
    if launch.tile:
        step, stored, _ = wide_gradients(step, launch.tile)
    packed, num_rows, turns = minibatch.packed, minibatch.num_rows, minibatch.turns
    conditioned = minibatch.shuffled.conditioned
    given = KernelArguments()
    places = [
        SamplePlace(_pointer(given, conditioned[number]), None, shuffled=False)
        if number in conditioned
        else SamplePlace("table", packed.columns[number], shuffled=True)
        if packed.columns[number] is not None
        else SamplePlace(_pointer(given, packed.leaves[number]), None, shuffled=True)
        for number in range(len(step.sample_leaves))
    ]
    if minibatch.vector is not None:
        _pointer(given, minibatch.vector.numbers)
    aligned = len(given.arrays)
    slots = [_slot(given, array, minibatch.vector) for array in minibatch.uniforms.slots]
    whole_blocks = num_rows % launch.block == 0
    pointers = [_pointer(given, array) for array in given.arrays]
    again = bool(launch.reloads_weights)
    source = gradient_source(
        step,
        places,
        slots,
        pointers,
        whole_blocks=whole_blocks,
        numerics=numerics,
        reads_again=again,
        tiles=TiledLoops(stored, launch.kept_kilobytes) if launch.tile else None,
    )
    size = sum(each.size for each in step.sums if each.is_computed)
    programs = min(launch.num_programs, -(-num_rows // launch.block))
    sums = jax.ShapeDtypeStruct((programs, size), jnp.dtype(jnp.float32))
    rows = stored_arrays(stored, num_rows, numerics)
    sizes = {"N": num_rows, "T": turns, "STRIDE": minibatch.stride, "W": packed.table.shape[1], "SIZE": size}
    arrays = [packed.table, minibatch.shuffled.rows, minibatch.number.reshape(1), *given.arrays]
    constants, uniforms = {**sizes, "PROGRAMS": programs, "BLOCK": launch.block}, len(given.arrays) - aligned
    return Kernel(source, programs, (sums, *rows), constants, launch.num_warps, uniforms), arrays


def _pointer(given: KernelArguments, array: Any) -> str:
    """Returns the name of the pointer to an array."""
    return f"given{given.index_of(array)}"


def _slot(given: KernelArguments, array: Any, vector: Vector | None) -> str:
    """Returns the pointer to a uniform array, within the weights' vector if it is a weight."""
    offset = None if vector is None else vector.offset_of(array)
    if vector is None or offset is None:
        return _pointer(given, array)
    return f"({_pointer(given, vector.numbers)} + {offset})"


# --- its source -------------------------------------------------------------------------------------------


def gradient_source(
    step: GradientStep,
    places: Sequence[SamplePlace],
    slots: Sequence[str],
    pointers: Sequence[str],
    *,
    whole_blocks: bool,
    numerics: Numerics,
    reads_again: bool = False,
    tiles: TiledLoops | None = None,
) -> str:
    """Generates the source of a gradient kernel.

    The kernel takes pointers to the packed batch, to the rows of all minibatches `[M, N]`, to the number of the
    current minibatch, to the arrays in `pointers`, and to the output, the partial sums `[PROGRAMS, SIZE]`.
    Compile-time arguments are `N` samples (or sequences of `T` steps that are `STRIDE` rows apart), `W` words per
    row of the packed batch, `SIZE`, `PROGRAMS` and `BLOCK`. Each iteration prefetches the samples of the next
    block.

    Args:
        step: the program of one sample.
        places: where each leaf of the samples is stored.
        slots: pointers to the program's uniform arrays.
        pointers: names of the arguments used by `places` and `slots`.
        whole_blocks: whether every block is full.
        numerics: precision of matrix products.
        reads_again: whether weight matrices are reloaded in every step of a sequence.
        tiles: how matrices are read in tiles, and rows to store in the arrays after the partial sums, or None to
            keep all matrices on the chip.
    """
    # All loops share one set of tiles, of which each keeps some, so that offsets in the result do not depend on
    # the loops.
    stored = tiles.stored if tiles else ()
    plan = _plan_of(step, stored)
    numbers = {node: f"sum{n}" for n, node in enumerate(node for each in plan.loops for node in each.numbers)}
    size = _operations(step, plan)
    in_turns = any(each.turns.count > 1 for each in plan.loops)  # such a loop reads each scalar separately
    memory = BY_INSTRUCTIONS if in_turns or size > MAX_NODES_BY_TRITON else BY_TRITON
    lines = []
    for n, each in enumerate(plan.loops):
        lines += _sample_loop(
            _Common(step, places, slots, whole_blocks, numerics, reads_again, memory, tiles),
            each,
            numbers,
            f"p{n}",
        )
    arguments = ", ".join(["table", "rows", "minibatch", *pointers, "sums", *stored_names(stored)])
    constants = ", ".join(
        f"{name}: tl.constexpr" for name in ("N", "T", "STRIDE", "W", "SIZE", "PROGRAMS", "BLOCK")
    )
    head = [
        "@triton.jit",
        f"def {GRADIENTS_KERNEL}({arguments}, {constants}):",
        "    rows += tl.load(minibatch).to(tl.int64) * N",
        "    own = sums + tl.program_id(0) * SIZE",
        f"    {FAR}",
    ]
    return "\n".join([*head, *lines, *_number_stores(plan, numbers), "", entry(GRADIENTS_KERNEL)])


def gradient_operations(step: GradientStep) -> int:
    """Returns the number of operations in the gradient kernel of a step."""
    return _operations(step, _plan_of(step))


def _operations(step: GradientStep, plan: FissionPlan) -> int:
    return sum(len(_program_of(step, each).nodes()) for each in plan.loops)


def _plan_of(step: GradientStep, stored: Sequence[StoredRow] = ()) -> FissionPlan:
    kept = accumulators_of(step.sums, step.program.outputs)
    plan = plan_sample_loops(kept, step.program, step.forwarded_outputs, stored)
    return plan if stored else reroll(plan, step.program, step.sample_leaves)


class _Common(NamedTuple):
    """The arguments that all loops of a kernel share."""

    step: GradientStep
    places: Sequence[SamplePlace]
    slots: Sequence[str]
    whole_blocks: bool
    numerics: Numerics
    reads_again: bool
    memory: Memory
    tiles: TiledLoops | None


MAX_NODES_BY_TRITON = 1_000
"""Maximum number of nodes of a program that uses the loads of Triton. A program of 900 nodes compiles in a minute,
and a program of 1,700 nodes in hours."""


def _sample_loop(task: _Common, each: SampleLoop, numbers: Mapping[Node, str], prefix: str) -> list[str]:
    """Writes a loop over a program's samples and its sums, with `prefix` before all names."""
    mask = "" if task.whole_blocks else "here"
    step, program = task.step, _program_of(task.step, each)
    back = {place: step.forwarded_outputs[place] for place in each.carried}
    samples = SamplePrefetch(prefix, by_step=bool(step.carried_leaves), memory=task.memory, turns=each.turns)
    reads_again = bool(step.carried_leaves) and (task.reads_again or not matrices_fit(program.nodes()))
    reads_again |= task.tiles is not None
    slots = slots_read_again(task.slots) if reads_again else task.slots
    kept = NOTHING_KEPT if task.tiles is None else KeptMatrices(task.slots, task.tiles.kept * 1024)
    source = KernelSource(task.numerics, slots, indent=2, memory=task.memory, prefix=f"{prefix}v", kept=kept)
    writer = TritonWriter(source, beside=samples.beside, exact_scalars=False)
    inputs = _inputs(task, program, samples, prefix)
    source.lines += samples.words
    sums = _SumWriter(writer, each, numbers, mask)
    outputs = writer.write(schedule_of(program, segmented=True, sums=sums.nodes), inputs, add_sum=sums.add)
    names = dict(zip(program.outputs, outputs, strict=True))
    carried = _BackwardCarry(prefix, step, each.carried)
    carried.hand_back(source, [names[node] for node in back.values()])
    loop = [LOOP_OVER_BLOCKS]
    if step.carried_leaves or each.turns.count > 1:
        loop = [*_loop_in_turns("T" if step.carried_leaves else each.turns.count), *carried.forgotten()]
    here = [f"        {mask} = first + tl.arange(0, BLOCK) < N"] if mask else []
    uniforms, inside = source.before.lines, [*samples.ahead(), *source.lines, *samples.over()]
    if reads_again:
        uniforms, inside = read_where_used(uniforms, inside, "first" if loop == [LOOP_OVER_BLOCKS] else "count")
    before = [*uniforms, *samples.opening(), *_empty(each, numbers), *carried.nothing()]
    return [*before, *loop, *here, *inside, *_tile_stores(each, task.memory), *_sum_lines(each, numbers)]


LOOP_OVER_BLOCKS = "    for first in range(tl.program_id(0) * BLOCK, N, PROGRAMS * BLOCK):"


def _loop_in_turns(turns: int | str) -> Sequence[str]:
    """Lines for all iterations of a block, such as the steps of its sequences, then those for the next block."""
    blocks = "tl.cdiv(N - tl.program_id(0) * BLOCK, PROGRAMS * BLOCK)"
    return (
        f"    for count in range({blocks} * {turns}):",
        f"        first = tl.program_id(0) * BLOCK + count // {turns} * (PROGRAMS * BLOCK)",
    )


def _program_of(step: GradientStep, each: SampleLoop) -> Program:
    """Returns the program of all that a loop sums or hands back."""
    summing_from = [node for tile in each.tiles.values() for term in tile.terms for node in term.nodes]
    back = [step.forwarded_outputs[place] for place in each.carried]
    stored = [node for _, row in each.stored for node in row]
    return Program(step.program.inputs, (*dict.fromkeys([*summing_from, *each.numbers, *back, *stored]),))


class _BackwardCarry:
    """What a loop hands back from each step of its sequences to the one before."""

    def __init__(self, prefix: str, step: GradientStep, places: Sequence[int]) -> None:
        widths = {place: leaf.width for leaf in step.carried_leaves for place in leaf.places}
        shape = lambda width: "[BLOCK]" if width is None else f"[BLOCK, {columns(width)}]"
        self._shapes = {_carried_name(prefix, place): shape(widths[place]) for place in places}

    def nothing(self) -> list[str]:
        """Returns the lines before the loop."""
        return [f"    {name} = tl.zeros({shape}, tl.float32)" for name, shape in self._shapes.items()]

    def forgotten(self) -> list[str]:
        """Returns the lines at the start of an iteration: the last step of a block receives nothing."""
        return [f"        {name} = tl.where(count % T == 0, 0.0, {name})" for name in self._shapes]

    def hand_back(self, source: KernelSource, values: Sequence[str]) -> None:
        """Writes the end of a turn. All values have names before the first is assigned."""
        new = [source.fresh() for _ in values]
        for name, value, shape in zip(new, values, self._shapes.values(), strict=True):
            source.line(f"{name} = tl.broadcast_to({value}, {shape}).to(tl.float32)")
        for name, value in zip(self._shapes, new, strict=True):
            source.line(f"{name} = {value}")


def _carried_name(prefix: str, place: int) -> str:
    return f"{prefix}back{place}"


def _inputs(task: _Common, program: Program, samples: SamplePrefetch, prefix: str) -> list[str]:
    """Loads the inputs that a loop needs, and returns their names."""
    needed = {node for node in program.nodes() if node.op == "input"}
    names = [""] * len(program.inputs)
    for leaf in task.step.carried_leaves:
        for place in leaf.places:
            names[place] = _carried_name(prefix, place)
    for leaf, place in zip(task.step.sample_leaves, task.places, strict=True):
        wanted = [n for n, number in enumerate(leaf.places) if program.inputs[number] in needed]
        for n, name in zip(wanted, samples.read(leaf, place, wanted), strict=True):
            names[leaf.places[n]] = name
    return names


# --- sums -------------------------------------------------------------------------------------------------


class _SumWriter:
    """Adds a block's results to the accumulators, each as soon as it is computed, so that it need not be held."""

    def __init__(self, writer: TritonWriter, each: SampleLoop, numbers: Mapping[Node, str], mask: str) -> None:
        self._writer, self._mask = writer, mask
        self._terms = [(n, term) for n, tile in each.tiles.items() for term in tile.terms]
        self._numbers = [(node, numbers[node]) for node in each.numbers]
        self._stores = row_tile_stores(each.stored)

    @property
    def nodes(self) -> list[list[Node]]:
        """The nodes that each sum reads: terms of tiles, then scalars, then tiles of rows that are stored."""
        summed = [term.nodes for _, term in self._terms] + [[node] for node, _ in self._numbers]
        return summed + [[store.tile] for store in self._stores]

    def add(self, number: int, names: Names) -> None:
        """Adds a sum by its number."""
        if number < len(self._terms):
            self._add_term(*self._terms[number], names)
        elif number >= len(self._terms) + len(self._numbers):
            store = self._stores[number - len(self._terms) - len(self._numbers)]
            store.write(self._writer.source, names[store.tile], self._mask)
        else:
            node, total = self._numbers[number - len(self._terms)]
            self._add_number(total, names[node])

    def _add_term(self, n: int, term: TileTerm, names: Names) -> None:
        """Writes `tile += right^T left`. Padding samples are zero on the right."""
        left, right = self._side(term.left, names), self._side(term.right, names)
        if self._mask:
            right = f"tl.where({self._mask}[:, None], {right}, 0.0)"
        self._writer.source.line(f"tile{n} = {self._writer.product(f'tl.trans({right})', left, onto=f'tile{n}')}")

    def _add_number(self, total: str, name: str) -> None:
        """Adds a scalar of each sample to accumulators, one for each position of a block."""
        self._writer.source.line(
            f"{total} += tl.where({self._mask}, {name}, 0.0)" if self._mask else f"{total} += {name}"
        )

    def _side(self, side: Side, names: Names) -> str:
        if is_row(side):
            (row,) = side
            assert row is not None
            return self._writer.masked(row, names[row], "0.0")
        if side == (None,):
            return self._writer.source.before.ones()
        return self._writer.beside([ONE if node is None else names[node] for node in side])


def _empty(each: SampleLoop, numbers: Mapping[Node, str]) -> list[str]:
    lines = [f"    tile{n} = tl.zeros({_shape(tile)}, tl.float32)" for n, tile in each.tiles.items()]
    return lines + [f"    {numbers[node]} = tl.zeros([BLOCK], tl.float32)" for node in each.numbers]


def _shape(tile: Tile) -> str:
    return f"[{columns(tile.columns)}, {columns(tile.rows)}]"


def _tile_stores(each: SampleLoop, memory: Memory) -> list[str]:
    lines = []
    for n, tile in each.tiles.items():
        lines += [f"    i{n} = tl.arange(0, {columns(tile.rows)})[None, :]"]
        lines += [f"    o{n} = tl.arange(0, {columns(tile.columns)})[:, None]"]
        lines += [_store(n, part, memory) for part in tile.parts]
    return lines


def _sum_lines(each: SampleLoop, numbers: Mapping[Node, str]) -> list[str]:
    """Lines that reduce the values of a block's positions to one."""
    return [f"    {numbers[node]}_all = tl.sum({numbers[node]}, axis=0)" for node in each.numbers]


def _number_stores(plan: FissionPlan, numbers: Mapping[Node, str]) -> list[str]:
    lines = []
    for offset, terms in plan.numbers:
        parts = [
            f"{numbers[node]}_all" if factor == 1 else f"{factor} * {numbers[node]}_all" for factor, node in terms
        ]
        lines.append(f"    tl.store(own + {offset}, {' + '.join(parts)})")
    return lines


def _store(n: int, part: TilePart, memory: Memory) -> str:
    """Stores the part of a tile that belongs to one result, in the result's row-major order."""
    row, strides = f"(i{n} - {part.first_row})", part.strides
    place = f"{part.offset} + {row} * {strides[0]} + o{n} * {strides[1]}"
    inside = [f"({row} >= 0)", f"({row} < {part.rows})", f"(o{n} < {part.columns})"]
    return f"    {memory.write(f'own + {place}', f'tile{n}', inside)}"
