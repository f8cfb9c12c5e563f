"""Runs a partition's replicas as workers, sees that they live, and gathers what they tell.

    rows        metrics, iteration by iteration
    saved       the whole state, put together from the replicas' parts
    rewound     something was lost that the others cannot do without: all of them went back to the last state
    notice      what a user should know

A lost actor or environment worker is replaced and the training goes on; a replica that others compute in step
with takes all back to the last state that was put together. Both a bounded number of times.
"""

import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from rollmill.core.errors import RollmillError, UsageError
from rollmill.dataflow import Graph, Group, Partition, State, share, start, start_learner
from rollmill.execution.common_end import CommonEnd
from rollmill.execution.groups import STRIDE, Part, assemble, share_of
from rollmill.execution.workers import ALL, Finished, Hung, Job, Lost, Message, Received, Started, Supervision

Row = dict[str, Any]

MARGIN_SECONDS = 0.5
"""How far ahead a checkpoint is announced, so that nobody has passed it already."""

THREADS = "NPROC"
"""The environment variable that tells XLA how many threads a program on a CPU may have."""

MOST_RESTARTS = 5
"""In a row, without an iteration between them that had not been done before."""


class Rows(NamedTuple):
    """Metrics of the iterations that follow the first `first` ones."""

    first: int
    rows: list[Row]


class Saved(NamedTuple):
    """The state after so many iterations, on the host."""

    iteration: int
    state: State


class Rewound(NamedTuple):
    """All replicas begin again after so many iterations."""

    iteration: int


class Notice(NamedTuple):
    """A line for the user."""

    text: str


Told: TypeAlias = Rows | Saved | Rewound | Notice


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
    ) -> None:
        """`workers` has a job for each replica; `blank` is a state at the beginning, on the host.

        On a `mesh` all replicas are one program, and states can be had at multiples of a stride.
        """
        self._mesh = mesh
        self._meeting = free_address() if mesh else ""
        self._graph, self._partition, self._workers = graph, partition, workers
        self._saved, self._blank, self._restored = begin_with, blank, restored
        self._began, self._goes_on = begin_with.iteration, restored
        self._end = CommonEnd(workers, graph.loops.iterations)
        self._iteration = self._furthest = begin_with.iteration
        self._generation = 1 if restored else 0
        self._epoch = 0
        self._attempts: dict[str, int] = {}
        self._restarts: dict[str, int] = {}
        self._wanted: int | None = None
        self._parts: dict[int, dict[str, Part]] = {}
        self._finished: set[str] = set()
        self._row_seconds = 0.1
        self._row_at = time.monotonic()
        self._done = False

    def run(self, stopping: Callable[[], bool] = lambda: False) -> Iterator[Told]:
        """What happens, until the training ends; closing it early leaves the workers to their supervisor.

        Args:
            stopping: whether to `stop`; asked after each event, and about twice a second while nothing happens.

        Raises:
            LostWorker: a worker was lost too many times in a row.
        """
        self._workers.start()
        for job in self._workers.jobs:
            self._begin(job)
        while not self._done:
            events = self._workers.events(timeout=0.5)
            self._heed(stopping)
            for event in events:
                if event.job in self._workers.jobs:  # not of a worker that was replaced since
                    yield from self._on(event)
                    self._heed(stopping)  # there may be many, and replicas go on until they are told
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
            self.stop()

    @property
    def last(self) -> int:
        """The number of iterations after which the training ends."""
        return self._end.last

    # --- events --------------------------------------------------------------------------------------

    def _on(self, event: Any) -> Iterator[Told]:
        match event:
            case Started(job, seconds):
                yield Notice(f"{job.name} started in {seconds:.1f} s")
            case Received(job, message):
                yield from self._receive(job, message)
            case Finished(job):
                self._finished.add(job.name)  # its part of the state came before
                self._end.finished(job)
            case Lost(job, reason):
                yield Notice(f"{job.name} was lost: {reason}")
                yield from self._recover(job, reason, event.details if event.raised else "")
            case Hung(job, seconds, where):
                yield Notice(f"{job.name} hangs since {seconds:.0f} s {where}")
                try:
                    yield from self._recover(job, f"it hung {where}", "")
                except UsageError as error:  # nobody can replace it
                    raise LostWorker(f"{job.name} hangs since {seconds:.0f} s {where}. {error}") from error

    def _check_alive(self) -> None:
        """Whether a state can still come.

        Raises:
            LostWorker: it cannot.
        """
        if len(self._finished) == len(self._workers.jobs):
            raise LostWorker(f"all workers ended, but no whole state came after iteration {self._saved.iteration}")

    def _receive(self, job: Job, message: Message) -> Iterator[Told]:
        fields = message.fields
        match message.kind:
            case "process":
                yield Notice(f"{job.name} is process {fields['pid']}")
            case "row":
                yield self._rows(fields["iteration"], [fields["metrics"]])
            case "rows":
                yield self._rows(fields["first"], fields["rows"])
            case "snapshot":
                part = Part(fields["lowest"], message.arrays)
                self._parts.setdefault(fields["iteration"], {})[job.name] = part
            case "hold":
                self._end.hear(job, fields["begun"])
            case "missed" if fields["iteration"] == self._wanted:
                self._wanted = None
            case "failures":
                yield from map(partial(_failed_environment, job), fields["failures"])
        yield from self._save_if_whole()

    def _rows(self, first: int, rows: list[Row]) -> Rows:
        now = time.monotonic()
        self._row_seconds = 0.8 * self._row_seconds + 0.2 * (now - self._row_at) / len(rows)
        self._row_at = now
        self._iteration = first + len(rows)
        if self._iteration > self._furthest:  # what fails in one iteration does so each time that it is come to
            self._furthest = self._iteration
            self._restarts.clear()
        if self._iteration == self.last:
            self._end_update()
        return Rows(first, [{name: np.float32(value) for name, value in row.items()} for row in rows])

    def _end_update(self) -> None:
        """The group with the update alone cannot know that no gradients come any more."""
        update = self._partition.holder("update")
        if update.fragments == ("update",):
            self._workers.send(update.name, "snapshot", {"iteration": self.last, "final": True})

    def _save_if_whole(self) -> Iterator[Told]:
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

    def _recover(self, job: Job, reason: str, details: str) -> Iterator[Told]:
        self._restarts[job.name] = self._restarts.get(job.name, 0) + 1
        if self._restarts[job.name] > MOST_RESTARTS:
            raise LostWorker(
                f"{job.name} was lost {MOST_RESTARTS + 1} times in a row: {reason}\n{details}".strip()
            )
        if replaceable(self._partition, self._group(job)):
            self._attempts[job.name] = self._attempts.get(job.name, 0) + 1
            self._begin(self._workers.replace(job))
            if self._wanted is not None:
                self._workers.send(job.name, "snapshot", {"iteration": self._wanted})
            yield Notice(f"{job.name} was replaced; the training goes on")
        else:
            yield from self._begin_again()

    def _begin_again(self) -> Iterator[Told]:
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
        yield Rewound(self._saved.iteration)
        yield Notice(f"all workers begin again after iteration {self._saved.iteration}")

    @property
    def _keeps(self) -> bool:
        """Whether states hold the environments: asynchronous ones and Python objects begin anew."""
        return self._partition.synchronous and self._graph.host is None

    def _group(self, job: Job) -> Group:
        return next(group for group in self._partition.groups if group.name == job.group)


