"""Where rows lie while a block is computed, and what is done with whole rows: loops over its samples.

A row is held sample after sample, with as many columns as fill whole vectors; what is the same for all samples is
held once; numbers that were single ones lie one column after the other, and are read as they lie.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from rollmill.fusion.native.emitter import FLOAT32, INT64, POINTER, Emitter, Value, memory_type

ALIGNMENT = 64
"""Bytes of a cache line, and of the widest vector."""


class Placed(NamedTuple):
    """Rows in memory: the number of sample `s` in column `c` is `sample_stride s + column_stride c` from here."""

    pointer: Value
    sample_stride: int
    column_stride: int
    width: int
    dtype: np.dtype = FLOAT32

    def at(self, emit: Emitter, sample: Value | int, column: Value | int) -> Value:
        """The pointer to one number."""
        kind = memory_type(self.dtype)
        whole = lambda n: emit.integer(n) if isinstance(n, int) else n
        offset = emit.builder.mul(whole(sample), emit.integer(self.sample_stride))
        own = emit.builder.mul(whole(column), emit.integer(self.column_stride))
        return emit.at(self.pointer, emit.builder.add(offset, own), kind)

    @property
    def is_contiguous(self) -> bool:
        """Whether the columns of a sample lie side by side."""
        return self.column_stride == 1


class Scratch:
    """Memory for one block, given out piece by piece."""

    def __init__(self, emit: Emitter, base: Value) -> None:
        self._emit, self._base = emit, base
        self.size = 0

    def take(self, numbers: int, dtype: np.dtype = FLOAT32) -> Value:
        """A piece for as many numbers."""
        size = self._bytes(numbers, dtype)
        with self._emit.once():
            piece = self._emit.at(self._base, self.size, ir.IntType(8))
        self.size += size
        return piece

    @staticmethod
    def _bytes(numbers: int, dtype: np.dtype) -> int:
        return -(-numbers * np.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT


def padded(width: int, lanes: int) -> int:
    """Columns of a row in memory."""
    return -(-width // lanes) * lanes


def pack(
    emit: Emitter,
    target: Value,
    source: Value,
    shape: tuple[int, int],
    strides: tuple[int, int],
    columns: int,
    dtype: np.dtype = FLOAT32,
) -> None:
    """Copies a matrix to rows of so many columns, of which those that it lacks are zero.

    Args:
        emit: writes it.
        target: where to.
        source: its first number.
        shape: its rows and columns.
        strides: from row to row and from column to column.
        columns: of the copy.
        dtype: of its numbers.
    """
    kinds = [POINTER, POINTER, *[INT64] * 5]
    name = f"pack_{dtype.name}"
    if name not in emit.module.globals:
        _define_pack(ir.Function(emit.module, ir.FunctionType(ir.VoidType(), kinds), name), memory_type(dtype))
    numbers = (*shape, *strides, columns)
    emit.builder.call(emit.module.globals[name], [target, source, *map(emit.integer, numbers)])


def _define_pack(function: ir.Function, kind: Any) -> None:
    function.linkage = "internal"
    target, source, rows, columns, row_stride, column_stride, all_columns = function.args
    emit = Emitter(function, 1)
    builder = emit.builder
    with emit.loop(rows) as row, emit.loop(all_columns) as column:
        offset = builder.add(builder.mul(row, row_stride), builder.mul(column, column_stride))
        inside = builder.icmp_unsigned("<", column, columns)
        safe = builder.select(inside, offset, emit.integer(0))
        number = builder.load(emit.at(source, safe, kind), typ=kind)
        number = builder.select(inside, number, ir.Constant(kind, 0))
        place = builder.add(builder.mul(row, all_columns), column)
        builder.store(number, emit.at(target, place, kind))
    builder.ret_void()


def unpack(
    emit: Emitter,
    target: Value,
    source: Value,
    shape: tuple[int, int],
    strides: tuple[int, int],
    columns: int,
    dtype: np.dtype,
) -> None:
    """Copies rows of so many columns to where they belong: the other way of `pack`, and with its arguments."""
    kind = memory_type(dtype)
    with emit.loop(shape[0]) as row, emit.loop(shape[1]) as column:
        place = emit.builder.add(emit.builder.mul(row, emit.integer(columns)), column)
        number = emit.builder.load(emit.at(source, place, kind), typ=kind)
        offset = emit.builder.mul(row, emit.integer(strides[0]))
        offset = emit.builder.add(offset, emit.builder.mul(column, emit.integer(strides[1])))
        emit.builder.store(number, emit.at(target, offset, kind))


def side_by_side(emit: Emitter, scratch: Scratch, rows: Placed, block: int) -> Placed:
    """A copy whose columns lie side by side."""
    columns = padded(rows.width, emit.lanes)
    copy = Placed(scratch.take(block * columns, rows.dtype), columns, 1, rows.width, rows.dtype)
    zero = ir.Constant(memory_type(rows.dtype), 0)
    with emit.loop(block) as sample:
        for column in range(columns):
            kind = memory_type(rows.dtype)
            inside = column < rows.width
            number = emit.builder.load(rows.at(emit, sample, column), typ=kind) if inside else zero
            emit.builder.store(number, copy.at(emit, sample, column))
    return copy


# --- products ----------------------------------------------------------------------------------------------


class Tiling(NamedTuple):
    """How many rows and vectors of a product are in registers at once."""

    rows: int
    vectors: int


def tilings(rows: int, vectors: int, room: int) -> list[tuple[int, int, Tiling]]:
    """The pieces that a product is cut into: the first row and vector of each, and its size."""
    pieces, first = [], 0
    while first < vectors:
        width = min(4, vectors - first)
        pieces += [(0, first, Tiling(min(rows, max(1, room // width)), width))]
        first += width
    return pieces


def product(emit: Emitter, left: Placed, matrix: Placed, target: Placed, block: int, room: int) -> None:
    """`target[s] = sum over k of left[s, k] matrix[k]` for all samples of a block."""
    vectors = target.sample_stride // emit.lanes
    for _, first, tile in tilings(block, vectors, room):
        rows = _power_of_two_below(tile.rows, block)
        with emit.loop(block, step=rows) as sample:
            samples = [emit.builder.add(sample, emit.integer(n)) for n in range(rows)]

            def turn(k: Value, sums: list[Value], samples=samples, first=first, tile=tile) -> list[Value]:
                factors = _vectors(emit, matrix, k, first, tile.vectors)
                numbers = [_broadcast(emit, left, own, k) for own in samples]
                return _outer(emit, numbers, factors, sums)

            zeros = [emit.constant(0.0)] * (rows * tile.vectors)
            sums = emit.sums(left.width, zeros, turn)
            _store_tile(emit, target, samples, first, tile.vectors, sums)


def gathered(emit: Emitter, sums: Placed, left: Placed, right: Placed, block: int, room: int) -> None:
    """`sums[o] += sum over samples s of left[s, o] right[s]`."""
    vectors = sums.sample_stride // emit.lanes
    for _, first, tile in tilings(left.width, vectors, room):
        rows, whole = tile.rows, left.width - left.width % tile.rows
        if whole:
            with emit.loop(whole, step=rows) as column:
                _gather_tile(emit, sums, left, right, block, column, rows, first, tile.vectors)
        if whole < left.width:
            rest = left.width - whole
            _gather_tile(emit, sums, left, right, block, emit.integer(whole), rest, first, tile.vectors)


def _gather_tile(
    emit: Emitter,
    sums: Placed,
    left: Placed,
    right: Placed,
    block: int,
    column: Value,
    rows: int,
    first: int,
    vectors: int,
) -> None:
    columns = [emit.builder.add(column, emit.integer(n)) for n in range(rows)]
    start = [vector for own in columns for vector in _vectors(emit, sums, own, first, vectors)]

    def turn(sample: Value, now: list[Value]) -> list[Value]:
        factors = _vectors(emit, right, sample, first, vectors)
        numbers = [_broadcast(emit, left, sample, own) for own in columns]
        return _outer(emit, numbers, factors, now)

    _store_tile(emit, sums, columns, first, vectors, emit.sums(block, start, turn))


def _outer(emit: Emitter, numbers: list[Value], factors: list[Value], sums: list[Value]) -> list[Value]:
    pairs = [(number, factor) for number in numbers for factor in factors]
    return [emit.fma(*pair, total) for pair, total in zip(pairs, sums, strict=True)]


def _vectors(emit: Emitter, rows: Placed, row: Value, first: int, count: int) -> list[Value]:
    return [emit.load(rows.at(emit, row, (first + n) * emit.lanes), FLOAT32) for n in range(count)]


def _broadcast(emit: Emitter, rows: Placed, sample: Value, column: Value) -> Value:
    return emit.broadcast(emit.load_number(rows.at(emit, sample, column), FLOAT32))


def _store_tile(
    emit: Emitter, target: Placed, rows: list[Value], first: int, vectors: int, sums: list[Value]
) -> None:
    places = [(row, (first + n) * emit.lanes) for row in rows for n in range(vectors)]
    for (row, column), vector in zip(places, sums, strict=True):
        emit.store(vector, target.at(emit, row, column), FLOAT32)


def _power_of_two_below(most: int, block: int) -> int:
    """Divides a block, which is a power of two."""
    return min(block, 1 << (most.bit_length() - 1))
