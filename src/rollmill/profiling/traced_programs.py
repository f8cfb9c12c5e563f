"""Finds compiled programs in a trace's metadata, where the compiler says more of them than executables do."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from rollmill.profiling.protobuf import number_in, part_in, parts_of

ALLOCATIONS = 3
"""The number of a `BufferAssignmentProto`'s field."""
NOT_TEMPORARY = (3, 5, 7, 12)
"""Numbers of a `BufferAllocationProto`'s fields: whether it is thread-local, a parameter, perhaps a result, a
constant."""
LEAST_IN_COMMON = 0.5
"""Share of the instructions that two texts of one program have in common at least."""


class AssignedProgram(NamedTuple):
    """A compiled program, and where its buffers are."""

    name: str
    instructions: Mapping[int, str]
    """The names of the program's instructions, by their numbers."""
    assignment: bytes
    """A `BufferAssignmentProto`, serialised."""

    @property
    def temporary(self) -> int:
        """Bytes of its temporary memory."""
        return sum(number_in(each, 2) for each in temporary_allocations(self.assignment))


def temporary_allocations(assignment: bytes) -> Iterator[bytes]:
    """The serialised `BufferAllocationProto`s of temporary memory.

    Args:
        assignment: a `BufferAssignmentProto`, serialised.
    """
    for allocation in parts_of(assignment, ALLOCATIONS):
        if not any(number_in(allocation, field) for field in NOT_TEMPORARY):
            yield allocation


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


def known_program(
    name: str, module: bytes, temporary: int, programs: Iterable[AssignedProgram]
) -> AssignedProgram | None:
    """The program among those of a trace; None if it is not there.

    On a GPU a program has another number in traces than its executable has, and a few instructions that were added
    last are in one of them only: so it is known by most of its instructions, and among programs that differ in
    their shapes alone by its memory.

    Args:
        name: the program's.
        module: its `HloModuleProto`, serialised.
        temporary: bytes of its temporary memory.
        programs: those in a trace.
    """
    names = {*instruction_names(module).values()}
    alike = [(_common(names, {*each.instructions.values()}), each) for each in programs if each.name == name]
    common, program = max(
        alike, key=lambda pair: (round(pair[0], 2), -abs(pair[1].temporary - temporary)), default=(0.0, None)
    )
    return program if common >= LEAST_IN_COMMON else None


def _common(names: set[str], others: set[str]) -> float:
    return len(names & others) / max(1, len(names | others))


def instruction_names(module: bytes) -> dict[int, str]:
    """The names of a program's instructions, by number.

    Args:
        module: an `HloModuleProto`, serialised.
    """
    return {
        number_in(instruction, 35): part_in(instruction, 1).decode()
        for computation in parts_of(module, 3)
        for instruction in parts_of(computation, 2)
    }
