"""Removes the profiler's own cost from its measurements (Gleeson et al., "RL-Scope", MLSys 2021, section 3.4).

Recording an event costs time, partly inside the event and partly after it. Within a run, windows with and without
the profiler alternate. Their difference, divided by the number of events, is the cost of an event. The share of
the cost that falls inside events is measured with a program of known duration (`measure_event`). The reported
error is a prediction error: every second window is corrected with the costs in the other windows.

On an accelerator, recording has two costs. It prolongs each kernel and the launch of the next kernel, by about the
same time in every recording. It also slows down the host. If the host falls behind, the device waits, for a time
that differs between recordings. The waiting time is therefore measured in each window with the profiler. To
estimate it without the profiler, the time in which the device works, less the calibrated cost of its events, is
subtracted from the duration of an iteration without the profiler. The estimate is at most the minimum of the
measured times.
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
"""Upper limit for the cost of a host span, which cannot be distinguished from the cost of program events."""
MAX_FACTOR = 2.0
"""Factor by which the cost of an event in a run may differ from the calibrated cost."""
TURNS, REPEATS = 400, 9
"""Number of turns of the calibration loop of short instructions, and number of times it is measured."""


class PairedWindow(NamedTuple):
    """A window with the profiler, and the preceding window without it."""

    profiled: float
    """Duration of an iteration with the profiler, in nanoseconds."""
    unprofiled: float
    program_events: float
    """Number of program events per iteration, in all processes."""
    span_events: float
    waiting: float | None = None
    """The part of `profiled` in which an accelerator waits for the host, or None if not known."""

    @property
    def extra(self) -> float:
        """Nanoseconds that the profiler adds to an iteration."""
        return self.profiled - self.unprofiled


class EventCosts(NamedTuple):
    """The cost of recording one event, in nanoseconds."""

    program: float
    span: float
    inside: float = 0.0
    """Share of a program event's cost that falls inside the event."""
    in_idle_time: bool = False
    """True if the remaining share falls into idle time of the device, as on an accelerator, whose traces have no
    event of an enclosing loop."""
    calibrated: float = 0.0
    """Cost of a program event in a program of known duration, or 0 if it is not known."""
    waiting_kept: float | None = None
    """Nanoseconds per iteration in which an accelerator would also wait for the host without the profiler. None if
    waiting is not known in all windows."""

    @property
    def bounded(self) -> float:
        """Cost of recording a program event, kept within a factor of `MAX_FACTOR` of the calibrated cost.

        This cost is subtracted from the operation of the event. The limit is needed because other work on the
        machine makes windows differ by more than the profiler's cost. Several processes also disturb each other,
        so their difference is not the cost of events.
        """
        if not self.calibrated:
            return self.program
        return min(max(self.program, self.calibrated / MAX_FACTOR), self.calibrated * MAX_FACTOR)

    def on(self, *, accelerated: bool) -> "EventCosts":
        """Returns the costs in a process on an accelerator, or in a process on a CPU. A calibration is valid for
        one of the two.
        """
        if accelerated == self.in_idle_time:
            return self
        return self._replace(in_idle_time=accelerated, inside=0.0, calibrated=0.0)


def costs(
    pairs: Sequence[PairedWindow], *, inside: float = 0.0, in_idle_time: bool = False, calibrated: float = 0.0
) -> EventCosts:
    """Estimates the cost of events from pairs of windows.

    The additional time of an iteration is attributed to host spans up to a limit, and beyond that to program
    events. If the waiting time of an accelerator is known, it includes the cost of spans. The other arguments are
    fields of `EventCosts`.
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
    """Returns the interquartile mean, which ignores outliers like a median, but varies less."""
    outer = (len(values) + 1) // 4
    return statistics.fmean(sorted(values)[outer : len(values) - outer])


def corrected_duration(pair: PairedWindow, found: EventCosts) -> float:
    """Predicts the nanoseconds of an iteration without the profiler, from a window with the profiler."""
    late = 0.0 if found.waiting_kept is None else max(0.0, (pair.waiting or 0.0) - found.waiting_kept)
    return pair.profiled - late - pair.program_events * found.program - pair.span_events * found.span


def held_out_ratio(pairs: Sequence[PairedWindow], *, calibrated: float = 0.0) -> float:
    """Returns the corrected duration of an iteration relative to one without the profiler, ideally 1.

    Every second pair is corrected with the costs in the other pairs, with which it shares no window, so this tests
    a prediction. Each window is compared with the window before it, because the speed of a busy machine changes. A
    single pair is corrected with its own costs.
    """
    if not _know_waiting(pairs):
        pairs = [pair._replace(waiting=None) for pair in pairs]
    found = costs(pairs[::2], calibrated=calibrated)
    return middle_mean([corrected_duration(pair, found) / pair.unprofiled for pair in pairs[1::2] or pairs])


class WithoutCost(NamedTuple):
    """The times of a process after the profiler's cost has been removed, in nanoseconds of its windows."""

    device: Mapping[Path, float]
    """Device time of each operation in nanoseconds."""
    host: float
    """Factor by which the time with only the host at work is reduced."""
    starts: float = 1.0
    """Factor by which the time of kernel launches on an accelerator is reduced."""


