"""Queues of trajectories, from the group with the policy to the group with the gradients."""

import jax
import numpy as np

from rollmill.channels.errors import Damaged
from rollmill.channels.protocols import Gathered
from rollmill.dataflow import Trajectory
from rollmill.workers.replica.context import ReplicaContext
from rollmill.workers.replica.layouts import AXES, trajectory_layout
from rollmill.workers.replica.work import StageRun, Work


class TrajectorySender:
    """Sends each rollout to the replicas that learn from it."""

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context
        self._targets = context.peers("trajectory")
        self._sender = context.wire.sender(
            "trajectory",
            source=context.replica,
            targets=list(self._targets),
            layout=trajectory_layout(context.flow, len(context.index) // len(self._targets)),
            checksum=context.checksums,
        )

    @property
    def resumed_at(self) -> int:
        """The first iteration that the replaced worker had not delivered to all of its targets."""
        return self._context.first + min(map(self._delivered, self._targets))

    def __call__(self, work: Work) -> Work:
        """Sends the trajectory, to each target its environments."""
        assert work.trajectory is not None
        parts = [work.trajectory] if len(self._targets) == 1 else _split(work.trajectory, len(self._targets))
        for target, part in zip(self._targets, parts, strict=True):
            if self._context.attempt and self._context.first + self._delivered(target) > work.iteration:
                continue  # the replaced worker had delivered this one, and no further
            tree = jax.tree.map(np.asarray, part)
            self._context.control.at("waiting for room to send a trajectory")
            self._sender.send(tree, version=work.version, iteration=work.iteration, target=target)
        return work

    def _delivered(self, target: int) -> int:
        return self._sender.statistics()[target].messages


class TrajectoryReceiver:
    """Joins the rollouts of the replicas that collect for this one."""

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context
        self._sources = list(context.peers("trajectory"))
        self._synchronous = context.role.partner("trajectory").synchronous
        layout = trajectory_layout(context.flow, len(context.index) // len(self._sources))
        self._receiver = context.wire.receiver(
            "trajectory", sources=self._sources, target=context.replica, layout=layout
        )

    def __call__(self, work: Work) -> Work:
        """Takes one rollout of each source, or as many of any as make a batch where nobody waits.

        Raises:
            Damaged: a synchronous rollout is of another iteration.
        """
        self._context.control.at("waiting for trajectories")
        if self._synchronous:
            gathered = self._receiver.gather(axis=AXES, sources=self._sources)
            _check_iteration(gathered, work.iteration)
        else:
            gathered = self._receiver.gather(axis=AXES, count=len(self._sources))
        lags = [work.iteration - header.version for header in gathered.headers]
        return work._replace(trajectory=gathered.tree, lags=lags)


def send_stage(context: ReplicaContext) -> StageRun:
    """Makes the stage that sends trajectories."""
    sender = TrajectorySender(context)
    return StageRun(sender, resumed_at=lambda: sender.resumed_at)


def receive_stage(context: ReplicaContext) -> StageRun:
    """Makes the stage that receives trajectories."""
    return StageRun(TrajectoryReceiver(context))


def _split(trajectory: Trajectory, count: int) -> list[Trajectory]:
    """Equal parts of the environments, in order."""
    split = lambda axis: lambda leaf: np.split(np.asarray(leaf), count, axis=axis)
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
                f"the trajectory of replica {header.source} is of iteration {header.iteration}; "
                f"iteration {iteration} was expected."
            )
