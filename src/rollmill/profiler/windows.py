"""The windows of a profiled training: without the profiler, with it, and again, until there are enough."""

import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from rollmill.core.processor_time import CoreUse, Readings, core_use, read_processor_time
from rollmill.gpus.activity import GpuActivity
from rollmill.profiling.correction import PairedWindow
from rollmill.profiling.device_use import DeviceUse
from rollmill.profiling.recording import RecordedWindow, TraceRecorder
from rollmill.profiling.results import THIS_PROCESS
from rollmill.profiling.summary import ProcessWindows
from rollmill.workers.reports import MetricsRows, Recorded, Report, Training

WARM_SECONDS = 2.0
"""Shortest time of training before the first window."""
SHORT_SECONDS = 0.3
"""Shortest duration of the windows by which it is seen that the training has come to its speed."""
STEADY = 0.9
"""It has if a window takes at least this share of the time of the one before."""
MOST_SHORT_WINDOWS = 30
FIRST_RECORDING_SECONDS = 0.05
"""Shortest duration of the first recording, which belongs to no window."""
SETTLE_SECONDS = 0.3
"""Time that belongs to no window after a recording begins in workers, and after it ends in workers or on
accelerators."""
RECORDED_SHORT_SECONDS = 0.1
"""Shortest duration of the windows by which it is seen that a training has come to its speed while it is recorded:
short, because all of its events are collected."""
SLOWED = 1.5
"""A training that takes so many times as long as usual may not have come to its speed yet."""
LONGEST_SLOWED_SECONDS = 0.9
"""Time after which such a training is taken to be so slow because it is recorded."""
REPLY_SECONDS = 300.0
"""How long workers may take to reduce a window."""
FORGET_SECONDS = 30.0
"""How long they may take to forget the events of one that is not read."""


@runtime_checkable
class RecordsWorkers(Protocol):
    """A training whose workers are processes that can be recorded."""

    def start_recording(self) -> Sequence[str]:
        """Begins in all workers; returns their names."""
        ...

    def stop_recording(self, number: int, begin: int, end: int) -> None:
        """Requests a `Recorded` with this number of each."""
        ...

    def abandon_recording(self, number: int) -> None:
        """Ends in all workers, whose events are forgotten; requests a `Recorded` with this number of each."""
        ...


class ReportedProgress(NamedTuple):
    """How far the training is."""

    now: int
    """Nanoseconds of the monotonic clock."""
    iteration: int


class WindowSpan(NamedTuple):
    """A window of time, from one report to another."""

    begin: ReportedProgress
    end: ReportedProgress

    @property
    def iterations(self) -> int:
        """Iterations that were done in it."""
        return self.end.iteration - self.begin.iteration

    @property
    def per_iteration(self) -> float:
        """Nanoseconds of an iteration."""
        return (self.end.now - self.begin.now) / self.iterations


class PlainWindow(NamedTuple):
    """A window without the profiler."""

    span: WindowSpan
    activity: list[dict[str, Any]]
    """The driver's figures of each GPU in it."""
    processors: Readings
    """The clocks of the host's cores at its beginning and its end."""


class ProfiledWindow(NamedTuple):
    """A window with the profiler, in all processes."""

    span: WindowSpan
    processes: dict[str, RecordedWindow]
    """Empty if its events were not read."""
    use: DeviceUse | None = None
    """How long the accelerator was at work, if this process alone computes, on one of them."""
    missing: frozenset[str] = frozenset()
    """Workers that were to tell what they recorded, and did not: they were lost, or did not answer in time."""

    @property
    def program_events(self) -> float:
        """Events of compiled programs in an iteration, in all processes."""
        return sum(each.times.program_events for each in self.processes.values()) / self.span.iterations

    @property
    def waiting(self) -> float | None:
        """Nanoseconds of an iteration in which an accelerator waits for the host; None where that is not known."""
        if self.use is None:
            return None
        return max(0.0, self.span.per_iteration - self.use.working / self.span.iterations)

    @property
    def span_events(self) -> float:
        """Events of the host in an iteration, in all processes."""
        return sum(each.times.span_events for each in self.processes.values()) / self.span.iterations


