"""Sums over a profile that reports and advice share: the tree of operations, and parts of the whole time."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import fsum, inf
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

from rollmill.core.operations import STEPPING
from rollmill.profiling.results import THIS_PROCESS, OperationTime, Overlap, ProcessTime, Profile, TimelineSpan

ITSELF = "itself"
"""Name of the part of an operation that lies in none of those inside it."""
DEEPEST = 16
"""Names of a path that a tree tells apart."""


class OperationNode(NamedTuple):
    """An operation with those inside; its figures are sums of both, an iteration."""

    path: tuple[str, ...]
    device: float
    host: float
    kernels: float
    mixed: float
    flops: float
    bytes: float
    inside: tuple["OperationNode", ...]
    """The operations inside, the longest first; then, if they are not all of it, what it does itself."""

    @property
    def seconds(self) -> float:
        """Device and host together."""
        return self.device + self.host

    @property
    def name(self) -> str:
        """Its own name."""
        return self.path[-1]

    @property
    def depth(self) -> int:
        """Number of operations around it."""
        return len(self.path) - 1


def operation_tree(operations: Sequence[OperationTime]) -> tuple[OperationNode, ...]:
    """The outermost operations, the longest first; operations that only their parts name are added."""
    named = [replace(one, path=one.path[:DEEPEST]) for one in operations if one.path]
    return _nodes_below((), named)


def _nodes_below(path: tuple[str, ...], operations: Sequence[OperationTime]) -> tuple[OperationNode, ...]:
    depth = len(path)
    names = dict.fromkeys(operation.path[depth] for operation in operations if len(operation.path) > depth)
    nodes = [
        _node((*path, name), [one for one in operations if len(one.path) > depth and one.path[depth] == name])
        for name in names
    ]
    return tuple(sorted(nodes, key=lambda node: -node.seconds))


def _node(path: tuple[str, ...], operations: Sequence[OperationTime]) -> OperationNode:
    inside = _nodes_below(path, operations)
    own = [operation for operation in operations if len(operation.path) == len(path)]
    itself = [_summed((*path, ITSELF), own)] if inside and any(operation.seconds for operation in own) else []
    return _summed(path, operations)._replace(inside=(*inside, *itself))


def _summed(path: tuple[str, ...], operations: Sequence[OperationTime]) -> OperationNode:
    return OperationNode(
        path,
        device=fsum(one.device for one in operations),
        host=fsum(one.host for one in operations),
        kernels=fsum(one.kernels for one in operations),
        mixed=fsum(one.mixed for one in operations),
        flops=fsum(one.flops for one in operations),
        bytes=fsum(one.bytes for one in operations),
        inside=(),
    )


def in_order(nodes: Iterable[OperationNode]) -> Iterator[OperationNode]:
    """Every operation of a tree, each before those inside."""
    for node in nodes:
        yield node
        yield from in_order(node.inside)


class ShownOperations(NamedTuple):
    """The operations that a report has room for."""

    nodes: Sequence[OperationNode]
    """Each before those inside."""
    left_out: int
    """Number of shorter ones."""


def longest_operations(profile: Profile, *, least: float, most: int | None = None) -> ShownOperations:
    """The longest operations of a profile.

    Args:
        profile: whose operations.
        least: share of the whole time below which an operation does not count.
        most: number of operations.
    """
    whole = whole_time(profile)
    nodes = [node for node in in_order(operation_tree(profile.operations)) if whole.share(node.seconds) >= least]
    limit = min(sorted((node.seconds for node in nodes), reverse=True)[:most], default=0.0)
    shown = [node for node in nodes if node.seconds >= limit][:most]
    return ShownOperations(shown, len(nodes) - len(shown))


class WholeTime(NamedTuple):
    """The seconds of an iteration, summed over the processes that train, and where no operation has them."""

    seconds: float
    idle: float
    """While neither host nor device is at work."""
    unnamed: float
    """Time of no operation, though host or device are at work."""

    def share(self, seconds: float) -> float:
        """The part of the whole, from 0 to 1."""
        return seconds / self.seconds if self.seconds > 0 else 0.0


@runtime_checkable
class HasName(Protocol):
    """A process, or what was recorded of it."""

    @property
    def name(self) -> str:
        """The name of the process."""
        ...


Process = TypeVar("Process", bound=HasName)


def working_processes(processes: Sequence[Process]) -> tuple[Process, ...]:
    """The processes that train: where there are workers, the one that coordinates them only waits for them."""
    return tuple(process for process in processes if process.name != THIS_PROCESS) or tuple(processes)


def whole_time(profile: Profile) -> WholeTime:
    """The time that shares of a profile are of: an iteration of each process that trains."""
    named = fsum(operation.seconds for operation in profile.operations)
    overlap = total_overlap(working_processes(profile.processes))
    measured = duration_of(overlap)
    whole = max(named, measured or profile.iteration.unprofiled)
    idle = min(whole - named, overlap.neither)
    return WholeTime(whole, idle=idle, unnamed=whole - named - idle)


def duration_of(overlap: Overlap) -> float:
    """The iteration that the four parts are of."""
    return overlap.host_only + overlap.device_only + overlap.both + overlap.neither


class DeviceKinds(NamedTuple):
    """The seconds of the devices in an iteration by what they do, summed over the processes that train."""

    kernels: float
    """Instructions that compute, and the time between them in which no other one runs."""
    copies: float
    collectives: float
    idle: float


def device_kinds(profile: Profile) -> DeviceKinds:
    """The time of the devices in an iteration, by what they do."""
    device = fsum(operation.device for operation in profile.operations)
    copies = fsum(operation.copies for operation in profile.operations)
    collectives = fsum(operation.collectives for operation in profile.operations)
    return DeviceKinds(device - copies - collectives, copies, collectives, whole_time(profile).seconds - device)


OVERLAPS = {"both at work": "both", "only the device": "device", "only the host": "host", "neither": "idle"}
"""Titles of the parts of an overlap, and what colours them."""


def overlap_values(overlap: Overlap) -> tuple[float, float, float, float]:
    """The parts of an overlap in the order of `OVERLAPS`."""
    return overlap.both, overlap.device_only, overlap.host_only, overlap.neither


def total_overlap(processes: Sequence[ProcessTime]) -> Overlap:
    """Sums over processes."""
    overlaps = [process.overlap for process in processes]
    return Overlap(
        host_only=fsum(overlap.host_only for overlap in overlaps),
        device_only=fsum(overlap.device_only for overlap in overlaps),
        both=fsum(overlap.both for overlap in overlaps),
        neither=fsum(overlap.neither for overlap in overlaps),
    )


def category_seconds(process: ProcessTime, category: str) -> float:
    """Durations of a process's activities of one category."""
    return fsum(one.seconds for one in process.host if one.category == category)


