"""Prepares common starts of all replicas: what each replica begins with, and how long starting takes."""

import time
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rollmill.dataflow import Graph, OwnedPart, Role, State, empty_experience, graph_roles, replica_environments
from rollmill.planning.plan import AllReduce
from rollmill.processes.jobs import Job
from rollmill.programs.compile_clock import CompileTimes, Interval, union
from rollmill.programs.kernels import Launches
from rollmill.programs.states import begin_learner, start_environments
from rollmill.workers.protocol import Begin
from rollmill.workers.replica.snapshots import share_of
from rollmill.workers.reports import Durations, Saved
from rollmill.workers.run_spec import RunSpec


class Starts:
    """Keeps the state from which replicas begin, and counts their common starts and their single replacements."""

    def __init__(self, graph: Graph, spec: RunSpec, initial: State, restored: Saved | None) -> None:
        plan = spec.read_plan()
        self.mesh = plan.place == "mesh"
        """Whether all replicas are one program, whose state can be had at multiples of a stride."""
        self.roles: Mapping[str, Role] = graph_roles(graph, plan.partition, mesh=self.mesh)
        self.saved = restored or Saved(0, initial)
        """The newest state that was assembled."""
        self.restarts = 0
        """How often all replicas have begun again."""
        self._num_envs = graph.loops.num_envs
        self._launches = _by_group(spec.kernels.launches, self.roles, mesh=self.mesh)
        self._reduction: AllReduce | None = None
        self._rendezvous_address = ""
        self._generation = 1 if restored else 0
        self._attempts: dict[str, int] = {}
        self._has_saved = self._restores = restored is not None
        self._first = self.saved.iteration

    def role(self, job: Job) -> Role:
        """Returns the role of the group to which a job's replica belongs."""
        return self.roles[job.group]

    def attempts(self, job: Job) -> int:
        """Returns how often a job's replica has been replaced since the last common start."""
        return self._attempts.get(job.name, 0)

    def keep(self, saved: Saved) -> None:
        """Keeps an assembled state, from which the next common start begins."""
        self.saved, self._has_saved = saved, True

    def keep_launches(self, job: Job, launches: Launches | None) -> None:
        """Keeps the kernel launches that the first replica of a group has chosen."""
        if launches is not None:
            self._launches[job.group] = launches

    def keep_reduction(self, reduction: AllReduce | None) -> None:
        """Keeps the all-reduce that a mesh has chosen by timing, for later starts."""
        self._reduction = reduction or self._reduction

    @property
    def can_begin(self) -> bool:
        """True if replicas can begin. The workers of a mesh first need the address at which its processes
        connect.
        """
        return not self.mesh or self._rendezvous_address != ""

    def meet_at(self, address: str) -> None:
        """Sets the address at which the processes of a mesh connect, on the host of the first process, until the
        next common start.
        """
        self._rendezvous_address = address

    @property
    def launches(self) -> Launches:
        """The kernel launches of all groups that have chosen, to be recorded in the run."""
        return next(iter(self._launches.values())) if self.mesh else {"groups": dict(self._launches)}

    def replace(self, job: Job) -> None:
        """Counts the replacement of a lost replica."""
        self._attempts[job.name] = self.attempts(job) + 1

    def begin_again(self) -> None:
        """Prepares a common restart of all replicas from the newest state, and counts it."""
        self.restarts += 1
        self._generation += 1
        self._attempts.clear()
        self._rendezvous_address = ""
        self._first = self.saved.iteration
        self._restores = self._has_saved or self._keeps_environments

    def begin(self, job: Job) -> Begin:
        """Returns the message that tells a job's replica to begin, with its share of the state."""
        role, attempt = self.role(job), self.attempts(job)
        restores_environments = self._restores and self._keeps_environments
        arrays = {}
        if self._restores and not (attempt and role.steps_environments):
            everything = range(self._num_envs)
            index = (
                everything if self.mesh else replica_environments(self._num_envs, role.group.replicas, job.replica)
            )
            arrays = share_of(
                self.saved.state,
                index,
                learner=role.learns,
                environments=restores_environments,
                rings=OwnedPart.REPLAY in role.owned_parts,
            )
        return Begin(
            first=self._first,
            restart=self.restarts,
            attempt=attempt,
            generation=self._generation,
            resets_environments=not restores_environments,
            rendezvous_address=self._rendezvous_address,
            launches=self._launches.get(job.group),
            reduction=self._reduction,
            arrays=arrays,
        )

    @property
    def _keeps_environments(self) -> bool:
        """Whether states hold the environments. Asynchronous ones and Python objects begin anew."""
        return any(OwnedPart.ENVIRONMENTS in role.owned_parts for role in self.roles.values())


def _by_group(launches: Launches | None, groups: Iterable[str], *, mesh: bool) -> dict[str, Launches]:
    """Returns the launches that a run has kept, by the names of its groups."""
    if launches is None:
        return {}
    return dict.fromkeys(groups, launches) if mesh else dict(launches.get("groups", {}))


class StartUp:
    """Computes how long a run compiled and started up, from the reports of all workers, requested at `began`
    (`time.monotonic`).

    Workers build and compile both in parallel and one after another, so neither a sum nor a maximum over workers
    gives the time in which nothing was learned. Each worker reports the times at which it compiled, and their
    union counts.
    """

    def __init__(self, began: float) -> None:
        self._began = began
        self._compiled: list[Interval] = []
        self._built = began

    def add(self, times: CompileTimes) -> Durations:
        """Adds a worker's compile times as soon as they arrive. Returns the durations so far."""
        now = time.monotonic()
        self._compiled += [(now - begin, now - end) for begin, end in times.compiled]
        self._built = max(self._built, now - times.built)
        return Durations(_length(self._compiled), _length([*self._compiled, (self._began, self._built)]))


def _length(intervals: Iterable[Interval]) -> float:
    return sum((end - begin for begin, end in union(intervals)), start=0.0)


def initial_host_state(graph: Graph, shapes: State, key: Any) -> State:
    """Creates the initial training state on the host. Host environments are filled with zeros, because no state
    contains them.
    """
    index = jnp.arange(graph.loops.num_envs, dtype=jnp.int32)
    # The learner and the environments are compiled as separate programs, as in the workers. Their values are then
    # the same bit for bit, and the workers find the programs in the cache.
    learner = begin_learner(graph, key)
    if graph.host is None:
        collector = start_environments(graph, key, index, 0)
    else:
        collector = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes.collector)
    rings = jax.jit(lambda: empty_experience(graph, index))()
    return State(collector, learner, key, jnp.int32(0), rings)
