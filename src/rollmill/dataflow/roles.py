"""Derives the role of each group in a partition: its stages, its channels, and its part of the training state.

`planning.picture` prints roles, and `workers.replica` runs them. No other code decides what a group does.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Literal, NamedTuple

from rollmill.dataflow.graph import Graph
from rollmill.dataflow.partition import Group, Partition


class Stage(StrEnum):
    """A part of an iteration that one replica performs. A role lists its stages in order."""

    APPLY = "apply gradients"
    """The loop of a group with the update but not the gradients. Each message of gradients gives one update."""
    FETCH = "fetch parameters"
    """Fetches the parameters of an iteration from the group with the update."""
    SERVE = "serve environments"
    """Receives actions, steps the environments, and answers with timesteps."""
    RECEIVE_WEIGHTS = "receive weights"
    """Waits for the weights of the iteration. Asynchronous actors take the newest weights."""
    COLLECT = "collect"
    """Collects one rollout."""
    SEND_TRAJECTORIES = "send trajectories"
    """Sends the rollout to the group with the gradients."""
    RECEIVE_TRAJECTORIES = "receive trajectories"
    """Receives the trajectories of an iteration and concatenates them along the environments."""
    LEARN = "learn"
    """Prepares the batch, then learns from its minibatches."""
    PUBLISH = "publish weights"
    """Publishes the weights to the group with the policy, once in an iteration."""
    ITERATE = "iterate"
    """Performs whole iterations, as one program on the devices of all replicas (a mesh)."""
    REPORT = "report metrics"
    """Sends the metrics of an iteration to the coordinator."""


class OwnedPart(StrEnum):
    """A part of the training state that a group contributes to a snapshot."""

    ENVIRONMENTS = "environments"
    """States of environments."""
    POLICY_INPUTS = "policy inputs"
    """Observations, action masks and memories for the next decisions."""
    PARAMETERS = "parameters"
    """Leaves of the learner that the update writes: weights and optimiser state."""
    REPLAY = "replay memory"
    """Contents of the experience store for the replica's environments."""
    STATISTICS = "statistics"
    """Leaves of the learner that `prepare` writes, such as running statistics."""


class Channel(NamedTuple):
    """A connection between the replicas of two groups, or among the replicas of one group."""

    name: str
    kind: Literal["queue", "latest value", "all-reduce"]
    sender: Group
    receiver: Group

    def other_end(self, group: Group) -> Group:
        """Returns the group at the other end of the channel."""
        return self.receiver if group.name == self.sender.name else self.sender


class Role(NamedTuple):
    """What each replica of one group does: its stages, channels, and part of a snapshot."""

    group: Group
    stages: tuple[Stage, ...]
    channels: tuple[Channel, ...]
    """Channels with an end in this group."""
    owned_parts: frozenset[OwnedPart]
    in_step: bool
    """Whether all replicas end after the same iteration and share in every snapshot, instead of being stopped."""
    replaceable: bool
    """Whether a lost replica can be replaced while all others continue, without returning to the last snapshot."""

    def has_channel(self, name: str) -> bool:
        """Returns whether the group is at one end of a channel."""
        return any(channel.name == name for channel in self.channels)

    def partner(self, name: str) -> Group:
        """Returns the group at the other end of a channel."""
        return next(channel for channel in self.channels if channel.name == name).other_end(self.group)

    @property
    def steps_environments(self) -> bool:
        """Whether the group's replicas step environments."""
        return "environment" in self.group.fragments

    @property
    def learns(self) -> bool:
        """Whether the group's replicas hold a learner from the start of the run."""
        return not {Stage.LEARN, Stage.APPLY, Stage.ITERATE}.isdisjoint(self.stages)

    @property
    def ends_on_request(self) -> bool:
        """Whether the group's last state must be requested, because the group does not count iterations."""
        return Stage.APPLY in self.stages


def roles(
    partition: Partition, *, host: bool = False, replay: bool = False, mesh: bool = False
) -> dict[str, Role]:
    """Derives the role of each group, by group name.

    Args:
        partition: a partition that `check_partition` accepts.
        host: whether environments are Python objects, which snapshots do not hold.
        replay: whether the graph has an experience store.
        mesh: whether the replicas of the only group form one program, and therefore use no channels.
    """
    channels = partition_channels(partition)
    derived = {
        group.name: _role(group, partition, channels, host=host, replay=replay) for group in partition.groups
    }
    if not mesh:
        return derived
    return {
        name: role._replace(stages=(Stage.ITERATE, Stage.REPORT), channels=()) for name, role in derived.items()
    }


def graph_roles(graph: Graph, partition: Partition, *, mesh: bool = False) -> dict[str, Role]:
    """Derives the roles of the groups that train a graph."""
    return roles(partition, host=graph.host is not None, replay=graph.replay is not None, mesh=mesh)


def partition_channels(partition: Partition) -> tuple[Channel, ...]:
    """Returns all channels between groups, and among the replicas that compute gradients."""
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
    in_step = partition.synchronous or group.holds("update") or (group.holds("gradients") and group.synchronous)
    return Role(
        group=group,
        stages=_stages(group, partition),
        channels=tuple(channel for channel in channels if group in (channel.sender, channel.receiver)),
        owned_parts=_find_owned(group, partition, host=host, replay=replay) if in_step else frozenset(),
        in_step=in_step,
        replaceable=_replaceable(group),
    )


def _stages(group: Group, partition: Partition) -> tuple[Stage, ...]:
    environment, policy, gradients, update = map(group.holds, ("environment", "policy", "gradients", "update"))
    if update and not gradients:
        # Synchronous workers report the mean of their metrics. For asynchronous workers, the update reports all
        # metrics.
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


def _find_owned(group: Group, partition: Partition, *, host: bool, replay: bool) -> frozenset[OwnedPart]:
    # Asynchronous environments, and environments in Python, begin new episodes when a run is resumed.
    kept = partition.synchronous and not host
    owned = {
        OwnedPart.ENVIRONMENTS: kept and group.holds("environment"),
        OwnedPart.POLICY_INPUTS: kept and group.holds("policy"),
        OwnedPart.PARAMETERS: group.holds("update"),
        OwnedPart.REPLAY: group.holds("gradients") and replay,
        OwnedPart.STATISTICS: group.holds("gradients"),
    }
    return frozenset(part for part, owns in owned.items() if owns)


def _replaceable(group: Group) -> bool:
    """Returns whether replicas hold environments and compute no synchronous gradients."""
    if group.holds("gradients") or group.holds("update"):
        return group.holds("environment") and not group.synchronous
    return group.holds("environment")
