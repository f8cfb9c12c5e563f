"""The role of each group of a partition: its stages, channels and part of the state, derived as data.

`planning.picture` prints roles and `workers.replica` runs them; nothing else in `workers` derives what a group
does from the fragments that it holds.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Literal, NamedTuple

from rollmill.dataflow.graph import Graph
from rollmill.dataflow.partition import Group, Partition


class Stage(StrEnum):
    """A part of an iteration that one replica does. A role lists its stages in the order in which data passes."""

    APPLY = "apply gradients"
    """The whole loop of a group that holds the update alone: one update for each message of gradients."""
    FETCH = "fetch parameters"
    """Take the parameters that an iteration begins with from the group of the update."""
    SERVE = "serve environments"
    """Receive actions from the group of the policy, step the environments, and answer with timesteps."""
    RECEIVE_WEIGHTS = "receive weights"
    """Wait for the weights of the iteration; asynchronous actors take the newest ones."""
    COLLECT = "collect"
    """Collect one rollout."""
    SEND_TRAJECTORIES = "send trajectories"
    """Send the rollout's trajectory to the group of the gradients."""
    RECEIVE_TRAJECTORIES = "receive trajectories"
    """Receive the trajectories of an iteration, and join them along the environments."""
    LEARN = "learn"
    """Prepare the batch, then go through its epochs of minibatches."""
    PUBLISH = "publish weights"
    """Publish the weights to the group of the policy, once an iteration."""
    REPORT = "report metrics"
    """Send the metrics of an iteration to the coordinator."""


class Owned(StrEnum):
    """A part of the training state that snapshots take from one group."""

    ENVIRONMENTS = "environments"
    """States of environments."""
    POLICY_INPUTS = "policy inputs"
    """Observations, action masks and memories, with which the next decisions are made."""
    PARAMETERS = "parameters"
    """Leaves of the learner that the update writes: weights and the optimiser's state."""
    REPLAY = "replay memory"
    """Rings of stored transitions, of the replica's environments."""
    STATISTICS = "statistics"
    """Leaves of the learner that `prepare` writes: running statistics."""


class Channel(NamedTuple):
    """A connection between the replicas of two groups, or among those of one."""

    name: str
    kind: Literal["queue", "latest value", "all-reduce"]
    sender: Group
    receiver: Group

    def other_end(self, group: Group) -> Group:
        """The group at the end that is not this group's."""
        return self.receiver if group.name == self.sender.name else self.sender


class Role(NamedTuple):
    """The work of each replica of one group."""

    group: Group
    stages: tuple[Stage, ...]
    channels: tuple[Channel, ...]
    """The channels with an end in this group."""
    owned: frozenset[Owned]
    in_step: bool
    """All replicas end after the same iteration and contribute to every snapshot. Replicas of other groups
    continue until they are ended."""
    replaceable: bool
    """Whether one of its replicas can be lost without taking all others back to the last snapshot."""

    def has_channel(self, name: str) -> bool:
        """Whether the group has an end of the channel with that name."""
        return any(channel.name == name for channel in self.channels)

    def partner(self, name: str) -> Group:
        """The group at the other end of the channel with that name."""
        return next(channel for channel in self.channels if channel.name == name).other_end(self.group)

    @property
    def steps_environments(self) -> bool:
        """Whether environments are stepped in its replicas."""
        return "environment" in self.group.fragments

    @property
    def learns(self) -> bool:
        """Whether its replicas hold the learner, so that they need it to begin."""
        return Stage.LEARN in self.stages or Stage.APPLY in self.stages

    @property
    def ends_on_request(self) -> bool:
        """Whether it cannot count iterations and has to be asked for the last state."""
        return Stage.APPLY in self.stages


def roles(partition: Partition, *, host: bool = False, replay: bool = False) -> dict[str, Role]:
    """The role of each group, by the group's name.

    Args:
        partition: a valid one (`check_partition`).
        host: whether environments are Python objects, which snapshots do not hold.
        replay: whether transitions are stored in a replay memory.
    """
    channels = channels_of(partition)
    return {group.name: _role(group, partition, channels, host=host, replay=replay) for group in partition.groups}


def roles_of(graph: Graph, partition: Partition) -> dict[str, Role]:
    """The roles of the groups that train a graph."""
    return roles(partition, host=graph.host is not None, replay=graph.replay is not None)


def channels_of(partition: Partition) -> tuple[Channel, ...]:
    """All channels between groups, and among the replicas of the group that computes gradients."""
    environment, policy, gradients, update = map(
        partition.holder, ("environment", "policy", "gradients", "update")
    )
    channels: list[Channel] = []
    if environment != policy:
        channels += [
            Channel("opening", "queue", environment, policy),
            Channel("action", "queue", policy, environment),
            Channel("timestep", "queue", environment, policy),
        ]
    if policy != gradients:
        channels += [
            Channel("weights", "latest value", gradients, policy),
            Channel("trajectory", "queue", policy, gradients),
        ]
    if gradients != update:
        channels += [
            Channel("parameters", "latest value", update, gradients),
            Channel("gradients", "queue", gradients, update),
        ]
    if gradients.replicas > 1 and gradients.synchronous:
        channels.append(Channel("mean", "all-reduce", gradients, gradients))
    return tuple(channels)


def _role(group: Group, partition: Partition, channels: Sequence[Channel], *, host: bool, replay: bool) -> Role:
    in_step = partition.synchronous or group.has("update") or (group.has("gradients") and group.synchronous)
    return Role(
        group=group,
        stages=_stages(group, partition),
        channels=tuple(channel for channel in channels if group in (channel.sender, channel.receiver)),
        owned=_owned(group, partition, host=host, replay=replay) if in_step else frozenset(),
        in_step=in_step,
        replaceable=_replaceable(group),
    )


def _stages(group: Group, partition: Partition) -> tuple[Stage, ...]:
    environment, policy, gradients, update = map(group.has, ("environment", "policy", "gradients", "update"))
    if update and not gradients:
        # Synchronous workers report the mean of their metrics; of asynchronous ones the update sees all.
        reports = not partition.holder("gradients").synchronous
        return (Stage.APPLY, Stage.REPORT) if reports else (Stage.APPLY,)
    applicable = {
        Stage.FETCH: gradients and not update,
        Stage.SERVE: environment and not policy,
        Stage.RECEIVE_WEIGHTS: policy and not gradients,
        Stage.COLLECT: policy,
        Stage.SEND_TRAJECTORIES: policy and not gradients,
        Stage.RECEIVE_TRAJECTORIES: gradients and not policy,
        Stage.LEARN: gradients,
        Stage.PUBLISH: gradients and not policy,
        Stage.REPORT: gradients and (update or group.synchronous),
    }
    return tuple(stage for stage, applies in applicable.items() if applies)


def _owned(group: Group, partition: Partition, *, host: bool, replay: bool) -> frozenset[Owned]:
    # Asynchronous environments and Python objects begin new episodes when a run goes on.
    kept = partition.synchronous and not host
    owned = {
        Owned.ENVIRONMENTS: kept and group.has("environment"),
        Owned.POLICY_INPUTS: kept and group.has("policy"),
        Owned.PARAMETERS: group.has("update"),
        Owned.REPLAY: group.has("gradients") and replay,
        Owned.STATISTICS: group.has("gradients"),
    }
    return frozenset(part for part, owns in owned.items() if owns)


def _replaceable(group: Group) -> bool:
    """True for replicas with environments that compute no synchronous gradients."""
    if group.has("gradients") or group.has("update"):
        return group.has("environment") and not group.synchronous
    return group.has("environment")
