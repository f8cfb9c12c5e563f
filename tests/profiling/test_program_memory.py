"""Temporary memory of compiled programs by operation, from their beginning to their end."""

import json
from dataclasses import asdict, replace

import jax
import jax.numpy as jnp
import pytest

from profiling.by_hand import USES, profile
from rollmill.core.operations import traced
from rollmill.profiling.hlo import Instruction, read_instructions
from rollmill.profiling.jax_trace import trace_of_programs
from rollmill.profiling.program_memory import HEAPS, MOST_INTERVALS, memory_by_operation
from rollmill.profiling.protobuf import fields_of, number_in, part_in
from rollmill.profiling.report.html import profile_page
from rollmill.profiling.report.memory import COLOURS, memory_section
from rollmill.profiling.report.terminal import draw_profile
from rollmill.profiling.results import MemoryUse, OperationMemory, read_profile
from rollmill.profiling.traced_programs import AssignedProgram, assigned_programs, instruction_names, known_program

SIDE = 512
MATRIX = 4 * SIDE * SIDE


def work(x):
    """Matrices of the policy, then of gradients; at least two of the policy's are there at once."""
    with traced("policy"):
        first = jnp.sort(jnp.outer(x, x), axis=0)
        second = jnp.sort(jnp.flip(first, 1), axis=1)
    with traced("gradients"):
        return jnp.sort(second.T @ second, axis=0).sum()


@pytest.fixture(scope="module")
def compiled():
    """The program, and what a trace says of it."""
    made = jax.jit(work).lower(jnp.linspace(0.0, 1.0, SIDE)).compile()
    module = made.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    program = known_program("jit_work", module, assigned_programs(trace_of_programs()))
    assert program is not None
    return made, program


@pytest.fixture(scope="module")
def found(compiled):
    made, program = compiled
    return memory_by_operation(program, read_instructions(made.as_text())), made.memory_analysis()


def test_temporary_memory_is_divided_among_the_operations_that_write_it(found):
    operations, stats = found
    assert sum(one.bytes for one in operations) == pytest.approx(stats.temp_size_in_bytes, rel=0.01)
    by_path = {one.path: one for one in operations}
    assert by_path["policy",].bytes >= MATRIX
    assert set(by_path) <= {("policy",), ("gradients",), ("other",)}


def test_it_is_told_from_the_beginning_to_the_end(found):
    courses = {one.path: one.course for one in found[0]}
    policy, gradients = courses["policy",], courses["gradients",]
    assert 2 <= len(policy) == len(gradients) <= MOST_INTERVALS
    assert gradients[0] == 0 < policy[0]
    assert policy[-1] < max(policy)
    assert policy.index(max(policy)) < gradients.index(max(gradients))
    assert max(map(sum, zip(*courses.values(), strict=True))) == sum(one.bytes for one in found[0])


def test_of_a_program_from_the_cache_the_fullest_moment_is_known(compiled, found):
    made, program = compiled
    kept = b"".join(field(number, value) for number, value in fields_of(program.assignment) if number != HEAPS)
    again = memory_by_operation(program._replace(assignment=kept), read_instructions(made.as_text()))
    assert not any(one.course for one in again)
    assert {one.path: one.bytes for one in again} == {one.path: one.bytes for one in found[0] if one.bytes}


def field(number, value):
    """A field of a serialised protocol buffer."""
    if isinstance(value, int):
        return varint(8 * number) + varint(value)
    return varint(8 * number + 2) + varint(len(value)) + value


def varint(value):
    rest = bytes([value & 127])
    return rest if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def allocation(index, buffers, **kind):
    """An allocation with buffers of number, offset and size."""
    flags = b"".join(field(number, 1) for number in kind.values())
    assigned = (field(1, number) + field(2, offset) + field(3, size) for number, offset, size in buffers)
    return field(3, field(1, index) + field(2, 1000) + flags + b"".join(field(9, each) for each in assigned))


def heap(*events):
    """Events of a kind, a buffer and an instruction; the index of the allocation is not up to date."""
    made = (field(1, kind) + field(2, buffer) + field(4, name.encode()) for kind, buffer, name in events)
    return field(4, b"".join(field(1, each) for each in made) + field(3, 99))


ALLOCATE, FREE, SHARE = 0, 1, 2
COLLECT, LEARN = ("collect",), ("learn",)


def program(assignment):
    return AssignedProgram("jit_step", {}, assignment)


def of(shares):
    return Instruction("kernel", shares, 0.0, 0.0)


