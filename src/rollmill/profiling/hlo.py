"""Reads a compiled program's text: to which operation each of its instructions belongs, and what it computes.

XLA keeps for an instruction the scopes that it was traced in (`op_name`). Many instructions come of several traced
ones (fusions), or of none (copies that loops need). A fusion is divided among the operations of its parts by their
cost; what has no scope of its own belongs to the loop or branch that it lies in.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from rollmill.core.operations import SCOPE_MARK

Path: TypeAlias = tuple[str, ...]
"""An operation and those around it, the outermost first."""

Kind: TypeAlias = Literal["kernel", "container", "copy", "collective"]

CONTAINERS = frozenset({"while", "call", "conditional", "async-start", "async-done"})
COPIES = frozenset({"copy", "copy-start", "copy-done", "bitcast-convert"})
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-", "send", "recv")
FREE = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota", "after-all"})
"""Instructions that compute nothing, or next to nothing."""

BYTES_OF = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s64": 8, "u64": 8, "f64": 8}
"""Bytes of an element, where they are not 4."""

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
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
"""In calls of cuDNN whose operands are not those that the axes are of; their operations are not counted."""
_OPERATION = re.compile(re.escape(SCOPE_MARK) + r'([^/()":]+)')


class Instruction(NamedTuple):
    """One instruction that a backend runs by itself, as a kernel or a thunk."""

    kind: Kind
    shares: Mapping[Path, float]
    """The operations that it belongs to, with the share of each; they sum to 1."""
    flops: float
    bytes: float
    """Bytes of operands and results."""


class _Line(NamedTuple):
    name: str
    opcode: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    operands: tuple[str, ...]
    called: tuple[str, ...]
    path: Path
    contracted: tuple[int, ...]
    """Axes of the first operand that a product of matrices sums over."""
    kernel_axes: str = ""
    """Axes of a convolution's kernel, such as `01io`: spatial ones, input features and output features."""

    @property
    def result_elements(self) -> int:
        """Elements of the first result; others of a library's call are its workspace."""
        return math.prod(self.shapes[0][1]) if self.shapes else 0

    @property
    def elements(self) -> int:
        return sum(math.prod(dims) for _, dims in self.shapes)

    @property
    def bytes(self) -> int:
        return sum(math.prod(dims) * BYTES_OF.get(kind, 4) for kind, dims in self.shapes)


def operations_in(op_name: str) -> Path:
    """The operations in an instruction's `op_name`, the outermost first."""
    path: list[str] = []
    for name in _OPERATION.findall(op_name):
        if not path or path[-1] != name:  # gradients are traced in the scope of what they are gradients of
            path.append(name)
    return tuple(path)


def module_name(text: str) -> str:
    """The name of a compiled program, from the first line of its text."""
    return text[:400].removeprefix("HloModule ").partition(",")[0].strip()


def program_key(name: str, number: int) -> str:
    """A name that tells a compiled program apart from others with its name; the name alone if it has no number."""
    return f"{name}/{number}" if number else name


def program_number(module: bytes) -> int:
    """The number by which traces name a compiled program; 0 if it has none.

    Args:
        module: an `HloModuleProto`, serialised: a sequence of fields, of which the number is the fifth.
    """
    at = 0
    while at < len(module):
        tag, at = _varint(module, at)
        field, kind = divmod(tag, 8)
        if kind == 0:
            value, at = _varint(module, at)
            if field == 5:
                return value
        elif kind == 2:
            length, at = _varint(module, at)
            at += length
        else:
            at += 8 if kind == 1 else 4
    return 0


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """An integer of seven bits a byte, the lowest first, and the place after it."""
    value, shift = 0, 0
    while data[at] >= 128:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
    return value | data[at] << shift, at + 1


def read_instructions(text: str) -> dict[str, Instruction]:
    """The instructions of a compiled program that are run by themselves, by name.

    Args:
        text: from `jax.stages.Compiled.as_text`, or an executable's `hlo_modules`.
    """
    computations, entry = _read_computations(text)
    shapes = {line.name: line for lines in computations.values() for line in lines}
    read: dict[str, Instruction] = {}

    def visit(computation: str, around: Path) -> None:
        for line in computations.get(computation, ()):
            if line.opcode in FREE or line.name in read:
                continue
            path = line.path or around
            read[line.name] = _instruction(line, path, computations, shapes)
            if line.opcode in CONTAINERS:
                for called in line.called:
                    visit(called, path)

    visit(entry, ())
    return read


def _instruction(
    line: _Line, path: Path, computations: Mapping[str, Sequence[_Line]], shapes: Mapping[str, _Line]
) -> Instruction:
    if line.opcode in CONTAINERS:
        return Instruction("container", {path: 1.0}, 0.0, 0.0)
    moved = line.bytes + sum(shapes[name].bytes for name in line.operands if name in shapes)
    parts = list(_parts(line, computations)) if line.opcode == "fusion" else [line]
    weights: dict[Path, float] = defaultdict(float)
    for part in parts:
        weights[part.path or path] += _weight(part, shapes)
    total = sum(weights.values())
    shares = {each: weight / total for each, weight in weights.items() if weight > 0} if total else {path: 1.0}
    return Instruction(_kind(line, parts), shares, sum(_flops(part, shapes) for part in parts), float(moved))


