"""When windows of a profiled training begin and end, by a training that reports on a clock of its own."""

import itertools
from collections.abc import Collection, Mapping, Sequence

import jax
import pytest

from rollmill.gpus.activity import GpuActivity
from rollmill.profiler import windows as windows_module
from rollmill.profiler.windows import Windows
from rollmill.profiling.attribution import WindowTimes
from rollmill.profiling.device_use import DeviceUse
from rollmill.profiling.recording import RecordedWindow
from rollmill.profiling.results import Overlap

USUAL, RECORDED, SLOW = 10_000_000, 11_000_000, 30_000_000
"""Nanoseconds of an iteration: usually, while it is recorded, and for a while after a recording began or ended."""
WORKING = 7_000_000
"""Nanoseconds in which an accelerator is at work in an iteration that is recorded."""
SECOND = 1_000_000_000


class Clock:
    """Time passes by iterations, which are slow for a while after each change of the recording."""

    def __init__(self, slow_seconds: Mapping[bool, float], *, later: float = 1.0) -> None:
        self.now = 0
        self.slow_until = 0
        self.recording = self.has_recorded = False
        self.later = later
        """Factor by which iterations are longer from the first recording on."""
        self._slow_seconds = slow_seconds

    def monotonic_ns(self) -> int:
        return self.now

    def monotonic(self) -> float:
        return 1e-9 * self.now

    def change(self, *, recording: bool) -> None:
        self.recording, self.has_recorded = recording, True
        self.slow_until = self.now + round(1e9 * self._slow_seconds[recording])

    def iterate(self) -> None:
        usual = SLOW if self.now < self.slow_until else RECORDED if self.recording else USUAL
        self.now += round(usual * (self.later if self.has_recorded else 1.0))


