"""Emits a step's writes to large arrays of the environment state.

A write replaces either one element in each sample's array, or the whole array, and only for samples that request
it. Whole arrays are written one sample after the other, with consecutive elements in the lanes of a vector.
"""

import math
from collections.abc import Sequence

import numpy as np
from llvmlite import ir

from rollmill.fusion.backends.cpu.builder import INT32, INT64, Value, memory_type
from rollmill.fusion.backends.cpu.codegen import CodeWriter, MemoryCells
from rollmill.fusion.backends.cpu.control import BlockValue, Vectors
from rollmill.fusion.backends.cpu.memory import Placed
from rollmill.fusion.ir import Node
from rollmill.fusion.kernels.leaves import CellStore, Fill, Leaf
from rollmill.fusion.opt.schedule import schedule_of

BOOL, PLACE = np.dtype(np.bool_), np.dtype(np.int32)


def write_stores(
    writer: CodeWriter, leaves: Sequence[Leaf], nodes: Sequence[Node], values: Sequence[BlockValue]
) -> None:
    """Emits the writes of a step to large arrays, in order.

    `nodes` are the outputs of the step's program, and `values` their computed values.
    """
    for leaf in leaves:
        assert leaf.memory is not None
        cells = writer.cells[leaf.memory]
        for write in leaf.writes:
            holds = None if write.condition is None else _numbers(values[write.condition])
            if isinstance(write, CellStore):
                places, numbers = _numbers(values[write.place]), _numbers(values[write.value])
                _store_cells(writer, cells, places, numbers, holds)
            else:
                _fill(writer, leaf, write, [(nodes[n], values[n]) for n in write.captures], holds)


def _numbers(value: BlockValue) -> Vectors:
    assert isinstance(value, list)
    return value


def _store_cells(
    writer: CodeWriter, cells: MemoryCells, places: Vectors, numbers: Vectors, holds: Vectors | None
) -> None:
    """Stores an element of each sample, where a condition holds."""
    emit, kind = writer.emit, memory_type(cells.dtype)
    nowhere = writer.scratch.take(1, cells.dtype)  # target of writes whose condition is false
    for group, (own, vector) in enumerate(zip(places, numbers, strict=True)):
        rows = cells.places(emit, group, own)
        for lane in range(emit.lanes):
            at = ir.Constant(INT32, lane)
            place = emit.builder.sext(emit.builder.extract_element(rows, at), INT64)
            target = emit.at(cells.pointer, place, kind)
            if holds is not None:
                target = emit.builder.select(emit.builder.extract_element(holds[group], at), target, nowhere)
            emit.store(emit.builder.extract_element(vector, at), target, cells.dtype)


def _fill(
    writer: CodeWriter, leaf: Leaf, fill: Fill, captured: Sequence[tuple[Node, BlockValue]], holds: Vectors | None
) -> None:
    """Stores all elements of each sample for which a condition holds, one sample after the other."""
    emit = writer.emit
    # Stored in memory, from which the values of one sample are broadcast to all lanes.
    beside = [writer.beside([_numbers(value)], node.dtype) for node, value in captured]
    asked = None if holds is None else writer.beside([holds], BOOL)

    def write(sample: Value) -> None:
        outer = writer.cells
        writer.cells = [_of_sample(writer, cells, sample) for cells in outer]
        inputs = [_repeat(writer, row, sample) for row in beside]
        _write_elements(writer, leaf, fill, inputs)
        writer.cells = outer

    with emit.loop(writer.block) as sample:
        if asked is None:
            write(sample)
        else:
            with emit.builder.if_then(emit.load_number(asked.at(emit, sample, 0), BOOL)):
                write(sample)


def _of_sample(writer: CodeWriter, cells: MemoryCells, sample: Value) -> MemoryCells:
    emit = writer.emit
    first = emit.builder.mul(sample, emit.integer(cells.stride))
    return MemoryCells(emit.at(cells.pointer, first, memory_type(cells.dtype)), 0, cells.dtype)


def _repeat(writer: CodeWriter, row: Placed, sample: Value) -> Vectors:
    number = writer.emit.load_number(row.at(writer.emit, sample, 0), row.dtype)
    return [writer.emit.broadcast(number)] * writer.groups


def _write_elements(writer: CodeWriter, leaf: Leaf, fill: Fill, inputs: Sequence[BlockValue]) -> None:
    """Stores the elements of one sample, a block of them at a time."""
    assert leaf.memory is not None
    emit, cells, size = writer.emit, writer.cells[leaf.memory], math.prod(leaf.shape)
    whole, schedule = size // writer.block * writer.block, schedule_of(fill.program)

    def elements(first: Value, last: int) -> Vectors:
        begin = emit.broadcast(emit.builder.trunc(first, INT32))
        steps = [_counting(writer, group) for group in range(writer.groups)]
        places = [emit.builder.add(begin, step) for step in steps]
        if last < size:
            return _numbers(writer.write(schedule, [places, *inputs])[0])
        most = emit.constant(size - 1, PLACE)
        places = [emit.intrinsic("smin", place, most) for place in places]
        return _numbers(writer.write(schedule, [places, *inputs])[0])

    kind = memory_type(leaf.dtype)
    if whole:
        with emit.loop(whole, step=writer.block) as first:
            for group, vector in enumerate(elements(first, whole - 1)):
                place = emit.builder.add(first, emit.integer(group * emit.lanes))
                emit.store(vector, emit.at(cells.pointer, place, kind), leaf.dtype)
    if whole < size:
        for n, number in enumerate(_each(writer, elements(emit.integer(whole), size))[: size - whole]):
            emit.store(number, emit.at(cells.pointer, whole + n, kind), leaf.dtype)


def _each(writer: CodeWriter, vectors: Vectors) -> list[Value]:
    lanes = range(writer.emit.lanes)
    extract = writer.emit.builder.extract_element
    return [extract(vector, ir.Constant(INT32, lane)) for vector in vectors for lane in lanes]


def _counting(writer: CodeWriter, group: int) -> Value:
    first = group * writer.emit.lanes
    return ir.Constant(
        ir.VectorType(INT32, writer.emit.lanes), [first + lane for lane in range(writer.emit.lanes)]
    )
