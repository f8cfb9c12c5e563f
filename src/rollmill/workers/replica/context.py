"""Describes one replica of a group: its role, its environments and channels, and the results of its stages."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool

from rollmill.channels.wire import Wire
from rollmill.core.types import Key
from rollmill.dataflow import Flow, Graph, Group, Role, Trajectory, Weights, flow, peers, replica_environments
from rollmill.programs.compile_clock import CompileClock
from rollmill.workers.protocol import Begin, send
from rollmill.workers.replica.progress import ReplicaControl
from rollmill.workers.reports import Row
from rollmill.workers.run_spec import RunSpec


@dataclass(frozen=True)
class ReplicaContext:
    """Everything that one replica of a group needs to build its stages and run them."""

    spec: RunSpec
    begin: Begin
    graph: Graph
    role: Role
    replica: int
    wire: Wire
    control: ReplicaControl
    compile_clock: CompileClock | None = None
    """Records when this replica compiles. None if nobody needs the times."""
    shared_flow: Flow | None = None
    """Dataflow of the graph, if this process has already derived it, otherwise None."""

    @cached_property
    def flow(self) -> Flow:
        """Dataflow of the graph. Deriving it takes seconds for a large graph, so a mesh does not use it."""
        found = flow(self.graph) if self.shared_flow is None else self.shared_flow
        return found.with_metrics_only() if self.spec.read_plan().partition.sends_only_gradients else found

    @property
    def group(self) -> Group:
        """The group to which this replica belongs."""
        return self.role.group

    @property
    def key(self) -> Key:
        """Root key of the run."""
        return jax.random.key(np.uint32(self.spec.seed))

    @property
    def index(self) -> np.ndarray:
        """Global indices of this replica's environments."""
        return np.asarray(
            replica_environments(self.graph.loops.num_envs, self.group.replicas, self.replica), np.int32
        )

    @property
    def start_key(self) -> Key:
        """Random key from which environments start. It differs after every restart."""
        return jax.random.fold_in(self.key, self.start_number) if self.start_number else self.key

    @property
    def start_number(self) -> int:
        """Number that identifies a start of the environments: 0 for the first start of a run, otherwise a hash of
        first iteration, generation and attempt.
        """
        starts = self.begin.first, self.begin.generation, self.begin.attempt
        return int(np.random.SeedSequence(starts).generate_state(1)[0]) if any(starts) else 0

    def peers(self, channel: str) -> range:
        """Returns the numbers of the replicas at the other end of a channel that share environments with this
        replica.
        """
        return peers(self.group.replicas, self.role.partner(channel).replicas, self.replica)


class IterationState(NamedTuple):
    """Results of one iteration so far. Each stage of a replica adds its own results."""

    iteration: int
    weights: Weights | None = None
    """Weights with which the policy acts, or None until a stage has received or chosen them."""
    version: int = 0
    """Number of iterations that the weights have learned from."""
    trajectory: Trajectory | None = None
    lags: Sequence[int] | None = None
    """Age of the weights of each received trajectory, in iterations, or None."""
    lost: Bool[np.ndarray, " E"] | None = None
    """Environments that were lost since the previous trajectory, or None if there are none. Their episodes do not
    continue in this trajectory."""
    metrics: Row | None = None
    """Metrics to report, or None if another replica reports them."""


class StageRun(ABC):
    """A stage of one replica, with open channels and programs that are ready to compile."""

    @abstractmethod
    def run(self, state: IterationState) -> IterationState:
        """Performs the stage's part of one iteration, and returns the results so far."""

    def part(self) -> Mapping[str, Any]:
        """Returns the named arrays that the stage contributes to a snapshot."""
        return {}

    @property
    def resumed_at(self) -> int | None:
        """The first iteration that a replaced worker had not delivered completely, or None if this stage delivers
        nothing.
        """
        return None


class StartReport:
    """Reports to the coordinator, once, how long a replica took to build and compile.

    It is created when the replica is built and its first iteration begins.
    """

    def __init__(self, context: ReplicaContext) -> None:
        self._context, self._began = context, time.monotonic()
        self._sent = False

    def send(self) -> None:
        """Sends the report, once the first iteration is done. Later calls have no effect."""
        if self._sent:
            return
        self._sent = True
        self._context.control.started()
        if self._context.compile_clock is not None:
            send(self._context.control, self._context.compile_clock.report(self._began))


class Lag:
    """Collects policy lags between two rows of metrics. A lag is the age, in versions, of the weights that
    collected a batch.
    """

    def __init__(self) -> None:
        self._lags: list[int] = []

    def add(self, *lags: int) -> None:
        """Adds the policy lags of one or several batches."""
        self._lags.extend(lags)

    def take(self) -> dict[str, float]:
        """Returns the mean and maximum policy lag since the last call, as metrics."""
        lags, self._lags = self._lags, []
        return lag_metrics(lags)


def lag_metrics(lags: Iterable[int]) -> dict[str, float]:
    """Returns the mean and maximum of policy lags as metrics."""
    values = list(lags) or [0]
    return {"policy_lag/mean": sum(values) / len(values), "policy_lag/max": float(max(values))}
