"""Control flow over blocks: variables that branches and loops assign, and loops of each sample's own turns."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from rollmill.fusion.backends.cpu.builder import Emitter, Value
from rollmill.fusion.backends.cpu.memory import Placed
from rollmill.fusion.ir import Node
from rollmill.fusion.opt.schedule import EmitLoop, Schedule

Vectors: TypeAlias = list[Value]
"""A number of each sample of a block."""

BlockValue: TypeAlias = Vectors | Placed | None
"""The value of a node for a block, or None for a row computed where it is read."""


@runtime_checkable
class BlockWriter(Protocol):
    """Writes programs for blocks of samples."""

    emit: Emitter
    block: int
    """Samples of a block."""
    groups: int
    """Vectors of a block."""

    def write(self, schedule: Schedule, inputs: Sequence[BlockValue]) -> list[BlockValue]:
        """Writes a program, and returns the values of its outputs."""
        ...

    def value(self, node: Node) -> BlockValue:
        """Returns the value of a node. Rows lie in memory."""
        ...

    def anywhere(self, condition: Vectors) -> Value:
        """Returns whether a boolean holds for any sample of the block."""
        ...

    def new_rows(self, width: int, dtype: np.dtype) -> Placed:
        """Memory for a row of each sample."""
        ...

    def copy(self, source: Placed, target: Placed) -> None:
        """Copies rows."""
        ...

    def contiguous(self, held: BlockValue) -> Placed:
        """Rows with contiguous elements."""
        ...

    def beside(self, numbers: Sequence[Vectors], dtype: np.dtype) -> Placed:
        """Numbers of each sample as rows in memory."""
        ...


def new_variable(writer: BlockWriter, node: Node) -> Any:
    """Returns a variable for a node's value: numbers of each sample, zero at first, or rows."""
    if node.width is None:
        kind = writer.emit.vector(node.dtype)
        slots = [writer.emit.slot(kind) for _ in range(writer.groups)]
        for slot in slots:
            writer.emit.builder.store(writer.emit.constant(0, node.dtype), slot)
        return slots, node.dtype
    return writer.new_rows(node.width, node.dtype)


def clear(writer: BlockWriter, variable: Any) -> None:
    """Sets a variable of floats to zero."""
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
    """Gives a variable a value."""
    if isinstance(variable, Placed):
        assert isinstance(value, Placed)
        writer.copy(value, variable)
        return
    assert isinstance(value, list)
    for slot, vector in zip(variable[0], value, strict=True):
        writer.emit.builder.store(vector, slot)


def assign_all(writer: BlockWriter, variables: Sequence[Any], values: Sequence[BlockValue]) -> None:
    """Assigns all at once: rows that only change places are copied before they are overwritten."""
    # A value that is a variable's own memory may be overwritten before it is read.
    moved = [_copied(writer, value) if value in rows_of(variables) else value for value in values]
    for variable, value in zip(variables, moved, strict=True):
        assign(writer, variable, value)


def read(writer: BlockWriter, variable: Any) -> BlockValue:
    """Returns the value that a variable has."""
    if isinstance(variable, Placed):
        return variable
    slots, dtype = variable
    return [writer.emit.builder.load(slot, typ=writer.emit.vector(dtype)) for slot in slots]


def rows_of(variables: Sequence[Any]) -> list[Placed]:
    """Returns the variables that hold rows."""
    return [variable for variable in variables if isinstance(variable, Placed)]


def write_loop(writer: BlockWriter, item: EmitLoop) -> Any:
    """Writes a loop, in which each sample continues for as long as its own condition holds."""
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
        if loop.turns:
            with writer.emit.loop(loop.turns):
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


def _copied(writer: BlockWriter, rows: BlockValue) -> Placed:
    assert isinstance(rows, Placed)
    copy = writer.new_rows(rows.width, rows.dtype)
    writer.copy(rows, copy)
    return copy
