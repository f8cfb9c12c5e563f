"""Runs a partition's replicas as workers, watches them, and reports metrics and states (`workers.reports`).

A lost replica that steps environments and computes no synchronous gradients is replaced, and the training goes on;
after the loss of any other, all return to the last state that was assembled (`dataflow.Role.replaceable`). Both
happen a bounded number of times (`recovery`).
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rollmill.core.errors import RollmillError, UsageError
from rollmill.core.operations import span
from rollmill.dataflow import (
    Graph,
    Owned,
    Partition,
    Role,
    State,
    empty_experience,
    roles_of,
    share,
    start,
    start_learner,
)
from rollmill.planning.plan import AllReduce
from rollmill.processes.clocks import Clock
from rollmill.processes.events import Audible, Finished, Hung, Lost, Received, Silent, Started
from rollmill.processes.jobs import Job
from rollmill.processes.supervision import ALL, Supervision
from rollmill.programs.compile_clock import CompileTimes
from rollmill.programs.faults.find import stop_at_nonfinite
from rollmill.workers.coordination.failure_log import FailureLog
from rollmill.workers.coordination.link_notices import link_notice
from rollmill.workers.coordination.meeting import MeetingPort
from rollmill.workers.coordination.recovery import Recovery, pause_before
from rollmill.workers.coordination.start_up import StartUp
from rollmill.workers.coordination.stop import StopBarrier
from rollmill.workers.protocol import (
    AbandonRecording,
    Begin,
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
from rollmill.workers.replica import STRIDE, StatePart, assemble, share_of
from rollmill.workers.reports import (
    LaunchesChosen,
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

MARGIN_SECONDS = 0.5
"""How far ahead a snapshot is announced, so that probably no replica has passed it."""

MOST_RESTARTS = 5
"""Consecutive losses of a replica that steps no environments after which a run ends (`recovery`)."""

SLOW_STOP_SECONDS = 2.0
"""A training that has not stopped by then says what it waits for."""


class LostWorker(RollmillError):
    """A worker was lost too many times in a row."""

    exit_code = 1


class Coordinator:
    """Drives the workers of a partition from one iteration to another."""

    def __init__(
        self,
        graph: Graph,
        partition: Partition,
        workers: Supervision,
        *,
        begin_with: Saved,
        initial: State,
        restored: bool,
        mesh: bool = False,
        launches: Mapping[str, Any] | None = None,
        max_failures: int = 5,
        hang_seconds: float = 120.0,
        fault_advice: str = "",
        check_loaded: Callable[[str, Loaded, Clock], None] = lambda worker, loaded, clock: None,
    ) -> None:
        """Makes a coordinator; `run` starts the workers.

        Args:
            graph: what is trained.
            partition: of this graph.
            workers: a job for each replica.
            begin_with: the state to begin with.
            initial: a state at the beginning, on the host.
            restored: whether `begin_with` is from a checkpoint.
            mesh: whether all replicas are one program, of which states can be had at multiples of a stride.
            launches: of a mesh's kernels, as they were chosen when the run began.
            max_failures: losses in a row of a replica that steps environments that the training survives.
            hang_seconds: losses of a replica that steps environments are not consecutive if it has worked for more
                than this in between.
            fault_advice: ends the message about a number that is not finite.
            check_loaded: checks the code that a replica has loaded.
        """
        self._check_loaded = check_loaded
        self._max_failures, self._recovery = max_failures, Recovery(hang_seconds)
        self._due: dict[str, float] = {}
        """When lost replicas, or `ALL`, are started again."""
        self._failures = FailureLog()
        self._stop_asked_at: float | None = None
        self._slow_stop_noted = False
        self._mesh, self._launches = mesh, launches
        self._reduction: AllReduce | None = None
        self._meeting = MeetingPort() if mesh else None
        self._graph, self._workers, self._fault_advice = graph, workers, fault_advice
        self._roles = roles_of(graph, partition)
        self._saved, self._initial, self._restored = begin_with, initial, restored
        self._began, self._goes_on = begin_with.iteration, restored
        self._barrier = StopBarrier(workers, graph.loops.iterations)
        self._first = self._iteration = self._furthest = begin_with.iteration
        self._generation = 1 if restored else 0
        self._restart = 0
        self._attempts: dict[str, int] = {}
        self._replacing: set[str] = set()
        """Lost replicas whose replacements are not at work yet."""
        self._wanted: int | None = None
        self._parts: dict[int, dict[str, StatePart]] = {}
        self._finished: set[str] = set()
        self._row_seconds = 0.1
        self._row_at = time.monotonic()
        self._done = False

    def run(self, stopping: Callable[[], bool] = lambda: False) -> Iterator[Report]:
        """Yields reports until the training ends; closing it early leaves the workers to their supervisor.

        Args:
            stopping: whether to `stop`; asked after each event, and about twice a second while nothing happens.

        Raises:
            LostWorker: a worker was lost too many times in a row.
            EnvironmentFailed: an environment failed too many times in a row.
            UnfitHost: a replica's host has other code, or lacks some.
            NonFiniteError: an environment gave a number that is not finite.
            CheckpointError: a worker sent a state without a part that it owns.
        """
        with contextlib.closing(self._meeting) if self._meeting else contextlib.nullcontext():
            yield from self._run(stopping)

    def _run(self, stopping: Callable[[], bool]) -> Iterator[Report]:
        self._start_up = StartUp(time.monotonic())
        self._workers.start()
        for job in self._workers.jobs:
            self._begin(job)
        while not self._done:
            events = self._next_events()
            self._heed(stopping)
            for event in events:
                if event.job in self._workers.jobs and not self._is_due(event.job):  # of no earlier worker
                    yield from self._on(event)
                    self._heed(stopping)  # there may be many, and replicas go on until they are told
            yield from self._start_due()
            yield from self._note_slow_stop()
            if self._barrier.settle(self._in_step) and self._iteration == self.last:
                self._request_last_snapshot()  # no metrics will come that would do so
            if not self._done:
                self._check_alive()

    def request_snapshot(self) -> None:
        """Requests the state after one of the next iterations."""
        passed = self._wanted is not None and self._iteration > self._wanted + 1
        if (self._wanted is None or passed) and self._iteration < self.last:
            self._wanted = min(self._ahead(), self.last)
            self._parts = {n: parts for n, parts in self._parts.items() if n > self._iteration}
            send_to(self._workers, ALL, SnapshotRequest(self._wanted))

    def start_recording(self) -> Sequence[str]:
        """Has all workers record their events for the profiler; returns their names."""
        self._workers.measure_clocks()
        send_to(self._workers, ALL, StartRecording())
        return [job.name for job in self._workers.jobs if job.name not in self._finished]

    def stop_recording(self, number: int, begin: int, end: int) -> None:
        """Has all workers stop recording; requests a `Recorded` of each.

        Args:
            number: of this request; answers repeat it.
            begin: the window's first nanosecond on this host's monotonic clock.
            end: the nanosecond after its last.
        """
        for job in self._workers.jobs:
            ahead = self._workers.clock(job).ahead_ns
            send_to(self._workers, job, StopRecording(number, begin + ahead, end + ahead))

    def abandon_recording(self, number: int) -> None:
        """Has all workers stop recording, and forget the events; requests a `Recorded` of each when it has.

        Args:
            number: of this request; answers repeat it.
        """
        send_to(self._workers, ALL, AbandonRecording(number))

    def stop(self) -> None:
        """Ends the training after an iteration that all replicas can come to, with its state."""
        self._barrier.stop()

    def _heed(self, stopping: Callable[[], bool]) -> None:
        if stopping():
            self._stop_asked_at = self._stop_asked_at or time.monotonic()
            self.stop()

    def _note_slow_stop(self) -> Iterator[Notice]:
        asked = self._stop_asked_at
        if asked is None or self._done or self._slow_stop_noted or time.monotonic() - asked < SLOW_STOP_SECONDS:
            return
        self._slow_stop_noted = True
        yield Notice(
            f"stopping; still waiting for {self.waited_for}. Ctrl-C once more ends the run at once; it can be "
            "resumed from its newest checkpoint"
        )

    @property
    def waited_for(self) -> str:
        """The replicas that have not ended yet and wait for no other, and what each of them does."""
        activities = {name: note for name, note in self._workers.doing().items() if name not in self._finished}
        busy = {name: note for name, note in activities.items() if not note.startswith("waiting")} or activities
        return "; ".join(f"{name} ({note})" for name, note in busy.items()) or "workers to start"

    @property
    def out_of_reach(self) -> str:
        """See `Training`."""
        return ", ".join(f"{name} on {host}" for name, host in self._workers.out_of_reach().items())

    @property
    def last(self) -> int:
        """The number of iterations after which the training ends."""
        return self._barrier.last

    # --- events --------------------------------------------------------------------------------------

    def _on(self, event: Any) -> Iterator[Report]:
        match event:
            case Started(job, seconds):
                self._recovery.started(job.name)
                yield Notice(f"{job.name} started in {seconds:.1f} s")
            case Received(job, message):
                yield from self._receive(job, parse(message))
            case Finished(job):
                self._finished.add(job.name)  # its part of the state came before
                self._barrier.finished(job)
            case Lost(job, reason):
                if event.final is not None:
                    raise type(event.final)(f"{job.name}: {event.final}")
                yield Notice(f"{job.name} was lost: {reason}", failed="worker")
                yield from self._recover(job, reason, event.details if event.raised else "")
            case Silent() | Audible():
                yield link_notice(event)
            case Hung():
                yield from self._on_hung(event)

    def _on_hung(self, hung: Hung) -> Iterator[Report]:
        told = f"{hung.job.name} hangs since {hung.seconds:.0f} s {hung.where}"
        yield Notice(told, failed="worker")
        try:
            yield from self._recover(hung.job, f"it hung {hung.where}", "", hung_seconds=hung.seconds)
        except UsageError as error:  # nobody can replace it
            raise LostWorker(f"{told}. {error}") from error

    def _check_alive(self) -> None:
        """Whether a state can still come.

        Raises:
            LostWorker: it cannot.
        """
        if len(self._finished) == len(self._workers.jobs):
            raise LostWorker(f"all workers ended, but no whole state came after iteration {self._saved.iteration}")

    def _receive(self, job: Job, message: Any) -> Iterator[Report]:
        match message:
            case Loaded() | Process() | KernelsChosen() | MeshCompiled() | WindowRecorded():
                yield from self._pass_on(job, message)
            case EnvFailures() | EnvGrowth():
                yield from self._failures.told(job.name, message, self._graph.settings["environment"])
            case CompileTimes() if self._is_starting_up(job):
                yield StartedUp(self._start_up.add(message))
            case IterationMetrics(first, rows):
                yield from self._report_metrics(first, rows)
            case SnapshotPart(iteration, lowest, arrays):
                part = StatePart(lowest, arrays, job.name, self._role(job).owned)
                self._parts.setdefault(iteration, {})[job.name] = part
            case Hold(begun):
                self._barrier.hear(job, begun)
            case MissedSnapshot(iteration) if iteration == self._wanted:
                self._wanted = None
        yield from self._save_if_whole()

    def _is_starting_up(self, job: Job) -> bool:
        """Whether this replica's start belongs to that of the training: another attempt, too, until it gets on."""
        return self._furthest == self._first or (self._restart == 0 and not self._attempts.get(job.name))

    def _pass_on(
        self, job: Job, message: Loaded | Process | KernelsChosen | MeshCompiled | WindowRecorded
    ) -> Iterator[Report]:
        match message:
            case Loaded():
                self._check_loaded(job.name, message, self._workers.clock(job))
            case Process(pid):
                yield from self._tell_process(job.name, pid)
            case KernelsChosen():
                for other in self._workers.jobs:
                    if other.name != job.name:
                        send_to(self._workers, other, message)
            case MeshCompiled():
                yield from self._keep_choices(message)
            case WindowRecorded(number, window):
                yield Recorded(job.name, number, window)

    def _tell_process(self, name: str, pid: int) -> Iterator[Notice]:
        yield Notice(f"{name} is process {pid}")
        if name in self._replacing:
            self._replacing.remove(name)
            yield Notice(f"{name} was replaced; the training goes on")

    def _keep_choices(self, compiled: MeshCompiled) -> Iterator[Report]:
        """Reports what the processes of a mesh have chosen by timing, and keeps it for when they begin again."""
        launches, reduction, notes = compiled
        yield from map(Notice, notes if self._restart == 0 else ())
        if launches is not None:
            self._launches = launches
            yield LaunchesChosen(launches)
        if reduction is not None:
            self._reduction = reduction
            yield ReductionChosen(reduction)

    def _report_metrics(self, first: int, rows: Sequence[Row]) -> Iterator[MetricsRows]:
        """Reports the metrics of iterations after the first `first` ones.

        Raises:
            NonFiniteError: one of them is not finite.
        """
        now = time.monotonic()
        self._row_seconds = 0.8 * self._row_seconds + 0.2 * (now - self._row_at) / len(rows)
        self._row_at = now
        self._iteration = first + len(rows)
        if self._iteration > self._furthest:  # a deterministic failure recurs: only new progress resets the counts
            self._furthest = self._iteration
            self._recovery.advanced()
        if self._iteration == self.last:
            self._request_last_snapshot()
        counted = self._failures.add_to(rows)
        rows = [{name: np.float32(value) for name, value in row.items()} for row in counted]
        yield MetricsRows(first, rows)
        stop_at_nonfinite(first, rows, self._fault_advice)

    def _request_last_snapshot(self) -> None:
        """Ends groups that cannot count iterations, because they do not know that no gradients come any more."""
        for name, role in self._roles.items():
            if role.ends_on_request:
                send_to(self._workers, name, SnapshotRequest(self.last, final=True))

    def _save_if_whole(self) -> Iterator[Report]:
        for iteration, parts in sorted(self._parts.items()):
            if not self._in_step <= parts.keys():
                continue
            del self._parts[iteration]
            state = assemble(self._initial, iteration, list(parts.values()))
            if iteration == self._wanted:
                self._wanted = None
            self._saved, self._restored = Saved(iteration, state), True
            yield self._saved
            self._done = iteration >= self.last
            return

    @property
    def _in_step(self) -> set[str]:
        """Jobs that have a part of the state, so that they must end after the same iteration."""
        return {job.name for job in self._workers.jobs if self._role(job).in_step}

    def _ahead(self) -> int:
        """An iteration that probably no replica has reached; one that has answers `MissedSnapshot`."""
        ahead = self._iteration + 2 + int(MARGIN_SECONDS / max(self._row_seconds, 1e-4))
        return -(-ahead // STRIDE) * STRIDE + STRIDE if self._mesh else ahead

    # --- beginning, and beginning again --------------------------------------------------------------

    def _begin(self, job: Job) -> None:
        role, attempt = self._role(job), self._attempts.get(job.name, 0)
        keeps = self._goes_on and self._keeps_environments
        arrays = {}
        if self._goes_on and not (attempt and role.steps_environments):
            num_envs = self._graph.loops.num_envs
            index = range(num_envs) if self._mesh else share(num_envs, role.group.replicas, job.replica)
            rings = Owned.REPLAY in role.owned
            arrays = share_of(self._saved.state, index, learner=role.learns, environments=keeps, rings=rings)
        begin = Begin(
            first=self._began,
            restart=self._restart,
            attempt=attempt,
            generation=self._generation,
            opens=not keeps,
            meeting_address=self._meeting.address if self._meeting else "",
            launches=self._launches,
            reduction=self._reduction,
            arrays=arrays,
        )
        self._finished.discard(job.name)
        self._barrier.inform(job)  # before it begins, so that it begins nothing that it must not
        send_to(self._workers, job, begin)

    def _recover(self, job: Job, reason: str, details: str, *, hung_seconds: float = 0.0) -> Iterator[Report]:
        role = self._role(job)
        steps = role.steps_environments
        count = self._recovery.add(job.name, environments=steps, idle_seconds=hung_seconds)
        limit = self._max_failures if steps else MOST_RESTARTS
        if steps:
            self._failures.lost()
        if count > limit:
            raise LostWorker("\n".join(filter(None, [self._lost_too_often(job, count, reason), details])))
        alone, pause = role.replaceable, pause_before(count)
        if pause:
            yield Notice(
                f"{job.name} was lost {count} times in a row (more than {limit} end the run); "
                f"it is started again in {pause:g} s"
            )
            self._workers.stop(job if alone else ALL, grace_seconds=0.0)
        self._due = {**self._due, job.name: time.monotonic() + pause} if alone else {ALL: time.monotonic() + pause}
        yield from self._start_due()

    def _lost_too_often(self, job: Job, count: int, reason: str) -> str:
        text = f"{job.name} was lost {count} times in a row: {reason}"
        role = self._role(job)
        if self._graph.host is None or not role.steps_environments:
            return text
        index = share(self._graph.loops.num_envs, role.group.replicas, job.replica)
        return (
            f"{text}\nIt steps environments {index[0]} to {index[-1]} of {self._graph.settings['environment']}.\n"
            f"hint: mend the environment, or allow more losses in a row with --max-failures (now {count - 1})."
        )

    def _next_events(self) -> list[Any]:
        timeout = min(max(min(self._due.values()) - time.monotonic(), 0.0), 0.5) if self._due else 0.5
        with span("reports of workers", "waiting"):
            events = self._workers.events(timeout=timeout)
        if not events and self._due:
            time.sleep(min(timeout, 0.05))  # where all are stopped, nothing is waited for
        return events

    def _is_due(self, job: Job) -> bool:
        return ALL in self._due or job.name in self._due

    def _start_due(self) -> Iterator[Report]:
        """Starts again those replicas whose pause is over."""
        now = time.monotonic()
        due = {name for name, start_at in self._due.items() if start_at <= now}
        self._due = {name: start_at for name, start_at in self._due.items() if name not in due}
        if ALL in due:
            yield from self._begin_again()
            return
        for job in self._workers.jobs:
            if job.name in due:
                self._replace(job)

    def _replace(self, job: Job) -> None:
        self._attempts[job.name] = self._attempts.get(job.name, 0) + 1
        self._begin(self._workers.replace(job))
        if self._wanted is not None:
            send_to(self._workers, job.name, SnapshotRequest(self._wanted))
        self._replacing.add(job.name)

    def _begin_again(self) -> Iterator[Report]:
        self._restart += 1
        if self._meeting:
            self._meeting.change()
        self._generation += 1
        self._attempts.clear()
        self._replacing.clear()
        self._parts.clear()
        self._wanted = None
        self._iteration = self._saved.iteration
        self._began, self._goes_on = self._saved.iteration, self._restored or self._keeps_environments
        self._barrier.begin_again()
        for job in self._workers.jobs:
            self._begin(self._workers.replace(job))
        yield RolledBack(self._saved.iteration)
        yield Notice(f"all workers begin again after iteration {self._saved.iteration}")

    @property
    def _keeps_environments(self) -> bool:
        """Whether states hold the environments: asynchronous ones and Python objects start anew."""
        return any(Owned.ENVIRONMENTS in role.owned for role in self._roles.values())

    def _role(self, job: Job) -> Role:
        return self._roles[job.group]


def initial_host_state(graph: Graph, shapes: State, key: Any) -> State:
    """A state at the beginning; zeros where environments are Python objects, which no state holds."""
    index = jnp.arange(graph.loops.num_envs, dtype=jnp.int32)
    if graph.host is None:
        return jax.jit(lambda key: start(graph, key, index))(key)
    learner = jax.jit(partial(start_learner, graph))(key)  # the learner's own program, from the cache there
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes.collector)
    rings = jax.jit(lambda: empty_experience(graph, index))()
    return State(zeros, learner, key, jnp.int32(0), rings)
