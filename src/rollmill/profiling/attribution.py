"""Divides the time of a recorded window among operations and activities.

At each instant, a thread's time belongs to the innermost event that can be classified. If several threads or
streams compute at the same instant, the instant is divided among them equally. The durations of all operations, of
the host, and of idle time therefore add up to the window.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from rollmill.core.operations import INNER
from rollmill.profiling.classes import (
    PYTHON,
    ROOT,
    RUNNING,
    Classifier,
    DeviceWork,
    EventClass,
    HostActivity,
    KernelStart,
    LaneState,
    is_span,
)
from rollmill.profiling.hlo import Instruction
from rollmill.profiling.hlo_text import Path
from rollmill.profiling.results import Overlap
from rollmill.profiling.trace import Event, Lane, Trace

IDLE_CATEGORY = "waiting"
MAX_START_GAP = 20_000
"""Longest gap between two kernels of a stream, in nanoseconds, that counts as the launch of the second one. CUDA
graphs and the profiler take some microseconds for each kernel. A longer gap means that the host is late."""


class StateSegment(NamedTuple):
    """A period in which the state of a thread or stream does not change."""

    start: int
    end: int
    state: LaneState


class DeviceTime(NamedTuple):
    """Device time of one operation in one window, in nanoseconds."""

    work: float = 0.0
    """Time inside kernels."""
    between: float = 0.0
    """Time between the kernels of a running program, while no thread is inside a kernel."""
    kernels: float = 0.0
    mixed: float = 0.0
    """The part of `work` spent in fusions of several operations."""
    flops: float = 0.0
    bytes: float = 0.0
    work_events: float = 0.0
    """Number of events recorded inside `work`. If several threads work, an event counts in part."""
    between_events: float = 0.0
    """Number of events recorded in `between`, which is the time of the enclosing loop."""
    copies: float = 0.0
    """The part of `work` spent on copies."""
    collectives: float = 0.0
    """The part of `work` spent on exchanging data between devices."""

    def __add__(self, other: "DeviceTime") -> "DeviceTime":  # type: ignore[override]
        return DeviceTime(*(mine + its for mine, its in zip(self, other, strict=True)))


WORK, BETWEEN, KERNELS, MIXED, FLOPS, BYTES, WORK_EVENTS, BETWEEN_EVENTS, COPIES, COLLECTIVES = range(
    len(DeviceTime._fields)
)
"""Positions of the fields of `DeviceTime` in lists of running sums, which are faster than new tuples."""


def _sums() -> dict[Path, list[float]]:
    return defaultdict(lambda: [0.0] * len(DeviceTime._fields))


FIELD_OF_KIND = {"copy": COPIES, "collective": COLLECTIVES}
"""For each kind of instruction, the field of `DeviceTime` that holds its part of `WORK`."""


class WindowTimes(NamedTuple):
    """The times of one process in one window, in nanoseconds."""

    duration: int
    device: Mapping[Path, DeviceTime]
    kernel_time: float
    """Sum of the durations of all kernels, even if some ran at the same time."""
    host: Mapping[HostActivity, float]
    """Time of each host activity, summed over all threads."""
    host_only: Mapping[Path, float]
    """Time of each operation in which no device computes and no kernel is being launched, divided among the
    working threads."""
    starts: Mapping[Path, float]
    """Time of each operation in which no device computes, but kernels are being launched."""
    starts_beside_host: float
    """The part of `starts` in which a host thread is also at work. It belongs to `overlap.host_only`."""
    overlap: Overlap
    program_events: float
    """Number of recorded events of compiled programs."""
    span_events: float
    """Number of recorded events of the host."""
    calls: Mapping[str, float]
    """For each category, the number of activities that begin inside another category."""

    def longer(self, factor: float) -> "WindowTimes":
        """Scales all durations and counts to a window that is longer by `factor`."""
        if factor == 1.0:
            return self
        scaled = {name: _scale(value, factor) for name, value in self._asdict().items()}
        return WindowTimes(**{**scaled, "duration": round(scaled["duration"])})


def _scale(value: Any, factor: float) -> Any:
    if isinstance(value, Mapping):
        return {key: _scale(each, factor) for key, each in value.items()}
    if isinstance(value, DeviceTime):
        return DeviceTime(*(each * factor for each in value))
    if isinstance(value, Overlap):
        return Overlap(**_scale(asdict(value), factor))
    return value * factor


def segments(lane: Lane, classify: Classifier, begin: int, end: int) -> Iterator[StateSegment]:
    """Yields the successive states of a thread or stream from nanosecond `begin` to `end` of the trace's clock,
    without gaps.
    """
    open_events = _OpenEvents(lane)
    now = begin
    for event in lane.events:
        if event.end <= begin or event.start >= end:
            continue
        state = classify(event, on_device=lane.on_device)
        for time in (*open_events.ends_until(event.start), event.start):
            if min(time, end) > now:
                yield StateSegment(now, min(time, end), open_events.state_before(state, event.start - now))
                now = min(time, end)
            open_events.close_until(time)
        open_events.push(event.end, state)
    for time in (*open_events.ends_until(end), end):
        if min(time, end) > now:
            yield StateSegment(now, min(time, end), open_events.state)
            now = min(time, end)
        open_events.close_until(time)


class _OpenEvents:
    """The events of a lane that contain one point in time, and the state that they determine."""

    def __init__(self, lane: Lane) -> None:
        self._on_device = lane.on_device
        self._runs_python = any(is_span(event) for event in lane.events)
        self._base: EventClass = PYTHON if self._runs_python else None
        self._open: list[tuple[int, EventClass]] = []
        self._last_work: DeviceWork | None = None

    @property
    def state(self) -> EventClass:
        """The class of the innermost event."""
        return self._open[-1][1] if self._open else self._base

    def state_before(self, following: EventClass, nanoseconds: int) -> LaneState:
        """Returns the state until the lane's next event, of class `following`."""
        is_gap = self._on_device and not self._open and self._last_work is not None
        if is_gap and nanoseconds <= MAX_START_GAP and isinstance(following, DeviceWork):
            return KernelStart(following.instruction)
        return self.state

    def ends_until(self, time: int) -> list[int]:
        """Returns the ends of the open events that end by `time`, the innermost first."""
        return [end for end, _ in reversed(self._open) if end <= time]

    def close_until(self, time: int) -> None:
        """Removes the events that have ended."""
        while self._open and self._open[-1][0] <= time:
            self._open.pop()

    def push(self, end: int, state: EventClass) -> None:
        """Pushes an event that lies inside all events on the stack."""
        state = self._inside(state)
        if isinstance(state, DeviceWork) and state.instruction is not RUNNING:
            self._last_work = state
        self._open.append((end, state))

    def _inside(self, state: EventClass) -> EventClass:
        """Returns the state of an event inside the open ones."""
        around = self.state
        if isinstance(state, DeviceWork) and state.instruction is ROOT:
            if isinstance(around, DeviceWork):
                return around
            return _after(self._last_work) if self._last_work else state
        if isinstance(state, HostActivity) and state.category == IDLE_CATEGORY and not self._runs_python:
            return None  # a thread of the framework that is waiting
        if isinstance(state, HostActivity):
            return state.inside(around if isinstance(around, HostActivity) else None)
        return around if state is None else state


