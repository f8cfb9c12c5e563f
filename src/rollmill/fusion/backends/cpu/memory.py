"""Rows of a block in scratch memory, and operations on whole rows.

A row is stored sample by sample, with its columns padded to whole vectors. Rows that are equal for all samples are
stored once. Rows assembled from scalars are stored column by column.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from rollmill.fusion.backends.cpu.builder import FLOAT32, INT64, POINTER, Emitter, Value, memory_type

ALIGNMENT = 64
"""Alignment of scratch memory in bytes: the size of a cache line, and of the widest vector."""

MAX_BESIDE = 4
"""Maximum number of adjacent vectors of a row that a matrix product holds in registers."""


class Placed(NamedTuple):
    """Rows in memory, one per sample. Column `c` of sample `s` is at `sample_stride * s + column_stride * c`."""

    pointer: Value
    sample_stride: int
    column_stride: int
    width: int
    dtype: np.dtype = FLOAT32

    def at(self, emit: Emitter, sample: Value | int, column: Value | int) -> Value:
        """Returns the address of one column of one sample's row."""
        kind = memory_type(self.dtype)
        whole = lambda n: emit.integer(n) if isinstance(n, int) else n
        # Strides are constants, so LLVM folds the multiplications into the addresses of loads and stores.
        offset = emit.builder.mul(whole(sample), emit.integer(self.sample_stride))
        own = emit.builder.mul(whole(column), emit.integer(self.column_stride))
        return emit.at(self.pointer, emit.builder.add(offset, own), kind)

    @property
    def is_contiguous(self) -> bool:
        """Whether the columns of a sample are adjacent in memory."""
        return self.column_stride == 1


