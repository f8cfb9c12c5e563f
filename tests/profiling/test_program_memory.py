"""Temporary memory of compiled programs by operation, from their beginning to their end."""

import gc
import json
from dataclasses import asdict, replace

import jax
import jax.numpy as jnp
import pytest

from profiling.by_hand import USES, profile
from rollmill.core.operations import operation_scope
from rollmill.profiler.report.html import profile_page
from rollmill.profiler.report.memory import COLOURS, memory_section
from rollmill.profiler.report.terminal import draw_profile
from rollmill.profiling.hlo import Instruction, read_instructions
from rollmill.profiling.jax_trace import trace_of_programs
from rollmill.profiling.program_memory import HEAPS, MAX_INTERVALS, memory_by_operation
from rollmill.profiling.protobuf import fields_of, number_in, numbers_in, part_in
from rollmill.profiling.results import MemoryUse, OperationMemory, read_profile
from rollmill.profiling.traced_programs import AssignedProgram, assigned_programs, instruction_names, known_program

SIDE = 512
MATRIX = 4 * SIDE * SIDE


def work(x):
    """Matrices of the policy, then of gradients; at least two of the policy's are there at once."""
    with operation_scope("policy"):
        first = jnp.sort(jnp.outer(x, x), axis=0)
        second = jnp.sort(jnp.flip(first, 1), axis=1)
    with operation_scope("gradients"):
        return jnp.sort(second.T @ second, axis=0).sum()


def traced_program(name, compiled):
    """What a trace says of a compiled program."""
    module = compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    program = known_program(name, module, temporary, assigned_programs(trace_of_programs()))
    assert program is not None
    return program


def from_the_cache(program):
    """The same program, without how its allocations were filled."""
    kept = b"".join(field(number, value) for number, value in fields_of(program.assignment) if number != HEAPS)
    return program._replace(assignment=kept)


@pytest.fixture(scope="module", autouse=True)
def no_other_programs():
    """A trace tells of every program of its process: of those that other modules have compiled, too."""
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="module")
def compiled():
    return jax.jit(work).lower(jnp.linspace(0.0, 1.0, SIDE)).compile()


@pytest.fixture(scope="module")
def found(compiled):
    program = traced_program("jit_work", compiled)
    return memory_by_operation(program, read_instructions(compiled.as_text())), compiled.memory_analysis()


def test_temporary_memory_is_divided_among_the_operations_that_write_it(found):
    operations, stats = found
    assert sum(one.bytes for one in operations) == pytest.approx(stats.temp_size_in_bytes, rel=0.01)
    by_path = {one.path: one for one in operations}
    assert by_path["policy",].bytes >= MATRIX
    assert set(by_path) <= {("policy",), ("gradients",), ("other",)}


def test_it_is_told_from_the_beginning_to_the_end(found):
    courses = {one.path: one.course for one in found[0]}
    policy, gradients = courses["policy",], courses["gradients",]
    assert 2 <= len(policy) == len(gradients) <= MAX_INTERVALS
    assert gradients[0] == 0 < policy[0]
    assert policy[-1] < max(policy)
    assert policy.index(max(policy)) < gradients.index(max(gradients))
    assert max(map(sum, zip(*courses.values(), strict=True))) == sum(one.bytes for one in found[0])


def test_of_a_program_from_the_cache_the_fullest_moment_is_known(compiled, found):
    program = from_the_cache(traced_program("jit_work", compiled))
    again = memory_by_operation(program, read_instructions(compiled.as_text()))
    assert not any(one.course for one in again)
    assert {one.path: one.bytes for one in again} == {one.path: one.bytes for one in found[0] if one.bytes}


def loop(x):
    """Two matrices that a loop carries on, in place."""
    with operation_scope("start"):
        state = jnp.outer(x, x), jnp.outer(x, -x)
    with operation_scope("steps"):
        state, _ = jax.lax.scan(lambda two, _: ((jnp.sort(two[1], axis=0), two[0] + 1.0), None), state, length=3)
        return state[0].sum() + state[1].sum()


def test_what_a_loop_carries_on_is_for_what_wrote_it_before():
    compiled = jax.jit(loop).lower(jnp.linspace(0.0, 1.0, SIDE)).compile()
    program, instructions = traced_program("jit_loop", compiled), read_instructions(compiled.as_text())
    by_path = {one.path: one.bytes for one in memory_by_operation(program, instructions)}
    assert by_path["start",] >= MATRIX and by_path["steps",] >= MATRIX
    assert by_path.get(("other",), 0) < 100
    kept = {one.path: one.bytes for one in memory_by_operation(from_the_cache(program), instructions)}
    assert sum(kept.values()) == pytest.approx(sum(by_path.values()), abs=100) and kept.get(("other",), 0) < 100


