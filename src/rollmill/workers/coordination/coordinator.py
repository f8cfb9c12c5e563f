"""Runs the replicas of a partition as workers, watches them, and reports metrics and states (`workers.reports`).

If a replica that steps environments and computes no synchronous gradients is lost, it is replaced and training
continues. After the loss of any other replica, all replicas restart from the last assembled state
(`dataflow.Role.replaceable`). `recovery` limits how often both may happen.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from rollmill.core.errors import UsageError
from rollmill.core.operations import span
from rollmill.dataflow import Graph, State, replica_environments
from rollmill.processes.clocks import Clock
from rollmill.processes.events import Audible, Event, Finished, Hung, Leaving, Lost, Received, Silent, Started
from rollmill.processes.jobs import Job
from rollmill.processes.supervision import ALL, Supervision
from rollmill.programs.compile_clock import CompileTimes
from rollmill.programs.faults.locate import stop_at_nonfinite
from rollmill.workers.coordination.notices import FailureLog, link_notice
from rollmill.workers.coordination.recovery import Recovery, pause_before
from rollmill.workers.coordination.snapshots import Pace, SnapshotCollector
from rollmill.workers.coordination.starts import Starts, StartUp
from rollmill.workers.coordination.stop import StopBarrier
from rollmill.workers.protocol import (
    AbandonRecording,
    EnvFailures,
    EnvGrowth,
    Hold,
    IterationMetrics,
    KernelsChosen,
    Loaded,
    MeshCompiled,
    MissedSnapshot,
    Process,
    SnapshotPart,
    SnapshotRequest,
    StartRecording,
    StopRecording,
    WindowRecorded,
    parse,
    send_to,
)
from rollmill.workers.replica.snapshots import StatePart
from rollmill.workers.reports import (
    LaunchesChosen,
    LostWorker,
    MetricsRows,
    Notice,
    Recorded,
    ReductionChosen,
    Report,
    RolledBack,
    Row,
    Saved,
    StartedUp,
)
from rollmill.workers.run_spec import RunSpec

MAX_RESTARTS = 5
"""Maximum number of consecutive losses of a replica without environments. One more ends the run."""

LEAVE_SECONDS = 60.0
"""Seconds after which a replica leaves a host that is about to be removed, even if no newer state has arrived."""

SLOW_STOP_SECONDS = 2.0
"""Seconds after which a run that has not stopped names the workers that it waits for."""


class Coordinator:
    """Drives the workers of a partition, with one job per replica, from the first iteration to the last.

    It resumes from the checkpoint `restored`, or begins with the state `initial` on the host. `fault_advice` ends
    the message about a non-finite number. `check_loaded` checks the code that a replica has loaded.
    """

    def __init__(
        self,
        graph: Graph,
        spec: RunSpec,
        workers: Supervision,
        *,
        initial: State,
        restored: Saved | None = None,
        fault_advice: str = "",
        check_loaded: Callable[[str, Loaded, Clock], None] = lambda worker, loaded, clock: None,
    ) -> None:
        self._graph, self._workers = graph, workers
        self._fault_advice, self._check_loaded = fault_advice, check_loaded
        self._starts = Starts(graph, spec, initial, restored)
        self._pace = Pace(self._starts.saved.iteration)
        self._snapshots = SnapshotCollector(workers, initial)
        self._barrier = StopBarrier(workers, graph.loops.iterations)
        self._failures = FailureLog()
        self._max_failures = spec.tolerances.max_failures
        self._recovery = Recovery(spec.tolerances.hang_seconds)
        self._due: dict[str, float] = {}
        """When lost replicas, or `ALL`, are started again."""
        self._replacing: set[str] = set()
        """Lost replicas whose replacements have not begun yet."""
        self._leaving: dict[str, float] = {}
        """Replicas that have to leave their hosts, and when they do without a newer state."""
        self._finished: set[str] = set()
        self._noted: dict[str, Sequence[str]] = {}
        """Notes on the kernels of each group."""
        self._stop_asked_at: float | None = None
        self._slow_stop_reported = False
        self._done = False

    def run(self, stopping: Callable[[], bool] = lambda: False) -> Iterator[Report]:
        """Runs the training and yields reports until it ends. If the iterator is closed early, the supervisor ends
        the workers.

        `stopping` returns whether to stop. It is called after each event, and otherwise about twice a second.

        Raises `LostWorker` or `EnvironmentFailed` after too many consecutive losses of a worker or failures of an
        environment, `UnfitHost` if a host lacks code or has other code, `NonFiniteError` for a non-finite number
        of an environment, and `CheckpointError` if a worker sent a state without a part that it owns.
        """
        self._start_up = StartUp(time.monotonic())
        self._workers.start()
        self._begin_all()
        while not self._done:
            events = self._next_events()
            self._check_stop(stopping)
            for event in events:
                # ignores events of a worker that has been replaced
                if event.job in self._workers.jobs and not self._is_due(event.job):
                    yield from self._handle(event)
                    # checked after each event, because there may be many, and replicas run until they are held
                    self._check_stop(stopping)
            self._leave_overdue()
            yield from self._start_due()
            yield from self._report_slow_stop()
            if self._barrier.settle(self._in_step) and self._pace.iteration == self.last:
                # requested here, because no more metrics will arrive that would trigger the request
                self._request_last_snapshot()
            if not self._done:
                self._check_alive()

    def request_snapshot(self) -> None:
        """Requests a snapshot of the training state after one of the next iterations."""
        self._snapshots.request(self._pace, self.last, mesh=self._starts.mesh)

    def start_recording(self) -> Sequence[str]:
        """Tells all workers to record their events for the profiler, and returns the names of the workers."""
        self._workers.measure_clocks()
        send_to(self._workers, ALL, StartRecording())
        return [job.name for job in self._workers.jobs if job.name not in self._finished]

    def stop_recording(self, number: int, begin: int, end: int) -> None:
        """Tells all workers to stop recording. Each answers with a `Recorded` that repeats `number`.

        The recorded window lasts from `begin` until just before `end`, in nanoseconds of this host's monotonic
        clock.
        """
        for job in self._workers.jobs:
            ahead = self._workers.clock(job).ahead_ns
            send_to(self._workers, job, StopRecording(number, begin + ahead, end + ahead))

    def abandon_recording(self, number: int) -> None:
        """Tells all workers to stop recording and to discard the events. Each answers with a `Recorded` that
        repeats `number`.
        """
        send_to(self._workers, ALL, AbandonRecording(number))

    def stop(self) -> None:
        """Ends training after an iteration that all replicas can reach, and reports the state after it."""
        self._barrier.stop()

    @property
    def waited_for(self) -> str:
        """Names and activities of the replicas that have not ended and wait for no other replica."""
        activities = {name: note for name, note in self._workers.doing().items() if name not in self._finished}
        busy = {name: note for name, note in activities.items() if not note.startswith("waiting")} or activities
        return "; ".join(f"{name} ({note})" for name, note in busy.items()) or "workers to start"

    @property
    def unreachable_workers(self) -> str:
        """Names of the workers on unreachable hosts, and of these hosts, for messages."""
        return ", ".join(f"{name} on {host}" for name, host in self._workers.unreachable_hosts().items())

    @property
    def last(self) -> int:
        """Number of iterations after which training ends."""
        return self._barrier.last

    # --- stopping ------------------------------------------------------------------------------------

    def _check_stop(self, stopping: Callable[[], bool]) -> None:
        if stopping():
            self._stop_asked_at = self._stop_asked_at or time.monotonic()
            self.stop()

    def _report_slow_stop(self) -> Iterator[Notice]:
        asked = self._stop_asked_at
        if asked is None or self._done or self._slow_stop_reported:
            return
        if time.monotonic() - asked >= SLOW_STOP_SECONDS:
            self._slow_stop_reported = True
            yield Notice(
                f"stopping; waiting for {self.waited_for}. Press Ctrl-C again to end the run at once; it can be "
                "resumed from its newest checkpoint"
            )

    def _check_alive(self) -> None:
        """Raises `LostWorker` if no state can come any more."""
        if len(self._finished) == len(self._workers.jobs):
            saved = self._starts.saved.iteration
            raise LostWorker(f"all workers ended, but no complete state arrived after iteration {saved}")

    def _request_last_snapshot(self) -> None:
        """Ends groups that do not count iterations, and so cannot detect that no more gradients will arrive."""
        for name, role in self._starts.roles.items():
            if role.ends_on_request:
                send_to(self._workers, name, SnapshotRequest(self.last, final=True))

    # --- events --------------------------------------------------------------------------------------

    def _next_events(self) -> list[Event]:
        timeout = min(max(min(self._due.values()) - time.monotonic(), 0.0), 0.5) if self._due else 0.5
        with span("reports of workers", "waiting"):
            events = self._workers.events(timeout=timeout)
        if not events and self._due:
            time.sleep(min(timeout, 0.05))  # if all workers are stopped, `events` returns at once
        return events

    def _handle(self, event: Event) -> Iterator[Report]:
        match event:
            case Started(job, seconds):
                self._recovery.started(job.name)
                yield Notice(f"{job.name} started in {seconds:.1f} s")
            case Received(job, message):
                yield from self._receive(job, parse(message))
            case Finished(job):
                self._finished.add(job.name)  # its part of the state arrived earlier
                self._barrier.finished(job)
            case Lost(job, reason):
                if event.final is not None:
                    raise type(event.final)(f"{job.name}: {event.final}")
                yield Notice(f"{job.name} was lost: {reason}", failed="worker")
                yield from self._recover(job, reason, event.details if event.raised else "")
            case Silent() | Audible() | Hung() | Leaving():
                yield from self._handle_trouble(event)

    def _handle_trouble(self, event: Silent | Audible | Hung | Leaving) -> Iterator[Report]:
        match event:
            case Hung():
                yield from self._handle_hung(event)
            case Leaving():
                yield from self._handle_leaving(event)
            case _:
                yield link_notice(event)

    def _handle_hung(self, hung: Hung) -> Iterator[Report]:
        text = f"{hung.job.name} hangs since {hung.seconds:.0f} s {hung.where}"
        yield Notice(text, failed="worker")
        try:
            yield from self._recover(hung.job, f"it hung {hung.where}", "", hung_seconds=hung.seconds)
        except UsageError as error:  # a worker that is a thread cannot be replaced
            raise LostWorker(f"{text}. {error}") from error

    def _handle_leaving(self, leaving: Leaving) -> Iterator[Report]:
        """Moves a replica to another host: one with a part of the state after a checkpoint."""
        job = leaving.job
        if self._stop_asked_at is not None or self._is_due(job):
            return
        if self._starts.role(job).replaceable:
            yield Notice(f"{job.name} goes to another host: {leaving.reason}")
            self._due[job.name] = time.monotonic()
            return
        yield Notice(
            f"{job.name} goes to another host after a checkpoint: {leaving.reason}", wants_checkpoint=True
        )
        self._leaving[job.name] = time.monotonic() + LEAVE_SECONDS
        self.request_snapshot()

    def _leave_overdue(self) -> None:
        """Lets replicas leave from the last state if a newer one takes too long."""
        if self._leaving and min(self._leaving.values()) < time.monotonic():
            self._leave()

    def _leave(self) -> None:
        """Has all replicas begin again, those that leave on other hosts."""
        self._leaving.clear()
        if self._stop_asked_at is None:
            self._due = {ALL: time.monotonic()}

    def _receive(self, job: Job, message: Any) -> Iterator[Report]:
        match message:
            case IterationMetrics(first, rows):
                yield from self._report_metrics(first, rows)
            case SnapshotPart(iteration, lowest, arrays):
                part = StatePart(lowest, arrays, job.name, self._starts.role(job).owned_parts)
                self._snapshots.add(iteration, part)
            case Hold(begun):
                self._barrier.hear(job, begun)
            case MissedSnapshot(iteration):
                self._snapshots.missed(iteration)
            case EnvFailures() | EnvGrowth():
                yield from self._failures.receive(job.name, message, self._graph.settings["environment"])
            case WindowRecorded(number, window):
                yield Recorded(job.name, number, window)
            case _:
                yield from self._receive_start(job, message)
        yield from self._save_if_complete()

    def _receive_start(self, job: Job, message: Any) -> Iterator[Report]:
        """Handles the messages that a replica sends until it iterates."""
        match message:
            case Loaded():
                self._check_loaded(job.name, message, self._workers.clock(job))
            case Process(pid, meeting):
                yield Notice(f"{job.name} is process {pid}")
                if meeting:
                    self._starts.meet_at(meeting)
                    self._begin_all()
                if job.name in self._replacing:
                    self._replacing.remove(job.name)
                    yield Notice(f"{job.name} was replaced; training continues")
            case KernelsChosen():
                yield from self._pass_on(job, message)
            case MeshCompiled():
                yield from self._keep_choices(job, message)
            case CompileTimes() if self._is_starting_up(job):
                yield StartedUp(self._start_up.add(message))

    def _pass_on(self, sender: Job, chosen: KernelsChosen) -> Iterator[Report]:
        """Keeps the kernels that the first replica of a group has chosen, and sends them to the others."""
        self._starts.keep_launches(sender, chosen.launches)
        for job in self._workers.jobs:
            if job.group == sender.group and job.name != sender.name:
                send_to(self._workers, job, KernelsChosen(chosen.launches))
        yield from self._report_kernels(sender, chosen.notes)
        if chosen.launches is not None and not self._starts.mesh:
            yield LaunchesChosen(self._starts.launches)

    def _report_kernels(self, sender: Job, notes: Sequence[str]) -> Iterator[Notice]:
        """Reports notes on the kernels of a group at its first start, and what several groups note once."""
        if notes and sender.group not in self._noted:
            yield from (Notice(note) for note in notes if not any(note in said for said in self._noted.values()))
            self._noted[sender.group] = notes

    def _is_starting_up(self, job: Job) -> bool:
        """Returns whether this replica starts with the run, before the first iteration."""
        is_first = not (self._starts.restarts or self._starts.attempts(job))
        return is_first or self._pace.furthest == self._pace.first

    def _keep_choices(self, job: Job, compiled: MeshCompiled) -> Iterator[Report]:
        """Reports what the processes of a mesh chose by timing, and keeps it for the next common start."""
        launches, reduction, notes = compiled
        yield from self._report_kernels(job, notes)
        self._starts.keep_launches(job, launches)
        self._starts.keep_reduction(reduction)
        if launches is not None:
            yield LaunchesChosen(launches)
        if reduction is not None:
            yield ReductionChosen(reduction)

    def _report_metrics(self, first: int, rows: Sequence[Row]) -> Iterator[MetricsRows]:
        """Reports the metrics of iterations after the first `first` ones."""
        if self._pace.advance(first + len(rows), len(rows)):
            # reset only by new progress, because a deterministic failure recurs at the same iteration
            self._recovery.advanced()
        if self._pace.iteration == self.last:
            self._request_last_snapshot()
        counted = self._failures.add_to(rows)
        rows = [{name: np.float32(value) for name, value in row.items()} for row in counted]
        yield MetricsRows(first, rows)
        stop_at_nonfinite(first, rows, self._fault_advice)

    def _save_if_complete(self) -> Iterator[Report]:
        if (saved := self._snapshots.complete(self._in_step)) is not None:
            self._starts.keep(saved)
            yield saved
            self._done = saved.iteration >= self.last
            if self._leaving and not self._done:
                self._leave()

    @property
    def _in_step(self) -> set[str]:
        """Jobs with a part of the state, which therefore must end after the same iteration."""
        return {job.name for job in self._workers.jobs if self._starts.role(job).in_step}

    # --- beginning, and beginning again --------------------------------------------------------------

    def _begin_all(self) -> None:
        """Lets all replicas begin, unless they form a mesh whose rendezvous address is not known yet."""
        for job in self._workers.jobs if self._starts.can_begin else ():
            self._begin(job)

    def _begin(self, job: Job) -> None:
        self._finished.discard(job.name)
        self._barrier.inform(job)  # sent first, so that the replica begins no iteration after the end
        send_to(self._workers, job, self._starts.begin(job))

    def _recover(self, job: Job, reason: str, details: str, *, hung_seconds: float = 0.0) -> Iterator[Report]:
        role = self._starts.role(job)
        steps = role.steps_environments
        count = self._recovery.add(job.name, environments=steps, idle_seconds=hung_seconds)
        limit = self._max_failures if steps else MAX_RESTARTS
        if steps:
            self._failures.lost()
        if count > limit:
            raise LostWorker("\n".join(filter(None, [self._explain_losses(job, count, reason), details])))
        pause, to_start = pause_before(count), job.name if role.replaceable else ALL
        if pause:
            yield Notice(
                f"{job.name} was lost {count} times in a row (the limit is {limit}) and is restarted in "
                f"{pause:g} s"
            )
            self._workers.stop(to_start, grace_seconds=0.0)
        self._due = {**(self._due if role.replaceable else {}), to_start: time.monotonic() + pause}
        yield from self._start_due()

    def _explain_losses(self, job: Job, count: int, reason: str) -> str:
        text = f"{job.name} was lost {count} times in a row: {reason}"
        role = self._starts.role(job)
        if self._graph.host is None or not role.steps_environments:
            return text
        index = replica_environments(self._graph.loops.num_envs, role.group.replicas, job.replica)
        return (
            f"{text}\nIt steps environments {index[0]} to {index[-1]} of {self._graph.settings['environment']}.\n"
            f"hint: fix the environment, or allow more losses in a row with --max-failures (now {count - 1})."
        )

    def _is_due(self, job: Job) -> bool:
        return ALL in self._due or job.name in self._due

    def _start_due(self) -> Iterator[Report]:
        """Starts again those replicas that have paused long enough."""
        now = time.monotonic()
        due = {name for name, start_at in self._due.items() if start_at <= now}
        self._due = {name: start_at for name, start_at in self._due.items() if name not in due}
        if ALL in due:
            yield from self._begin_again()
            return
        for job in self._workers.jobs:
            if job.name in due:
                self._starts.replace(job)
                self._begin(self._workers.replace(job))
                self._snapshots.repeat(job.name)
                self._replacing.add(job.name)

    def _begin_again(self) -> Iterator[Report]:
        self._starts.begin_again()
        self._snapshots.clear()
        self._replacing.clear()
        self._leaving.clear()
        self._pace.begin_again(self._starts.saved.iteration)
        self._barrier.begin_again()
        for job in self._workers.jobs:
            self._workers.replace(job)
        self._begin_all()
        yield RolledBack(self._pace.iteration)
        yield Notice(f"all workers restart after iteration {self._pace.iteration}")
