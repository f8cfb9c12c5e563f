"""Attributes the instructions of a compiled program to operations, and counts their FLOPs and bytes.

For each instruction, XLA stores the scopes in which the instruction was traced (`op_name`). Many instructions
combine several traced ones (fusions), or come from none (copies that loops need). A fusion is divided among the
operations of its parts by cost. An instruction without a scope belongs to the enclosing loop or branch.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from rollmill.profiling.hlo_costs import COPIES, Computations, Lines, bytes_of, flops_of, weight_of
from rollmill.profiling.hlo_text import HloLine, Path, read_computations
from rollmill.profiling.protobuf import number_in

Kind: TypeAlias = Literal["kernel", "container", "copy", "collective"]

CONTAINERS = frozenset({"while", "call", "conditional", "async-start", "async-done"})
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-", "send", "recv")
FREE = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota", "after-all"})
"""Instructions that compute almost nothing."""


class Instruction(NamedTuple):
    """An instruction that a backend runs separately, as a kernel or a thunk."""

    kind: Kind
    shares: Mapping[Path, float]
    """The operations to which the instruction belongs, each with its share. Shares sum to 1."""
    flops: float
    bytes: float
    """Bytes that it reads and writes."""


def module_name(text: str) -> str:
    """Returns the name of a compiled program, from the first line of its text."""
    return text[:400].removeprefix("HloModule ").partition(",")[0].strip()


def program_key(name: str, number: int) -> str:
    """Returns a key that distinguishes compiled programs with the same name by their number."""
    return f"{name}/{number}" if number else name


def program_number(module: bytes) -> int:
    """Returns the number that a serialized `HloModuleProto` has in traces, or 0 if it has none."""
    return number_in(module, 5)


def read_instructions(text: str) -> dict[str, Instruction]:
    """Reads the instructions that run separately from a compiled program's HLO text, by name."""
    computations, entry = read_computations(text)
    lines = {line.name: line for computation in computations.values() for line in computation}
    read: dict[str, Instruction] = {}

    def visit(computation: str, around: Path) -> None:
        for line in computations.get(computation, ()):
            if line.opcode in FREE or line.name in read:
                continue
            path = line.path or around
            read[line.name] = _instruction(line, path, computations, lines)
            if line.opcode in CONTAINERS:
                for called in line.called:
                    visit(called, path)

    visit(entry, ())
    return read


def _instruction(line: HloLine, path: Path, computations: Computations, lines: Lines) -> Instruction:
    if line.opcode in CONTAINERS:
        return Instruction("container", {path: 1.0}, 0.0, 0.0)
    parts = list(_parts(line, computations)) if line.opcode == "fusion" else [line]
    weights: dict[Path, float] = defaultdict(float)
    for part in parts:
        weights[part.path or path] += weight_of(part, lines)
    total = sum(weights.values())
    shares = {each: weight / total for each, weight in weights.items() if weight > 0} if total else {path: 1.0}
    flops = math.fsum(flops_of(part, lines) for part in parts)
    return Instruction(_kind(line, parts), shares, flops, bytes_of(line, computations, lines))


def _parts(fusion: HloLine, computations: Computations) -> Iterator[HloLine]:
    """Yields the instructions in a fusion that compute something."""
    for called in fusion.called:
        for line in computations.get(called, ()):
            if line.opcode == "fusion":
                yield from _parts(line, computations)
            elif line.opcode not in FREE:
                yield line


def _kind(line: HloLine, parts: Sequence[HloLine]) -> Kind:
    if line.opcode.startswith(COLLECTIVES):
        return "collective"
    return "copy" if parts and all(part.opcode in COPIES for part in parts) else "kernel"