def _after(work: DeviceWork) -> DeviceWork:
    """Returns the time on a kernel's thread between the kernel and the next kernel of its program."""
    return DeviceWork(Instruction("container", work.instruction.shares, 0.0, 0.0))


def attribute(trace: Trace, classify: Classifier, begin: int, end: int) -> WindowTimes:
    """Divides the time of one process from nanosecond `begin` to `end` of the trace's clock among operations and
    activities.
    """
    changes: list[tuple[int, int, LaneState]] = []
    host: dict[HostActivity, float] = defaultdict(float)
    kernel_time = 0.0
    for number, lane in enumerate(trace.lanes):
        for segment in segments(lane, classify, begin, end):
            changes.append((segment.start, number, segment.state))
            if isinstance(segment.state, HostActivity):
                host[segment.state] += segment.end - segment.start
            elif isinstance(segment.state, DeviceWork) and segment.state.instruction.kind != "container":
                kernel_time += segment.end - segment.start
    changes.sort(key=lambda change: change[0])
    divided = _Division()
    now = begin
    for time, lane, state in changes:
        divided.advance(time - now)
        divided.become(lane, state)
        now = time
    divided.advance(end - now)
    counts = _count(trace.lanes, classify, begin, end)
    device = defaultdict(DeviceTime, counts.device)
    for path, times in divided.device.items():
        device[path] = device[path] + DeviceTime(*times)
    return WindowTimes(
        duration=end - begin,
        device=dict(device),
        kernel_time=kernel_time,
        host=dict(host),
        host_only=dict(divided.host_only),
        starts=dict(divided.starts),
        starts_beside_host=divided.starts_beside_host,
        overlap=Overlap(*map(float, divided.overlap)),
        program_events=counts.program_events,
        span_events=counts.span_events,
        calls=counts.calls,
    )


