"""Counts the operations and the bytes of a compiled program's instructions, from their shapes.

An element of an element-wise instruction counts as one floating-point operation, and what only moves data as none.
Caches do not count: all that an instruction reads or writes is bytes of memory. Of a buffer that it indexes, that
is the part that it picks or replaces, as in XLA's own cost analysis.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from rollmill.profiling.hlo_text import HloLine

Computations: TypeAlias = Mapping[str, Sequence[HloLine]]
Lines: TypeAlias = Mapping[str, HloLine]
"""Lines of all computations by their names."""

COPIES = frozenset({"copy", "copy-start", "copy-done", "bitcast-convert"})
MOVES = COPIES | {
    "broadcast",
    "concatenate",
    "dynamic-slice",
    "dynamic-update-slice",
    "gather",
    "pad",
    "reshape",
    "reverse",
    "slice",
    "transpose",
}
"""Instructions that compute nothing."""
PICKS = frozenset({"slice", "dynamic-slice", "gather"})
"""Instructions that read as much of their first operand as their result has."""
VIEWS = frozenset({"bitcast", "reshape"})
"""Instructions that name the same bytes differently."""
LIBRARY_OPCODES = frozenset({"dot", "convolution", "custom-call"})


def flops_of(line: HloLine, lines: Lines) -> float:
    """Floating-point operations; 0 of a library's call that does not say in its attributes what it computes."""
    if line.opcode in LIBRARY_OPCODES:
        return 2.0 * line.result_elements * _products_of_an_element(line, lines)
    if line.opcode in MOVES or not _is_float(line):
        return 0.0
    if line.opcode.startswith("reduce") and line.operands and line.operands[0] in lines:
        return float(lines[line.operands[0]].elements)
    return float(_changed_elements(line, lines))


def weight_of(line: HloLine, lines: Lines) -> float:
    """The cost of a part of a fusion, in comparison with the others; a broadcast is only another index."""
    if line.opcode == "broadcast":
        return 0.0
    return max(float(_changed_elements(line, lines)), flops_of(line, lines))


def bytes_of(line: HloLine, computations: Computations, lines: Lines) -> float:
    """Bytes that an instruction reads and writes."""
    read = [
        _bytes_read(line, position, lines[name], computations, lines)
        for position, name in enumerate(line.operands)
        if name in lines
    ]
    return float(_bytes_written(line, computations, lines) + sum(read))


def _products_of_an_element(line: HloLine, lines: Lines) -> int:
    """Products that are summed for an element of a result: of a dot, a convolution, or a library's call of one.

    The second operand of a convolution is its kernel, of which each element of the result uses all but the axis of
    output features.
    """
    if line.kernel_axes:
        kernel = _dims_of(line, 1, lines)
        return math.prod(size for size, axis in zip(kernel, line.kernel_axes, strict=False) if axis != "o")
    left = _dims_of(line, 0, lines)
    if not left or (line.opcode == "custom-call" and not line.contracted):
        return 0
    return math.prod(left[axis] for axis in line.contracted)


def _dims_of(line: HloLine, operand: int, lines: Lines) -> tuple[int, ...]:
    """The shape of an operand; empty if it is unknown."""
    known = lines.get(line.operands[operand]) if operand < len(line.operands) else None
    return known.shapes[0][1] if known is not None and known.shapes else ()


def _is_float(line: HloLine) -> bool:
    return any(kind.startswith(("f", "bf")) for kind, _ in line.shapes)


def _updates(line: HloLine) -> tuple[str, ...]:
    """The operands that replace parts of others; empty if it is no instruction that does that."""
    if line.opcode == "dynamic-update-slice":
        return line.operands[1:2]
    if line.opcode == "scatter":  # buffers, indices, and an update of each buffer
        return line.operands[len(line.operands) // 2 + 1 :]
    return ()


def _replaced(line: HloLine) -> int:
    """Number of the first operands of which parts are replaced, in place."""
    return len(_updates(line))


def _changed_elements(line: HloLine, lines: Lines) -> int:
    """Elements of the results that an instruction computes; the others are there before."""
    if known := [lines[name] for name in _updates(line) if name in lines]:
        return sum(update.elements for update in known)
    return line.elements


def _bytes_read(line: HloLine, position: int, operand: HloLine, computations: Computations, lines: Lines) -> int:
    """Bytes of an operand that an instruction reads."""
    if line.opcode == "fusion" and line.called:
        return min(operand.bytes, _bytes_used(computations.get(line.called[0], ()), position, computations, lines))
    if position < _replaced(line):
        return 0
    if position == 0 and line.opcode in PICKS:
        return min(operand.bytes, line.bytes)
    return operand.bytes


def _bytes_used(fused: Sequence[HloLine], parameter: int, computations: Computations, lines: Lines) -> int:
    """Bytes that a fused computation reads of a parameter: all that those of its instructions do that use it."""
    uses: dict[str, list[tuple[HloLine, int]]] = defaultdict(list)
    for line in fused:
        for position, name in enumerate(line.operands):
            uses[name].append((line, position))

    def used(value: HloLine) -> Iterator[int]:
        for line, position in uses[value.name]:
            if line.opcode in VIEWS:
                yield from used(line)
            else:
                yield _bytes_read(line, position, value, computations, lines)

    return sum(sum(used(line)) for line in fused if line.parameter == parameter)


def _bytes_written(line: HloLine, computations: Computations, lines: Lines) -> int:
    """Bytes that an instruction writes: of a fusion, those of its result."""
    if line.opcode == "fusion" and line.called:
        roots = [each for each in computations.get(line.called[0], ()) if each.is_root]
        return _bytes_written(roots[0], computations, lines) if roots else line.bytes
    if line.opcode == "tuple":
        return sum(_bytes_written(lines[name], computations, lines) for name in line.operands if name in lines)
    if line.opcode in VIEWS and line.operands and line.operands[0] in lines:
        return _bytes_written(lines[line.operands[0]], computations, lines)
    if known := [lines[name] for name in _updates(line) if name in lines]:
        return sum(update.bytes for update in known)
    return line.bytes
