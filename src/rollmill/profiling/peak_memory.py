"""Reads which operations a compiled program's temporary memory is for, from the compiler's assignment of buffers.

XLA plans a program's memory when it compiles it: each buffer has a place in an allocation, and of each allocation
it names the buffers that are live when it is fullest. A buffer is for the operation of the instruction that
writes it first.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping

from rollmill.profiling.hlo import Instruction
from rollmill.profiling.hlo_text import Path
from rollmill.profiling.protobuf import number_in, numbers_in, parts_of

BUFFERS, ALLOCATIONS, FULLEST = 1, 3, 5
"""Numbers of a `BufferAssignmentProto`'s fields (xla/service/hlo.proto); the last says which buffers are live when
an allocation is fullest."""
NOT_TEMPORARY = (3, 5, 7, 12)
"""Numbers of a `BufferAllocationProto`'s fields: whether it is thread-local, a parameter, perhaps a result, a
constant."""
COMPUTATIONS, INSTRUCTIONS, NAME, INSTRUCTION_ID = 3, 2, 1, 35
"""Numbers of the fields of an `HloModuleProto`, of its computations, and of their instructions."""


def bytes_when_fullest(
    assignment: bytes, module: bytes, instructions: Mapping[str, Instruction]
) -> dict[Path, float]:
    """The bytes of temporary memory for each operation when it is fullest; empty if the compiler does not say.

    Args:
        assignment: a `BufferAssignmentProto`, serialised.
        module: the program's `HloModuleProto`, serialised.
        instructions: its instructions, by name.
    """
    fullest = {number_in(each, 1): set(numbers_in(each, 2)) for each in parts_of(assignment, FULLEST)}
    writers = {number_in(each, 1): _writer(each) for each in parts_of(assignment, BUFFERS)}
    names = dict(_names(module))
    found: dict[Path, float] = defaultdict(float)
    for allocation in parts_of(assignment, ALLOCATIONS):
        if any(number_in(allocation, field) for field in NOT_TEMPORARY):
            continue
        live = fullest.get(number_in(allocation, 1), set())
        for buffer, size in _distinct_buffers(allocation, live).items():
            instruction = instructions.get(names.get(writers.get(buffer, 0), ""))
            for path, share in instruction.shares.items() if instruction else (((), 1.0),):
                found[path] += share * size
    return {path: size for path, size in found.items() if size}


def _writer(buffer: bytes) -> int:
    """The number of the instruction that writes a buffer first."""
    return next((number_in(place, 4) for place in parts_of(buffer, 3)), 0)


def _distinct_buffers(allocation: bytes, live: set[int]) -> dict[int, int]:
    """The sizes of an allocation's live buffers, of those in one place the largest."""
    largest: dict[int, tuple[int, int]] = {}
    for assigned in parts_of(allocation, 9):
        buffer, offset, size = (number_in(assigned, field) for field in (1, 2, 3))
        if buffer in live:
            largest[offset] = max(largest.get(offset, (0, 0)), (size, buffer))
    return {buffer: size for size, buffer in largest.values()}


def _names(module: bytes) -> Iterator[tuple[int, str]]:
    """The number and the name of each instruction."""
    for computation in parts_of(module, COMPUTATIONS):
        for instruction in parts_of(computation, INSTRUCTIONS):
            name = next(parts_of(instruction, NAME), b"")
            yield number_in(instruction, INSTRUCTION_ID), name.decode()