def test_programs_that_differ_in_their_shapes_alone_have_their_own_memory():
    made = [jax.jit(loop).lower(jnp.linspace(0.0, 1.0, side)).compile() for side in (SIDE // 2, SIDE)]
    for compiled in made:
        program, stats = traced_program("jit_loop", compiled), compiled.memory_analysis()
        operations = memory_by_operation(program, read_instructions(compiled.as_text()))
        assert 0.5 < sum(one.bytes for one in operations) / stats.temp_size_in_bytes <= 1.0


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
    """Events of a kind, a buffer, an instruction, and one whose memory it uses; the allocation's index is old."""
    made = (
        field(1, kind) + field(2, buffer) + field(4, name.encode()) + b"".join(field(5, one) for one in used)
        for kind, buffer, name, *used in events
    )
    return field(4, b"".join(field(1, each) for each in made) + field(3, 99))


ALLOCATE, FREE, SHARE = 0, 1, 2
COLLECT, LEARN = ("collect",), ("learn",)


def program(assignment):
    return AssignedProgram("jit_step", {}, assignment)


def of(shares):
    return Instruction("kernel", shares, 0.0, 0.0)


INSTRUCTIONS = {
    "first": of({COLLECT: 1.0}),
    "second": of({COLLECT: 0.5, LEARN: 0.5}),
    "third": of({LEARN: 1.0}),
    "zeros": of({(): 1.0}),
    "loop": Instruction("container", {LEARN: 1.0}, 0.0, 0.0),
}


def test_buffers_in_one_place_share_its_memory():
    assignment = allocation(7, [(1, 0, 300), (2, 512, 100), (3, 0, 200)]) + heap(
        (ALLOCATE, 1, "first"),
        (ALLOCATE, 2, "second"),
        (SHARE, 3, "third", 1),
        (FREE, 1, ""),
        (FREE, 2, ""),
        (FREE, 3, ""),
    )
    assert memory_by_operation(program(assignment), INSTRUCTIONS) == (
        OperationMemory(COLLECT, 350, (300, 350, 50, 0, 0)),
        OperationMemory(LEARN, 50, (0, 50, 250, 200, 0)),
    )


@pytest.mark.parametrize("passes_on", ["a parameter", "loop"])
def test_memory_that_an_instruction_passes_on_is_for_what_wrote_it(passes_on):
    assignment = allocation(0, [(1, 0, 300), (2, 0, 300), (3, 0, 300)]) + heap(
        (ALLOCATE, 1, "first"),
        (SHARE, 2, passes_on, 1),
        (FREE, 1, ""),
        (SHARE, 3, "third", 2),
        (FREE, 2, ""),
        (FREE, 3, ""),
    )
    assert memory_by_operation(program(assignment), INSTRUCTIONS) == (
        OperationMemory(COLLECT, 300, (300, 0, 0)),
        OperationMemory(LEARN, 0, (0, 300, 0)),
    )


def test_memory_that_no_operation_writes_at_first_is_for_the_one_that_does():
    assignment = allocation(0, [(1, 0, 300), (2, 0, 300), (3, 512, 20)]) + heap(
        (ALLOCATE, 3, "zeros"), (ALLOCATE, 1, "zeros"), (SHARE, 2, "loop", 1), (FREE, 1, ""), (FREE, 2, "")
    )
    assert memory_by_operation(program(assignment), INSTRUCTIONS) == (
        OperationMemory(LEARN, 300, (0, 300, 0)),
        OperationMemory(("other",), 20, (20, 20, 20)),
    )


def test_of_a_program_from_the_cache_what_is_passed_on_is_for_a_writer_of_its_place():
    writers = {1: "loop", 2: "first", 3: "third"}
    buffers = b"".join(field(1, field(1, number) + field(3, field(4, number))) for number in writers)
    places = allocation(0, [(1, 0, 300), (2, 0, 300), (3, 0, 200)])
    fullest = field(5, field(1, 0) + field(2, bytes([1])))
    kept = AssignedProgram("jit_step", writers, buffers + places + fullest)
    assert memory_by_operation(kept, INSTRUCTIONS) == (OperationMemory(COLLECT, 300),)


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
    assert len(one.course) == MAX_INTERVALS and one.bytes == max(one.course) == 1000
    assert sorted(one.course)[:-1] == [10] * (MAX_INTERVALS - 1)


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
    assert known_program("jit_step", whole, 0, [another, this, start]) is this
    assert known_program("jit_step", module("u", "v", "x"), 0, [another, this, start]) is None
    assert known_program("jit_step", b"", 0, []) is None


def test_fields_of_protocol_buffers_are_read():
    message = b"\x08\x96\x01" + b"\x12\x03abc" + b"\x19" + bytes(8) + b"\x25" + bytes(4) + b"\x2a\x02\x05\x06"
    assert list(fields_of(message)) == [(1, 150), (2, b"abc"), (3, bytes(8)), (4, bytes(4)), (5, b"\x05\x06")]
    assert number_in(message, 1) == 150 and number_in(message, 9) == 0
    assert list(numbers_in(message, 5)) == [5, 6] and list(numbers_in(message, 1)) == [150]
    assert part_in(message, 2) == b"abc" and part_in(message, 9) == b""


def test_reports_tell_it():
    by_hand = profile()
    assert "learn / gradients 180 MiB" in " ".join(draw_profile(by_hand, width=140).split())
    page = profile_page(by_hand)
    assert "Temporary memory of jit_learn" in page and "180 MiB at most" in page
    assert read_profile(json.dumps(asdict(by_hand)), where="here") == by_hand


def drawn_memory(memory) -> str:
    """Memory of programs as the page draws it."""
    return "".join(memory_section(memory).body)


def test_operations_without_a_colour_of_their_own_are_drawn_as_one():
    many = tuple(OperationMemory((f"part {index}",), 100 - index, (100 - index,)) for index in range(COLOURS + 2))
    use = MemoryUse("jit_step", 1, 1, 1000, many)
    drawn = drawn_memory([use])
    assert drawn.count("<path") == COLOURS + 1 and "<title>all smaller ones</title>" in drawn
    assert drawn_memory([replace(use, operations=many[:COLOURS])]).count("<path") == COLOURS
    assert drawn_memory([replace(use, operations=())]).count("<path") == 0
    larger = MemoryUse("jit_other", 1, 1, 2000)
    assert "Temporary memory of jit_step" in drawn_memory([larger, use])


def test_a_page_says_how_to_see_the_course_of_a_program_from_the_cache():
    kept = tuple(replace(one, course=()) for one in USES)
    drawn = drawn_memory([MemoryUse("jit_step", 1, 1, 1000, kept)])
    assert "<path" not in drawn and "180 MiB" in drawn and "ROLLMILL_CACHE_DIR" in drawn
