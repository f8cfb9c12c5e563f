"""Takes the profiler's own cost out of what it measured (Gleeson et al., "RL-Scope", MLSys 2021, section 3.4).

Recording an event costs time, part of it inside the event, the rest after it. In one training, windows with the
profiler and without it take turns; their difference, divided by the number of events, is an event's cost. A window
is corrected with the cost that the *other* windows give, so that the error that is reported is that of a
prediction. The part that lies inside events is measured on a program of known duration (`inside_share`).
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rollmill.profiling.attribution import DeviceTime
from rollmill.profiling.hlo import Path
from rollmill.profiling.recording import TraceRecorder

SPAN_NANOSECONDS = 900.0
"""Highest cost of a span of the host, which cannot be told apart from the cost of a program's events."""
TURNS, REPEATS = 400, 3
"""Turns of the loop of short instructions, and measurements of it."""


class PairedWindow(NamedTuple):
    """A window with the profiler, and the windows without it around it."""

    profiled: float
    """Nanoseconds of an iteration."""
    unprofiled: float
    program_events: float
    """Events of an iteration, in all processes."""
    span_events: float

    @property
    def program_cost(self) -> float:
        """Nanoseconds for each event of a program, given those of the host's spans."""
        extra = self.profiled - self.unprofiled - self.span_events * self.span_cost
        return max(0.0, extra) / self.program_events if self.program_events else 0.0

    @property
    def span_cost(self) -> float:
        """Nanoseconds for each span of the host."""
        extra = max(0.0, self.profiled - self.unprofiled)
        return min(SPAN_NANOSECONDS, extra / self.span_events) if self.span_events else 0.0


class EventCosts(NamedTuple):
    """Nanoseconds that recording an event adds to an iteration."""

    program: float
    span: float
    inside: float = 0.0
    """The share of a program event's cost that lies inside the event."""
    in_idle_time: bool = False
    """The other share lies in the device's idle time: on an accelerator, whose events have none around them."""


def costs(pairs: Sequence[PairedWindow], *, inside: float = 0.0, in_idle_time: bool = False) -> EventCosts:
    """The costs by all of these windows: medians."""
    if not pairs:
        return EventCosts(0.0, 0.0, inside, in_idle_time)
    program = statistics.median(pair.program_cost for pair in pairs)
    return EventCosts(program, statistics.median(pair.span_cost for pair in pairs), inside, in_idle_time)


def corrected_duration(pair: PairedWindow, found: EventCosts) -> float:
    """Nanoseconds of an iteration without the profiler, predicted for a window with it."""
    return pair.profiled - pair.program_events * found.program - pair.span_events * found.span


def held_out_durations(pairs: Sequence[PairedWindow]) -> list[float]:
    """The corrected duration of each window, by the costs of the others; of a single one, by its own."""
    return [
        corrected_duration(pair, costs([other for other in pairs if other is not pair] or [pair]))
        for pair in pairs
    ]


def corrected_device(
    device: Mapping[Path, DeviceTime], found: EventCosts, *, longest: float = math.inf
) -> dict[Path, float]:
    """Nanoseconds of each operation on the device without the cost of its events.

    Where more would be taken than there is, the rest is taken from the other operations in proportion, so that the
    sum is right.

    Args:
        device: times of operations.
        found: costs of events.
        longest: nanoseconds that all operations together take at most: those that the training would have taken.
    """
    whole = sum(times.work + times.between for times in device.values())
    cost = found.program * sum(_costly_events(times, found) for times in device.values())
    target = max(0.0, min(whole - cost, longest))
    reduced = {path: _corrected(times, found) for path, times in device.items()}
    total = sum(reduced.values())
    return {path: value * target / total for path, value in reduced.items()} if total else dict(reduced)


def _costly_events(times: DeviceTime, found: EventCosts) -> float:
    """The number of events whose whole cost would be what lies in the operation's time."""
    return float(found.inside * times.kernels if found.in_idle_time else times.events)


def _corrected(times: DeviceTime, found: EventCosts) -> float:
    inside = times.kernels * found.program * found.inside
    after = _costly_events(times, found) * found.program - inside
    return max(0.0, times.work - inside) + max(0.0, times.between - after)


def inside_share(recorder: TraceRecorder) -> float:
    """Measures the share of an event's cost that lies inside the event.

    A program of many short instructions in a row is run with and without the profiler: kernels that take longer in
    all than the program without it have that much of the cost inside.
    """
    program = jax.jit(_many_short_instructions).lower(jnp.zeros((64, 64))).compile()
    run = lambda: program(jnp.zeros((64, 64))).block_until_ready()
    shares = []
    for _ in range(REPEATS):
        plain = min(_nanoseconds(run) for _ in range(3))
        recorder.start()
        begin = time.monotonic_ns()
        run()
        end = time.monotonic_ns()
        window = recorder.stop(begin, end).times
        events = max(1, window.program_events)
        kernels = max(1.0, sum(times.kernels for times in window.device.values()))
        cost = max(1.0, (end - begin - plain) / events)
        inside = max(0.0, window.kernel_time - plain) / kernels
        shares.append(min(1.0, inside * kernels / (cost * events)))
    return statistics.median(shares)


def _many_short_instructions(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, TURNS, lambda _, x: jnp.sort(jnp.flip(x, 0) + 1.0, axis=1)[:, ::-1], x)


def _nanoseconds(run: Callable[[], object]) -> int:
    begin = time.monotonic_ns()
    run()
    return time.monotonic_ns() - begin
