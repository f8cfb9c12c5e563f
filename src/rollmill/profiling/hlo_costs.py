"""Counts the FLOPs and bytes of a compiled program's instructions from their shapes.

An element of an element-wise instruction counts as one floating-point operation, and moving data as none. Caches
are ignored: all reads and writes count as memory traffic. As in the cost analysis of XLA, an instruction that
indexes a buffer reads or writes only the selected or replaced part.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
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
"""Names of HLO instructions that move data and compute nothing."""
PICKS = frozenset({"slice", "dynamic-slice", "gather"})
"""Instructions that read only part of their first operand: the size of their result."""
VIEWS = frozenset({"bitcast", "reshape"})
"""Instructions that name the same bytes differently."""
LIBRARY_OPCODES = frozenset({"dot", "convolution", "custom-call"})


def flops_of(line: HloLine, lines: Lines) -> float:
    """Returns the floating-point operations of an instruction, or 0 for a library call whose attributes do not
    show what it computes.
    """
    if line.opcode in LIBRARY_OPCODES:
        return 2.0 * line.result_elements * _products_of_an_element(line, lines)
    if line.opcode in MOVES or not any(kind.startswith(("f", "bf")) for kind, _ in line.shapes):
        return 0.0
    if line.opcode.startswith("reduce") and line.operands and line.operands[0] in lines:
        return float(lines[line.operands[0]].elements)
    return float(_count_changed_elements(line, lines))


def weight_of(line: HloLine, lines: Lines) -> float:
    """Returns the cost of an instruction relative to others in the same fusion. Broadcasts cost nothing."""
    if line.opcode == "broadcast":
        return 0.0
    return max(float(_count_changed_elements(line, lines)), flops_of(line, lines))


def bytes_of(line: HloLine, computations: Computations, lines: Lines) -> float:
    """Returns the bytes that an instruction reads and writes."""
    return float(_bytes_written(line, computations, lines) + sum(_bytes_read(line, computations, lines)))


def _products_of_an_element(line: HloLine, lines: Lines) -> int:
    """Returns the products that a dot, a convolution, or a library call of one sums for an element of its result.

    The second operand of a convolution is its kernel. Each element of the result uses all its axes but the output
    features.
    """
    if line.kernel_axes:
        kernel = _dims_of(line, 1, lines)
        return math.prod(size for size, axis in zip(kernel, line.kernel_axes, strict=False) if axis != "o")
    left = _dims_of(line, 0, lines)
    if not left or (line.opcode == "custom-call" and not line.contracted):
        return 0
    return math.prod(left[axis] for axis in line.contracted)


def _dims_of(line: HloLine, operand: int, lines: Lines) -> tuple[int, ...]:
    """Returns the shape of an operand, empty if it is unknown."""
    known = lines.get(line.operands[operand]) if operand < len(line.operands) else None
    return known.shapes[0][1] if known is not None and known.shapes else ()


def _updates(line: HloLine) -> tuple[str, ...]:
    """Returns the operands that replace parts of others."""
    if line.opcode == "dynamic-update-slice":
        return line.operands[1:2]
    if line.opcode == "scatter":  # buffers, indices, and one update per buffer
        return line.operands[len(line.operands) // 2 + 1 :]
    return ()


def _count_changed_elements(line: HloLine, lines: Lines) -> int:
    """Returns the elements of the results that an instruction computes, not those that it keeps."""
    if known := [lines[name] for name in _updates(line) if name in lines]:
        return sum(update.elements for update in known)
    return line.elements


def _bytes_read(line: HloLine, computations: Computations, lines: Lines) -> list[int]:
    """Returns the bytes that an instruction reads of each operand, or 0 of one that is unknown."""
    read = [lines[name].bytes if name in lines else 0 for name in line.operands]
    if line.opcode == "fusion" and line.called:
        used = _bytes_used(computations.get(line.called[0], ()), computations, lines)
        return [min(size, used[position]) for position, size in enumerate(read)]
    replaced = len(_updates(line))  # the first operands are replaced in place
    read[:replaced] = [0] * replaced
    if line.opcode in PICKS:
        read[:1] = [min(size, line.bytes) for size in read[:1]]
    return read


def _bytes_used(fused: Sequence[HloLine], computations: Computations, lines: Lines) -> Mapping[int, int]:
    """Returns the bytes that a fused computation reads of each parameter, by parameter index."""
    used: dict[int, int] = defaultdict(int)
    numbers: dict[str, int] = {}  # indices of parameters, also for views of parameters
    for line in fused:  # each line comes after its operands
        if line.parameter is not None:
            numbers[line.name] = line.parameter
        elif line.opcode in VIEWS and line.operands and line.operands[0] in numbers:
            numbers[line.name] = numbers[line.operands[0]]
        else:
            for name, size in zip(line.operands, _bytes_read(line, computations, lines), strict=True):
                if name in numbers:
                    used[numbers[name]] += size
    return used


def _bytes_written(line: HloLine, computations: Computations, lines: Lines) -> int:
    """Returns the bytes written by an instruction. For a fusion it is the size of its result."""
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
