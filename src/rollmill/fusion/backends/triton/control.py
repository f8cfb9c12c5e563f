"""Writes the items of a schedule as Triton source: nodes, branches and loops."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from rollmill.fusion.backends.triton.operations import TYPES
from rollmill.fusion.backends.triton.source import KernelSource
from rollmill.fusion.ir import Loop, Node
from rollmill.fusion.opt.schedule import Accumulate, Emit, EmitLoop, If, Item, Schedule, Segment

SEPARATOR = "; "
"""Separates the names of a node that has several results."""

Names: TypeAlias = Mapping[Node, str]
"""Maps the nodes written so far to their names in the source."""

AddSum: TypeAlias = Callable[[int, Names], None]
"""Function that writes the addition to one of a schedule's sums, given the sum's number and the names of nodes."""

ALWAYS = "tl.num_programs(0) > 0"
"""A condition that is always true. LLVM can prove this and drops the branch, whereas Triton keeps it."""


@runtime_checkable
class NodeWriter(Protocol):
    """Protocol for writing nodes as Triton source, as this module needs it. `TritonWriter` implements it."""

    source: KernelSource
    tiles: dict[Any, str]
    """Names of values that several nodes share. Names defined inside a branch are dropped when it ends."""

    def node(self, node: Node, operands: list[str]) -> str:
        """Writes the source of a node whose operands have these names, and returns its name."""
        ...

    def shape(self, node: Node) -> str:
        """Returns the shape of a node's Triton tensor, such as `[BLOCK, 64]`."""
        ...

    def write(self, schedule: Schedule, inputs: Sequence[str]) -> list[str]:
        """Writes a scheduled program whose inputs have these names, and returns the names of its outputs."""
        ...


def write_items(writer: NodeWriter, items: Sequence[Item], names: Names, add_sum: AddSum | None = None) -> Names:
    """Writes the items of a schedule, given the names of earlier nodes. Returns the names of all nodes."""
    known = dict(names)
    for item in items:
        match item:
            case Emit(node):
                known[node] = writer.node(node, [known[operand] for operand in node.operands])
            case EmitLoop():
                known[item.node] = _write_loop(writer, item, [known[operand] for operand in item.node.operands])
            case If(condition, body, results):
                holds = f"tl.max({known[condition]}.to(tl.int32), axis=0) != 0"
                known |= _write_branch(writer, holds, body, results, known)
            case Segment(body, results):
                known |= _write_branch(writer, ALWAYS, body, results, known)
            case Accumulate(number):
                assert add_sum is not None
                add_sum(number, known)
    return known


# --- branches ---------------------------------------------------------------------------------------------


def _write_branch(
    writer: NodeWriter, condition: str, body: Sequence[Item], results: Sequence[Node], names: Names
) -> Names:
    """Writes a branch, and returns the names of its results, which are zero if it is not taken."""
    source, lines, tiles = writer.source, writer.source.lines, dict(writer.tiles)
    # Lines of the branch are collected first, because its results must be declared before it and are known after
    # it.
    source.lines = []
    source.deeper()
    inside = write_items(writer, body, names)
    handed_out = {node: _hand_out(writer, node, inside[node]) for node in results}
    source.deeper(-1)
    branch, source.lines, writer.tiles = source.lines, lines, tiles
    for node, own in handed_out.items():
        for name, kind in zip(own.split(SEPARATOR), _kinds(node), strict=True):
            source.line(f"{name} = tl.zeros({writer.shape(kind)}, {TYPES[kind.dtype.name]})")
    source.line(f"if {condition}:")
    source.lines += branch
    return handed_out


def _hand_out(writer: NodeWriter, node: Node, names: str) -> str:
    """Returns new names for a node, with the shape and the type with which they are declared before the branch."""
    outside = []
    for name, kind in zip(names.split(SEPARATOR), _kinds(node), strict=True):
        outside.append(writer.source.fresh())
        whole = f"tl.broadcast_to({name}, {writer.shape(kind)})"
        writer.source.line(f"{outside[-1]} = {whole}.to({TYPES[kind.dtype.name]})")
    return SEPARATOR.join(outside)


def _kinds(node: Node) -> Sequence[Node]:
    """Returns nodes with the types and widths of a node's results. A loop has several results."""
    return node.attributes[0].body.outputs if node.op == "loop" else (node,)


# --- loops ------------------------------------------------------------------------------------------------


def _write_loop(writer: NodeWriter, item: EmitLoop, operands: Sequence[str]) -> str:
    """Returns the names of the carried values, joined by commas."""
    loop, source = item.loop, writer.source
    count, middle = len(loop.body.outputs), len(loop.body.inputs)
    pairs = zip(operands, loop.body.outputs, strict=False)
    carried = [_assign(source, _copy(writer, name, node)) for name, node in pairs]
    inputs, tiles = [*carried, *operands[count:middle]], dict(writer.tiles)
    if item.condition is None:
        source.line(f"for _ in range({loop.trip_count}):")
        source.deeper()
        _replace(source, carried, writer.write(item.body, inputs))
        source.deeper(-1)
        writer.tiles = tiles
        return SEPARATOR.join(carried)
    asked = [*carried, *operands[middle:]]
    going = _assign(source, writer.write(item.condition, asked)[0])
    source.line(f"while tl.max({going}.to(tl.int32), axis=0) != 0:")
    source.deeper()
    _replace(source, carried, writer.write(item.body, inputs), going, loop)
    # Tiles are named after their operands, but the carried names have new values now.
    writer.tiles = dict(tiles)
    source.line(f"{going} = {writer.write(item.condition, asked)[0]}")
    source.deeper(-1)
    writer.tiles = tiles
    return SEPARATOR.join(carried)


def _copy(writer: NodeWriter, name: str, node: Node) -> str:
    """Returns a value in its shape after a turn. Unlike `x + 0`, `x - 0` keeps the sign of zeros."""
    whole = name if node.width is None else f"tl.broadcast_to({name}, {writer.shape(node)})"
    if node.dtype == np.bool_:
        return f"{whole} & tl.full({writer.shape(node)}, 1, tl.int1)"
    return f"{whole} - tl.zeros({writer.shape(node)}, {TYPES[node.dtype.name]})"


def _replace(
    source: KernelSource, carried: Sequence[str], after: Sequence[str], going: str = "", loop: Loop | None = None
) -> None:
    """Assigns the carried values after an iteration, all at once.

    With a condition, environments that are not `going` any more keep theirs.
    """
    news = [_assign(source, new) for new in after]
    for n, (name, new) in enumerate(zip(carried, news, strict=True)):
        if loop is not None:
            condition = going if loop.body.outputs[n].width is None else f"{going}[:, None]"
            new = f"tl.where({condition}, {new}, {name})"
        source.line(f"{name} = {new}")


def _assign(source: KernelSource, text: str) -> str:
    name = source.fresh()
    source.line(f"{name} = {text}")
    return name