def stepping_seconds(process: ProcessTime) -> float:
    """Durations of a process's steps of environments: simulators, and the Python code around them."""
    return fsum(
        one.seconds
        for one in process.host
        if one.category == "simulator" or (one.category == "python" and _is_stepping(one.activity))
    )


def _is_stepping(activity: str) -> bool:
    return activity == STEPPING or activity.startswith(f"{STEPPING}/")


def over_processes(profile: Profile, seconds: Callable[[ProcessTime], float]) -> float:
    """A sum over processes."""
    return fsum(seconds(process) for process in profile.processes)


def lanes_of(process: ProcessTime) -> dict[str, list[TimelineSpan]]:
    """The spans of each lane of a timeline, by their start; spans that are no stretch of time are left out."""
    lanes: dict[str, list[TimelineSpan]] = {}
    for span in sorted(process.timeline, key=lambda one: one.start):
        if 0.0 <= span.start <= span.end < inf:
            lanes.setdefault(span.lane, []).append(span)
    return lanes


def first_of_each_kind(processes: Sequence[ProcessTime], most: int) -> list[ProcessTime]:
    """At most so many processes in their order: of each kind, such as `actor`, the first ones."""
    rank: dict[str, int] = {}
    order = []
    for index, process in enumerate(processes):
        kind = process.name.partition("/")[0]
        rank[kind] = rank.get(kind, -1) + 1
        order.append((rank[kind], index))
    return [processes[index] for index in sorted(index for _, index in sorted(order)[:most])]
