"""Measures how busy the cores of this machine are, in total and for this process with its descendants."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""The quota of the control group that a container runs in: microseconds of processor time in a period."""


class ProcessorTime(NamedTuple):
    """Readings of processor clocks, in seconds since an arbitrary time."""

    wall: float
    computed: float
    """Processor time of this process and its living descendants, in seconds."""
    idle: float
    """Idle time of the cores that this process may run on, summed over the cores, in seconds."""


@dataclass(frozen=True)
class CoreUse:
    """Average number of busy cores of this host over an interval."""

    busy: float
    """Average number of cores that computed for this process and its descendants."""
    idle: float
    """Average number of idle cores that this process may use."""


Readings = tuple[ProcessorTime | None, ProcessorTime | None]
"""Processor clocks at the beginning and at the end of an interval."""


def read_processor_time() -> ProcessorTime | None:
    """Reads the processor clocks, or returns None if the system has none."""
    if sys.platform != "linux":
        return None
    try:
        return ProcessorTime(time.monotonic(), time.process_time() + _descendants_time(), _idle_time())
    except (OSError, ValueError, IndexError):
        return None


def core_use(readings: Sequence[Readings]) -> CoreUse | None:
    """Returns the average numbers of busy and idle cores over intervals.

    Each reading contains the clocks at the beginning and at the end of an interval. Returns None if there are no
    intervals, if a clock could not be read, or if processor time decreased within an interval. It decreases when a
    descendant ends, because its time is then no longer counted.
    """
    known = [(begin, end) for begin, end in readings if begin is not None and end is not None]
    wall = sum(end.wall - begin.wall for begin, end in known)
    computed = [end.computed - begin.computed for begin, end in known]
    if wall <= 0.0 or len(known) < len(readings) or min(computed) < 0.0:
        return None
    busy = sum(computed) / wall
    idle = sum(end.idle - begin.idle for begin, end in known) / wall
    return CoreUse(busy, max(0.0, min(idle, allowed_cores() - busy)))


def allowed_cores() -> float:
    """Returns how many cores this process may use, given its affinity and its container's quota."""
    cores = float(len(os.sched_getaffinity(0))) if sys.platform == "linux" else float(os.cpu_count() or 1)
    return min(cores, quota) if (quota := _quota()) is not None else cores


def _quota() -> float | None:
    """Returns the cores that the control group may keep busy, if it limits them."""
    try:
        most, period = QUOTA.read_text().split()
        return int(most) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # the limit `max` means that there is none
        return None


def _descendants_time() -> float:
    """Returns the processor time of all living descendants of this process, in seconds."""
    children: dict[int, list[tuple[int, float]]] = {}
    for parent, process, seconds in _processes():
        children.setdefault(parent, []).append((process, seconds))
    total, parents = 0.0, [os.getpid()]
    while parents:
        for process, seconds in children.pop(parents.pop(), []):
            total += seconds
            parents.append(process)
    return total


def _processes() -> Iterator[tuple[int, int, float]]:
    """Yields the parent's id, the id and the processor time in seconds of every visible process."""
    tick = os.sysconf("SC_CLK_TCK")
    for folder in PROC.iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        yield int(fields[1]), int(folder.name), (int(fields[11]) + int(fields[12])) / tick


def _idle_time() -> float:
    """Returns the idle and disk-wait time of the cores that this process may run on."""
    tick, ours = os.sysconf("SC_CLK_TCK"), {f"cpu{core}" for core in os.sched_getaffinity(0)}
    lines = [line.split() for line in (PROC / "stat").read_text().splitlines()]
    found = [(int(line[4]) + int(line[5])) / tick for line in lines if line and line[0] in ours]
    if len(found) < len(ours):
        raise ValueError("the system does not report the time of each core")
    return sum(found)
