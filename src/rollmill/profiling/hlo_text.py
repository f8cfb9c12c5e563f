"""Parses a compiled program's text into its computations, line by line."""

import math
import re
from typing import NamedTuple, TypeAlias

from rollmill.core.operations import SCOPE_MARK

Path: TypeAlias = tuple[str, ...]
"""An operation and those around it, the outermost first."""

BYTES_OF = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s64": 8, "u64": 8, "f64": 8}
"""Bytes of an element of types other than 4."""

_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)[}\]]')
_KERNEL_AXES = re.compile(r"dim_labels=[\w?]+_([\w?]+)->")
_BACKWARD = "$convBackward"
"""Marks cuDNN calls with permuted operands, whose FLOPs are not counted."""
_OPERATION = re.compile(re.escape(SCOPE_MARK) + r'([^/()":]+)')


class HloLine(NamedTuple):
    """One line of HLO text: an instruction of a computation."""

    name: str
    opcode: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    operands: tuple[str, ...]
    called: tuple[str, ...]
    path: Path
    contracted: tuple[int, ...]
    """Axes of the first operand that a matrix product sums over."""
    kernel_axes: str = ""
    """Axes of a convolution's kernel, such as `01io`: spatial ones, input features and output features."""
    parameter: int | None = None
    """Its number, if it is a parameter of its computation."""
    is_root: bool = False
    """Whether it is the computation's result."""

    @property
    def result_elements(self) -> int:
        """Number of elements in the first result. Further results of a library call are its workspace."""
        return math.prod(self.shapes[0][1]) if self.shapes else 0

    @property
    def elements(self) -> int:
        """Number of elements in all results."""
        return sum(math.prod(dims) for _, dims in self.shapes)

    @property
    def bytes(self) -> int:
        """Size of all results in bytes."""
        return sum(math.prod(dims) * BYTES_OF.get(kind, 4) for kind, dims in self.shapes)


def operations_in(op_name: str) -> Path:
    """Returns the operations named in an instruction's `op_name`, the outermost first.

    If XLA merges instructions, it joins their names. Only the first name counts.
    """
    path: list[str] = []
    for name in _OPERATION.findall(op_name.partition(";")[0]):
        if not path or path[-1] != name:  # gradients are traced in the scope of the differentiated operation
            path.append(name)
    return tuple(path)


def read_computations(text: str) -> tuple[dict[str, list[HloLine]], str]:
    """Parses HLO text. Returns the lines of each computation by its name, and the name of the entry
    computation.
    """
    computations: dict[str, list[HloLine]] = {}
    entry, lines = "", list[HloLine]()
    for row in text.splitlines():
        if (head := _COMPUTATION.match(row)) is not None:
            lines = computations[head[2]] = []
            entry = head[2] if head[1] else entry
        elif (match := _INSTRUCTION.match(row)) is not None:
            lines.append(_read_line(match[2], match[3], is_root=match[1] is not None))
    return computations, entry


def _read_line(name: str, rest: str, *, is_root: bool) -> HloLine:
    kind, after = _split_type(rest)
    opcode = _OPCODE.match(after)
    if opcode is None:
        return HloLine(name, "parameter", (), (), (), (), ())
    operands, attributes = _split_parentheses(after[opcode.end() - 1 :])
    called = [*_CALLED.findall(attributes)]
    for branches in _BRANCHES.findall(attributes):
        called += [branch.strip().lstrip("%") for branch in branches.split(",")]
    op_name, contracted = _OP_NAME.search(attributes), _CONTRACTED.search(attributes)
    kernel_axes = _KERNEL_AXES.search(attributes)
    return HloLine(
        name,
        opcode[1],
        tuple((element, _numbers(dims)) for element, dims in _SHAPE.findall(kind)),
        tuple(_OPERAND.findall(operands)),
        tuple(called),
        operations_in(op_name[1]) if op_name else (),
        _numbers(contracted[1]) if contracted else (),
        "" if _BACKWARD in attributes or kernel_axes is None else kernel_axes[1],
        int(operands.strip("()")) if opcode[1] == "parameter" else None,
        is_root,
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.replace('"', "").split(",") if number)


def _split_type(text: str) -> tuple[str, str]:
    """Splits off the type of a result, which may be a tuple."""
    if text.startswith("("):
        return _split_parentheses(text)
    kind, _, after = text.partition(" ")
    return kind, after


def _split_parentheses(text: str) -> tuple[str, str]:
    """Splits a string after the parenthesis that closes the first."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[: position + 1], text[position + 1 :]
    return text, ""
