"""Alternates windows of time with and without the profiler during a run."""

import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import jax

from rollmill.gpus.activity import GpuActivity
from rollmill.profiling.correction import PairedWindow
from rollmill.profiling.device_use import DeviceUse
from rollmill.profiling.processor_time import CoreUse, Readings, core_use, read_processor_time
from rollmill.profiling.recording import RecordedWindow, TraceRecorder
from rollmill.profiling.results import THIS_PROCESS
from rollmill.profiling.summary import ProcessWindows
from rollmill.workers.reports import MetricsRows, Recorded, Report, Training

WARM_SECONDS = 2.0
"""Minimum training time before the first window, in seconds."""
SHORT_SECONDS, RECORDED_SHORT_SECONDS = 0.3, 0.1
"""Minimum durations, without and with the profiler, of the short windows that show whether a run's speed is
steady. With the profiler, it is short because all events are collected."""
STEADY = 0.9
"""Speed is steady if an iteration takes at least this share of its duration in the preceding short window."""
MAX_SHORT_WINDOWS = 30
FIRST_RECORDING_SECONDS = 0.05
"""Minimum duration of the first recording, which is discarded."""
SETTLE_SECONDS = 0.3
"""Seconds in no window after a recording begins in workers, and after it ends in workers or accelerators."""
SLOWED = 1.5
"""Factor by which iterations are slower than usual if a run may not have reached its steady speed yet."""
LONG_SECONDS = 8.0
"""If a pair of windows takes this much longer than asked for, windows whose events are not read are left out.
Pairs of short iterations take up to five seconds longer on a GPU, which builds CUDA graphs again."""
MAX_SLOWED_SECONDS = 0.9
"""Seconds of recording after which such a slow run is considered slow because of the recording."""
REPLY_SECONDS, FORGET_SECONDS = 300.0, 30.0
"""Maximum seconds for workers to reduce a window to sums, and to discard an unread window's events."""


@runtime_checkable
class RecordsWorkers(Protocol):
    """Interface of a session whose worker processes can be recorded."""

    def start_recording(self) -> Sequence[str]:
        """Starts recording in every worker, and returns their names."""
        ...

    def stop_recording(self, number: int, begin: int, end: int) -> None:
        """Stops recording in every worker, and asks each to reply with a `Recorded` tagged `number`."""
        ...

    def abandon_recording(self, number: int) -> None:
        """Stops recording in every worker and discards the events. Each worker still replies with a `Recorded`."""
        ...


class ReportedProgress(NamedTuple):
    """The number of completed iterations in a report, and the time of the report in nanoseconds."""

    now: int
    iteration: int


class WindowSpan(NamedTuple):
    """The beginning and end of a window, at two reports of a run."""

    begin: ReportedProgress
    end: ReportedProgress

    @property
    def iterations(self) -> int:
        """Number of iterations completed in the window."""
        return self.end.iteration - self.begin.iteration

    @property
    def per_iteration(self) -> float:
        """Mean duration of an iteration in the window, in nanoseconds."""
        return (self.end.now - self.begin.now) / self.iterations


class PlainWindow(NamedTuple):
    """A window of time without the profiler."""

    span: WindowSpan
    activity: list[dict[str, Any]]
    """The driver's figures for each GPU in the window."""
    processors: Readings
    """Processor times of the host's cores at the beginning and the end of the window."""


class ProfiledWindow(NamedTuple):
    """A window of time with the profiler, in all processes."""

    span: WindowSpan
    processes: dict[str, RecordedWindow]
    """Recorded window of each process, by name. Empty if events were not read."""
    use: DeviceUse | None = None
    """How long the accelerator worked, if only this process computes, on a single accelerator."""
    missing: frozenset[str] = frozenset()
    """Names of workers that were lost, or did not send their recording in time."""

    @property
    def program_events(self) -> float:
        """Number of events of compiled programs per iteration, in all processes."""
        return sum(each.times.program_events for each in self.processes.values()) / self.span.iterations

    @property
    def span_events(self) -> float:
        """Number of host events per iteration, in all processes."""
        return sum(each.times.span_events for each in self.processes.values()) / self.span.iterations

    @property
    def waiting(self) -> float | None:
        """Nanoseconds per iteration in which a GPU waits for the host, or None if that is not known."""
        if self.use is None:
            return None
        return max(0.0, self.span.per_iteration - self.use.working / self.span.iterations)


