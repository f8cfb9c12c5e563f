"""Reads what a compiled program's temporary memory is for, from the compiler's assignment of buffers.

XLA plans a program's memory when it compiles it: it goes through the instructions in their order, and gives each
buffer a place in an allocation, from the instruction that writes it first to the one that reads it last. A loop's
instructions are gone through once. A buffer is for the operation of the instruction that writes it first.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from rollmill.profiling.hlo import Instruction
from rollmill.profiling.hlo_text import Path
from rollmill.profiling.protobuf import number_in, numbers_in, part_in, parts_of
from rollmill.profiling.results import UNNAMED, OperationMemory
from rollmill.profiling.traced_programs import AssignedProgram

BUFFERS, ALLOCATIONS, HEAPS, FULLEST = 1, 3, 4, 5
"""Numbers of a `BufferAssignmentProto`'s fields (xla/service/hlo.proto). The third is how allocations were filled,
the last which buffers are needed when each is fullest."""
NOT_TEMPORARY = (3, 5, 7, 12)
"""Numbers of a `BufferAllocationProto`'s fields: whether it is thread-local, a parameter, perhaps a result, a
constant."""
FREE = 1
"""The kind of an event after which a buffer is not needed any more; with others it begins to be."""
MOST_INTERVALS = 120
"""Intervals that a program's course is divided into at most."""


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


def memory_by_operation(
    program: AssignedProgram, instructions: Mapping[str, Instruction]
) -> tuple[OperationMemory, ...]:
    """The temporary memory of each operation.

    Args:
        program: where its buffers are. Of one that JAX's cache of compiled programs kept, the compiler says only
            which are needed when it is fullest: then operations have no course.
        instructions: the program's instructions, by name.

    Returns:
        the operations, first those with most memory when that of the whole program is fullest; nothing if the
        compiler does not say.
    """
    moments = list(_moments(program, instructions))
    totals = [sum(moment.values()) for moment in moments]
    course = [moments[_fullest(totals, interval)] for interval in _intervals(len(totals))]
    fullest = moments[_fullest(totals, range(len(totals)))] if moments else _kept_moment(program, instructions)
    found = [
        OperationMemory(
            path=path or (UNNAMED,),
            bytes=round(fullest.get(path, 0)),
            course=tuple(round(moment.get(path, 0)) for moment in course),
        )
        for path in {path for moment in (fullest, *course) for path in moment}
    ]
    used = [one for one in found if any((one.bytes, *one.course))]
    return tuple(sorted(used, key=lambda one: (-one.bytes, -max(one.course, default=0), one.path)))


def _places(assignment: bytes) -> dict[int, Place]:
    """Where each buffer of temporary memory is, by its number."""
    return {
        number_in(assigned, 1): Place(number_in(allocation, 1), number_in(assigned, 2), number_in(assigned, 3))
        for allocation in parts_of(assignment, ALLOCATIONS)
        if not any(number_in(allocation, field) for field in NOT_TEMPORARY)
        for assigned in parts_of(allocation, 9)
    }


def _moments(program: AssignedProgram, instructions: Mapping[str, Instruction]) -> Iterator[Mapping[Path, float]]:
    """The bytes of each operation after each event of the heap."""
    places = _places(program.assignment)
    heaps = [
        [each for each in parts_of(heap, 1) if number_in(each, 2) in places]
        for heap in parts_of(program.assignment, HEAPS)
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
            here[number] = Buffer(size, _shares(part_in(event, 4).decode(), instructions))
        _count(here, now, 1)
        yield dict(now)


def _kept_moment(program: AssignedProgram, instructions: Mapping[str, Instruction]) -> Mapping[Path, float]:
    """The bytes of each operation at the fullest moment, as the compiler names it."""
    places = _places(program.assignment)
    writers = {
        number_in(each, 1): number_in(part_in(each, 3), 4) for each in parts_of(program.assignment, BUFFERS)
    }
    needed: dict[tuple[int, int], dict[int, Buffer]] = defaultdict(dict)
    for moment in parts_of(program.assignment, FULLEST):
        for number in sorted(places.keys() & set(numbers_in(moment, 2))):
            allocation, offset, size = places[number]
            writer = program.instructions.get(writers.get(number, 0), "")
            needed[allocation, offset][number] = Buffer(size, _shares(writer, instructions))
    now: dict[Path, float] = defaultdict(float)
    for here in needed.values():
        _count(here, now, 1)
    return now


def _shares(writer: str, instructions: Mapping[str, Instruction]) -> Mapping[Path, float]:
    """The operations of the instruction that writes a buffer."""
    found = instructions.get(writer)
    return found.shares if found else {(): 1.0}


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
