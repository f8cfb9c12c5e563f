"""Emits branches and loops for blocks of samples.

A branch is taken if any sample needs it. A loop runs until its last sample is done. Samples that are done earlier
keep their values.
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from rollmill.fusion.backends.cpu.builder import Emitter, Value
from rollmill.fusion.backends.cpu.memory import Placed
from rollmill.fusion.ir import Node
from rollmill.fusion.opt.schedule import EmitLoop, Schedule

Vectors: TypeAlias = list[Value]
"""A scalar of each sample of a block, as a list of vectors with one sample per lane."""

BlockValue: TypeAlias = Vectors | Placed | None
"""The value of a node for a block of samples. None stands for a row that its reader computes."""


@runtime_checkable
class BlockWriter(Protocol):
    """Protocol for emitting programs for blocks of samples. `CodeWriter` implements it."""

    emit: Emitter
    block: int
    """Number of samples in a block."""
    groups: int
    """Number of vectors in a block."""

    def write(self, schedule: Schedule, inputs: Sequence[BlockValue]) -> list[BlockValue]:
        """Emits a scheduled program, and returns the values of its outputs."""
        ...

    def value(self, node: Node) -> BlockValue:
        """Returns the computed value of a node. Rows are stored in memory."""
        ...

    def anywhere(self, condition: Vectors) -> Value:
        """Emits a test of whether a boolean is true for any sample of the block."""
        ...

    def new_rows(self, width: int, dtype: np.dtype) -> Placed:
        """Allocates scratch memory for one row of `width` columns per sample."""
        ...

    def copy(self, source: Placed, target: Placed) -> None:
        """Emits a copy of the rows of all samples to other rows."""
        ...

    def contiguous(self, held: BlockValue) -> Placed:
        """Returns rows whose columns are adjacent in memory, copying them if needed."""
        ...

    def beside(self, numbers: Sequence[Vectors], dtype: np.dtype) -> Placed:
        """Stores scalars in memory as the columns of one row per sample."""
        ...


def new_variable(writer: BlockWriter, node: Node) -> Any:
    """Allocates storage for the value of a node: local variables initialised to zero, or rows in scratch
    memory.
    """
    if node.width is None:
        kind = writer.emit.vector(node.dtype)
        slots = [writer.emit.slot(kind) for _ in range(writer.groups)]
        for slot in slots:
            writer.emit.builder.store(writer.emit.constant(0, node.dtype), slot)
        return slots, node.dtype
    return writer.new_rows(node.width, node.dtype)


def clear(writer: BlockWriter, variable: Any) -> None:
    """Emits code that sets a float variable to zero for all samples."""
    emit = writer.emit
    if not isinstance(variable, Placed):
        slots, dtype = variable
        for slot in slots:
            emit.builder.store(emit.constant(0, dtype), slot)
        return
    with emit.loop(writer.block) as sample:
        for column in range(0, variable.sample_stride, emit.lanes):
            emit.store(emit.constant(0.0), variable.at(emit, sample, column), variable.dtype)


def assign(writer: BlockWriter, variable: Any, value: BlockValue) -> None:
    """Emits machine code that assigns a node's value to a variable, for all samples of a block."""
    if isinstance(variable, Placed):
        assert isinstance(value, Placed)
        writer.copy(value, variable)
        return
    assert isinstance(value, list)
    for slot, vector in zip(variable[0], value, strict=True):
        writer.emit.builder.store(vector, slot)


def assign_all(writer: BlockWriter, variables: Sequence[Any], values: Sequence[BlockValue]) -> None:
    """Emits simultaneous assignments to several variables. A row that another assignment overwrites is copied
    first.
    """
    # A value may lie in the memory of a variable that is overwritten before the value is read.
    moved = [_copy(writer, value) if value in rows_of(variables) else value for value in values]
    for variable, value in zip(variables, moved, strict=True):
        assign(writer, variable, value)


def read(writer: BlockWriter, variable: Any) -> BlockValue:
    """Emits machine code that loads the current value of a variable, for all samples of a block."""
    if isinstance(variable, Placed):
        return variable
    slots, dtype = variable
    return [writer.emit.builder.load(slot, typ=writer.emit.vector(dtype)) for slot in slots]


def rows_of(variables: Sequence[Any]) -> list[Placed]:
    """Returns the rows among several variables, leaving out scalars."""
    return [variable for variable in variables if isinstance(variable, Placed)]


def write_loop(writer: BlockWriter, item: EmitLoop) -> Any:
    """Emits a loop in which each sample continues as long as its own condition is true."""
    node, loop = item.node, item.loop
    count, middle = len(loop.body.outputs), len(loop.body.inputs)
    variables = [new_variable(writer, output) for output in loop.body.outputs]
    for variable, operand in zip(variables, node.operands[:count], strict=True):
        assign(writer, variable, writer.value(operand))
    of_body = [writer.value(operand) for operand in node.operands[count:middle]]
    of_condition = [writer.value(operand) for operand in node.operands[middle:]]
    now = lambda: [read(writer, variable) for variable in variables]

    def turn(goes_on: Vectors | None) -> None:
        before = now()
        after = writer.write(item.body, [*before, *of_body])
        if goes_on is not None:
            after = [_where(writer, goes_on, *pair) for pair in zip(after, before, strict=True)]
        assign_all(writer, variables, after)

    condition = item.condition
    if condition is None:
        if loop.trip_count:
            with writer.emit.loop(loop.trip_count):
                turn(None)
    else:
        goes_on: list[Vectors] = []

        def again() -> Value:
            (holds,) = writer.write(condition, [*now(), *of_condition])
            assert isinstance(holds, list)
            goes_on.append(holds)
            return writer.anywhere(holds)

        with writer.emit.repeat_while(again):
            turn(goes_on[0])
    return now()


def _where(writer: BlockWriter, condition: Vectors, new: BlockValue, old: BlockValue) -> BlockValue:
    if isinstance(new, list):
        assert isinstance(old, list)
        return [writer.emit.builder.select(*own) for own in zip(condition, new, old, strict=True)]
    assert isinstance(new, Placed) and isinstance(old, Placed)
    own = writer.beside([condition], np.dtype(np.bool_))
    rows, new = writer.new_rows(new.width, new.dtype), writer.contiguous(new)
    with writer.emit.loop(writer.block) as sample:
        goes_on = writer.emit.broadcast(writer.emit.load_number(own.at(writer.emit, sample, 0), own.dtype))
        for n in range(0, rows.sample_stride, writer.emit.lanes):
            pair = [writer.emit.load(each.at(writer.emit, sample, n), new.dtype) for each in (new, old)]
            writer.emit.store(
                writer.emit.builder.select(goes_on, *pair), rows.at(writer.emit, sample, n), new.dtype
            )
    return rows


def _copy(writer: BlockWriter, rows: BlockValue) -> Placed:
    assert isinstance(rows, Placed)
    copy = writer.new_rows(rows.width, rows.dtype)
    writer.copy(rows, copy)
    return copy