T = TypeVar("T")
Steps: TypeAlias = Generator[None, ReportedProgress, T]
"""A generator of measurement steps. Each `yield` waits for the next report of the run."""


class Windows:
    """The windows of a profiled run, which advance whenever the run reports metrics.

    Args:
        count: number of windows with the profiler whose events are read.
        unread: number of further windows with the profiler after each of these. Their events are not read. They
            show how much longer an iteration takes and, on a GPU, how long it waits for the host.
        seconds: shortest duration of a window without the profiler.
        profiled_seconds: shortest duration of a window with the profiler.
        workers: records the workers, if they are processes.
        activity: the driver's figures for GPUs.
        learns_from: first iteration with learning, after a replay memory has been filled. No window begins before
            it.
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
        self._unprofiled: list[PlainWindow] = []
        self.recorded: list[ProfiledWindow] = []
        """All windows with the profiler."""
        self.incomplete: list[ProfiledWindow] = []
        """Windows without the recordings of some workers, which count for nothing."""
        self.left_out = 0
        """Number of windows that were left out, because iterations are long."""
        self.done = False
        self._usual = 0.0
        """Nanoseconds of an iteration without the profiler, once the training has come to its speed."""
        self._steps = self._measure()
        next(self._steps)

    def advance(self, iteration: int) -> None:
        """Advances the windows at a report of metrics. `iteration` is the number of iterations completed."""
        if not self.done:
            try:
                self._steps.send(ReportedProgress(time.monotonic_ns(), iteration))
            except StopIteration:
                self.done = True

    def receive(self, worker: str, number: int, window: RecordedWindow | None) -> None:
        """Receives the window that a worker recorded, or None if the worker discarded its events.

        Replies to earlier requests are late, and are ignored.
        """
        if number == self._number:
            self._received[worker] = window

    def close(self) -> None:
        """Ends a recording in progress without turning it into a window."""
        self._steps.close()
        self._recorder.abandon()

    # --- results ----------------------------------------------------------------------------------------

    @property
    def plain(self) -> list[WindowSpan]:
        """The windows without the profiler."""
        return [window.span for window in self._unprofiled]

    @property
    def activities(self) -> list[list[dict[str, Any]]]:
        """The driver's figures for each GPU, in each window without the profiler."""
        return [window.activity for window in self._unprofiled]

    @property
    def cores(self) -> CoreUse | None:
        """How many cores were at work in the windows without the profiler, or None if that is not known."""
        return core_use([window.processors for window in self._unprofiled])

    @property
    def profiled(self) -> list[ProfiledWindow]:
        """The windows with the profiler whose events were read."""
        return [window for window in self.recorded if window.processes]

    @property
    def iterations(self) -> int:
        """Number of iterations in all windows whose events were read."""
        return sum(window.span.iterations for window in self.profiled)

    @property
    def planned(self) -> int:
        """Number of windows with the profiler if training does not end earlier."""
        return self._count * (1 + self._unread) - self.left_out

    @property
    def lost_workers(self) -> list[str]:
        """Names of workers whose recording of at least one window is missing."""
        return sorted({name for window in self.incomplete for name in window.missing})

    @property
    def waits(self) -> float:
        """How often per iteration the GPU waits for the host under the profiler, or 0 if that is not known."""
        measured = [
            (window.use.waits, window.span.iterations) for window in self.recorded if window.use is not None
        ]
        return sum(waits for waits, _ in measured) / sum(count for _, count in measured) if measured else 0.0

    def pairs(self) -> list[PairedWindow]:
        """Pairs each window with the profiler with the preceding window without it.

        No two pairs share a window, so the cost of the profiler in some pairs can be tested on the others. If the
        events of a window were not read, the mean number of events in the other windows is used.
        """
        programs = statistics.fmean(window.program_events for window in self.profiled)
        spans = statistics.fmean(window.span_events for window in self.profiled)
        pairs = []
        for plain, window in zip(self.plain, self.recorded, strict=False):
            events = (window.program_events, window.span_events) if window.processes else (programs, spans)
            pairs.append(PairedWindow(window.span.per_iteration, plain.per_iteration, *events, window.waiting))
        return pairs

    def by_process(self) -> list[ProcessWindows]:
        """Returns the windows of each process. A worker may lack windows if it started late or ended early."""
        processes = []
        for name in dict.fromkeys(name for window in self.profiled for name in window.processes):
            windows = [window for window in self.profiled if name in window.processes]
            iterations = sum(window.span.iterations for window in windows)
            processes.append(ProcessWindows(name, [window.processes[name] for window in windows], iterations))
        return processes

    # --- measurement ------------------------------------------------------------------------------------

    def _measure(self) -> Steps[None]:
        yield from self._warm_up()
        # The first recording of a process takes longer, especially on a GPU, so it is not counted.
        yield from self._profile_window(FIRST_RECORDING_SECONDS)
        begin = yield from self._regain_speed()
        for number in range(self._count):
            self._show(f"window {number + 1} of {self._count}")
            for rest in range(1 + self._unread):
                started = begin.now
                begin = yield from self._pair_of_windows(begin, read=not rest)
                if begin.now - started > 1e9 * (LONG_SECONDS + self._seconds + self._profiled_seconds):
                    self.left_out += self._unread - rest
                    break
        self._unprofiled.append((yield from self._plain_window(begin)))

    def _pair_of_windows(self, begin: ReportedProgress, *, read: bool) -> Steps[ReportedProgress]:
        """Measures a window without the profiler and one with it, and returns when the next window can begin."""
        plain = yield from self._plain_window(begin)
        window = yield from self._profile_window(self._profiled_seconds, read=read)
        if window.missing:
            self.incomplete.append(window)
        else:
            self._unprofiled.append(plain)
            self.recorded.append(window)
        return (yield from self._regain_speed())

    def _warm_up(self) -> Steps[None]:
        """Waits until the training learns and has come to its speed."""
        if self._learns_from:
            self._show(f"waiting for iteration {self._learns_from}, from which on it learns")
        while (yield).iteration < self._learns_from:
            pass
        begin = yield from self._pause(WARM_SECONDS)
        self._usual = (yield from self._until(_is_steady, begin, SHORT_SECONDS)).per_iteration

    def _regain_speed(self) -> Steps[ReportedProgress]:
        """Waits until the training is back at its speed after a recording: CUDA graphs are built again then.

        A steady speed that is not much lower will do, because the machine may have other work now.
        """
        if jax.default_backend() == "cpu":
            return (yield from self._pause(SETTLE_SECONDS if self._workers is not None else 0.0))

        def is_back(before: WindowSpan | None, now: WindowSpan) -> bool:
            is_near = now.per_iteration < SLOWED * self._usual
            return STEADY * now.per_iteration < self._usual or (is_near and _is_steady(before, now))

        begin = yield from self._pause(SETTLE_SECONDS)
        return (yield from self._until(is_back, begin, SHORT_SECONDS)).end

    def _settle_while_recording(self, begin: ReportedProgress) -> Steps[ReportedProgress]:
        """Waits until CUDA graphs are built, which begins anew with a recording."""

        def is_settled(before: WindowSpan | None, now: WindowSpan) -> bool:
            recorded = now.end.now - begin.now
            may_be_slowed = now.per_iteration > SLOWED * self._usual and recorded < 1e9 * MAX_SLOWED_SECONDS
            return _is_steady(before, now) and not may_be_slowed

        return (yield from self._until(is_settled, begin, RECORDED_SHORT_SECONDS)).end

    def _until(
        self, is_reached: Callable[[WindowSpan | None, WindowSpan], bool], begin: ReportedProgress, seconds: float
    ) -> Steps[WindowSpan]:
        """Returns the first of some short windows at which, with the one before, a speed is reached."""
        before, now = None, (yield from self._window(begin, seconds))
        for _ in range(MAX_SHORT_WINDOWS):
            if is_reached(before, now):
                break
            before, now = now, (yield from self._window(now.end, seconds))
        return now

    def _pause(self, seconds: float) -> Steps[ReportedProgress]:
        """Waits for the report of the work in progress, and then for a report at least `seconds` later."""
        begin = yield
        while True:
            now = yield
            if now.now - begin.now >= 1e9 * seconds:
                return now

    def _window(self, begin: ReportedProgress, seconds: float) -> Steps[WindowSpan]:
        """Returns a window of at least this many seconds, begun again if the training was rolled back."""
        before = begin
        while True:
            end = yield
            if end.iteration < before.iteration:
                begin = end
            before = end
            if end.now - begin.now >= 1e9 * seconds and end.iteration > begin.iteration:
                return WindowSpan(begin, end)

    def _plain_window(self, begin: ReportedProgress) -> Steps[PlainWindow]:
        self._activity.restart()
        before = read_processor_time()
        span = yield from self._window(begin, self._seconds)
        return PlainWindow(span, self._activity.total(), (before, read_processor_time()))

    def _profile_window(self, seconds: float, *, read: bool = True) -> Steps[ProfiledWindow]:
        awaited = set(self._workers.start_recording()) if self._workers is not None else set()
        self._recorder.start()
        if self._workers is not None:
            begin = yield from self._pause(SETTLE_SECONDS)  # workers start their recordings later
        else:
            begin = yield  # skips a report of iterations that began before the recording
        if jax.default_backend() != "cpu":
            begin = yield from self._settle_while_recording(begin)
        span = yield from self._window(begin, seconds)
        self._received.clear()
        self._number += 1
        window, use = self._end_recordings(span, read=read)
        yield from self._replies(awaited, REPLY_SECONDS if read else FORGET_SECONDS)
        if window is None:
            return ProfiledWindow(span, {}, use)
        others = {name: other for name, other in self._received.items() if other is not None}
        return ProfiledWindow(span, {THIS_PROCESS: window, **others}, use, frozenset(awaited - others.keys()))

    def _end_recordings(self, span: WindowSpan, *, read: bool) -> tuple[RecordedWindow | None, DeviceUse | None]:
        """Ends the recordings of all processes.

        Returns this process's window if events are read, and the use of its accelerator if only this process
        computes, on one device.
        """
        begin, end = span.begin.now, span.end.now
        if self._workers is None and jax.default_backend() != "cpu":
            window, use = self._recorder.stop_with_use(begin, end, read=read)
            # Several devices also wait for each other, and an idle device shows nothing.
            return window, use if use.devices == 1 and use.kernels else None
        if read:
            if self._workers is not None:
                self._workers.stop_recording(self._number, begin, end)
            return self._recorder.stop(begin, end), None
        if self._workers is not None:
            self._workers.abandon_recording(self._number)
        self._recorder.abandon()
        return None, None

    def _replies(self, awaited: set[str], seconds: float) -> Steps[None]:
        """Waits until these workers have ended their recordings, which slows the training down.

        A lost worker never replies. If it was started again, the training is rolled back, and waiting ends.
        """
        deadline, iteration = time.monotonic() + seconds, 0
        while awaited - self._received.keys() and time.monotonic() < deadline:
            now = yield
            if now.iteration < iteration:
                return
            iteration = now.iteration


def _is_steady(before: WindowSpan | None, now: WindowSpan) -> bool:
    return before is not None and STEADY * before.per_iteration < now.per_iteration


class ProfiledTraining:
    """A training session that advances the profiler's windows with its reports, and ends with the last window."""

    def __init__(self, training: Training, windows: Windows) -> None:
        self._training, self._windows = training, windows
        self.request_snapshot = training.request_snapshot

    def run(self, stopping: Callable[[], bool]) -> Iterator[Report]:
        """Yields the reports of the session until training ends. The last reports contain the final training
        state.
        """
        for report in self._training.run(lambda: self._windows.done or stopping()):
            yield report
            match report:
                case MetricsRows(first, rows, counts):
                    self._windows.advance(first + (sum(counts) if counts is not None else len(rows)))
                case Recorded(worker, number, window):
                    read = RecordedWindow.from_json(window) if window is not None else None
                    self._windows.receive(worker, number, read)

    @property
    def unreachable_workers(self) -> str:
        """Names of the workers on unreachable hosts, with the name of each worker's host."""
        return self._training.unreachable_workers

    @property
    def waited_for(self) -> str:
        """Names of workers that delay the end of the run."""
        return self._training.waited_for
