"""Finds compiled programs in the metadata of a trace, which contains more about them than executables do."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from rollmill.profiling.protobuf import number_in, part_in, parts_of

ALLOCATIONS = 3
"""Number of the field of a `BufferAssignmentProto` with its allocations."""
NOT_TEMPORARY = (3, 5, 7, 12)
"""Fields of a `BufferAllocationProto` that mark memory that is not temporary: thread-local memory, parameters,
possible results and constants."""
PLANES, PLANE_NAME, PROGRAMS, STATISTICS, BYTES = 1, 2, 4, 5, 6
"""Numbers of fields of an `XSpace`, of its planes, of the programs in a plane's metadata, and of their statistics
(tsl/profiler/protobuf/xplane.proto)."""
MODULE, ASSIGNMENT = 1, 3
"""Numbers of fields of an `HloProto` (xla/service/hlo.proto)."""
COMPUTATIONS, INSTRUCTIONS, NAME, INSTRUCTION_ID = 3, 2, 1, 35
"""Numbers of fields of an `HloModuleProto`, of its computations, and of their instructions. The name of a module
is also 1."""
MIN_IN_COMMON = 0.5
"""Minimum share of common instructions for which two programs count as the same."""


class AssignedProgram(NamedTuple):
    """A compiled program in a trace, with its buffer assignment."""

    name: str
    instructions: Mapping[int, str]
    """The names of the program's instructions, by number."""
    assignment: bytes
    """A serialized `BufferAssignmentProto`."""

    @property
    def temporary(self) -> int:
        """Size of the program's temporary memory in bytes."""
        return sum(number_in(each, 2) for each in temporary_allocations(self.assignment))


def temporary_allocations(assignment: bytes) -> Iterator[bytes]:
    """Yields the `BufferAllocationProto`s of temporary memory in a serialized `BufferAssignmentProto`."""
    for allocation in parts_of(assignment, ALLOCATIONS):
        if not any(number_in(allocation, field) for field in NOT_TEMPORARY):
            yield allocation


def assigned_programs(trace: bytes) -> list[AssignedProgram]:
    """Returns the compiled programs in the metadata of a trace, a serialized `XSpace`."""
    metadata = (plane for plane in parts_of(trace, PLANES) if part_in(plane, PLANE_NAME) == b"/host:metadata")
    statistics = (
        part_in(statistic, BYTES)  # an `HloProto`
        for plane in metadata
        for entry in parts_of(plane, PROGRAMS)
        for statistic in parts_of(part_in(entry, 2), STATISTICS)  # the value of a map entry
    )
    programs = ((part_in(each, MODULE), part_in(each, ASSIGNMENT)) for each in statistics)
    return [
        AssignedProgram(part_in(module, NAME).decode(), instruction_names(module), assignment)
        for module, assignment in programs
        if module and assignment
    ]


def known_program(
    name: str, module: bytes, temporary: int, programs: Iterable[AssignedProgram]
) -> AssignedProgram | None:
    """Returns the program of a trace that corresponds to `module`, or None.

    On a GPU, the number of a program in a trace differs from the number of its executable, and one of the two may
    lack a few instructions that were added last. A program therefore matches if it has most of the instructions of
    `module`, a serialized `HloModuleProto`. Its `temporary` memory in bytes distinguishes programs that differ
    only in shapes.
    """
    names = {*instruction_names(module).values()}
    alike = [(_common(names, {*each.instructions.values()}), each) for each in programs if each.name == name]
    common, program = max(
        alike, key=lambda pair: (round(pair[0], 2), -abs(pair[1].temporary - temporary)), default=(0.0, None)
    )
    return program if common >= MIN_IN_COMMON else None


def _common(names: set[str], others: set[str]) -> float:
    return len(names & others) / max(1, len(names | others))


def instruction_names(module: bytes) -> dict[int, str]:
    """Returns the names of all instructions in a serialized `HloModuleProto`, by number."""
    return {
        number_in(instruction, INSTRUCTION_ID): part_in(instruction, NAME).decode()
        for computation in parts_of(module, COMPUTATIONS)
        for instruction in parts_of(computation, INSTRUCTIONS)
    }
