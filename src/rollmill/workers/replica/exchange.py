"""Stages that exchange data between the group with the policy and the group with the gradients.

Trajectories are sent through queues. Weights are a latest value, which the learner publishes and actors receive.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from rollmill.channels.errors import Damaged
from rollmill.channels.protocols import Gathered, Header
from rollmill.channels.shm.gpu_slots import own_gpu
from rollmill.channels.transfers import is_on_gpu, to_device
from rollmill.dataflow import Trajectory
from rollmill.workers.replica.context import IterationState, ReplicaContext, StageRun
from rollmill.workers.replica.env_client import RESTARTED
from rollmill.workers.replica.layouts import AXES, trajectory_layout, weights_layout
from rollmill.workers.replica.learner_state import LearnerState

TRAJECTORY_CAPACITY = 1
"""Number of rollouts of a source that wait for a learner. More would be learned from with older weights."""


class ReceiveWeights(StageRun):
    """Stage that waits for the weights of an iteration, or takes the newest weights in an asynchronous group."""

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context
        self._reader = context.wire.latest_reader(
            f"weights/{context.peers('weights')[0]}",
            layout=weights_layout(context.flow),
            reader=context.replica,
            readers=context.group.replicas,
        )

    def run(self, state: IterationState) -> IterationState:
        """Adds the received weights and their version to the results of the iteration."""
        self._context.control.at("waiting for weights")
        latest = self._reader.read(at_least=self._oldest(state.iteration))
        return state._replace(weights=to_device(latest.tree), version=latest.version)

    def _oldest(self, iteration: int) -> int:
        """Returns the oldest version of the weights that may collect the rollout of an iteration."""
        group, learners = self._context.group, self._context.role.partner("weights")
        if group.synchronous:
            return iteration
        if group.replicas <= learners.replicas:  # the only source of its learners, which are one iteration behind
            return max(self._context.begin.first, iteration - 1)
        return self._context.begin.first


class PublishWeights(StageRun):
    """Stage that publishes the weights after each iteration. It publishes the initial weights when it
    is created.
    """

    def __init__(self, context: ReplicaContext, learner: LearnerState) -> None:
        self._learner = learner
        self._writer = context.wire.latest_writer(
            f"weights/{context.replica}",
            layout=weights_layout(context.flow),
            readers=context.role.partner("weights").replicas,
        )
        self._publish(context.begin.first)

    def run(self, state: IterationState) -> IterationState:
        """Publishes the weights after learning in this iteration."""
        self._publish(state.iteration + 1)
        return state

    def _publish(self, version: int) -> None:
        self._writer.publish(self._learner.weights, version=version)


class SendTrajectories(StageRun):
    """Stage that sends each rollout to the replicas that learn from its environments.

    An asynchronous replica then waits until they have taken the rollout, and begins the next one with the newest
    weights. Once a rollout was sent, a learner finishes at most one iteration before it takes the rollout. If the
    learner has one source, the policy lag is at most 1. If it has several, it may also finish iterations with the
    rollouts of the others while a source collects.
    """

    def __init__(self, context: ReplicaContext) -> None:
        self._context, self._first = context, context.begin.first
        self._targets = context.peers("trajectory")
        self._sender = context.wire.sender(
            "trajectory",
            source=context.replica,
            targets=list(self._targets),
            layout=trajectory_layout(context.flow, len(context.index) // len(self._targets)),
            capacity=TRAJECTORY_CAPACITY,
            checksum=context.spec.checksums,
        )
        self._restarted = set(self._targets) if context.begin.attempt else set[int]()
        self._wait_until_taken()

    @property
    def resumed_at(self) -> int:
        """The first iteration whose rollout a replaced worker had not sent to all of its targets."""
        return self._first + min(map(self._count_delivered, self._targets))

    def run(self, state: IterationState) -> IterationState:
        """Sends each learning replica the part of the trajectory with its environments."""
        assert state.trajectory is not None
        parts = [state.trajectory] if len(self._targets) == 1 else _split(state.trajectory, len(self._targets))
        for target, part in zip(self._targets, parts, strict=True):
            if self._context.begin.attempt and self._first + self._count_delivered(target) > state.iteration:
                continue  # the replaced worker had delivered this rollout to some targets, including this one
            jax.block_until_ready(part)
            self._context.control.at("waiting for space to send a trajectory")
            flags = RESTARTED if target in self._restarted else 0
            self._sender.send(part, version=state.version, iteration=state.iteration, flags=flags, target=target)
            self._restarted.discard(target)
        self._wait_until_taken()
        return state

    def _wait_until_taken(self) -> None:
        """Waits until no rollout of this replica occupies a slot, unless the replica is synchronous."""
        if self._context.group.synchronous:
            return
        self._context.control.at("waiting for the learner")
        for target in self._targets:
            self._count_delivered(target)  # between hosts, waits until rollouts of a lost worker are known
            self._sender.reserve(target=target)

    def _count_delivered(self, target: int) -> int:
        return self._sender.statistics()[target].messages


class ReceiveTrajectories(StageRun):
    """Stage that receives rollouts from the replicas that collect for this replica, and concatenates them.

    An asynchronous group may send several rollouts of one replica before the first of another. With a replay
    memory, a batch nevertheless has one rollout from each source, because a stored step is followed by the next
    step of its environment.
    """

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context
        self._sources = list(context.peers("trajectory"))
        self._synchronous = context.role.partner("trajectory").synchronous
        self._stores = context.graph.replay is not None
        self._from_each = self._synchronous or self._stores
        self._next: dict[int, int] = {}
        layout = trajectory_layout(context.flow, len(context.index) // len(self._sources))
        self._receiver = context.wire.receiver(
            "trajectory",
            sources=self._sources,
            target=context.replica,
            layout=layout,
            capacity=TRAJECTORY_CAPACITY,
            gpu=own_gpu(),
        )

    def run(self, state: IterationState) -> IterationState:
        """Adds a batch to the results of the iteration: one rollout from each source, or from any sources in
        asynchronous groups without a replay memory.

        Raises `Damaged` if a synchronous rollout belongs to another iteration.
        """
        self._context.control.at("waiting for trajectories")
        chosen: Any = {"sources": self._sources} if self._from_each else {"count": len(self._sources)}
        gathered = self._receiver.gather(axis=AXES, **chosen)
        if self._synchronous:
            _check_iteration(gathered, state.iteration)
        lags = [state.iteration - header.version for header in gathered.headers]
        lost = self._find_lost(gathered.headers) if self._stores else None
        return state._replace(trajectory=to_device(gathered.tree), lags=lags, lost=lost)

    def _find_lost(self, headers: Sequence[Header]) -> Bool[np.ndarray, " E"] | None:
        """Returns the environments of sources that were replaced, or of which a rollout was lost on its way."""
        missed = []
        for header in headers:
            expected = self._next.get(header.source, header.sequence)
            missed.append(bool(header.flags & RESTARTED) or header.sequence != expected)
            self._next[header.source] = header.sequence + 1
        return np.repeat(missed, len(self._context.index) // len(missed)) if any(missed) else None


def _split(trajectory: Trajectory, count: int) -> list[Trajectory]:
    """Splits a trajectory into equal parts along the environments, in order."""
    if any(map(is_on_gpu, jax.tree.leaves(trajectory))):
        return _split_on_gpu(trajectory, count)
    return _parts(lambda leaf, axis: np.split(np.asarray(leaf), count, axis=axis), trajectory, count)


@partial(jax.jit, static_argnums=1)
def _split_on_gpu(trajectory: Trajectory, count: int) -> list[Trajectory]:
    return _parts(lambda leaf, axis: jnp.split(leaf, count, axis=axis), trajectory, count)


def _parts(divide: Callable[[Any, int], list[Any]], trajectory: Trajectory, count: int) -> list[Trajectory]:
    split = lambda axis: lambda leaf: divide(leaf, axis)
    fields = [jax.tree.map(split(axis), field) for axis, field in zip(AXES, trajectory, strict=True)]
    is_list = lambda node: isinstance(node, list)
    return [
        Trajectory(*(jax.tree.map(lambda leaves, n=n: leaves[n], field, is_leaf=is_list) for field in fields))
        for n in range(count)
    ]


def _check_iteration(gathered: Gathered, iteration: int) -> None:
    for header in gathered.headers:
        if header.iteration != iteration:
            raise Damaged(
                f"the trajectory of replica {header.source} belongs to iteration {header.iteration}, expected "
                f"iteration {iteration}."
            )