Steps = Generator[None, ReportedProgress, None]
StepsUntil = Generator[None, ReportedProgress, ReportedProgress]
"""Steps that return the last report, with which a window can begin."""


class Windows:
    """The windows of a training, which its reports move on.

    Args:
        count: number of windows with the profiler whose events are read.
        unread: number of windows with it after each of them whose events are not: they tell how much longer an
            iteration takes, and on an accelerator how long it waits for the host.
        seconds: shortest duration of a window without it.
        profiled_seconds: shortest duration of a window with it.
        workers: records the workers, where they are processes.
        activity: the driver's figures of GPUs.
        learns_from: iterations before which nothing is learned, because a replay memory is filled first; no window
            begins before.
        show: shows a line to the user.
    """

    def __init__(
        self,
        *,
        count: int,
        unread: int,
        seconds: float,
        profiled_seconds: float,
        workers: RecordsWorkers | None,
        activity: GpuActivity,
        learns_from: int,
        show: Callable[[str], None],
    ) -> None:
        self._activity, self._learns_from = activity, learns_from
        self._count, self._unread = count, unread
        self._seconds, self._profiled_seconds = seconds, profiled_seconds
        self._workers, self._show = workers, show
        self._recorder = TraceRecorder()
        self._received: dict[str, RecordedWindow | None] = {}
        self._number = 0
        """Number of the last request to end recordings."""
        self.plain: list[WindowSpan] = []
        self.activities: list[list[dict[str, Any]]] = []
        """The driver's figures of each GPU, in each window without the profiler."""
        self._processors: list[Readings] = []
        self.recorded: list[ProfiledWindow] = []
        """All windows with the profiler."""
        self.incomplete: list[ProfiledWindow] = []
        """Those in which workers are missing, which count for nothing."""
        self.done = False
        self._usual = 0.0
        """Nanoseconds of an iteration without the profiler, once the training has come to its speed."""
        self._steps = self._all_steps()
        next(self._steps)

    def advance(self, iteration: int) -> None:
        """Notes a report of metrics, after as many iterations."""
        if not self.done:
            try:
                self._steps.send(ReportedProgress(time.monotonic_ns(), iteration))
            except StopIteration:
                self.done = True

    def receive(self, worker: str, number: int, window: RecordedWindow | None) -> None:
        """Notes that a worker has ended a recording, and its window if its events were read.

        Args:
            worker: its name.
            number: of the request that it answers; an answer to an earlier one has come too late.
            window: None if the events were forgotten.
        """
        if number == self._number:
            self._received[worker] = window

    @property
    def profiled(self) -> list[ProfiledWindow]:
        """The windows with the profiler whose events were read."""
        return [window for window in self.recorded if window.processes]

    def pairs(self) -> list[PairedWindow]:
        """Each window with the profiler beside the one without it before.

        No two have a window in common: what some of them tell of the profiler's cost can be tested with others. A
        window that was not read has as many events an iteration as those that were, on average.
        """
        programs = statistics.fmean(window.program_events for window in self.profiled)
        spans = statistics.fmean(window.span_events for window in self.profiled)
        pairs = []
        for number, window in enumerate(self.recorded):
            unprofiled = self.plain[number].per_iteration
            events = (window.program_events, window.span_events) if window.processes else (programs, spans)
            pairs.append(PairedWindow(window.span.per_iteration, unprofiled, *events, window.waiting))
        return pairs

    @property
    def waits(self) -> float:
        """Times that the accelerator waits for the host in an iteration with the profiler; 0 where not known."""
        known = [(window.use.waits, window.span.iterations) for window in self.recorded if window.use is not None]
        return sum(waits for waits, _ in known) / sum(count for _, count in known) if known else 0.0

    def by_process(self) -> list[ProcessWindows]:
        """The windows of each process: a worker may have come later, or have ended itself."""
        names = dict.fromkeys(name for window in self.profiled for name in window.processes)
        return [self._windows_of_process(name) for name in names]

    def _windows_of_process(self, name: str) -> ProcessWindows:
        windows = [window for window in self.profiled if name in window.processes]
        iterations = sum(window.span.iterations for window in windows)
        return ProcessWindows(name, [window.processes[name] for window in windows], iterations)

    @property
    def cores(self) -> CoreUse | None:
        """The cores that were at work in the windows without the profiler; None where that is not known."""
        return core_use(self._processors)

    @property
    def planned(self) -> int:
        """Windows with the profiler that there are if the training does not end before."""
        return self._count * (1 + self._unread)

    @property
    def lost_workers(self) -> list[str]:
        """Those that are missing in a window."""
        return sorted({name for window in self.incomplete for name in window.missing})

    @property
    def iterations(self) -> int:
        """Iterations in all windows that were read."""
        return sum(window.span.iterations for window in self.profiled)

    def _all_steps(self) -> Steps:
        yield from self._warm_up()
        begin = yield from self._discard_first_recording()
        for number in range(self._count):
            self._show(f"window {number + 1} of {self._count}")
            for read in [True] + [False] * self._unread:
                plain = yield from self._plain_window(begin)
                window = yield from self._profiled_window(self._profiled_seconds, read=read)
                if window.missing:
                    self.incomplete.append(window)
                else:
                    self._keep(plain)
                    self.recorded.append(window)
                begin = yield from self._regain_speed()
        self._keep((yield from self._plain_window(begin)))

    def _keep(self, plain: PlainWindow) -> None:
        self.plain.append(plain.span)
        self._processors.append(plain.processors)
        self.activities.append(plain.activity)

    def _warm_up(self) -> Steps:
        """Lets the training come to its speed after it began to learn."""
        if self._learns_from:
            self._show(f"waiting for iteration {self._learns_from}, from which on it learns")
        while (yield).iteration < self._learns_from:
            pass
        begin = yield from self._pause(WARM_SECONDS)
        self._usual = yield from self._come_to_speed(begin)

    def _discard_first_recording(self) -> StepsUntil:
        """Records once for nothing: the first recording of a process takes longer, above all on a GPU."""
        yield from self._profiled_window(FIRST_RECORDING_SECONDS)
        return (yield from self._regain_speed())

    def _settle_while_recording(self, begin: ReportedProgress) -> StepsUntil:
        """Goes on until CUDA graphs, which are made anew when a recording begins, are made."""
        before = yield from self._window(begin, RECORDED_SHORT_SECONDS)
        for _ in range(MOST_SHORT_WINDOWS):
            now = yield from self._window(before.end, RECORDED_SHORT_SECONDS)
            recorded = now.end.now - begin.now
            may_be_slowed = now.per_iteration > SLOWED * self._usual and recorded < 1e9 * LONGEST_SLOWED_SECONDS
            if STEADY * before.per_iteration < now.per_iteration and not may_be_slowed:
                return now.end
            before = now
        return before.end

    def _come_to_speed(self, begin: ReportedProgress) -> Generator[None, ReportedProgress, float]:
        """Goes on until a short window is hardly faster than the last; returns an iteration's nanoseconds."""
        before = yield from self._window(begin, SHORT_SECONDS)
        for _ in range(MOST_SHORT_WINDOWS):
            now = yield from self._window(before.end, SHORT_SECONDS)
            if now.per_iteration > STEADY * before.per_iteration:
                return now.per_iteration
            before = now
        return before.per_iteration

    def _regain_speed(self) -> StepsUntil:
        """Lets the training come back to its speed after a recording: CUDA graphs are made anew then.

        That is its usual speed, or a steady one that is not much lower, because the machine has other work now.
        """
        if jax.default_backend() == "cpu":
            return (yield from self._pause(SETTLE_SECONDS if self._workers is not None else 0.0))
        before = yield from self._window((yield from self._pause(SETTLE_SECONDS)), SHORT_SECONDS)
        for _ in range(MOST_SHORT_WINDOWS):
            if STEADY * before.per_iteration < self._usual:
                break
            now = yield from self._window(before.end, SHORT_SECONDS)
            is_steady = STEADY * before.per_iteration < now.per_iteration < SLOWED * self._usual
            before = now
            if is_steady:
                break
        return before.end

    def _pause(self, seconds: float) -> StepsUntil:
        """Lets this many seconds pass, and a report of what was under way."""
        begin = yield
        while True:
            now = yield
            if now.now - begin.now >= 1e9 * seconds:
                return now

    def _plain_window(self, begin: ReportedProgress) -> Generator[None, ReportedProgress, PlainWindow]:
        self._activity.restart()
        before = read_processor_time()
        span = yield from self._window(begin, self._seconds)
        return PlainWindow(span, self._activity.total(), (before, read_processor_time()))

    def _window(self, begin: ReportedProgress, seconds: float) -> Generator[None, ReportedProgress, WindowSpan]:
        """A window from a report to the first one after so many seconds; anew if the training was rolled back."""
        before = begin
        while True:
            end = yield
            if end.iteration < before.iteration:
                begin = end
            before = end
            if end.now - begin.now >= 1e9 * seconds and end.iteration > begin.iteration:
                return WindowSpan(begin, end)

    def _profiled_window(
        self, seconds: float, *, read: bool = True
    ) -> Generator[None, ReportedProgress, ProfiledWindow]:
        awaited = set(self._workers.start_recording()) if self._workers is not None else set()
        self._recorder.start()
        if self._workers is not None:
            begin = yield from self._pause(SETTLE_SECONDS)  # workers hear of it later
        else:
            begin = yield  # a report of iterations that were under way while the recording began
        if jax.default_backend() != "cpu":
            begin = yield from self._settle_while_recording(begin)
        span = yield from self._window(begin, seconds)
        self._received.clear()
        self._number += 1
        own, use = self._end_recordings(span, read=read)
        yield from self._answers(awaited, REPLY_SECONDS if read else FORGET_SECONDS)
        if own is None:
            return ProfiledWindow(span, {}, use)
        read_there = {name: window for name, window in self._received.items() if window is not None}
        return ProfiledWindow(span, {THIS_PROCESS: own, **read_there}, use, frozenset(awaited - read_there.keys()))

    def _end_recordings(self, span: WindowSpan, *, read: bool) -> tuple[RecordedWindow | None, DeviceUse | None]:
        """Ends them in all processes.

        Returns:
            this process's window if events are read, and the use of its accelerator, if it alone computes, on one.
        """
        begin, end = span.begin.now, span.end.now
        if self._workers is None and jax.default_backend() != "cpu":
            own, use = self._recorder.stop_with_use(begin, end, read=read)
            # Several devices wait for each other, too, and one that computed nothing tells nothing.
            return own, use if use.devices == 1 and use.kernels else None
        if read:
            if self._workers is not None:
                self._workers.stop_recording(self._number, begin, end)
            return self._recorder.stop(begin, end), None
        if self._workers is not None:
            self._workers.abandon_recording(self._number)
        self._recorder.abandon()
        return None, None

    def _answers(self, awaited: set[str], seconds: float) -> Steps:
        """Waits until these workers have ended their recordings, which slows the training down.

        Of one that has ended itself nothing is heard for so long; of one that has begun anew neither, but then the
        training is rolled back.
        """
        deadline, iteration = time.monotonic() + seconds, 0
        while awaited - self._received.keys() and time.monotonic() < deadline:
            now = yield
            if now.iteration < iteration:
                return
            iteration = now.iteration

    def close(self) -> None:
        """Ends a recording that is going on, without a window."""
        self._steps.close()
        self._recorder.abandon()


class ProfiledTraining:
    """A training whose reports move windows on, and that ends with the last of them.

    Args:
        training: the training.
        windows: its windows.
    """

    def __init__(self, training: Training, windows: Windows) -> None:
        self._training, self._windows = training, windows
        self.request_snapshot = training.request_snapshot

    def run(self, stopping: Callable[[], bool]) -> Iterator[Report]:
        """See `Training`."""
        for report in self._training.run(lambda: self._windows.done or stopping()):
            yield report
            match report:
                case MetricsRows(first, rows, counts):
                    self._windows.advance(first + (sum(counts) if counts is not None else len(rows)))
                case Recorded(worker, number, window):
                    read = RecordedWindow.from_json(window) if window is not None else None
                    self._windows.receive(worker, number, read)

    @property
    def out_of_reach(self) -> str:
        """See `Training`."""
        return self._training.out_of_reach

    @property
    def waited_for(self) -> str:
        """See `Training`."""
        return self._training.waited_for
