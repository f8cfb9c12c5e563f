"""Windows of this process, recorded."""

import time

import jax
import jax.numpy as jnp

from rollmill.core.operations import operation
from rollmill.profiling.correction import EventCosts
from rollmill.profiling.recording import RecordedWindow, TraceRecorder
from rollmill.profiling.summary import ProcessWindows, operations

NUMBERS = jnp.linspace(0.0, 1.0, 50_000)


def record(program) -> RecordedWindow:
    program(NUMBERS).block_until_ready()
    recorder = TraceRecorder()
    recorder.start()
    begin = time.monotonic_ns()
    program(NUMBERS).block_until_ready()
    return recorder.stop(begin, time.monotonic_ns())


def sorted_often(numbers):
    return jax.lax.fori_loop(0, 4, lambda _, x: jnp.sort(-x), numbers)


def test_a_program_without_operations_is_recorded_under_no_name():
    window = record(jax.jit(sorted_often))
    found = operations([ProcessWindows("training", [window])], 1.0, EventCosts(0.0, 0.0), 1.0)
    assert max(found, key=lambda each: each.device).path == ("other",)
    assert all(each.device == 0.0 or each.path == ("other",) for each in found)


def test_programs_with_equal_names_keep_their_own_operations():
    def step(numbers):
        with operation("first"):
            return sorted_often(numbers)

    first = jax.jit(step)
    first(NUMBERS)

    def step(numbers):
        with operation("second"):
            return sorted_often(numbers)

    second = jax.jit(step)
    second(NUMBERS)
    for name, program in (("first", first), ("second", second)):
        times = record(program).times.device
        assert max(times, key=lambda path: times[path].work) == (name,)
