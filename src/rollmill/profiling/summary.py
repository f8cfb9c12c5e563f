"""Reduces recorded windows to durations of one iteration, without the profiler's own cost."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

from rollmill.profiling.attribution import DeviceTime
from rollmill.profiling.correction import EventCosts, IdleTime, WithoutCost, without_cost
from rollmill.profiling.hlo_text import Path
from rollmill.profiling.recording import RecordedWindow
from rollmill.profiling.results import (
    UNNAMED,
    DeviceActivity,
    HostTime,
    MemoryUse,
    OperationTime,
    Overlap,
    ProcessTime,
)

SECOND = 1e9
AMOUNTS = ("device", "host", "kernels", "flops", "bytes", "copies", "collectives")
"""Fields of an operation that are divided when the operation is divided."""
MAX_COURSES = 4
"""Maximum number of programs for which the course of memory over the program is stored."""
TRANSITIONS = {
    "dispatch": "host to framework",
    "simulator": "host to simulator",
    "cuda": "framework to CUDA",
    "transfer": "host to device memory",
    "channel": "to other workers",
    "waiting": "waits",
}
"""Names of the transitions into each category of host activities."""


class ProcessWindows(NamedTuple):
    """All recorded windows of one process."""

    name: str
    windows: Sequence[RecordedWindow]
    iterations: float
    """Number of iterations in all windows."""

    @property
    def accelerators(self) -> int:
        """Number of accelerators that computed for the process."""
        return max(window.accelerators for window in self.windows)


def operations(processes: Sequence[ProcessWindows], costs: EventCosts, iteration: float) -> list[OperationTime]:
    """Returns the time of each operation, summed over processes, in iterations that take `iteration` seconds."""
    device: dict[Path, float] = defaultdict(float)
    host: dict[Path, float] = defaultdict(float)
    counts: dict[Path, DeviceTime] = defaultdict(DeviceTime)
    for process in processes:
        for path, times in _device_times(process).items():
            counts[path] = counts[path] + DeviceTime(*(each / process.iterations for each in times))
        corrected = _without_cost(process, costs, iteration)
        scale = 1.0 / (SECOND * process.iterations)
        for path, nanoseconds in corrected.device.items():
            device[path] += scale * nanoseconds
        for window in process.windows:
            for path, nanoseconds in window.times.host_only.items():
                host[path] += scale * nanoseconds * corrected.host
            for path, nanoseconds in window.times.starts.items():
                host[path] += scale * nanoseconds * corrected.starts
    return [
        OperationTime(
            path=path or (UNNAMED,),
            device=device[path],
            host=host[path],
            kernels=counts[path].kernels,
            mixed=min(counts[path].mixed / SECOND, device[path]),
            flops=counts[path].flops,
            bytes=counts[path].bytes,
            copies=_part_of(device[path], counts[path], counts[path].copies),
            collectives=_part_of(device[path], counts[path], counts[path].collectives),
        )
        for path in sorted({*device, *host})
    ]


def _part_of(seconds: float, recorded: DeviceTime, part: float) -> float:
    """Returns the part of an operation's corrected duration that was `part` of its recorded one."""
    whole = recorded.work + recorded.between
    return seconds * part / whole if whole else 0.0


def divide(found: Sequence[OperationTime], path: Path, parts: Mapping[Path, float]) -> list[OperationTime]:
    """Divides the operation at `path` into `parts` in proportion to their shares, which sum to 1, as an
    estimate.
    """
    whole = next((operation for operation in found if operation.path == path), None)
    if whole is None:
        return list(found)
    by_path = {operation.path: operation for operation in found if operation.path != path}
    for part, share in parts.items():
        before = by_path.get(part, OperationTime(part, 0.0, 0.0))
        added = {name: getattr(before, name) + share * getattr(whole, name) for name in AMOUNTS}
        by_path[part] = replace(before, **added, mixed=before.mixed + share * whole.device)
    return [by_path[path] for path in sorted(by_path)]


def process_time(process: ProcessWindows, costs: EventCosts, iteration: float) -> ProcessTime:
    """Returns the times of one process, in iterations that take `iteration` seconds."""
    scale = 1.0 / (SECOND * process.iterations)
    host: dict[tuple[str, str], float] = defaultdict(float)
    transitions: dict[str, float] = defaultdict(float)
    for window in process.windows:
        for activity, nanoseconds in window.times.host.items():
            host[activity.name, activity.category] += nanoseconds * scale
        for category, count in window.times.calls.items():
            if category in TRANSITIONS:
                transitions[TRANSITIONS[category]] += count / process.iterations
    profiled = sum(window.times.duration for window in process.windows) * scale
    corrected = _without_cost(process, costs, iteration)
    return ProcessTime(
        name=process.name,
        host=tuple(_host_times(host, profiled, iteration)),
        overlap=_overlap(process, scale, corrected, iteration),
        transitions=dict(transitions),
        accelerators=process.accelerators,
        timeline=process.windows[-1].spans,
    )


