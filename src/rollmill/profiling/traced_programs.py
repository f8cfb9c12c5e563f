"""Finds compiled programs in a trace's metadata, where the compiler says more of them than executables do."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from rollmill.profiling.protobuf import number_in, part_in, parts_of

LEAST_IN_COMMON = 0.5
"""Share of the instructions that two texts of one program have in common at least."""


class AssignedProgram(NamedTuple):
    """A compiled program, and where its buffers are."""

    name: str
    instructions: Mapping[int, str]
    """The names of all of them, by number."""
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


def known_program(name: str, module: bytes, programs: Iterable[AssignedProgram]) -> AssignedProgram | None:
    """The program among those of a trace; None if it is not there.

    On a GPU a program has another number in traces than its executable has, and a few instructions that were added
    last are in one of them only: so it is known by most of its instructions.

    Args:
        name: the program's.
        module: its `HloModuleProto`, serialised.
        programs: those in a trace.
    """
    names = {*instruction_names(module).values()}
    alike = [(_common(names, {*each.instructions.values()}), each) for each in programs if each.name == name]
    common, program = max(alike, key=lambda pair: pair[0], default=(0.0, None))
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
