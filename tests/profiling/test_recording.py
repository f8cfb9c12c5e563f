"""Windows of this process, recorded."""

import json
import time

import jax
import jax.numpy as jnp
import pytest

from rollmill.core.operations import operation
from rollmill.profiling import jax_trace, trace
from rollmill.profiling.correction import EventCosts
from rollmill.profiling.recording import RecordedWindow, TraceRecorder
from rollmill.profiling.summary import ProcessWindows, operations
from rollmill.programs.cache import names_in_cache

NUMBERS = jnp.linspace(0.0, 1.0, 50_000)


@pytest.fixture(scope="module", autouse=True)
def own_programs():
    """Clears the programs of earlier tests, which would slow a recording down, and disables loading of programs
    with equal code and other names, as recorded runs do.
    """
    jax.clear_caches()
    with names_in_cache():
        yield


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
    found = operations([ProcessWindows("training", [window], 1.0)], EventCosts(0.0, 0.0), 1.0)
    assert max(found, key=lambda each: each.device).path == ("other",)
    assert all(each.device == 0.0 or each.path == ("other",) for each in found)


def test_of_too_many_events_intervals_are_read_for_the_whole(monkeypatch):
    monkeypatch.setattr(trace, "INTERVAL", 200_000)
    program = jax.jit(lambda x: jax.lax.fori_loop(0, 60, lambda _, x: jnp.sort(-x), x))
    program(NUMBERS).block_until_ready()
    recorder = TraceRecorder(most_events=6)
    recorder.start()
    begin = time.monotonic_ns()
    program(NUMBERS).block_until_ready()
    end = time.monotonic_ns()
    window = recorder.stop(begin, end)
    assert window.every > 10
    assert window.times.duration == pytest.approx(end - begin, rel=1e-3)
    assert sum(times.work for times in window.times.device.values()) == pytest.approx(end - begin, rel=0.2)
    counted = sum(times.flops for times in window.times.device.values())
    whole = 60 * 2 * NUMBERS.size
    assert whole / 3 < counted < 3 * whole, "a sort reaches into many intervals, but is one"
    assert RecordedWindow.from_json(json.loads(json.dumps(window.to_json()))) == window


def test_what_was_recorded_outside_of_a_window_is_not_read():
    program = jax.jit(sorted_often)
    program(NUMBERS).block_until_ready()
    recorder = TraceRecorder(most_events=100)
    recorder.start()
    for _ in range(40):
        program(NUMBERS).block_until_ready()
    begin = time.monotonic_ns()
    program(NUMBERS).block_until_ready()
    end = time.monotonic_ns()
    window = recorder.stop(begin, end)
    assert window.every == 1
    assert sum(times.work for times in window.times.device.values()) == pytest.approx(end - begin, rel=0.2)


def test_the_clock_of_intervals_stands_in_those_that_are_not_read():
    sampled = trace.Sampling(every=3).time
    width = trace.INTERVAL
    assert [sampled(time) for time in (0, width // 2, width, 2 * width, 3 * width)] == [
        0,
        width // 2,
        width,
        width,
        width,
    ]
    assert sampled(3 * width + 5) == width + 5
    assert trace.Sampling().time(12345) == 12345


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


def test_a_trace_that_cannot_stay_in_memory_is_read_from_its_file(monkeypatch, tmp_path):
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(jax_trace, "_session", lambda options: None)
    made = []
    begin = jax.profiler.start_trace
    monkeypatch.setattr(
        jax.profiler, "start_trace", lambda folder, **options: made.append(folder) or begin(folder, **options)
    )
    window = record(jax.jit(sorted_often))
    assert window.times.program_events > 0
    # A killed process's are removed by the next one: see tests/core/test_temporary.py.
    assert made and all(folder.parent == tmp_path / "temporary" for folder in made)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_recording_after_an_abandoned_one_is_whole():
    sort = jax.jit(sorted_often)
    alone = record(sort).times.program_events
    recorder = TraceRecorder()
    recorder.start()
    sort(NUMBERS).block_until_ready()
    recorder.abandon()
    assert record(sort).times.program_events == alone