class _Division:
    """Divides each instant among the lanes that compute in it."""

    def __init__(self) -> None:
        self._working: dict[int, DeviceWork] = {}
        self._between: dict[int, DeviceWork] = {}
        self._running: set[int] = set()
        self._starting: dict[int, KernelStart] = {}
        self._host: dict[int, HostActivity] = {}
        self._parallel = _ParallelWork()
        self.device = _sums()
        self.host_only: dict[Path, float] = defaultdict(float)
        self.starts: dict[Path, float] = defaultdict(float)
        self.starts_beside_host = 0.0
        self.overlap = [0.0, 0.0, 0.0, 0.0]

    def become(self, lane: int, state: LaneState) -> None:
        """Changes the state of a lane."""
        if (done := self._working.pop(lane, None)) is not None:
            self._parallel.end(lane, done)
        self._between.pop(lane, None)
        self._starting.pop(lane, None)
        self._host.pop(lane, None)
        self._running.discard(lane)
        if isinstance(state, DeviceWork):
            self._become_device_work(lane, state)
        elif isinstance(state, KernelStart):
            self._starting[lane] = state
        elif state is not None and state.category != IDLE_CATEGORY:
            self._host[lane] = state

    def _become_device_work(self, lane: int, state: DeviceWork) -> None:
        if state.instruction is RUNNING:
            self._running.add(lane)
        elif state.instruction.kind == "container":
            self._between[lane] = state
            if not self._working:
                self._count(BETWEEN_EVENTS, state, 1.0 / len(self._between))
        else:
            self._working[lane] = state
            self._parallel.begin(lane)
            self._count(WORK_EVENTS, state, 1.0 / len(self._working))

    def _count(self, field: int, state: DeviceWork, part: float) -> None:
        for path, share in state.instruction.shares.items():
            self.device[path][field] += part * share

    def advance(self, nanoseconds: int) -> None:
        """Divides the time until the next change."""
        if nanoseconds <= 0:
            return
        self._parallel.now += nanoseconds
        unseen = self._parallel.unseen() if self._running and not (self._working or self._between) else {}
        working, hosts = self._working or unseen, self._host
        computes = working or self._between
        which = (1 if computes else 3) if not hosts else (2 if computes else 0)
        self.overlap[which] += nanoseconds
        field = WORK if working else BETWEEN
        for state in computes.values():
            shares, kind = state.instruction.shares, FIELD_OF_KIND.get(state.instruction.kind)
            for path, share in shares.items():
                part = nanoseconds * share / len(computes)
                times = self.device[path]
                times[field] += part
                if field == WORK and len(shares) > 1:
                    times[MIXED] += part
                if field == WORK and kind is not None:
                    times[kind] += part
        if not computes:
            self._divide_idle_time(nanoseconds)

    def _divide_idle_time(self, nanoseconds: int) -> None:
        for start in self._starting.values():
            for path, share in start.instruction.shares.items():
                self.starts[path] += nanoseconds * share / len(self._starting)
        if self._starting:
            self.starts_beside_host += nanoseconds * bool(self._host)
            return
        for activity in self._host.values():
            self.host_only[activity.path] += nanoseconds / len(self._host)


class _ParallelWork:
    """Finds the kernel that computes while the program runs and no thread is in a kernel.

    The CPU backend of XLA divides large kernels into tasks for several threads. The kernel's event ends with the
    tasks of its own thread, and no event shows the others. The kernel is the longest one since the last such time.
    """

    def __init__(self) -> None:
        self.now = 0
        self._begun: dict[int, int] = {}
        self._longest: DeviceWork | None = None
        self._nanoseconds = -1

    def begin(self, lane: int) -> None:
        """Records that a lane's kernel begins."""
        self._begun[lane] = self.now

    def end(self, lane: int, work: DeviceWork) -> None:
        """Records that it ends."""
        nanoseconds = self.now - self._begun.pop(lane)
        if nanoseconds > self._nanoseconds:
            self._longest, self._nanoseconds = work, nanoseconds

    def unseen(self) -> dict[int, DeviceWork]:
        """Returns the kernel with tasks in other threads, if there is one."""
        self._nanoseconds = -1
        return {} if self._longest is None else {-1: self._longest}


class _Counts(NamedTuple):
    device: Mapping[Path, DeviceTime]
    program_events: float
    span_events: float
    calls: Mapping[str, float]


def _count(lanes: Sequence[Lane], classify: Classifier, begin: int, end: int) -> _Counts:
    """Counts the events that end in a window, by operation and by category.

    If only some intervals are read, an event counts by the part of it that was read: all intervals together
    count it once.
    """
    device = _sums()
    program_events, span_events, calls = 0.0, 0.0, defaultdict[str, float](float)
    for lane in lanes:
        around = _CategoriesAround()
        for event in lane.events:
            state = classify(event, on_device=lane.on_device)
            is_entered = isinstance(state, HostActivity) and around.enter(event, state.category)
            if not begin < event.end <= end:
                continue
            if isinstance(state, DeviceWork):
                program_events += event.part
                instruction = state.instruction
                for path, share in instruction.shares.items():
                    counts, share = device[path], share * event.part
                    counts[KERNELS] += share * (instruction.kind != "container")
                    counts[FLOPS] += share * instruction.flops
                    counts[BYTES] += share * instruction.bytes
            else:
                span_events += event.part
                if state is not None and is_entered:
                    calls[state.category] += event.part
    summed = {path: DeviceTime(*counts) for path, counts in device.items()}
    return _Counts(summed, program_events, span_events, dict(calls))


class _CategoriesAround:
    """The categories of a lane's activities around one time."""

    def __init__(self) -> None:
        self._open: list[tuple[int, str]] = []

    def enter(self, event: Event, category: str) -> bool:
        """Adds an activity. Returns whether it is the outermost, or inside another category."""
        if category == INNER:
            return False
        while self._open and self._open[-1][0] <= event.start:
            self._open.pop()
        is_other = not self._open or self._open[-1][1] != category
        self._open.append((event.end, category))
        return is_other
