"""Takes the profiler's own cost out of what it measured (Gleeson et al., "RL-Scope", MLSys 2021, section 3.4).

Recording an event costs time, part of it inside the event, the rest after it. Within a run, windows with and
without the profiler take turns. Their difference, divided by the number of events, is an event's cost. The
reported error is a prediction error: every second window is corrected by costs from the others. The part that lies
inside events is measured on a program of known duration (`measure_event`).

On an accelerator there are two costs. A kernel, and the start of the next kernel, take longer by about the same
time in every recording. The host, too, takes longer to start kernels. If that makes the host late, the device
waits, for a time that varies between recordings. So this waiting is measured in each window. It is limited to the
time that windows without the profiler leave for it, and to its minimum over the windows.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rollmill.profiling.attribution import DeviceTime
from rollmill.profiling.hlo_text import Path
from rollmill.profiling.recording import TraceRecorder

SPAN_NANOSECONDS = 900.0
"""Highest cost of a span of the host, which cannot be told apart from the cost of a program's events."""
MAX_FACTOR = 2.0
"""Factor by which an event's cost in a training may differ from the calibrated one."""
TURNS, REPEATS = 400, 9
"""Turns of the loop of short instructions, and measurements of it."""


class PairedWindow(NamedTuple):
    """A window with the profiler, and the preceding window without it."""

    profiled: float
    """Nanoseconds of an iteration."""
    unprofiled: float
    program_events: float
    """Events of an iteration, in all processes."""
    span_events: float
    waiting: float | None = None
    """Nanoseconds of `profiled` in which an accelerator waits for the host, or None if not known."""

    @property
    def extra(self) -> float:
        """Nanoseconds that the profiler adds to an iteration."""
        return self.profiled - self.unprofiled


class EventCosts(NamedTuple):
    """Nanoseconds that recording an event adds to an iteration."""

    program: float
    span: float
    inside: float = 0.0
    """The share of a program event's cost that lies inside the event."""
    in_idle_time: bool = False
    """Whether the other share lies in the device's idle time: on an accelerator, without an event of a loop
    around it."""
    calibrated: float = 0.0
    """The cost of a program's event in a program of known duration, or 0 if it is not known."""
    waiting_kept: float | None = None
    """Nanoseconds of an iteration in which an accelerator waits for the host without the profiler, too, or None if
    its waiting is not known in all windows."""

    @property
    def bounded(self) -> float:
        """The cost of a program's event that is taken from its operation, within a factor of the calibrated one.

        On a machine with other work, windows differ by more than the profiler's cost, and that belongs to no
        events. With several processes, which disturb each other, the difference of iterations is not the cost
        of events either.
        """
        if not self.calibrated:
            return self.program
        return min(max(self.program, self.calibrated / MAX_FACTOR), self.calibrated * MAX_FACTOR)

    def on(self, *, accelerated: bool) -> "EventCosts":
        """Returns the costs in a process on an accelerator, or on a CPU. A calibration is valid for one of
        them.
        """
        if accelerated == self.in_idle_time:
            return self
        return self._replace(in_idle_time=accelerated, inside=0.0, calibrated=0.0)


def costs(
    pairs: Sequence[PairedWindow], *, inside: float = 0.0, in_idle_time: bool = False, calibrated: float = 0.0
) -> EventCosts:
    """Returns the costs of events, estimated from all these windows.

    Spans of the host cost the extra time of an iteration, up to a limit, and events of programs the rest. If the
    waiting time of an accelerator is known, it includes the cost of spans. The other arguments are fields of
    `EventCosts`.
    """
    if _know_waiting(pairs):
        program, kept = _costs_beside_waiting(pairs, calibrated)
        return EventCosts(program, 0.0, inside, in_idle_time, calibrated, kept)
    spans = [pair.extra / pair.span_events for pair in pairs if pair.span_events]
    span = min(SPAN_NANOSECONDS, _cost(spans))
    programs = [
        (pair.extra - pair.span_events * span) / pair.program_events for pair in pairs if pair.program_events
    ]
    return EventCosts(_cost(programs), span, inside, in_idle_time, calibrated)


