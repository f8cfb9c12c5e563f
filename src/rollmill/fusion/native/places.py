"""Reads and writes the leaves of a tree for the samples of a block."""

from collections.abc import Mapping, Sequence

import numpy as np
from llvmlite import ir

from rollmill.fusion.leaves import Leaf
from rollmill.fusion.native.control import Held
from rollmill.fusion.native.emitter import INT32, Emitter, Value, memory_type
from rollmill.fusion.native.memory import Placed, pack, unpack
from rollmill.fusion.native.writer import Writer

MOST_TOGETHER = 8
"""Numbers of a sample that are put beside each other in registers."""


def load_leaf(writer: Writer, leaf: Leaf, pointer: Value, first: Value) -> list[Held]:
    """The numbers, or rows, of a leaf `[E, *shape]`, for a block that begins with this sample."""
    emit, size = writer.emit, len(leaf.places) * (leaf.width or 1)
    own = emit.at(pointer, emit.builder.mul(first, emit.integer(size)), memory_type(leaf.dtype))
    if leaf.width is None:
        return [_numbers(writer, leaf, own, n, size) for n in range(size)]
    return [_rows(writer, leaf, own, n * leaf.width, size) for n in range(len(leaf.places))]


def _numbers(writer: Writer, leaf: Leaf, pointer: Value, number: int, size: int) -> list[Value]:
    emit, kind = writer.emit, memory_type(leaf.dtype)
    first = lambda group: emit.at(pointer, group * emit.lanes * size + number, kind)
    if size == 1:
        return [emit.load(first(group), leaf.dtype) for group in range(writer.groups)]
    strides = emit.constant(size, np.dtype(np.int32))
    places = emit.builder.mul(emit.counting(), strides)
    return [emit.gather(first(group), places, leaf.dtype) for group in range(writer.groups)]


def _rows(writer: Writer, leaf: Leaf, pointer: Value, first: int, size: int) -> Placed:
    found = writer.new_rows(leaf.width or 0, leaf.dtype)
    source = writer.emit.at(pointer, first, memory_type(leaf.dtype))
    shape, strides = (writer.block, found.width), (size, 1)
    pack(writer.emit, found.pointer, source, shape, strides, found.sample_stride, leaf.dtype)
    return found


def store_leaf(
    writer: Writer, leaf: Leaf, found: Sequence[Held] | Mapping[int, Held], pointer: Value, first: Value
) -> None:
    """Writes what a leaf `[E, *shape]` is made of, for a block that begins with this sample."""
    emit, size = writer.emit, len(leaf.places) * (leaf.width or 1)
    own = emit.at(pointer, emit.builder.mul(first, emit.integer(size)), memory_type(leaf.dtype))
    if leaf.width is None:
        _store_numbers(writer, leaf, [found[place] for place in leaf.places], own)
        return
    for n, place in enumerate(leaf.places):
        rows = writer.contiguous(found[place])
        target = emit.at(own, n * leaf.width, memory_type(leaf.dtype))
        shape, strides = (writer.block, rows.width), (size, 1)
        unpack(emit, target, rows.pointer, shape, strides, rows.sample_stride, leaf.dtype)


def _store_numbers(writer: Writer, leaf: Leaf, numbers: Sequence[Held], pointer: Value) -> None:
    emit, kind, size = writer.emit, memory_type(leaf.dtype), len(numbers)
    together = size & (size - 1) == 0 and size <= MOST_TOGETHER
    for group in range(writer.groups):
        own = [number[group] for number in numbers]  # pyright: ignore[reportOptionalSubscript]
        target = emit.at(pointer, group * emit.lanes * size, kind)
        if together:
            emit.store(_interleaved(emit, own), target, leaf.dtype)
            continue
        for n, vector in enumerate(own):
            for lane in range(emit.lanes):
                number = emit.builder.extract_element(vector, ir.Constant(INT32, lane))
                emit.store(number, emit.at(target, lane * size + n, kind), leaf.dtype)


def _interleaved(emit: Emitter, vectors: list[Value]) -> Value:
    """The first elements of all vectors, then the second ones, and so on; as many vectors as a power of two."""
    if len(vectors) == 1:
        return vectors[0]
    even, odd = _interleaved(emit, vectors[::2]), _interleaved(emit, vectors[1::2])
    count = even.type.count
    order = [place for n in range(count) for place in (n, count + n)]
    return emit.builder.shuffle_vector(even, odd, ir.Constant(ir.VectorType(INT32, 2 * count), order))