def _failed_environment(job: Job, failure: dict[str, Any]) -> Notice:
    return Notice(
        f"{job.name}: environment {failure['index']} failed in {failure['doing']}: "
        f"{failure['error']}, at {failure['line']}; its episode was truncated"
    )


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


def jobs_of(
    partition: Partition,
    entry: str,
    settings: dict[str, Any],
    *,
    processes: bool = True,
    cores: int | None = None,
    gpus: Sequence[str] = (),
) -> Sequence[Job]:
    """A job for each replica; processes on CPUs are kept off accelerators, others take turns on them.

    Args:
        partition: whose groups' replicas they are.
        entry: what each of them calls.
        settings: what each of them is told.
        processes: whether they are processes, and no threads of one.
        cores: of the host that all of them share, where they do: XLA starts as many threads in each as is its
            part. With all cores in every worker, threads that wait for the others' work take turns on them.
        gpus: of the host that all of them share, as CUDA_VISIBLE_DEVICES names them.
    """
    replicas = list(partition.replicas)
    shared = {} if cores is None or THREADS in os.environ else {THREADS: str(max(1, cores // len(replicas)))}
    turns = itertools.cycle(gpus) if len(gpus) > 1 else None

    def environment(group: Group) -> dict[str, str]:
        if not processes:
            return shared
        if group.device == "cpu":
            return shared | {"JAX_PLATFORMS": "cpu"}
        return shared if turns is None else shared | {"CUDA_VISIBLE_DEVICES": next(turns)}

    return [
        Job(f"{group.name}/{replica}", group.name, replica, entry, settings, environment(group))
        for group, replica in replicas
    ]
