"""Reads a JAX profiler trace: the events of each thread and stream, in nanoseconds of the trace's clock."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rollmill.core.operations import SPAN_MARK
from rollmill.profiling.hlo import program_key

CLOCK = "clock"
"""Category of the span that records the host's clock: `rollmill:clock:NANOSECONDS`."""

MAX_EVENTS = 250_000
"""Number of events in a window above which only some intervals of it are read."""
INTERVAL = 997_000
"""Length of an interval in nanoseconds: longer than instructions, and no multiple of a run's periods."""

WHOLE = (-math.inf, math.inf)
"""A window that includes all events."""

IGNORED = ("end: ", "ThreadpoolListener")
"""Prefixes of the names of events that carry no information."""


class Event(NamedTuple):
    """A recorded event. Any two events of a lane are nested or disjoint."""

    start: int
    end: int
    name: str
    module: str = ""
    """The compiled program and its number. Empty for host events with an unambiguous name."""
    instruction: str = ""
    """The instruction that the device reports for the event, or empty."""
    part: float = 1.0
    """The fraction of the event's duration that lies in intervals that are read."""


class Sampling(NamedTuple):
    """Selects the intervals to read from a window with too many events. All other intervals are left out."""

    every: int = 1
    """One of this many intervals is read."""

    def time(self, nanoseconds: int) -> int:
        """Converts a time of the trace to a clock that stands still in intervals that are not read."""
        if self.every == 1:
            return nanoseconds
        before, rest = divmod(nanoseconds, INTERVAL * self.every)
        return before * INTERVAL + min(rest, INTERVAL)


class Lane(NamedTuple):
    """The events of a host thread or a device stream."""

    name: str
    on_device: bool
    """True for a stream of an accelerator, and False for a thread."""
    events: Sequence[Event]


class Trace(NamedTuple):
    """A trace of one process, with a lane for each thread and stream."""

    lanes: Sequence[Lane]
    clock_offset: int
    """Nanoseconds to add to a time of the trace to get the host's monotonic clock, or 0 if unknown."""
    sampling: Sampling = Sampling()
    """The intervals that were read. The times of events are on its clock."""

    @property
    def accelerators(self) -> int:
        """Number of accelerators that computed something in the trace."""
        return len({lane.name.partition(" stream ")[0] for lane in self.lanes if lane.on_device})


def read_trace(
    data: Any,
    is_ambiguous: Callable[[str], bool],
    *,
    window: tuple[int | float, int | float] = WHOLE,
    most_events: int = MAX_EVENTS,
) -> Trace:
    """Reads a `ProfileData` of the JAX profiler.

    `is_ambiguous` returns whether several programs have an instruction of this name. For such events, the program
    is read from the trace as well, which takes longer. `window` is the first nanosecond and the nanosecond after
    the last, on the host's monotonic clock. If the window has more than `most_events` events, only some intervals
    of it are read.
    """
    offset = clock_offset(data)
    begin, end = (time - offset for time in window)
    count = sum(sum(1 for _ in _within(line, begin, end)) for _, _, line in lanes_of(data))
    sampling = Sampling(every=max(1, math.ceil(count / most_events)))
    lanes = []
    for name, on_device, line in lanes_of(data):
        read = _events(_within(line, begin, end), on_device, is_ambiguous, sampling)
        if events := sorted(read, key=lambda event: (event.start, -event.end)):
            lanes.append(Lane(name, on_device, events))
    return Trace(lanes, offset, sampling)


def _within(line: Any, begin: int | float, end: int | float) -> Iterator[Any]:
    """Yields the events of a line that lie in the window, or reach into it."""
    for event in line.events:
        start = event.start_ns
        if start < end and start + event.duration_ns > begin:
            yield event


def lanes_of(data: Any) -> Iterator[tuple[str, bool, Any]]:
    """Yields the name of each lane, whether the lane is a device stream, and its recorded line."""
    for plane in data.planes:
        on_device = plane.name.startswith("/device:")
        for number, line in enumerate(plane.lines):
            if not on_device or line.name.startswith("Stream"):  # other lines are derived from the streams
                yield _lane_name(plane.name, line.name, number), on_device, line


def _events(
    recorded: Iterator[Any], on_device: bool, is_ambiguous: Callable[[str], bool], sampling: Sampling
) -> Iterator[Event]:
    for event in recorded:
        start, duration = round(event.start_ns), round(event.duration_ns)
        start, end = sampling.time(start), sampling.time(start + duration)
        if end > start and not (name := event.name).startswith(IGNORED):
            part = (end - start) / duration
            if on_device:
                stats = dict(event.stats)
                yield Event(start, end, name, _program(stats), str(stats.get("hlo_op", "")), part)
            elif is_ambiguous(name):
                yield Event(start, end, name, _program(dict(event.stats)), part=part)
            else:
                yield Event(start, end, name, part=part)


def clock_offset(data: Any) -> int:
    """Returns the nanoseconds to add to a time of the trace to get the host's monotonic clock, or 0 if unknown."""
    # the host's plane comes first
    for plane in sorted(data.planes, key=lambda plane: plane.name.startswith("/device:")):
        for line in plane.lines:
            for event in line.events:
                if event.name.startswith(f"{SPAN_MARK}:{CLOCK}:"):
                    return int(event.name.rpartition(":")[2]) - round(event.start_ns)
    return 0


def _program(stats: Mapping[str, Any]) -> str:
    return program_key(str(stats.get("hlo_module", "")), int(stats.get("program_id") or 0))


def _lane_name(plane: str, line: str, number: int) -> str:
    """Returns a name such as `GPU 0 stream 13` or `thread tf_XLAEigen 2`."""
    if (device := re.search(r"GPU:(\d+)", plane)) is not None:
        stream = re.search(r"#?(\d+)", line)
        return f"GPU {device[1]} stream {stream[1] if stream else line}"
    return f"thread {line.partition('/')[0]} {number}"
