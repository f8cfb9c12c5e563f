"""Attributes temporary memory to operations, based on the buffer assignment of XLA.

XLA plans the memory of a program when it compiles it. It visits the instructions in order, instructions in a loop
once, and gives each buffer a place in an allocation, from the instruction that first writes it to the instruction
that last reads it. A buffer belongs to the operation whose instruction first writes it. A buffer carried by a loop
belongs to the operation that wrote it before the loop, if there is one.
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from rollmill.profiling.hlo import Instruction
from rollmill.profiling.hlo_text import Path
from rollmill.profiling.protobuf import number_in, numbers_in, part_in, parts_of
from rollmill.profiling.results import UNNAMED, OperationMemory
from rollmill.profiling.traced_programs import AssignedProgram, temporary_allocations

BUFFERS, HEAPS, FULLEST = 1, 4, 5
"""Fields of a `BufferAssignmentProto` (xla/service/hlo.proto). The second holds the events that fill
allocations, the last the buffers that are needed when each is fullest."""
FREE = 1
"""Kind of the event after which a buffer is free. Events of other kinds allocate a buffer."""
MAX_INTERVALS = 120
"""Maximum number of intervals into which the instructions of a program are divided."""


Shares: TypeAlias = Mapping[Path, float]
"""The operations of a buffer, each with its share."""
NO_OPERATION: Shares = {(): 1.0}


class Place(NamedTuple):
    """The position of a buffer in an allocation, in bytes."""

    allocation: int
    offset: int
    size: int


class Buffer(NamedTuple):
    """A buffer that is live at some point of a program."""

    size: int
    shares: Shares


class HeapEvent(NamedTuple):
    """The point of a program at which a buffer begins or ceases to be live."""

    buffer: int
    is_end: bool
    writer: str
    """The instruction that writes the buffer, or passes it on."""
    origin: int
    """The buffer with the same memory before, or the buffer itself if its memory was free."""


def memory_by_operation(
    program: AssignedProgram, instructions: Mapping[str, Instruction]
) -> tuple[OperationMemory, ...]:
    """Returns the temporary memory of each operation, sorted by its size at peak memory, the largest first.

    The result is empty if the compiler does not report memory. For a program from the JAX compilation cache, only
    the point of peak memory is reported, so the memory of operations at other points is unknown.
    """
    places = {
        number_in(assigned, 1): Place(number_in(allocation, 1), number_in(assigned, 2), number_in(assigned, 3))
        for allocation in temporary_allocations(program.assignment)
        for assigned in parts_of(allocation, 9)
    }
    events = _events(program.assignment, places)
    shares = _shares_of_buffers(events, instructions)
    totals = [sum(now.values()) for now in _moments(events, places, shares)]
    chosen = {max(interval, key=totals.__getitem__) for interval in _intervals(len(totals))}
    # Iterated twice instead of kept in a list, because a large program has very many points.
    course = [dict(now) for index, now in enumerate(_moments(events, places, shares)) if index in chosen]
    if course:
        fullest = max(course, key=lambda moment: sum(moment.values()))
    else:
        fullest = _find_kept_moment(program, places, instructions)
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


def _events(assignment: bytes, places: Container[int]) -> list[HeapEvent]:
    """Returns the events of temporary memory, in the order of the instructions."""
    heaps = [
        [event for event in map(_event, parts_of(heap, 1)) if event.buffer in places]
        for heap in parts_of(assignment, HEAPS)
    ]
    return max(heaps, key=len, default=[])  # other kinds of memory of a backend are small


def _event(message: bytes) -> HeapEvent:
    buffer = number_in(message, 2)
    return HeapEvent(
        buffer,
        is_end=number_in(message, 1) == FREE,
        writer=part_in(message, 4).decode(),
        origin=number_in(message, 5) or buffer,
    )


def _moments(
    events: Iterable[HeapEvent], places: Mapping[int, Place], shares: Mapping[int, Shares]
) -> Iterator[Mapping[Path, float]]:
    """Yields the bytes of each operation after each change, always in the same mapping."""
    needed: dict[tuple[int, int], dict[int, Buffer]] = defaultdict(dict)
    now: dict[Path, float] = defaultdict(float)
    for event in events:
        place = places[event.buffer]
        here = needed[place.allocation, place.offset]
        before = _largest(here)
        if event.is_end:
            here.pop(event.buffer, None)
        else:
            here[event.buffer] = Buffer(place.size, shares[event.buffer])
        after = _largest(here)
        if before != after:
            _count(before, now, -1)
            _count(after, now, 1)
            yield now


def _shares_of_buffers(events: Iterable[HeapEvent], instructions: Mapping[str, Instruction]) -> dict[int, Shares]:
    """Returns the operations of each buffer.

    Of the buffers that share memory one after another, as those that a loop carries, some are written by
    instructions of no operation, such as zeros before the loop, or passed on. They are for the first that has
    an operation.
    """
    own: dict[int, Shares | None] = {}
    origins: dict[int, int] = {}
    first: dict[int, Shares] = {}
    for event in events:
        if event.is_end:
            continue
        writer = instructions.get(event.writer)
        own[event.buffer], origins[event.buffer] = _operations_of_writer(writer), event.origin
        if writer is not None and writer.shares != NO_OPERATION:
            first.setdefault(event.origin, writer.shares)
    return {number: shares or first.get(origins[number], NO_OPERATION) for number, shares in own.items()}


def _find_kept_moment(
    program: AssignedProgram, places: Mapping[int, Place], instructions: Mapping[str, Instruction]
) -> Mapping[Path, float]:
    """Returns the bytes of each operation at the fullest moment that the compiler reports.

    A buffer that no operation writes belongs to the first operation that writes a buffer with the same offset and
    size.
    """
    own: dict[int, Shares] = {}
    first: dict[Place, Shares] = {}
    for buffer in sorted(parts_of(program.assignment, BUFFERS), key=lambda each: number_in(each, 1)):
        number, name = number_in(buffer, 1), program.instructions.get(number_in(part_in(buffer, 3), 4), "")
        if number in places and (shares := _operations_of_writer(instructions.get(name))):
            own[number] = shares
            first.setdefault(places[number], shares)
    needed: dict[tuple[int, int], dict[int, Buffer]] = defaultdict(dict)
    for moment in parts_of(program.assignment, FULLEST):
        for number in sorted(places.keys() & set(numbers_in(moment, 2))):
            place = places[number]
            shares = own.get(number) or first.get(place, NO_OPERATION)
            needed[place.allocation, place.offset][number] = Buffer(place.size, shares)
    now: dict[Path, float] = defaultdict(float)
    for here in needed.values():
        _count(_largest(here), now, 1)
    return now


def _operations_of_writer(writer: Instruction | None) -> Shares | None:
    """Returns the operations of the instruction that writes a buffer, or None for loops and instructions
    without.
    """
    if writer is None or writer.kind == "container" or writer.shares == NO_OPERATION:
        return None
    return writer.shares


def _largest(buffers: Mapping[int, Buffer]) -> Buffer | None:
    """Returns the largest of the buffers that share one place, the first of equal ones."""
    return max(buffers.values(), key=lambda buffer: buffer.size, default=None)


def _count(buffer: Buffer | None, now: dict[Path, float], sign: int) -> None:
    """Adds a buffer's bytes to its operations, or subtracts them."""
    if buffer is not None:
        for path, share in buffer.shares.items():
            now[path] += sign * share * buffer.size


def _intervals(moments: int) -> Iterator[range]:
    """Divides moments into intervals of equal length, each of at least one."""
    edges = [moments * edge // MAX_INTERVALS for edge in range(MAX_INTERVALS + 1)]
    return (range(start, end) for start, end in pairwise(edges) if end > start)
