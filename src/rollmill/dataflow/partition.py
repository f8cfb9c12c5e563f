"""Divides the fragments of a graph into groups. Distribution policies return such partitions.

Fragments of one group become one program, and an edge between two groups becomes a channel (Zhu et al., "MSRL:
Distributed Reinforcement Learning with Dataflow Fragments", USENIX ATC 2023). Replicas of a group hold equal
ranges of the environments' global indices.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from rollmill.core.errors import UsageError, unknown_name
from rollmill.dataflow.graph import Loops
from rollmill.dataflow.interfaces import EDGES, Edge

FRAGMENTS = ("environment", "policy", "gradients", "update")

DeviceKind = Literal["any", "cpu", "gpu"]


class Group(NamedTuple):
    """Fragments that are placed together. The group has one or more replicas, each with all of the fragments."""

    name: str
    fragments: tuple[str, ...]
    replicas: int = 1
    device: DeviceKind = "any"
    synchronous: bool = True
    """Whether replicas wait for the weights of their iteration, instead of taking the newest weights."""

    def holds(self, *fragments: str) -> bool:
        """Returns whether the group holds all of the given fragments."""
        return set(fragments) <= set(self.fragments)


class Partition(NamedTuple):
    """Groups that together hold each fragment once, with the name of their distribution policy."""

    name: str
    groups: tuple[Group, ...]

    def holder(self, fragment: str) -> Group:
        """Returns the group that holds a fragment."""
        return next(group for group in self.groups if fragment in group.fragments)

    def are_separate(self, one: str, other: str) -> bool:
        """Returns whether two fragments lie in different groups."""
        return self.holder(one).name != self.holder(other).name

    @property
    def synchronous(self) -> bool:
        """Whether every group is synchronous. Placement then changes results only by rounding."""
        return all(group.synchronous for group in self.groups)

    @property
    def sends_only_gradients(self) -> bool:
        """Whether asynchronous replicas send nothing but gradients and metrics to the update."""
        return self.are_separate("gradients", "update") and not self.holder("gradients").synchronous

    @property
    def cut_edges(self) -> tuple[Edge, ...]:
        """Returns the edges between fragments of different groups."""
        return tuple(edge for edge in EDGES if self.are_separate(edge.source, edge.target))

    @property
    def replicas(self) -> Iterator[tuple[Group, int]]:
        """Returns every replica of every group of the partition."""
        return ((group, replica) for group in self.groups for replica in range(group.replicas))


def replica_environments(num_envs: int, replicas: int, replica: int) -> range:
    """Returns the global indices of the environments that one replica of a group holds."""
    width = num_envs // replicas
    return range(replica * width, (replica + 1) * width)


def peers(replicas: int, others: int, replica: int) -> range:
    """Returns the replicas of another group that share environments with a replica of this group.

    One of the two groups' replica counts must divide the other.
    """
    if others >= replicas:
        return replica_environments(others, replicas, replica)
    return range(replica * others // replicas, replica * others // replicas + 1)


def check_partition(partition: Partition, loops: Loops | None = None) -> None:
    """Checks that a partition can run with the environments of `loops`.

    Raises:
        UsageError: a group's number of replicas is invalid. The message names the group, the value, and a valid
            value.
    """
    if not partition.groups:
        raise UsageError(f"{partition.name}: a partition needs at least one group.")
    _check_fragments(partition)
    for group in partition.groups:
        _check_group(partition, group)
    for edge in partition.cut_edges:
        if edge.name in ("gradients", "parameters", "weights"):
            continue  # these edges connect all replicas with one
        source, target = partition.holder(edge.source), partition.holder(edge.target)
        more, fewer = max(source.replicas, target.replicas), min(source.replicas, target.replicas)
        if more % fewer:
            raise UsageError(
                f"{partition.name}: group {source.name!r} has replicas={source.replicas} and {target.name!r} "
                f"replicas={target.replicas}. One must be a multiple of the other, so that the data along "
                f"{edge.name!r} can be divided equally."
            )
    if loops is not None:
        for group in partition.groups:
            _check_share(group, loops)


def _check_fragments(partition: Partition) -> None:
    placed: dict[str, str] = {}
    names = [group.name for group in partition.groups]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UsageError(f"{partition.name}: two groups have the name {', '.join(sorted(twice))}.")
    for group in partition.groups:
        for fragment in group.fragments:
            if fragment not in FRAGMENTS:
                raise unknown_name("fragment", fragment, FRAGMENTS, hint=f"It belongs to group {group.name!r}.")
            if placed.get(fragment) == group.name:
                raise UsageError(f"{partition.name}: {fragment!r} occurs twice in group {group.name!r}.")
            if fragment in placed:
                raise UsageError(
                    f"{partition.name}: {fragment!r} is in two groups, {placed[fragment]!r} and {group.name!r}. "
                    "A fragment belongs to one group, which may have several replicas."
                )
            placed[fragment] = group.name
    if missing := [fragment for fragment in FRAGMENTS if fragment not in placed]:
        raise UsageError(f"{partition.name}: no group contains {', '.join(missing)}.")


def _check_group(partition: Partition, group: Group) -> None:
    where = f"{partition.name}: group {group.name!r}"
    if not group.fragments:
        raise UsageError(f"{where} contains no fragment. hint: leave the group out.")
    if group.replicas < 1:
        raise UsageError(f"{where} has replicas={group.replicas}, which must be at least 1.")
    if group.device not in ("any", "cpu", "gpu"):
        raise unknown_name("kind of device", group.device, ("any", "cpu", "gpu"))
    alone = group.holds("update") and not group.holds("gradients")
    if alone and len(group.fragments) > 1:
        others = " and ".join(fragment for fragment in group.fragments if fragment != "update")
        raise UsageError(
            f"{where} contains update with {others}, but not gradients. hint: give update a group of its own, or "
            "add gradients to this one."
        )
    if alone and group.replicas > 1:
        raise UsageError(
            f"{where} has replicas={group.replicas}, but an update without gradients needs exactly one replica, "
            "where all gradients meet. hint: use replicas=1, or add gradients to the group."
        )
    if group.holds("update") and not group.synchronous:
        raise UsageError(
            f"{where} computes the weights, so it cannot receive them asynchronously. hint: make the group "
            "synchronous."
        )
    if not group.synchronous and not group.holds("policy"):
        raise UsageError(
            f"{where} is asynchronous, but only a group with the policy receives weights. hint: make the group "
            "synchronous."
        )


def _check_share(group: Group, loops: Loops) -> None:
    learns = group.holds("gradients")
    shares = loops.num_shards if learns else loops.num_envs
    if shares % group.replicas == 0:
        return
    fits = [n for n in range(1, shares + 1) if shares % n == 0]
    fewer, more = [n for n in fits if n < group.replicas], [n for n in fits if n > group.replicas]
    nearest = fewer[-1:] + more[:1]
    what = f"num_shards={loops.num_shards}" if learns else f"num_envs={loops.num_envs}"
    raise UsageError(
        f"group {group.name!r} has replicas={group.replicas}, which do not divide {what} equally. Nearest "
        f"numbers of replicas that do: {' or '.join(map(str, nearest))}."
    )
