"""Machine code that sums gradients over the samples of a minibatch.

Each program computes a share of the samples, block by block.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from llvmlite import ir

from rollmill.core.errors import CannotFuse
from rollmill.fusion.backends.cpu.builder import FLOAT32, INT32, INT64, Emitter, Value, memory_type
from rollmill.fusion.backends.cpu.codegen import CodeWriter
from rollmill.fusion.backends.cpu.control import BlockValue, assign_all, clear, new_variable, read
from rollmill.fusion.backends.cpu.ffi import NativeKernel, new_program
from rollmill.fusion.backends.cpu.memory import (
    ALIGNMENT,
    Matrix,
    Placed,
    Scratch,
    emit_outer_sums,
    pack,
    round_up_width,
)
from rollmill.fusion.backends.cpu.target import processor
from rollmill.fusion.ir import Node
from rollmill.fusion.kernels.accumulators import Side, Tile, TilePart, TileTerm, accumulators_of, is_row
from rollmill.fusion.kernels.gradients import GradientStep, Minibatch
from rollmill.fusion.kernels.leaves import KernelArguments, Leaf
from rollmill.fusion.kernels.vector import Vector
from rollmill.fusion.opt.schedule import schedule_of

WORD = np.dtype(np.uint32)


class Spot(NamedTuple):
    """A position in one of the arrays that a CPU kernel takes."""

    number: int
    first: int = 0
    """Index of the first element."""


class SampleSource(NamedTuple):
    """Location from which a CPU kernel reads one leaf of the samples."""

    array: Spot
    stride: int
    """Elements between consecutive samples."""
    shuffled: bool
    """Whether samples are stored in the order of the batch, and so must be looked up by row, rather than in the
    order of the minibatch."""
    in_words: bool
    """Whether the elements are 32-bit words of the packed batch."""


def gradient_code(
    step: GradientStep, minibatch: Minibatch, samples: range, *, block: int, programs: int
) -> tuple[NativeKernel, list[Any]]:
    """Returns machine code that sums gradients over samples of a minibatch, and the arrays that it takes.

    The kernel returns partial sums `[programs, size]`.

    Raises:
        CannotFuse: the batch is too large, the number of samples is not a multiple of the block, or there are more
            programs than blocks.
    """
    own = processor()
    table = minibatch.packed.table
    if table.size >= 2**31:
        raise CannotFuse(f"a batch of {table.size:,} words exceeds the limit of 2^31.")
    if len(samples) % block or not 0 < programs <= len(samples) // block:
        raise CannotFuse(f"{programs} programs with blocks of {block} do not fit {len(samples)} samples.")
    given = KernelArguments([table, minibatch.shuffled.rows, minibatch.number.reshape(1)])
    sources = [_source(given, minibatch, leaf, n) for n, leaf in enumerate(step.sample_leaves)]
    arrays = minibatch.uniforms.slots
    slots = [_uniform(given, array, minibatch.vector) for array in arrays]
    size = sum(each.size for each in step.sums if each.is_computed)
    emit, pointers, number, base = new_program(min(own.lanes, block), len(given.arrays) + 1)
    # Pointers to weights are computed before the loop, because they are equal in every iteration.
    with emit.once():
        uniforms = [
            emit.at(pointers[slot.number], slot.first, memory_type(array.dtype))
            for slot, array in zip(slots, arrays, strict=True)
        ]
        minibatch_number = emit.builder.zext(emit.load_number(pointers[2], np.dtype(np.int32)), INT64)
    writer = CodeWriter(emit, Scratch(emit, base), uniforms, block=block, room=own.accumulators)
    sums = _BlockSums(writer, step)
    sums.begin()
    batch = _SampleLoads(writer, pointers, minibatch_number, minibatch)
    back = [
        new_variable(writer, step.program.inputs[place]) for leaf in step.carried_leaves for place in leaf.places
    ]
    needed = {node for node in step.program.nodes() if node.op == "input"}
    # Blocks are assigned to programs in a fixed order, so the sum does not depend on the cores that compute it.
    first = emit.builder.add(emit.builder.mul(number, emit.integer(block)), emit.integer(samples.start))
    with emit.loop(samples.stop, first=first, step=programs * block) as start:
        for variable in back:
            clear(writer, variable)
        with _turns(emit, minibatch.turns) as turn:
            batch.begin(start, turn)
            inputs = [read(writer, variable) for variable in back]
            inputs += [
                held if step.program.inputs[place] in needed else None
                for leaf, source in zip(step.sample_leaves, sources, strict=True)
                for place, held in zip(leaf.places, batch.read(leaf, source), strict=True)
            ]
            outputs = writer.write(schedule_of(step.program, sums=sums.nodes), inputs, add_sum=sums.add)
            handed_back = [outputs[place] for leaf in step.returned_leaves for place in leaf.places]
            assign_all(writer, back, handed_back)
    with emit.once():
        target = emit.at(pointers[-1], emit.builder.mul(number, emit.integer(size)), ir.FloatType())
    sums.store(target)
    emit.builder.ret_void()
    outputs = (jax.ShapeDtypeStruct((programs, size), jnp.dtype(jnp.float32)),)
    return NativeKernel(emit.module, programs, max(writer.scratch.size, ALIGNMENT), outputs), given.arrays


def _uniform(given: KernelArguments, array: Any, vector: Vector | None) -> Spot:
    """Weights are read from the vector that they were cut from."""
    offset = None if vector is None else vector.offset_of(array)
    if vector is None or offset is None:
        return Spot(given.index_of(array))
    return Spot(given.index_of(vector.numbers), offset)


def _source(given: KernelArguments, minibatch: Minibatch, leaf: Leaf, number: int) -> SampleSource:
    size = len(leaf.places) * (leaf.width or 1)
    packed, conditioned = minibatch.packed, minibatch.shuffled.conditioned
    if number in conditioned:
        return SampleSource(Spot(given.index_of(conditioned[number])), size, shuffled=False, in_words=False)
    column = packed.columns[number]
    if column is not None:
        return SampleSource(Spot(0, column), packed.table.shape[1], shuffled=True, in_words=True)
    return SampleSource(Spot(given.index_of(packed.leaves[number])), size, shuffled=True, in_words=False)


@contextmanager
def _turns(emit: Emitter, count: int) -> Iterator[Value | None]:
    """Steps of a sequence, from the last to the first. None if samples are not sequences."""
    if count == 1:
        yield None
        return
    with emit.loop(count) as turn:
        yield emit.builder.sub(emit.integer(count - 1), turn)


# --- the samples of a block ----------------------------------------------------------------------------------


class _SampleLoads:
    """Reads the samples of one block after the other."""

    def __init__(self, writer: CodeWriter, pointers: Sequence[Value], number: Value, minibatch: Minibatch) -> None:
        self._writer, self._pointers = writer, pointers
        self._number, self._minibatch = number, minibatch

    def begin(self, start: Value, turn: Value | None) -> None:
        """Begins a block at this row of the minibatch, and at this step of its sequences."""
        emit, minibatch = self._writer.emit, self._minibatch
        spot = lambda number: emit.builder.add(emit.builder.mul(number, emit.integer(minibatch.num_rows)), start)
        self._rows_at = emit.at(self._pointers[1], spot(self._number), INT32)
        lanes = range(0, self._writer.block, emit.lanes)
        self._rows = [emit.load(emit.at(self._rows_at, lane, INT32), WORD) for lane in lanes]
        if turn is None:
            self._spot, self._further = spot(self._number), None
            return
        # Steps of a sequence are consecutive, in the table and in the other leaves.
        steps = emit.builder.mul(self._number, emit.integer(minibatch.turns))
        self._spot = spot(emit.builder.add(steps, turn))
        self._further = emit.builder.mul(turn, emit.integer(minibatch.stride))
        further = emit.broadcast(emit.builder.trunc(self._further, INT32))
        self._rows = [emit.builder.add(rows, further) for rows in self._rows]

    def read(self, leaf: Leaf, source: SampleSource) -> list[BlockValue]:
        """Returns the elements or rows of a leaf."""
        if leaf.width is None:
            return [self._numbers(leaf, source, n) for n in range(len(leaf.places))]
        return [self._row(leaf, source, n * leaf.width) for n in range(len(leaf.places))]

    def _numbers(self, leaf: Leaf, source: SampleSource, number: int) -> list[Value]:
        emit, dtype = self._writer.emit, WORD if source.in_words else leaf.dtype
        pointer = self._at(source, number, dtype)
        if source.shuffled:
            stride = emit.constant(source.stride, WORD)
            numbers = [emit.gather(pointer, emit.builder.mul(rows, stride), dtype) for rows in self._rows]
        else:
            first = emit.builder.mul(self._spot, emit.integer(source.stride))
            numbers = self._writer.strided(emit.at(pointer, first, memory_type(dtype)), source.stride, dtype)
        return [emit.builder.bitcast(x, emit.vector(leaf.dtype)) for x in numbers] if source.in_words else numbers

    def _row(self, leaf: Leaf, source: SampleSource, first: int) -> Placed:
        """Returns a row of each sample, copied one by one."""
        emit, rows = self._writer.emit, self._writer.new_rows(leaf.width or 0, leaf.dtype)
        kind = memory_type(leaf.dtype)
        with emit.loop(self._writer.block) as sample:
            if source.shuffled:
                number = emit.builder.zext(emit.load_number(emit.at(self._rows_at, sample, INT32), WORD), INT64)
                number = number if self._further is None else emit.builder.add(number, self._further)
            else:
                number = emit.builder.add(self._spot, sample)
            place = emit.builder.mul(number, emit.integer(source.stride))
            own = emit.at(self._at(source, first, leaf.dtype), place, kind)
            row = Matrix(1, rows.width, 0, 1, rows.sample_stride, leaf.dtype)
            pack(emit, rows.at(emit, sample, 0), own, row)
        return rows

    def _at(self, source: SampleSource, number: int, dtype: np.dtype) -> Value:
        return self._writer.emit.at(
            self._pointers[source.array.number], source.array.first + number, memory_type(dtype)
        )


# --- sums ------------------------------------------------------------------------------------------------------


class _BlockSums:
    """Sums over samples: tiles in memory, scalars in variables."""

    def __init__(self, writer: CodeWriter, step: GradientStep) -> None:
        self._writer, self._emit = writer, writer.emit
        self._kept = accumulators_of(step.sums, step.program.outputs)
        self._numbers = {node: writer.emit.slot(writer.emit.vector(FLOAT32)) for _, node in self._kept.numbers}
        self._tiles = [self._place(tile) for tile in self._kept.tiles]
        places = zip(self._tiles, self._kept.tiles, strict=True)
        self._terms = [(place, term) for place, tile in places for term in tile.terms]

    def _place(self, tile: Tile) -> Placed:
        columns = round_up_width(tile.columns, self._emit.lanes)
        return Placed(self._writer.scratch.take(tile.rows * columns), columns, 1, tile.columns)

    def begin(self) -> None:
        """Sets all sums to zero."""
        zero = self._emit.constant(0.0)
        for slot in self._numbers.values():
            self._emit.builder.store(zero, slot)
        for sums, tile in zip(self._tiles, self._kept.tiles, strict=True):
            with self._emit.loop(tile.rows) as row:
                for column in range(0, sums.sample_stride, self._emit.lanes):
                    self._emit.store(zero, sums.at(self._emit, row, column), FLOAT32)

    @property
    def nodes(self) -> list[list[Node]]:
        """The nodes that each sum reads: terms of tiles, then scalars."""
        return [term.nodes for _, term in self._terms] + [[node] for node in self._numbers]

    def add(self, number: int) -> None:
        """Adds a block's part of a sum, by its number."""
        if number < len(self._terms):
            self._add_term(*self._terms[number])
        else:
            node = list(self._numbers)[number - len(self._terms)]
            self._add_number(node, self._numbers[node])

    def _add_term(self, sums: Placed, term: TileTerm) -> None:
        writer = self._writer
        right = writer.contiguous(self._side(term.right))
        emit_outer_sums(self._emit, sums, self._side(term.left), right, writer.block, writer.room)

    def _side(self, side: Side) -> Placed:
        if is_row(side):
            (row,) = side
            assert row is not None
            return self._writer.in_memory(row)
        ones = [self._emit.constant(1.0)] * self._writer.groups
        return self._writer.beside([ones if node is None else self._writer.vectors(node) for node in side])

    def _add_number(self, node: Node, slot: Value) -> None:
        total = self._emit.builder.load(slot, typ=self._emit.vector(FLOAT32))
        for vector in self._writer.vectors(node):
            total = self._emit.add(total, vector)
        self._emit.builder.store(total, slot)

    def store(self, target: Value) -> None:
        """Writes all sums as one vector."""
        for sums, tile in zip(self._tiles, self._kept.tiles, strict=True):
            for part in tile.parts:
                self._store_part(sums, part, target)
        for offset, node in self._kept.numbers:
            total = self._emit.builder.load(self._numbers[node], typ=self._emit.vector(FLOAT32))
            self._emit.store(self._writer.across("row_sum", total), self._at(target, offset), FLOAT32)

    def _store_part(self, sums: Placed, part: TilePart, target: Value) -> None:
        """Stores the part of a tile that belongs to one result, in the result's row-major order."""
        emit = self._emit
        strides = part.strides
        with emit.loop(part.rows) as row, emit.loop(part.columns) as column:
            own = emit.builder.add(row, emit.integer(part.first_row))
            number = emit.load_number(sums.at(emit, own, column), FLOAT32)
            place = emit.builder.mul(row, emit.integer(strides[0]))
            place = emit.builder.add(place, emit.builder.mul(column, emit.integer(strides[1])))
            place = emit.builder.add(place, emit.integer(part.offset))
            emit.store(number, self._at(target, place), FLOAT32)

    def _at(self, pointer: Value, place: Value | int) -> Value:
        return self._emit.at(pointer, place, ir.FloatType())
