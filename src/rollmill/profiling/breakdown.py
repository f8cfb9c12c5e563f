"""Sums over the operations and processes of a profile, used by reports and advice."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import fsum, inf
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

from rollmill.core.operations import STEPPING
from rollmill.profiling.results import THIS_PROCESS, OperationTime, Overlap, ProcessTime, Profile, TimelineSpan

ITSELF = "itself"
"""Name for the part of an operation that lies outside the operations inside it."""
MAX_DEPTH = 16
"""Maximum depth of the tree. Deeper operations count as part of the enclosing operation."""


class OperationNode(NamedTuple):
    """An operation in a tree of operations. Its figures include the operations inside it, per iteration."""

    path: tuple[str, ...]
    device: float
    host: float
    kernels: float
    mixed: float
    flops: float
    bytes: float
    inside: tuple["OperationNode", ...]
    """The operations inside this one, the longest first. If they do not make up all of it, `itself` comes last."""

    @property
    def seconds(self) -> float:
        """Device and host time of the operation together, in seconds per iteration."""
        return self.device + self.host

    @property
    def name(self) -> str:
        """The last part of the operation's path."""
        return self.path[-1]

    @property
    def depth(self) -> int:
        """Number of operations that enclose this one."""
        return len(self.path) - 1


def operation_tree(operations: Sequence[OperationTime]) -> tuple[OperationNode, ...]:
    """Builds a tree of operations, and returns the outermost ones, the longest first.

    Operations that occur only as parts of paths are added.
    """
    named = [replace(one, path=one.path[:MAX_DEPTH]) for one in operations if one.path]
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
    itself = [_sum_up((*path, ITSELF), own)] if inside and any(operation.seconds for operation in own) else []
    return _sum_up(path, operations)._replace(inside=(*inside, *itself))


def _sum_up(path: tuple[str, ...], operations: Sequence[OperationTime]) -> OperationNode:
    names = ("device", "host", "kernels", "mixed", "flops", "bytes")
    sums = {name: fsum(getattr(operation, name) for operation in operations) for name in names}
    return OperationNode(path, **sums, inside=())


def in_order(nodes: Iterable[OperationNode]) -> Iterator[OperationNode]:
    """Yields every operation of a tree, each before the operations inside it."""
    for node in nodes:
        yield node
        yield from in_order(node.inside)


class ShownOperations(NamedTuple):
    """The operations that a report has room for."""

    nodes: Sequence[OperationNode]
    """The shown operations, each before those inside it."""
    left_out: int
    """Number of shorter operations that are left out."""


def longest_operations(profile: Profile, *, least: float, most: int | None = None) -> ShownOperations:
    """Returns the longest operations of a profile: at most `most`, each with at least the share `least` of the
    whole time.
    """
    whole = whole_time(profile)
    nodes = [node for node in in_order(operation_tree(profile.operations)) if whole.share(node.seconds) >= least]
    limit = min(sorted((node.seconds for node in nodes), reverse=True)[:most], default=0.0)
    shown = [node for node in nodes if node.seconds >= limit][:most]
    return ShownOperations(shown, len(nodes) - len(shown))


class WholeTime(NamedTuple):
    """Seconds of an iteration, summed over the processes that train, and the seconds that belong to no
    operation.
    """

    seconds: float
    idle: float
    """Seconds in which neither host nor device is at work."""
    unnamed: float
    """Seconds in which host or device is at work for no named operation."""

    def share(self, seconds: float) -> float:
        """Returns `seconds` as a fraction of the whole time, from 0 to 1."""
        return seconds / self.seconds if self.seconds > 0 else 0.0


@runtime_checkable
class HasName(Protocol):
    """Interface of an object with a process name: a process, or its recording."""

    @property
    def name(self) -> str:
        """The name of the process."""
        ...


Process = TypeVar("Process", bound=HasName)


def working_processes(processes: Sequence[Process]) -> tuple[Process, ...]:
    """Returns the processes that train, without a coordinating process, which only waits for workers."""
    return tuple(process for process in processes if process.name != THIS_PROCESS) or tuple(processes)


def whole_time(profile: Profile) -> WholeTime:
    """Returns the total time of an iteration in all processes that train. Shares are relative to it."""
    named = fsum(operation.seconds for operation in profile.operations)
    overlap = total_overlap(working_processes(profile.processes))
    measured = duration_of(overlap)
    whole = max(named, measured or profile.iteration.unprofiled)
    idle = min(whole - named, overlap.neither)
    return WholeTime(whole, idle=idle, unnamed=whole - named - idle)


def duration_of(overlap: Overlap) -> float:
    """Returns the duration of an iteration, which is the sum of the four parts of `overlap`."""
    return overlap.host_only + overlap.device_only + overlap.both + overlap.neither


class DeviceKinds(NamedTuple):
    """Seconds per iteration in which devices compute, copy, exchange data or are idle, summed over the processes
    that train.
    """

    kernels: float
    """Seconds of instructions that compute, including the time between them."""
    copies: float
    collectives: float
    idle: float


def device_kinds(profile: Profile) -> DeviceKinds:
    """Returns the device time of an iteration by kind of work."""
    device = fsum(operation.device for operation in profile.operations)
    copies = fsum(operation.copies for operation in profile.operations)
    collectives = fsum(operation.collectives for operation in profile.operations)
    return DeviceKinds(device - copies - collectives, copies, collectives, whole_time(profile).seconds - device)


OVERLAPS = {"both at work": "both", "only the device": "device", "only the host": "host", "neither": "idle"}
"""Titles of the four parts of an overlap, and their colours."""


def overlap_values(overlap: Overlap) -> tuple[float, float, float, float]:
    """Returns the four parts of an overlap in the order of `OVERLAPS`."""
    return overlap.both, overlap.device_only, overlap.host_only, overlap.neither


def total_overlap(processes: Sequence[ProcessTime]) -> Overlap:
    """Sums the overlap of host and device over processes."""
    names = ("host_only", "device_only", "both", "neither")
    return Overlap(**{name: fsum(getattr(one.overlap, name) for one in processes) for name in names})


def category_seconds(process: ProcessTime, category: str) -> float:
    """Returns the seconds per iteration of a process's host activities in one category."""
    return fsum(one.seconds for one in process.host if one.category == category)


def stepping_seconds(process: ProcessTime) -> float:
    """Returns the seconds per iteration in which a process steps host environments, including the Python code
    around simulators.
    """
    is_step = lambda name: name == STEPPING or name.startswith(f"{STEPPING}/")
    return fsum(
        one.seconds
        for one in process.host
        if one.category == "simulator" or (one.category == "python" and is_step(one.activity))
    )


def lanes_of(process: ProcessTime) -> dict[str, list[TimelineSpan]]:
    """Returns the valid spans of each lane in a process's timeline, sorted by their start."""
    lanes: dict[str, list[TimelineSpan]] = {}
    for span in sorted(process.timeline, key=lambda one: one.start):
        if 0.0 <= span.start <= span.end < inf:
            lanes.setdefault(span.lane, []).append(span)
    return lanes


def first_of_each_kind(processes: Sequence[ProcessTime], most: int) -> list[ProcessTime]:
    """Selects at most `most` processes in their order, preferring the first process of each kind, such as
    `actor`.
    """
    rank: dict[str, int] = {}
    order = []
    for index, process in enumerate(processes):
        kind = process.name.partition("/")[0]
        rank[kind] = rank.get(kind, -1) + 1
        order.append((rank[kind], index))
    return [processes[index] for index in sorted(index for _, index in sorted(order)[:most])]
