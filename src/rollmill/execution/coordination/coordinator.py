"""Runs a partition's replicas as workers, sees that they live, and gathers what they tell.

    rows        metrics, iteration by iteration
    saved       the whole state, put together from the replicas' parts
    rewound     something was lost that the others cannot do without: all of them went back to the last state
    started up  how long building and compiling took, as far as is known by then
    notice      what a user should know

A lost actor or environment worker is replaced and the training goes on; a replica that others compute in step
with takes all back to the last state that was put together. Both a bounded number of times (`losses`).
"""

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rollmill.core.errors import RollmillError, UsageError
from rollmill.dataflow import Graph, Group, Partition, State, share, start, start_learner
from rollmill.execution.coordination.failure_log import FailureLog
from rollmill.execution.coordination.recovery import Recovery, pause_before
from rollmill.execution.coordination.reports import MetricsRows, Notice, Report, RolledBack, Row, Saved, StartedUp
from rollmill.execution.coordination.start_up import StartUp
from rollmill.execution.coordination.stop import StopBarrier
from rollmill.execution.processes import (
    ALL,
    Finished,
    Hung,
    Job,
    Lost,
    Received,
    Started,
    Supervision,
    WorkerMessage,
)
from rollmill.execution.replica import STRIDE, StatePart, assemble, share_of

MARGIN_SECONDS = 0.5
"""How far ahead a checkpoint is announced, so that nobody has passed it already."""