def test_buffers_in_one_place_share_its_memory():
    assignment = allocation(7, [(1, 0, 300), (2, 512, 100), (3, 0, 200)]) + heap(
        (ALLOCATE, 1, "first"),
        (ALLOCATE, 2, "second"),
        (SHARE, 3, "third"),
        (FREE, 1, ""),
        (FREE, 2, ""),
        (FREE, 3, ""),
    )
    instructions = {
        "first": of({COLLECT: 1.0}),
        "second": of({COLLECT: 0.5, LEARN: 0.5}),
        "third": of({LEARN: 1.0}),
    }
    assert memory_by_operation(program(assignment), instructions) == (
        OperationMemory(COLLECT, 350, (300, 350, 350, 50, 0, 0)),
        OperationMemory(LEARN, 50, (0, 50, 50, 250, 200, 0)),
    )


def test_arguments_and_results_are_not_temporary():
    heaps = heap((ALLOCATE, 1, "first"), (ALLOCATE, 2, "first"))
    given = allocation(0, [(1, 0, 300)], parameter=5)
    returned = allocation(1, [(2, 0, 300)], result=7)
    assert memory_by_operation(program(given + returned + heaps), {"first": of({COLLECT: 1.0})}) == ()


def test_of_long_programs_each_interval_has_its_fullest_moment():
    events = [(kind, buffer, "first") for buffer in range(1, 500) for kind in (ALLOCATE, FREE)]
    buffers = [(buffer, 0, 1000 if buffer == 250 else 10) for buffer in range(1, 500)]
    made = program(allocation(0, buffers) + heap(*events))
    (one,) = memory_by_operation(made, {"first": of({COLLECT: 1.0})})
    assert len(one.course) == MOST_INTERVALS and one.bytes == max(one.course) == 1000
    assert sorted(one.course)[:-1] == [10] * (MOST_INTERVALS - 1)


def test_a_compiler_that_does_not_say_what_is_live():
    assert memory_by_operation(program(b""), {}) == ()


def module(*names):
    """A program with one computation."""
    instructions = (field(1, name.encode()) + field(35, ord(name)) for name in names)
    return field(3, b"".join(field(2, each) for each in instructions))


def test_a_program_is_known_by_most_of_its_instructions():
    whole = module("a", "b", "c", "d")
    assert instruction_names(whole) == {97: "a", 98: "b", 99: "c", 100: "d"}
    another, this, start = (
        AssignedProgram(name, dict(enumerate(names)), b"")
        for name, names in (("jit_step", "abx"), ("jit_step", "abcx"), ("jit_start", "abcd"))
    )
    assert known_program("jit_step", whole, [another, this, start]) is this
    assert known_program("jit_step", module("u", "v", "x"), [another, this, start]) is None
    assert known_program("jit_step", b"", []) is None


def test_fields_of_protocol_buffers_are_read():
    message = b"\x08\x96\x01" + b"\x12\x03abc" + b"\x19" + bytes(8) + b"\x25" + bytes(4)
    assert list(fields_of(message)) == [(1, 150), (2, b"abc"), (3, bytes(8)), (4, bytes(4))]
    assert number_in(message, 1) == 150 and number_in(message, 9) == 0
    assert part_in(message, 2) == b"abc" and part_in(message, 9) == b""


def test_reports_tell_it():
    by_hand = profile()
    assert "learn / gradients 180 MiB" in " ".join(draw_profile(by_hand, width=140).split())
    page = profile_page(by_hand)
    assert "Temporary memory of jit_learn" in page and "180 MiB at most" in page
    assert read_profile(json.dumps(asdict(by_hand)), where="here") == by_hand


def test_operations_without_a_colour_of_their_own_are_drawn_as_one():
    many = tuple(OperationMemory((f"part {index}",), 100 - index, (100 - index,)) for index in range(COLOURS + 2))
    use = MemoryUse("jit_step", 1, 1, 1000, many)
    drawn = memory_section([use])
    assert drawn.count("<path") == COLOURS + 1 and "<title>others</title>" in drawn
    assert memory_section([replace(use, operations=many[:COLOURS])]).count("<path") == COLOURS
    assert memory_section([replace(use, operations=())]).count("<path") == 0


def test_a_page_says_how_to_see_the_course_of_a_program_from_the_cache():
    kept = tuple(replace(one, course=()) for one in USES)
    drawn = memory_section([MemoryUse("jit_step", 1, 1, 1000, kept)])
    assert "<path" not in drawn and "180 MiB" in drawn and "ROLLMILL_CACHE_DIR" in drawn
