"""Loads and stores leaves of pytrees for a block of samples."""

from collections.abc import Mapping, Sequence

import numpy as np
from llvmlite import ir

from rollmill.fusion.backends.cpu.builder import INT32, Emitter, Value, memory_type
from rollmill.fusion.backends.cpu.codegen import CodeWriter
from rollmill.fusion.backends.cpu.control import BlockValue
from rollmill.fusion.backends.cpu.memory import Matrix, Placed, pack, unpack
from rollmill.fusion.kernels.leaves import Leaf

MAX_TOGETHER = 8
"""Maximum number of scalars of a sample that are interleaved in registers, to be stored together."""


def load_leaf(writer: CodeWriter, leaf: Leaf, pointer: Value, first: Value) -> list[BlockValue]:
    """Loads the elements or rows of a leaf `[E, *shape]`, for the block of samples that starts at `first`."""
    size, kind = len(leaf.places) * (leaf.width or 1), memory_type(leaf.dtype)
    own = writer.emit.at(pointer, writer.emit.builder.mul(first, writer.emit.integer(size)), kind)
    parts = [writer.emit.at(own, n * (leaf.width or 1), kind) for n in range(len(leaf.places))]
    if leaf.width is None:
        return [writer.strided(part, size, leaf.dtype) for part in parts]
    return [_rows(writer, leaf.width, part, size, leaf.dtype) for part in parts]


def _rows(writer: CodeWriter, width: int, pointer: Value, size: int, dtype: np.dtype) -> Placed:
    rows = writer.new_rows(width, dtype)
    pack(writer.emit, rows.pointer, pointer, _matrix(writer, rows, size))
    return rows


def _matrix(writer: CodeWriter, rows: Placed, size: int) -> Matrix:
    """Rows of a block in external memory, with a stride in elements."""
    return Matrix(writer.block, rows.width, size, 1, rows.sample_stride, rows.dtype)


def store_leaf(
    writer: CodeWriter,
    leaf: Leaf,
    values: Sequence[BlockValue] | Mapping[int, BlockValue],
    pointer: Value,
    first: Value,
) -> None:
    """Stores the elements or rows of a leaf `[E, *shape]`, for the block of samples that starts at `first`."""
    emit, size = writer.emit, len(leaf.places) * (leaf.width or 1)
    own = emit.at(pointer, emit.builder.mul(first, emit.integer(size)), memory_type(leaf.dtype))
    if leaf.width is None:
        _store_numbers(writer, leaf, [values[place] for place in leaf.places], own)
        return
    for n, place in enumerate(leaf.places):
        rows = writer.contiguous(values[place])
        target = emit.at(own, n * leaf.width, memory_type(leaf.dtype))
        unpack(emit, target, rows.pointer, _matrix(writer, rows, size))


def _store_numbers(writer: CodeWriter, leaf: Leaf, numbers: Sequence[BlockValue], pointer: Value) -> None:
    emit, kind, size = writer.emit, memory_type(leaf.dtype), len(numbers)
    together = size & (size - 1) == 0 and size <= MAX_TOGETHER
    for group in range(writer.groups):
        own = [number[group] for number in numbers]  # pyright: ignore[reportOptionalSubscript]
        target = emit.at(pointer, group * emit.lanes * size, kind)
        # One wide store per group of lanes, if the elements of a sample can be combined in registers.
        if together:
            emit.store(_interleave(emit, own), target, leaf.dtype)
            continue
        for n, vector in enumerate(own):
            for lane in range(emit.lanes):
                number = emit.builder.extract_element(vector, ir.Constant(INT32, lane))
                emit.store(number, emit.at(target, lane * size + n, kind), leaf.dtype)


def _interleave(emit: Emitter, vectors: list[Value]) -> Value:
    """Interleaves a power of two vectors: the first elements of all, then the second, and so on."""
    if len(vectors) == 1:
        return vectors[0]
    even, odd = _interleave(emit, vectors[::2]), _interleave(emit, vectors[1::2])
    count = even.type.count
    order = [place for n in range(count) for place in (n, count + n)]
    return emit.builder.shuffle_vector(even, odd, ir.Constant(ir.VectorType(INT32, 2 * count), order))
