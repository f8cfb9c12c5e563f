"""Prints programs, one line per node, with names in the order of the nodes.

Equal programs have equal text. Constants and uniform values are written inline: `2.5`, `slot3[7]` for a scalar,
and `slot3[7:71]` for a row. Types follow a colon, such as `f32`, or `f32[64]` for a row of 64 columns.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from rollmill.fusion.ir.node import UNIFORM_OPERATIONS, Loop, Node, Program

INDENT = "  "

SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u"}
"""Short forms of dtype names, to which the number of bits is appended."""


class NodeNames:
    """Names of a program's nodes in its printed form."""

    def __init__(self, program: Program) -> None:
        self._names: dict[Node, str] = {}
        count = 0
        for node in program.nodes():
            if node.op == "input":
                self._names[node] = f"in{node.attributes[0]}"
            elif node.op not in ("constant", "uniform"):
                self._names[node], count = f"v{count}", count + 1

    def of(self, node: Node) -> str:
        """Formats a node as an operand: as its name, or as its value if it is written inline."""
        match node.op:
            case "constant":
                return str(node.value)
            case "uniform":
                slot, place = node.attributes
                return (
                    f"slot{slot}[{place}]" if node.width is None else f"slot{slot}[{place}:{place + node.width}]"
                )
            case "input" if node not in self._names:
                return f"in{node.attributes[0]}"  # an input that nothing reads
        return self._names[node]

    def all_of(self, nodes: Sequence[Node]) -> str:
        """Formats several nodes as operands in text, separated by commas."""
        return ", ".join(map(self.of, nodes))

    def line(self, node: Node) -> str:
        """Returns the line that defines a node. It does not include the body of a loop."""
        name, operands = f"{self.of(node)}:{type_text(node)}", self.all_of(node.operands)
        return f"{name} = {node.op}{_attributes_text(node)} {operands}".rstrip()


def program_text(program: Program) -> str:
    """Returns a program in printed form, with its inputs first and its outputs last."""
    return "\n".join(_program_lines(program))


def _program_lines(program: Program) -> Iterator[str]:
    names = NodeNames(program)
    yield inputs_line(program, names)
    for node in program.nodes():
        if node.op in ("input", "constant", "uniform"):
            continue
        yield INDENT + names.line(node)
        if node.op == "loop":
            yield from (INDENT * 2 + line for line in _loop_lines(node.attributes[0]))
    yield f"return {names.all_of(program.outputs)}"


def _loop_lines(loop: Loop) -> Iterator[str]:
    if loop.condition is not None:
        yield "while:"
        yield from (INDENT + line for line in _program_lines(loop.condition))
    yield "do:" if loop.condition is not None else f"{loop.trip_count} times:"
    yield from (INDENT + line for line in _program_lines(loop.body))


def inputs_line(program: Program, names: NodeNames) -> str:
    """Returns the line that lists a program's inputs, with the type of each input or the value that it equals."""
    shown = []
    for place, node in enumerate(program.inputs):
        own = node.op == "input" and node.attributes[0] == place
        shown.append(f"in{place}:{type_text(node)}" if own else f"in{place}={names.of(node)}")
    return f"program({', '.join(shown)}):"


def type_text(node: Node) -> str:
    """Formats the type of a node, such as `f32` or `i32[4]`, or the types of the values that a loop carries."""
    if node.op == "loop":
        return f"({', '.join(map(type_text, node.attributes[0].body.outputs))})"
    return _dtype_text(node.dtype) if node.width is None else f"{_dtype_text(node.dtype)}[{node.width}]"


def _dtype_text(dtype: np.dtype) -> str:
    kind = dtype.name.rstrip("0123456789")
    return f"{SHORT[kind]}{dtype.itemsize * 8}" if kind in SHORT else dtype.name


def _span(first: int, count: int | None) -> str:
    return f"{first}:{first + (count or 0)}"


def _attributes_text(node: Node) -> str:
    """Parameters of an operation."""
    if node.op == "dot":
        slot, row, column, _, transposed = node.attributes
        part = f"slot{slot}[{_span(row, node.operands[0].width)}, {_span(column, node.width)}]"
        return f"({part}{' transposed' if transposed else ''})"
    if node.op in UNIFORM_OPERATIONS:
        return f"(slot{node.attributes[0]})"
    if node.op == "cell":
        return f"(memory{node.attributes[0]})"
    if node.op == "loop" or not node.attributes:
        return ""
    return f"({', '.join(map(str, node.attributes))})"