def memory(processes: Sequence[ProcessWindows]) -> tuple[MemoryUse, ...]:
    """Returns the memory of all compiled programs, each once, the largest first.

    For programs with little temporary memory, memory use over the course of the program is omitted, so that files
    stay small.
    """
    uses = {use for process in processes for use in process.windows[-1].memory}
    ordered = sorted(uses, key=lambda use: (-(use.arguments + use.outputs + use.temporary), use.program))
    with_course = sorted(ordered, key=lambda use: -use.temporary)[:MAX_COURSES]
    without = lambda use: replace(use, operations=tuple(replace(one, course=()) for one in use.operations))
    return tuple(use if use in with_course else without(use) for use in ordered)


def device_activities(
    windows: Sequence[Sequence[Mapping[str, Any]]], processes: Sequence[ProcessTime]
) -> tuple[DeviceActivity, ...]:
    """Returns the driver's figures for each GPU, with the share of time in which kernels of these processes ran.

    Processes report how many GPUs they use, but not which ones, so their time is divided equally among the GPUs
    with the highest utilisation. `windows` holds the figures for each GPU in each window, from
    `GpuActivity.total`.
    """
    gpus = range(len(windows[0]) if windows else 0)
    utilisations = [_mean(window[gpu]["utilisation"] for window in windows) or 0.0 for gpu in gpus]
    used = min(len(gpus), sum(process.accelerators for process in processes))
    busiest = sorted(gpus, key=lambda gpu: -utilisations[gpu])[:used]
    busy = sum(process.accelerators * _device_share(process.overlap) for process in processes)
    return tuple(
        DeviceActivity(
            f"GPU {windows[0][gpu]['gpu']}",
            utilisation=utilisations[gpu],
            sm_activity=_mean(window[gpu]["sm_activity"] for window in windows),
            occupied=min(1.0, busy / used) if gpu in busiest else 0.0,
        )
        for gpu in gpus
    )


def _device_share(overlap: Overlap) -> float:
    device = overlap.device_only + overlap.both
    whole = device + overlap.host_only + overlap.neither
    return device / whole if whole else 0.0


def _mean(values: Iterable[float | None]) -> float | None:
    """Returns the mean of the known values."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _device_times(process: ProcessWindows) -> dict[Path, DeviceTime]:
    summed: dict[Path, DeviceTime] = defaultdict(DeviceTime)
    for window in process.windows:
        for path, times in window.times.device.items():
            summed[path] = summed[path] + times
    return summed


def _host_times(host: Mapping[tuple[str, str], float], profiled: float, iteration: float) -> list[HostTime]:
    """Returns activities of the host, the longest first.

    With the profiler, threads wait longer for others, so waiting is shortened by as much as the iteration is.
    """
    waiting = sum(seconds for (_, category), seconds in host.items() if category == "waiting")
    threads = max(1.0, round(sum(host.values()) / profiled)) if profiled else 1.0
    kept = max(0.0, waiting - threads * max(0.0, profiled - iteration)) / waiting if waiting else 1.0
    times = [
        HostTime(name, category, seconds * (kept if category == "waiting" else 1.0))
        for (name, category), seconds in host.items()
    ]
    return sorted(times, key=lambda time: -time.seconds)


def _without_cost(process: ProcessWindows, costs: EventCosts, iteration: float) -> WithoutCost:
    target = SECOND * process.iterations * iteration
    overlaps = [window.times.overlap for window in process.windows]
    idle = IdleTime(
        host_only=sum(overlap.host_only for overlap in overlaps),
        neither=sum(overlap.neither for overlap in overlaps),
        starts=math.fsum(time for window in process.windows for time in window.times.starts.values()),
    )
    here = costs.on(accelerated=process.accelerators > 0)
    return without_cost(_device_times(process), here, idle=idle, target=target, accelerators=process.accelerators)


def _overlap(process: ProcessWindows, scale: float, corrected: WithoutCost, iteration: float) -> Overlap:
    """Returns the overlap of an iteration without the profiler, in which the device's part is shorter."""
    measured = [window.times.overlap for window in process.windows]
    host_only, device_only, both = (
        sum(getattr(overlap, name) for overlap in measured) * scale
        for name in ("host_only", "device_only", "both")
    )
    starts = sum(window.times.starts_beside_host for window in process.windows) * scale
    device = scale * sum(corrected.device.values())
    ratio = device / (device_only + both) if device_only + both else 0.0
    host_only = (host_only - starts) * corrected.host + starts * corrected.starts
    device_only, both = device_only * ratio, both * ratio
    return Overlap(host_only, device_only, both, max(0.0, iteration - host_only - device_only - both))