class Scratch:
    """Allocates the scratch memory of one program, part by part."""

    def __init__(self, emit: Emitter, base: Value) -> None:
        self._emit, self._base = emit, base
        self.size = 0

    def take(self, numbers: int, dtype: np.dtype = FLOAT32) -> Value:
        """Allocates aligned scratch memory for `numbers` elements of `dtype`, and returns its address."""
        size = self._bytes(numbers, dtype)
        # Offsets are known when code is emitted, so addresses are computed once, before the loops over blocks.
        with self._emit.once():
            piece = self._emit.at(self._base, self.size, ir.IntType(8))
        self.size += size
        return piece

    @staticmethod
    def _bytes(numbers: int, dtype: np.dtype) -> int:
        return -(-numbers * np.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT


def round_up_width(width: int, lanes: int) -> int:
    """Returns `width` rounded up to a multiple of the vector width."""
    return -(-width // lanes) * lanes


class Matrix(NamedTuple):
    """Shape and strides of a matrix in external memory, for copies to and from scratch memory."""

    rows: int
    columns: int
    row_stride: int
    column_stride: int
    inside: int
    """Number of columns in scratch memory. Columns beyond the matrix are zero."""
    dtype: np.dtype = FLOAT32


def pack(emit: Emitter, target: Value, source: Value, matrix: Matrix) -> None:
    """Emits a copy of a matrix from external memory to padded scratch memory."""
    name, *numbers = f"pack_{matrix.dtype.name}", *matrix[:5]
    if name not in emit.module.globals:
        kinds = [POINTER, POINTER, *[INT64] * len(numbers)]
        function = ir.Function(emit.module, ir.FunctionType(ir.VoidType(), kinds), name)
        _define_pack(function, memory_type(matrix.dtype))
    emit.builder.call(emit.module.globals[name], [target, source, *map(emit.integer, numbers)])


def _define_pack(function: ir.Function, kind: Any) -> None:
    function.linkage = "internal"
    target, source, rows, columns, row_stride, column_stride, all_columns = function.args
    emit = Emitter(function, 1)
    builder = emit.builder
    with emit.loop(rows) as row, emit.loop(all_columns) as column:
        offset = builder.add(builder.mul(row, row_stride), builder.mul(column, column_stride))
        inside = builder.icmp_unsigned("<", column, columns)
        # Instead of a branch, a padding column reads the first element, which exists, and stores zero.
        safe = builder.select(inside, offset, emit.integer(0))
        number = builder.load(emit.at(source, safe, kind), typ=kind)
        number = builder.select(inside, number, ir.Constant(kind, 0))
        place = builder.add(builder.mul(row, all_columns), column)
        builder.store(number, emit.at(target, place, kind))
    builder.ret_void()


def unpack(emit: Emitter, target: Value, source: Value, matrix: Matrix) -> None:
    """Emits a copy of a matrix from padded scratch memory to external memory."""
    kind = memory_type(matrix.dtype)
    with emit.loop(matrix.rows) as row, emit.loop(matrix.columns) as column:
        place = emit.builder.add(emit.builder.mul(row, emit.integer(matrix.inside)), column)
        number = emit.builder.load(emit.at(source, place, kind), typ=kind)
        offset = emit.builder.mul(row, emit.integer(matrix.row_stride))
        offset = emit.builder.add(offset, emit.builder.mul(column, emit.integer(matrix.column_stride)))
        emit.builder.store(number, emit.at(target, offset, kind))


def side_by_side(emit: Emitter, scratch: Scratch, rows: Placed, block: int) -> Placed:
    """Copies rows to scratch memory, where the columns of each sample are adjacent."""
    columns = round_up_width(rows.width, emit.lanes)
    copy = Placed(scratch.take(block * columns, rows.dtype), columns, 1, rows.width, rows.dtype)
    # Products read whole vectors, so the padding columns must be zero.
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
    """A tile of a matrix product whose accumulators fit in registers: `rows` rows times `vectors` vectors."""

    first: int
    """Index of the first vector of the tile."""
    vectors: int
    rows: int


def tilings(rows: int, vectors: int, room: int) -> list[Tiling]:
    """Divides a matrix product into tiles that fit in `room` vector registers."""
    # A tile consists of `rows x width` sums in registers. Each iteration loads `width` vectors and broadcasts
    # `rows` scalars, so `rows * width` multiplications need `rows + width` loads.
    widths = [(first, min(MAX_BESIDE, vectors - first)) for first in range(0, vectors, MAX_BESIDE)]
    return [Tiling(first, width, min(rows, max(1, room // width))) for first, width in widths]


def product(emit: Emitter, left: Placed, matrix: Placed, target: Placed, block: int, room: int) -> None:
    """Emits `target[s] = sum over k of left[s, k] * matrix[k]` for all samples `s` of a block."""
    for tile in tilings(block, target.sample_stride // emit.lanes, room):
        rows = 1 << (tile.rows.bit_length() - 1)  # a power of two, so that it divides a block
        with emit.loop(block, step=rows) as sample:
            samples = [emit.builder.add(sample, emit.integer(n)) for n in range(rows)]

            # The default arguments bind this tile, because `turn` is called in the loop below.
            def turn(k: Value, sums: list[Value], samples=samples, tile=tile) -> list[Value]:
                factors = _vectors(emit, matrix, k, tile)
                numbers = [_broadcast(emit, left, own, k) for own in samples]
                return _outer(emit, numbers, factors, sums)

            zeros = [emit.constant(0.0)] * (rows * tile.vectors)
            _store_tile(emit, target, samples, tile, emit.sums(left.width, zeros, turn))


def emit_outer_sums(emit: Emitter, sums: Placed, left: Placed, right: Placed, block: int, room: int) -> None:
    """Emits `sums[o] += sum over s of left[s, o] * right[s]`, with `s` the samples of a block."""
    for tile in tilings(left.width, sums.sample_stride // emit.lanes, room):
        # Whole tiles are computed in a loop, and the rest as a smaller tile. The order of the sums is always the
        # same.
        whole = left.width - left.width % tile.rows
        add = partial(_gather_tile, emit, sums, left, right, block)
        with emit.loop(whole, step=tile.rows) as column:
            add(tile, column)
        if whole < left.width:
            add(tile._replace(rows=left.width - whole), emit.integer(whole))


def _gather_tile(
    emit: Emitter, sums: Placed, left: Placed, right: Placed, block: int, tile: Tiling, column: Value
) -> None:
    columns = [emit.builder.add(column, emit.integer(n)) for n in range(tile.rows)]
    # The sums are loaded into registers once per block, and stored once.
    start = [vector for own in columns for vector in _vectors(emit, sums, own, tile)]

    def turn(sample: Value, now: list[Value]) -> list[Value]:
        factors = _vectors(emit, right, sample, tile)
        numbers = [_broadcast(emit, left, sample, own) for own in columns]
        return _outer(emit, numbers, factors, now)

    _store_tile(emit, sums, columns, tile, emit.sums(block, start, turn))


def _outer(emit: Emitter, numbers: list[Value], factors: list[Value], sums: list[Value]) -> list[Value]:
    # All pairs, so that each loaded vector serves every row, and each broadcast scalar every vector.
    pairs = [(number, factor) for number in numbers for factor in factors]
    return [emit.fma(*pair, total) for pair, total in zip(pairs, sums, strict=True)]


def _vectors(emit: Emitter, rows: Placed, row: Value, tile: Tiling) -> list[Value]:
    return [emit.load(rows.at(emit, row, column), FLOAT32) for column in _columns(emit, tile)]


def _columns(emit: Emitter, tile: Tiling) -> range:
    """Returns the first columns of a tile's vectors."""
    return range(tile.first * emit.lanes, (tile.first + tile.vectors) * emit.lanes, emit.lanes)


def _broadcast(emit: Emitter, rows: Placed, sample: Value, column: Value) -> Value:
    return emit.broadcast(emit.load_number(rows.at(emit, sample, column), FLOAT32))


def _store_tile(emit: Emitter, target: Placed, rows: list[Value], tile: Tiling, sums: list[Value]) -> None:
    places = [(row, column) for row in rows for column in _columns(emit, tile)]
    for (row, column), vector in zip(places, sums, strict=True):
        emit.store(vector, target.at(emit, row, column), FLOAT32)
