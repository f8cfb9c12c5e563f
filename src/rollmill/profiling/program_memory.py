"""Reads what a compiled program's temporary memory is for, from the compiler's assignment of buffers.

XLA plans a program's memory when it compiles it: it goes through the instructions in their order, and gives each
buffer a place in an allocation, from the instruction that writes it first to the one that reads it last. A loop's
instructions are gone through once. A buffer is for the operation of the instruction that writes it first.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from rollmill.profiling.hlo import Instruction
from rollmill.profiling.hlo_text import Path
from rollmill.profiling.protobuf import number_in, part_in, parts_of
from rollmill.profiling.results import UNNAMED, OperationMemory

ALLOCATIONS, HEAPS = 3, 4
"""Numbers of a `BufferAssignmentProto`'s fields (xla/service/hlo.proto): allocations, and how they were filled."""
NOT_TEMPORARY = (3, 5, 7, 12)
"""Numbers of a `BufferAllocationProto`'s fields: whether it is thread-local, a parameter, perhaps a result, a
constant."""
FREE = 1
"""The kind of an event after which a buffer is not needed any more; with others it begins to be."""
MOST_INTERVALS = 120
"""Intervals that a program's course is divided into at most."""
LEAST_IN_COMMON = 0.5
"""Share of the instructions that two texts of one program have in common at least."""


class Place(NamedTuple):
    """Where a buffer is."""

    allocation: int
    offset: int
    size: int


class Buffer(NamedTuple):
    """A buffer that is needed at a moment."""

    size: int
    shares: Mapping[Path, float]
    """The operations that it is for, with the share of each."""


class AssignedProgram(NamedTuple):
    """A compiled program, and where its buffers are."""

    name: str
    instructions: frozenset[str]
    """The names of all of them."""
    assignment: bytes
    """A `BufferAssignmentProto`, serialised."""


def assigned_programs(trace: bytes) -> list[AssignedProgram]:
    """The compiled programs of a process that are in a trace's metadata.

    Args:
        trace: a serialised `XSpace` (tsl/profiler/protobuf/xplane.proto).
    """
    metadata = (plane for plane in parts_of(trace, 1) if part_in(plane, 2) == b"/host:metadata")
    statistics = (
        part_in(statistic, 6)  # an `HloProto`
        for plane in metadata
        for entry in parts_of(plane, 4)
        for statistic in parts_of(part_in(entry, 2), 5)
    )
    programs = ((part_in(each, 1), part_in(each, 3)) for each in statistics)
    return [
        AssignedProgram(part_in(module, 1).decode(), instruction_names(module), assignment)
        for module, assignment in programs
        if module and assignment
    ]


def assignment_of(name: str, module: bytes, programs: Iterable[AssignedProgram]) -> bytes:
    """The serialised `BufferAssignmentProto` of a program; empty if it is in no trace.

    On a GPU a program has another number in traces than its executable has, and a few instructions that were added
    last are in one of them only: so it is known by most of its instructions.

    Args:
        name: the program's.
        module: its `HloModuleProto`, serialised.
        programs: those in a trace.
    """
    names = instruction_names(module)
    alike = [
        (len(names & program.instructions) / len(names | program.instructions), program.assignment)
        for program in programs
        if program.name == name
    ]
    common, assignment = max(alike, key=lambda each: each[0], default=(0.0, b""))
    return assignment if common >= LEAST_IN_COMMON else b""


def instruction_names(module: bytes) -> frozenset[str]:
    """The names of a program's instructions.

    Args:
        module: an `HloModuleProto`, serialised.
    """
    return frozenset(
        part_in(instruction, 1).decode()
        for computation in parts_of(module, 3)
        for instruction in parts_of(computation, 2)
    )


def memory_by_operation(assignment: bytes, instructions: Mapping[str, Instruction]) -> tuple[OperationMemory, ...]:
    """The temporary memory of each operation, from a program's beginning to its end.

    Args:
        assignment: a `BufferAssignmentProto`, serialised.
        instructions: the program's instructions, by name.

    Returns:
        the operations, first those with most memory when that of the whole program is fullest; nothing if the
        compiler does not say.
    """
    moments = list(_moments(assignment, instructions))
    if not moments:
        return ()
    totals = [sum(moment.values()) for moment in moments]
    fullest = moments[_fullest(totals, range(len(totals)))]
    course = [moments[_fullest(totals, interval)] for interval in _intervals(len(totals))]
    found = (
        OperationMemory(
            path=path or (UNNAMED,),
            bytes=round(fullest.get(path, 0)),
            course=tuple(round(moment.get(path, 0)) for moment in course),
        )
        for path in {path for moment in course for path in moment}
    )
    used = (one for one in found if any(one.course))
    return tuple(sorted(used, key=lambda one: (-one.bytes, -max(one.course), one.path)))


def _places(assignment: bytes) -> dict[int, Place]:
    """Where each buffer of temporary memory is, by its number."""
    return {
        number_in(assigned, 1): Place(number_in(allocation, 1), number_in(assigned, 2), number_in(assigned, 3))
        for allocation in parts_of(assignment, ALLOCATIONS)
        if not any(number_in(allocation, field) for field in NOT_TEMPORARY)
        for assigned in parts_of(allocation, 9)
    }


def _moments(assignment: bytes, instructions: Mapping[str, Instruction]) -> Iterator[Mapping[Path, float]]:
    """The bytes of each operation after each event of the heap."""
    places = _places(assignment)
    heaps = [
        [each for each in parts_of(heap, 1) if number_in(each, 2) in places]
        for heap in parts_of(assignment, HEAPS)
    ]
    events = max(heaps, key=len, default=[])  # a kind of memory that a backend has besides has little
    needed: dict[tuple[int, int], dict[int, Buffer]] = defaultdict(dict)
    now: dict[Path, float] = defaultdict(float)
    for event in events:
        number = number_in(event, 2)
        allocation, offset, size = places[number]
        here = needed[allocation, offset]
        _count(here, now, -1)
        if number_in(event, 1) == FREE:
            here.pop(number, None)
        else:
            writer = instructions.get(part_in(event, 4).decode())
            here[number] = Buffer(size, writer.shares if writer else {(): 1.0})
        _count(here, now, 1)
        yield dict(now)


def _count(buffers: Mapping[int, Buffer], now: dict[Path, float], sign: int) -> None:
    """Adds a place's bytes to those of operations, or takes them away. Buffers at one place share its memory: the
    largest counts, of those the first.
    """
    if largest := max(buffers.values(), key=lambda buffer: buffer.size, default=None):
        for path, share in largest.shares.items():
            now[path] += sign * share * largest.size


def _intervals(moments: int) -> Iterator[range]:
    """Moments in intervals of equal length, each of at least one."""
    edges = [moments * edge // MOST_INTERVALS for edge in range(MOST_INTERVALS + 1)]
    return (range(start, end) for start, end in pairwise(edges) if end > start)


def _fullest(totals: Sequence[float], moments: range) -> int:
    """The first of the moments with the most memory."""
    return max(moments, key=totals.__getitem__)