def _know_waiting(pairs: Sequence[PairedWindow]) -> bool:
    return bool(pairs) and all(pair.waiting is not None for pair in pairs)


def _costs_beside_waiting(pairs: Sequence[PairedWindow], calibrated: float) -> tuple[float, float]:
    """Returns the cost of a program's event, and the waiting without the profiler, if the waiting is known.

    Windows show only the sum of these two effects. So events have their calibrated cost, as long as an amount
    of waiting explains the rest. Otherwise the rest is theirs. Without the profiler, a device waits no longer than
    in any window with the profiler.
    """
    unprofiled = middle_mean([pair.unprofiled for pair in pairs])
    least_waiting = min(pair.waiting or 0.0 for pair in pairs)
    working = middle_mean([pair.profiled - (pair.waiting or 0.0) for pair in pairs])
    events = middle_mean([pair.program_events for pair in pairs])
    kept = min(least_waiting, max(0.0, unprofiled - working + events * calibrated))
    cost = max(0.0, working + kept - unprofiled) / events if events else 0.0
    return cost, kept


def _cost(by_window: Sequence[float]) -> float:
    """Returns the nanoseconds of an event. Windows with other work on the machine may give negative ones."""
    return max(0.0, middle_mean(by_window)) if by_window else 0.0


def middle_mean(values: Sequence[float]) -> float:
    """Returns the interquartile mean, which ignores outliers as a median does, and varies less."""
    outer = (len(values) + 1) // 4
    return statistics.fmean(sorted(values)[outer : len(values) - outer])


def corrected_duration(pair: PairedWindow, found: EventCosts) -> float:
    """Predicts nanoseconds of an iteration without the profiler, for a window with it."""
    late = 0.0 if found.waiting_kept is None else max(0.0, (pair.waiting or 0.0) - found.waiting_kept)
    return pair.profiled - late - pair.program_events * found.program - pair.span_events * found.span


def held_out_ratio(pairs: Sequence[PairedWindow], *, calibrated: float = 0.0) -> float:
    """Returns the corrected duration of an iteration over that without the profiler: 1 if the correction is right.

    Every second pair is corrected by the costs of the others, with which it shares no window, so this is the
    error of a prediction. Each window is compared with the one before it, because the speed of a machine with
    other work changes. A single pair is corrected by its own costs.
    """
    if not _know_waiting(pairs):
        pairs = [pair._replace(waiting=None) for pair in pairs]
    found = costs(pairs[::2], calibrated=calibrated)
    return middle_mean([corrected_duration(pair, found) / pair.unprofiled for pair in pairs[1::2] or pairs])


class WithoutCost(NamedTuple):
    """The times of a process without the profiler's cost, in nanoseconds of its windows."""

    device: Mapping[Path, float]
    """Nanoseconds of each operation on the device."""
    host: float
    """The share that is left of the time of the host alone."""
    starts: float = 1.0
    """The share that is left of the time in which kernels of an accelerator are being started."""


class IdleTime(NamedTuple):
    """Nanoseconds of a process's windows in which its device does not compute."""

    host_only: float = 0.0
    """In which a thread of the host is at work."""
    neither: float = 0.0
    """In which none is."""
    starts: float = 0.0
    """The part of both in which a kernel of an accelerator is being started."""

    @property
    def waiting(self) -> float:
        """The rest, in which the device waits."""
        return max(0.0, self.host_only + self.neither - self.starts)