class IdleTime(NamedTuple):
    """Nanoseconds of a process's windows in which its device does not compute."""

    host_only: float = 0.0
    """Nanoseconds in which a host thread is at work."""
    neither: float = 0.0
    """Nanoseconds in which no host thread is at work."""
    starts: float = 0.0
    """The part of both in which a kernel is being launched on an accelerator."""

    @property
    def waiting(self) -> float:
        """Nanoseconds in which the device waits, which excludes the time of kernel launches."""
        return max(0.0, self.host_only + self.neither - self.starts)


def without_cost(
    device: Mapping[Path, DeviceTime], found: EventCosts, *, idle: IdleTime, target: float, accelerators: int = 1
) -> WithoutCost:
    """Removes the profiler's cost from the times of a process, whose windows would have taken `target` nanoseconds
    without it.

    On an accelerator, most of the cost falls between kernels. Only the part inside kernels is subtracted from the
    time of kernels, and the remainder from the time of launches. The rest of the target counts as waiting. On a
    CPU, the cost is subtracted from the operations of its events. Any remaining difference from the target, caused
    by host spans or other work on the machine, counts as waiting. If waiting cannot account for it, all times are
    scaled in proportion. With several `accelerators`, idle time is the time in which none of them computes.
    """
    corrected = {path: _correct(times, found) for path, times in device.items()}
    busy = math.fsum(corrected.values())
    if found.in_idle_time:
        kernels = math.fsum(times.kernels for times in device.values()) / max(1, accelerators)
        outside = (1.0 - found.inside) * found.bounded * kernels
        starts = min(max(0.0, idle.starts - outside), max(0.0, target - busy))
        left = max(0.0, target - busy - starts)
        scaled = _scale(corrected, min(1.0, _ratio(target, busy)))
        return WithoutCost(scaled, min(1.0, _ratio(left, idle.waiting)), _ratio(starts, idle.starts))
    whole = busy + idle.host_only + idle.neither
    scale = min(max(1.0, _ratio(target, whole)), _ratio(target, busy + idle.host_only))
    return WithoutCost(_scale(corrected, scale), scale)


def _correct(times: DeviceTime, found: EventCosts) -> float:
    if found.in_idle_time:
        return max(0.0, times.work - times.kernels * found.bounded * found.inside) + times.between
    inside, outside = found.bounded * found.inside, found.bounded * (1.0 - found.inside)
    work = max(0.0, times.work - times.work_events * inside)
    return work + max(0.0, times.between - times.between_events * outside)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 1.0


def _scale(times: Mapping[Path, float], factor: float) -> dict[Path, float]:
    return {path: nanoseconds * factor for path, nanoseconds in times.items()}


class MeasuredEvent(NamedTuple):
    """Cost of recording one event, measured with a program of known duration."""

    nanoseconds: float
    inside: float
    """Share of the cost that falls inside the event."""


def measure_event(recorder: TraceRecorder) -> MeasuredEvent:
    """Measures the cost of recording an event, and the share of the cost that falls inside the event.

    A program of many short instructions runs with and without the profiler. The time by which its recorded kernels
    exceed the duration of the program without the profiler is the cost inside events. Time in which an accelerator
    waits for the host does not count as a cost of events.
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
    return _measure_cost(end - begin - plain, window.kernel_time - plain, window.program_events)


def _measure_event_on_accelerator(recorder: TraceRecorder, run: Callable[[], object]) -> MeasuredEvent:
    plain = min(_nanoseconds(run) for _ in range(3))
    recorder.start()
    run()  # CUDA graphs are created again
    begin = time.monotonic_ns()
    run()
    _, use = recorder.stop_with_use(begin, time.monotonic_ns(), read=False)
    return _measure_cost(use.working - plain, use.computing - plain, float(use.kernels))


def _measure_cost(extra: float, extra_inside: float, events: float) -> MeasuredEvent:
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