class Recorder:
    """Stands for the profiler."""

    use: Mapping[str, int] = {}
    """Changes of the use of an accelerator that it finds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def start(self) -> None:
        self._clock.change(recording=True)

    def stop(self, begin: int, end: int) -> RecordedWindow:
        self._clock.change(recording=False)
        return recorded(begin, end)

    def abandon(self) -> None:
        self._clock.change(recording=False)

    def stop_with_use(self, begin: int, end: int, *, read: bool) -> tuple[RecordedWindow | None, DeviceUse]:
        window = self.stop(begin, end)
        return window if read else None, used(begin, end, **self.use)


class Worker:
    """A worker that takes a second to end a recording, in which the training is slow."""

    def __init__(self, clock: Clock, *, forgets: bool, lost_in: int | None = None) -> None:
        self._clock = clock
        self._forgets = forgets
        self._lost_in = lost_in
        """The number of the request that it cannot answer, because it has begun anew."""
        self._ends_at: int | None = None
        self._number, self._window = 0, None

    def start_recording(self) -> Sequence[str]:
        return ["actor/0"]

    def stop_recording(self, number: int, begin: int, end: int) -> None:
        self._end(number, recorded(begin, end) if number != self._lost_in else None)

    def abandon_recording(self, number: int) -> None:
        if self._forgets:
            self._end(number, None)

    def _end(self, number: int, window: RecordedWindow | None) -> None:
        self._number, self._window = number, window
        self._ends_at = self._clock.slow_until = self._clock.now + SECOND

    def answer(self, windows: Windows) -> None:
        """Tells that it has ended a recording, once it has."""
        if self._ends_at is not None and self._clock.now >= self._ends_at:
            self._ends_at = None
            windows.receive("actor/0", self._number - 1, None)  # comes too late
            windows.receive("actor/0", self._number, self._window)


def recorded(begin: int, end: int) -> RecordedWindow:
    iterations = (end - begin) // RECORDED
    nothing = Overlap(host_only=0.0, device_only=0.0, both=0.0, neither=0.0)
    times = WindowTimes(end - begin, {}, 0.0, {}, {}, {}, 0.0, nothing, 100 * iterations, 10 * iterations, {})
    return RecordedWindow(times, (), ())


def used(begin: int, end: int, **changes: int) -> DeviceUse:
    iterations = (end - begin) // RECORDED
    working = iterations * WORKING
    use = DeviceUse(0.9 * working, 0.1 * working, kernels=200 * iterations, waits=3 * iterations, devices=1)
    return use._replace(**changes)


def trained(
    monkeypatch: pytest.MonkeyPatch,
    *,
    begun: float,
    ended: float,
    learns_from: int = 0,
    unread: int = 0,
    has_worker: bool = False,
    forgets: bool = True,
    later: float = 1.0,
    lost_in: int | None = None,
    rolled_back: Collection[int] = (),
) -> Windows:
    """Windows of a training that is slow for some seconds after a recording has begun or ended.

    After the reports with the numbers `rolled_back` it goes on from 30 iterations before.
    """
    clock = Clock({True: begun, False: ended}, later=later)
    worker = Worker(clock, forgets=forgets, lost_in=lost_in) if has_worker else None
    monkeypatch.setattr(windows_module, "time", clock)
    monkeypatch.setattr(windows_module, "TraceRecorder", lambda: Recorder(clock))
    found = Windows(
        count=2,
        unread=unread,
        seconds=0.5,
        profiled_seconds=0.2,
        workers=worker,
        activity=GpuActivity(),
        learns_from=learns_from,
        show=lambda line: None,
    )
    iteration = 0
    for report in range(5000):
        iteration += -30 if report in rolled_back else 1
        clock.iterate()
        if worker is not None:
            worker.answer(found)
        found.advance(iteration)
        if found.done:
            return found
    raise AssertionError("the windows have no end")


def test_windows_on_a_gpu_wait_until_cuda_graphs_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    found = trained(monkeypatch, begun=0.5, ended=1.2)
    assert [span.per_iteration for span in found.plain] == pytest.approx([USUAL] * 3, rel=0.01)
    assert [window.span.per_iteration for window in found.profiled] == pytest.approx([RECORDED] * 2, rel=0.01)


def test_the_waiting_of_a_gpu_is_known_in_all_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    found = trained(monkeypatch, begun=0.5, ended=1.2, unread=2)
    assert [bool(window.processes) for window in found.recorded] == [True, False, False] * 2
    assert [pair.waiting for pair in found.pairs()] == pytest.approx([RECORDED - WORKING] * 6, rel=0.01)
    assert found.waits == pytest.approx(3)


def test_a_gpu_that_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(Recorder, "use", {"computing": 10**12})
    assert [pair.waiting for pair in trained(monkeypatch, begun=0.5, ended=1.2).pairs()] == [0.0] * 2


@pytest.mark.parametrize("use", [{"devices": 2}, {"kernels": 0}])
def test_the_waiting_of_several_gpus_and_of_an_idle_one_is_not_known(monkeypatch, use: Mapping[str, int]) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(Recorder, "use", use)
    found = trained(monkeypatch, begun=0.5, ended=1.2, unread=1)
    assert [pair.waiting for pair in found.pairs()] == [None] * 4 and found.waits == 0.0


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_the_waiting_of_a_device_is_not_known_where_workers_compute_and_on_a_cpu(
    monkeypatch, backend: str
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    found = trained(monkeypatch, begun=0.5, ended=1.2, unread=2, has_worker=backend == "gpu")
    assert [pair.waiting for pair in found.pairs()] == [None] * 6


def test_a_machine_that_has_become_slower_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    found = trained(monkeypatch, begun=0.5, ended=1.2, later=1.2)
    assert [span.per_iteration for span in found.plain] == pytest.approx([1.2 * USUAL] * 3, rel=0.01)
    between = [after.begin.now - before.end.now for before, after in itertools.pairwise(found.plain)]
    assert all(nanoseconds < 6 * SECOND for nanoseconds in between)


def test_windows_on_a_cpu_wait_for_what_was_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    found = trained(monkeypatch, begun=0.0, ended=0.02)
    assert [span.per_iteration for span in found.plain] == pytest.approx([USUAL] * 3, rel=0.01)


def test_no_window_begins_before_the_training_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    found = trained(monkeypatch, begun=0.0, ended=0.2, learns_from=1000)
    assert found.plain[0].begin.iteration > 1000


def test_windows_that_are_not_read_tell_the_cost_of_events_too(monkeypatch: pytest.MonkeyPatch) -> None:
    found = trained(monkeypatch, begun=0.0, ended=0.02, unread=3)
    assert (len(found.profiled), len(found.recorded), len(found.plain)) == (2, 8, 9)
    assert [bool(window.processes) for window in found.recorded] == [True, False, False, False] * 2
    for pair in found.pairs():
        assert (pair.program_events, pair.span_events) == pytest.approx((100, 10), rel=0.1)
        assert pair.profiled / pair.unprofiled == pytest.approx(RECORDED / USUAL, rel=0.02)


def test_long_iterations_leave_windows_out_that_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        windows_module, "LONG_SECONDS", 0.1
    )  # a pair of windows takes 0.74 s, 0.7 s of them as asked
    usual = trained(monkeypatch, begun=0.0, ended=0.02, unread=3)
    assert (len(usual.recorded), usual.left_out) == (8, 0)
    monkeypatch.setattr(windows_module, "LONG_SECONDS", 0.01)
    found = trained(monkeypatch, begun=0.0, ended=0.02, unread=3)
    assert (len(found.profiled), len(found.recorded), len(found.plain)) == (2, 2, 3)
    assert (found.left_out, found.planned) == (6, 2)


@pytest.mark.parametrize("unread", [0, 2])
def test_windows_begin_after_all_workers_have_ended_their_recordings(
    monkeypatch: pytest.MonkeyPatch, unread: int
) -> None:
    found = trained(monkeypatch, begun=0.0, ended=0.0, unread=unread, has_worker=True)
    assert [span.per_iteration for span in found.plain] == pytest.approx([USUAL] * len(found.plain), rel=0.01)
    assert all("actor/0" in window.processes for window in found.profiled)
    assert not found.incomplete


def test_a_worker_that_does_not_say_that_it_forgot_is_waited_for_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(windows_module, "FORGET_SECONDS", 2.0)
    found = trained(monkeypatch, begun=0.0, ended=0.0, unread=2, has_worker=True, forgets=False)
    assert len(found.recorded) == 6 and len(found.profiled) == 2
    assert all("actor/0" in window.processes for window in found.profiled)
    assert not found.incomplete, "what it recorded in the windows that were read is there"


def test_a_window_in_which_a_worker_was_lost_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = trained(monkeypatch, begun=0.0, ended=0.0, has_worker=True, lost_in=2)
    assert [window.missing for window in found.incomplete] == [{"actor/0"}]
    assert found.lost_workers == ["actor/0"]
    assert len(found.profiled) == 1 and len(found.plain) == 2
    assert {each.name: each.iterations for each in found.by_process()} == {
        "training": found.profiled[0].span.iterations,
        "actor/0": found.profiled[0].span.iterations,
    }


def test_a_window_begins_anew_where_the_training_was_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    found = trained(monkeypatch, begun=0.0, ended=0.0, rolled_back=range(70, 5000, 70))
    spans = [*found.plain, *(window.span for window in found.profiled)]
    assert max(span.per_iteration for span in spans) <= 1.01 * RECORDED