def _parts(fusion: _Line, computations: Mapping[str, Sequence[_Line]]) -> Iterator[_Line]:
    """The instructions in a fusion that compute something."""
    for called in fusion.called:
        for line in computations.get(called, ()):
            if line.opcode == "fusion":
                yield from _parts(line, computations)
            elif line.opcode not in FREE:
                yield line


def _kind(line: _Line, parts: Sequence[_Line]) -> Kind:
    if line.opcode.startswith(COLLECTIVES):
        return "collective"
    return "copy" if parts and all(part.opcode in COPIES for part in parts) else "kernel"


def _flops(line: _Line, shapes: Mapping[str, _Line]) -> float:
    """Floating-point operations; an element of an element-wise instruction counts as one.

    Calls of libraries say in their attributes what they compute; of those that do not, the operations are unknown.
    """
    if line.opcode in ("dot", "convolution", "custom-call"):
        return 2.0 * line.result_elements * _products_of_an_element(line, shapes)
    if line.opcode.startswith("reduce") and line.operands and line.operands[0] in shapes:
        return float(shapes[line.operands[0]].elements)
    return 0.0 if line.opcode in COPIES or not _is_float(line) else float(line.elements)


def _products_of_an_element(line: _Line, shapes: Mapping[str, _Line]) -> int:
    """Products that are summed for an element of a result: of a dot, a convolution, or a library's call of one.

    The second operand of a convolution is its kernel, of which each element of the result uses all but the axis of
    output features.
    """
    if line.kernel_axes:
        kernel = _dims_of(line, 1, shapes)
        return math.prod(size for size, axis in zip(kernel, line.kernel_axes, strict=False) if axis != "o")
    left = _dims_of(line, 0, shapes)
    if not left or (line.opcode == "custom-call" and not line.contracted):
        return 0
    return math.prod(left[axis] for axis in line.contracted)


def _dims_of(line: _Line, operand: int, shapes: Mapping[str, _Line]) -> tuple[int, ...]:
    """The shape of an operand; empty if it is unknown."""
    known = shapes.get(line.operands[operand]) if operand < len(line.operands) else None
    return known.shapes[0][1] if known is not None and known.shapes else ()


def _is_float(line: _Line) -> bool:
    return any(kind.startswith(("f", "bf")) for kind, _ in line.shapes)


def _weight(line: _Line, shapes: Mapping[str, _Line]) -> float:
    """The cost of a part of a fusion, in comparison with the others."""
    return max(float(line.elements), _flops(line, shapes))


def _read_computations(text: str) -> tuple[dict[str, list[_Line]], str]:
    computations: dict[str, list[_Line]] = {}
    entry, lines = "", list[_Line]()
    for row in text.splitlines():
        if (head := _COMPUTATION.match(row)) is not None:
            lines = computations[head[2]] = []
            entry = head[2] if head[1] else entry
        elif (match := _INSTRUCTION.match(row)) is not None:
            lines.append(_read_line(match[1], match[2]))
    return computations, entry


def _read_line(name: str, rest: str) -> _Line:
    kind, after = _split_type(rest)
    opcode = _OPCODE.match(after)
    if opcode is None:
        return _Line(name, "parameter", (), (), (), (), ())
    operands, attributes = _split_parentheses(after[opcode.end() - 1 :])
    called = [*_CALLED.findall(attributes)]
    for branches in _BRANCHES.findall(attributes):
        called += [branch.strip().lstrip("%") for branch in branches.split(",")]
    op_name, contracted = _OP_NAME.search(attributes), _CONTRACTED.search(attributes)
    kernel_axes = _KERNEL_AXES.search(attributes)
    return _Line(
        name,
        opcode[1],
        tuple((element, _numbers(dims)) for element, dims in _SHAPE.findall(kind)),
        tuple(_OPERAND.findall(operands)),
        tuple(called),
        operations_in(op_name[1]) if op_name else (),
        _numbers(contracted[1]) if contracted else (),
        "" if _BACKWARD in attributes or kernel_axes is None else kernel_axes[1],
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.replace('"', "").split(",") if number)


def _split_type(text: str) -> tuple[str, str]:
    """The type of a result, which may be a tuple, and the text after it."""
    if text.startswith("("):
        return _split_parentheses(text)
    kind, _, after = text.partition(" ")
    return kind, after


def _split_parentheses(text: str) -> tuple[str, str]:
    """The text up to the parenthesis that closes the first one, and the text after it."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[: position + 1], text[position + 1 :]
    return text, ""