MOST_RESTARTS = 5
"""Consecutive losses of a replica that steps no environments after which a run ends (`losses`)."""

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
        blank: State,
        restored: bool,
        mesh: bool = False,
        max_failures: int = 5,
        hang_seconds: float = 120.0,
    ) -> None:
        """`workers` has a job for each replica; `blank` is a state at the beginning, on the host.

        On a `mesh` all replicas are one program, and states can be had at multiples of a stride. A replica that
        steps environments may be lost `max_failures` times in a row; one that has worked for `hang_seconds`
        begins a new row.
        """
        self._max_failures, self._losses = max_failures, Recovery(hang_seconds)
        self._due: dict[str, float] = {}
        """When lost replicas, or `ALL`, are started again."""
        self._failures = FailureLog()
        self._stop_asked_at: float | None = None
        self._slow_stop_told = False
        self._mesh = mesh
        self._meeting = free_address() if mesh else ""
        self._graph, self._partition, self._workers = graph, partition, workers
        self._saved, self._blank, self._restored = begin_with, blank, restored
        self._began, self._goes_on = begin_with.iteration, restored
        self._end = StopBarrier(workers, graph.loops.iterations)
        self._iteration = self._furthest = begin_with.iteration
        self._generation = 1 if restored else 0
        self._epoch = 0
        self._attempts: dict[str, int] = {}
        self._wanted: int | None = None
        self._parts: dict[int, dict[str, StatePart]] = {}
        self._finished: set[str] = set()
        self._row_seconds = 0.1
        self._row_at = time.monotonic()
        self._done = False

    def run(self, stopping: Callable[[], bool] = lambda: False) -> Iterator[Report]:
        """What happens, until the training ends; closing it early leaves the workers to their supervisor.

        Args:
            stopping: whether to `stop`; asked after each event, and about twice a second while nothing happens.

        Raises:
            LostWorker: a worker was lost too many times in a row.
            EnvironmentFailed: an environment failed too many times in a row.
            NonFiniteError: an environment gave a number that is not finite.
        """
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
            yield from self._tell_slow_stop()
            if self._end.settle(self._answering) and self._iteration == self.last:
                self._end_update()  # which no row will tell it any more
            if not self._done:
                self._check_alive()

    def want_state(self) -> None:
        """Asks for the state after one of the next iterations."""
        passed = self._wanted is not None and self._iteration > self._wanted + 1
        if (self._wanted is None or passed) and self._iteration < self.last:
            self._wanted = min(self._ahead(), self.last)
            self._parts = {n: parts for n, parts in self._parts.items() if n > self._iteration}
            self._workers.send(ALL, "snapshot", {"iteration": self._wanted})

    def stop(self) -> None:
        """Ends the training after an iteration that all replicas can come to, with its state."""
        self._end.stop()

    def _heed(self, stopping: Callable[[], bool]) -> None:
        if stopping():
            self._stop_asked_at = self._stop_asked_at or time.monotonic()
            self.stop()

    def _tell_slow_stop(self) -> Iterator[Notice]:
        asked = self._stop_asked_at
        if asked is None or self._done or self._slow_stop_told or time.monotonic() - asked < SLOW_STOP_SECONDS:
            return
        self._slow_stop_told = True
        yield Notice(
            f"stopping; still waiting for {self.waited_for}. Ctrl-C once more ends the run at once; it can be "
            "resumed from its newest checkpoint"
        )

    @property
    def waited_for(self) -> str:
        """The replicas that have not ended yet and wait for no other, and what each of them does."""
        doing = {name: what for name, what in self._workers.doing().items() if name not in self._finished}
        busy = {name: what for name, what in doing.items() if not what.startswith("waiting")} or doing
        return "; ".join(f"{name} ({what})" for name, what in busy.items()) or "workers to start"

    @property
    def last(self) -> int:
        """The number of iterations after which the training ends."""
        return self._end.last

    # --- events --------------------------------------------------------------------------------------

    def _on(self, event: Any) -> Iterator[Report]:
        match event:
            case Started(job, seconds):
                self._losses.started(job.name)
                yield Notice(f"{job.name} started in {seconds:.1f} s")
            case Received(job, message):
                yield from self._notice(job, message)
                yield from self._receive(job, message)
            case Finished(job):
                self._finished.add(job.name)  # its part of the state came before
                self._end.finished(job)
            case Lost(job, reason):
                if event.final is not None:
                    raise type(event.final)(f"{job.name}: {event.final}")
                yield Notice(f"{job.name} was lost: {reason}")
                yield from self._recover(job, reason, event.details if event.raised else "")
            case Hung(job, seconds, where):
                yield Notice(f"{job.name} hangs since {seconds:.0f} s {where}")
                try:
                    yield from self._recover(job, f"it hung {where}", "", hung_seconds=seconds)
                except UsageError as error:  # nobody can replace it
                    raise LostWorker(f"{job.name} hangs since {seconds:.0f} s {where}. {error}") from error

    def _check_alive(self) -> None:
        """Whether a state can still come.

        Raises:
            LostWorker: it cannot.
        """
        if len(self._finished) == len(self._workers.jobs):
            raise LostWorker(f"all workers ended, but no whole state came after iteration {self._saved.iteration}")

    def _notice(self, job: Job, message: WorkerMessage) -> Iterator[Report]:
        """Reports of messages that the coordinator only passes on."""
        match message.kind:
            case "process":
                yield Notice(f"{job.name} is process {message.fields['pid']}")
            case "failures":
                yield from self._failures.add(job.name, message.fields["failures"])
            case "started" if self._epoch == 0 and not self._attempts.get(job.name):
                yield StartedUp(self._start_up.add(message.fields))

    def _receive(self, job: Job, message: WorkerMessage) -> Iterator[Report]:
        fields = message.fields
        match message.kind:
            case "row":
                yield self._rows(fields["iteration"], [fields["metrics"]])
            case "rows":
                yield self._rows(fields["first"], fields["rows"])
            case "snapshot":
                part = StatePart(fields["lowest"], message.arrays)
                self._parts.setdefault(fields["iteration"], {})[job.name] = part
            case "hold":
                self._end.hear(job, fields["begun"])
            case "missed" if fields["iteration"] == self._wanted:
                self._wanted = None
        yield from self._save_if_whole()

    def _rows(self, first: int, rows: list[Row]) -> MetricsRows:
        now = time.monotonic()
        self._row_seconds = 0.8 * self._row_seconds + 0.2 * (now - self._row_at) / len(rows)
        self._row_at = now
        self._iteration = first + len(rows)
        if self._iteration > self._furthest:  # what fails in one iteration does so each time that it is come to
            self._furthest = self._iteration
            self._losses.advanced()
        if self._iteration == self.last:
            self._end_update()
        rows = self._failures.add_to(rows)
        return MetricsRows(first, [{name: np.float32(value) for name, value in row.items()} for row in rows])

    def _end_update(self) -> None:
        """The group with the update alone cannot know that no gradients come any more."""
        update = self._partition.holder("update")
        if update.fragments == ("update",):
            self._workers.send(update.name, "snapshot", {"iteration": self.last, "final": True})

    def _save_if_whole(self) -> Iterator[Report]:
        for iteration, parts in sorted(self._parts.items()):
            if not self._answering <= parts.keys():
                continue
            del self._parts[iteration]
            state = assemble(self._blank, iteration, list(parts.values()))
            if iteration == self._wanted:
                self._wanted = None
            if state is None:
                continue
            self._saved, self._restored = Saved(iteration, state), True
            yield self._saved
            self._done = iteration >= self.last
            return

    @property
    def _answering(self) -> set[str]:
        """Jobs that have a part of the state, so that they must end after the same iteration."""
        return {job.name for job in self._workers.jobs if self._has_part(self._group(job))}

    def _has_part(self, group: Group) -> bool:
        return self._partition.synchronous or group.has("update") or (group.has("gradients") and group.synchronous)

    def _ahead(self) -> int:
        """An iteration that no replica has come to yet."""
        ahead = self._iteration + 2 + int(MARGIN_SECONDS / max(self._row_seconds, 1e-4))
        return -(-ahead // STRIDE) * STRIDE + STRIDE if self._mesh else ahead

    # --- beginning, and beginning again --------------------------------------------------------------

    def _begin(self, job: Job) -> None:
        group = self._group(job)
        replaced = self._attempts.get(job.name, 0)
        keeps = self._goes_on and self._keeps
        arrays = {}
        if self._goes_on and not (replaced and group.has("environment")):
            index = share(self._graph.loops.num_envs, group.replicas, job.replica)
            index = range(self._graph.loops.num_envs) if self._mesh else index
            arrays = share_of(
                self._saved.state,
                index,
                learner=group.has("gradients") or group.has("update"),
                environments=keeps,
            )
        fields = {
            "first": self._began,
            "epoch": self._epoch,
            "attempt": replaced,
            "generation": self._generation,
            "opens": not keeps,
            "meet": self._meeting,
        }
        self._finished.discard(job.name)
        self._end.tell(job)  # before it begins, so that it begins nothing that it must not
        self._workers.send(job, "begin", fields, arrays)

    def _recover(self, job: Job, reason: str, details: str, *, hung_seconds: float = 0.0) -> Iterator[Report]:
        group = self._group(job)
        steps = group.has("environment")
        count = self._losses.add(job.name, environments=steps, idle_seconds=hung_seconds)
        limit = self._max_failures if steps else MOST_RESTARTS
        if steps:
            self._failures.lost()
        if count > limit:
            raise LostWorker("\n".join(filter(None, [self._lost_too_often(job, count, reason), details])))
        alone, pause = replaceable(self._partition, group), pause_before(count)
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
        group, host = self._group(job), self._graph.host is not None
        if not (host and group.has("environment")):
            return text
        index = share(self._graph.loops.num_envs, group.replicas, job.replica)
        return (
            f"{text}\nIt steps environments {index[0]} to {index[-1]} of {self._graph.settings['environment']}.\n"
            f"hint: mend the environment, or allow more losses in a row with --max-failures (now {count - 1})."
        )

    def _next_events(self) -> list[Any]:
        if not self._due:
            return self._workers.events(timeout=0.5)
        timeout = min(max(min(self._due.values()) - time.monotonic(), 0.0), 0.5)
        events = self._workers.events(timeout=timeout)
        if not events:
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
                yield from self._replace(job)

    def _replace(self, job: Job) -> Iterator[Report]:
        self._attempts[job.name] = self._attempts.get(job.name, 0) + 1
        self._begin(self._workers.replace(job))
        if self._wanted is not None:
            self._workers.send(job.name, "snapshot", {"iteration": self._wanted})
        yield Notice(f"{job.name} was replaced; the training goes on")

    def _begin_again(self) -> Iterator[Report]:
        self._epoch += 1
        self._meeting = free_address() if self._mesh else ""
        self._generation += 1
        self._attempts.clear()
        self._parts.clear()
        self._wanted = None
        self._iteration = self._saved.iteration
        self._began, self._goes_on = self._saved.iteration, self._restored or self._keeps
        self._end.begin_again()
        for job in self._workers.jobs:
            self._begin(self._workers.replace(job))
        yield RolledBack(self._saved.iteration)
        yield Notice(f"all workers begin again after iteration {self._saved.iteration}")

    @property
    def _keeps(self) -> bool:
        """Whether states hold the environments: asynchronous ones and Python objects begin anew."""
        return self._partition.synchronous and self._graph.host is None

    def _group(self, job: Job) -> Group:
        return next(group for group in self._partition.groups if group.name == job.group)


def free_address() -> str:
    """A port of this host that nobody listens at now, where the processes of a mesh meet."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def replaceable(partition: Partition, group: Group) -> bool:
    """Whether a replica of this group can be lost without taking the others back."""
    if group.fragments == ("environment",):
        return True
    if group.has("gradients") or group.has("update"):
        return not group.synchronous and group.has("environment")
    return group.has("environment")


def host_blank(graph: Graph, shapes: State, key: Any) -> State:
    """A state at the beginning; zeros where environments are Python objects, which no state holds."""
    if graph.host is None:
        index = jnp.arange(graph.loops.num_envs, dtype=jnp.int32)
        return jax.jit(lambda key: start(graph, key, index))(key)
    learner = jax.jit(lambda key: start_learner(graph, key))(key)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes.collector)
    return State(zeros, learner, key, jnp.int32(0))