def without_cost(
    device: Mapping[Path, DeviceTime], found: EventCosts, *, idle: IdleTime, target: float, accelerators: int = 1
) -> WithoutCost:
    """Returns the times of a process in windows that would have taken `target` nanoseconds without the profiler.

    On an accelerator, most of the cost lies between kernels. Only the part inside kernels is subtracted from their
    times, and the remainder from the time in which kernels are being started. The device waits for the remaining
    time of the target. On a CPU, the cost is subtracted from the operations of its events. A remaining difference
    from the target, caused by spans of the host or by other work on the machine, counts as waiting time. If there
    is too little or too much of it, all times are scaled in proportion. With several `accelerators`, idle time is
    the time in which none of them computes.
    """
    corrected = {path: _corrected(times, found) for path, times in device.items()}
    busy = math.fsum(corrected.values())
    if found.in_idle_time:
        kernels = math.fsum(times.kernels for times in device.values()) / max(1, accelerators)
        outside = (1.0 - found.inside) * found.bounded * kernels
        starts = min(max(0.0, idle.starts - outside), max(0.0, target - busy))
        left = max(0.0, target - busy - starts)
        scaled = _scaled(corrected, min(1.0, _ratio(target, busy)))
        return WithoutCost(scaled, min(1.0, _ratio(left, idle.waiting)), _ratio(starts, idle.starts))
    whole = busy + idle.host_only + idle.neither
    scale = min(max(1.0, _ratio(target, whole)), _ratio(target, busy + idle.host_only))
    return WithoutCost(_scaled(corrected, scale), scale)


def _corrected(times: DeviceTime, found: EventCosts) -> float:
    if found.in_idle_time:
        return max(0.0, times.work - times.kernels * found.bounded * found.inside) + times.between
    inside, outside = found.bounded * found.inside, found.bounded * (1.0 - found.inside)
    work = max(0.0, times.work - times.work_events * inside)
    return work + max(0.0, times.between - times.between_events * outside)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 1.0


def _scaled(times: Mapping[Path, float], factor: float) -> dict[Path, float]:
    return {path: nanoseconds * factor for path, nanoseconds in times.items()}


class MeasuredEvent(NamedTuple):
    """Cost of recording one event, measured with a program of known duration."""

    nanoseconds: float
    inside: float
    """The share that lies inside the event."""


def measure_event(recorder: TraceRecorder) -> MeasuredEvent:
    """Measures the cost of recording an event, and the share of it that lies inside the event.

    A program of many short instructions in a row runs with and without the profiler. The time by which its
    kernels exceed the program without it is the cost inside. Time in which an accelerator waits for the host
    belongs to no event.
    """
    on_cpu = jax.default_backend() == "cpu"
    argument = jnp.zeros(512) if on_cpu else jnp.zeros((512, 512))
    program = jax.jit(_short_instructions).lower(argument).compile()
    run = lambda: program(argument).block_until_ready()
    measure = _measure_event_on_cpu if on_cpu else _measure_event_on_accelerator
    measured = [measure(recorder, run) for _ in range(REPEATS)]
    return MeasuredEvent(
        statistics.median(each.nanoseconds for each in measured),
        statistics.median(each.inside for each in measured),
    )


def _measure_event_on_cpu(recorder: TraceRecorder, run: Callable[[], object]) -> MeasuredEvent:
    plain = min(_nanoseconds(run) for _ in range(3))
    recorder.start()
    begin = time.monotonic_ns()
    run()
    end = time.monotonic_ns()
    window = recorder.stop(begin, end).times
    return _measured(end - begin - plain, window.kernel_time - plain, window.program_events)


def _measure_event_on_accelerator(recorder: TraceRecorder, run: Callable[[], object]) -> MeasuredEvent:
    plain = min(_nanoseconds(run) for _ in range(3))
    recorder.start()
    run()  # CUDA graphs are made anew
    begin = time.monotonic_ns()
    run()
    _, use = recorder.stop_with_use(begin, time.monotonic_ns(), read=False)
    return _measured(use.working - plain, use.computing - plain, float(use.kernels))


def _measured(extra: float, extra_inside: float, events: float) -> MeasuredEvent:
    """Returns the cost of each of these events, or 0, as without a calibration, if they made it no slower."""
    if extra <= 0.0 or not events:
        return MeasuredEvent(0.0, 0.0)
    return MeasuredEvent(extra / events, min(1.0, max(0.0, extra_inside) / extra))


def _short_instructions(x: jax.Array) -> jax.Array:
    """On a CPU they take less time than recording them, and on a GPU longer than starting them."""

    def turn(number: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(8):
            x = jax.lax.optimization_barrier(jnp.flip(x, 0) + 1.0)
        return x

    return jax.lax.fori_loop(0, TURNS, turn, x)


def _nanoseconds(run: Callable[[], object]) -> int:
    begin = time.monotonic_ns()
    run()
    return time.monotonic_ns() - begin
