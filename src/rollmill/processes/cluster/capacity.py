"""Checks that a cluster has the resources for all workers of a run, before any of them is requested."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rollmill.core.errors import UsageError
from rollmill.dataflow import Partition


class Demand(NamedTuple):
    """Resources that a worker requests from Ray. They decide on which nodes it fits and which GPUs it sees."""

    cpus: float = 1.0
    gpus: float = 0.0

    def __str__(self) -> str:
        return f"{self.cpus:g} CPU" + (f" and {self.gpus:g} GPU" if self.gpus else "")


def demands_of(partition: Partition, resources: Mapping[str, float]) -> dict[str, Demand]:
    """Returns the demand of each group's workers: a core, and a GPU if the group can use it and GPUs suffice.

    Either all groups that may run on any device get GPUs or none does, so that all results are rounded in the same
    way.
    """
    wanting = sum(group.replicas for group in partition.groups if group.device != "cpu")
    enough = resources.get("GPU", 0.0) >= wanting
    return {
        group.name: Demand(gpus=1.0 if group.device == "gpu" or (group.device == "any" and enough) else 0.0)
        for group in partition.groups
    }


STATUS_KEY = "__autoscaling_status"
"""Key under which the monitor of Ray stores the status of the nodes."""

READ_ONLY = "node_"
"""Prefix of node types in clusters whose nodes Ray only counts, where each node has its own type."""


class Room(NamedTuple):
    """Numbers of workers, with and without a GPU, that fit on the nodes of a cluster if nothing else
    runs there.
    """

    with_gpu: int
    in_all: int
    """Number of workers that fit, including those with a GPU."""


def room_of(nodes: Iterable[Mapping[str, float]]) -> Room:
    """Counts the workers that fit on nodes with these resources, in the units of Ray. Each worker needs one
    core.
    """
    counts = [(int(node.get("CPU", 0.0)), int(node.get("GPU", 0.0))) for node in nodes]
    return Room(sum(map(min, counts)), sum(cores for cores, _ in counts))


def check_room(partition: Partition, demands: Mapping[str, Demand], nodes: list[Mapping[str, float]]) -> None:
    """Raises a `UsageError` if the workers of a partition can never fit on the nodes at the same time."""
    room = room_of(nodes)
    asked = sum(group.replicas for group in partition.groups)
    with_gpu = sum(group.replicas for group in partition.groups if demands[group.name].gpus)
    groups = ", ".join(f"{group.replicas} x {group.name}" for group in partition.groups)
    for count, there, kind in ((asked, room.in_all, ""), (with_gpu, room.with_gpu, " with a GPU")):
        if count > there:
            raise UsageError(
                f"the cluster is too small for the workers of this run: {count} requested{kind}, {there} "
                f"available in total ({groups}; each needs a CPU, and the cluster has {len(nodes)} live nodes).\n"
                "hint: use fewer workers (--actors, --workers, --learners), or more nodes: `ray start "
                "--address=HOST:PORT` adds one, and its --num-cpus sets how many workers it accepts"
            )


def living_nodes(ray: Any) -> list[Mapping[str, float]]:
    """Returns the resources of each living node of a cluster."""
    return [node.get("Resources", {}) for node in ray.nodes() if node["Alive"]]


def autoscales(ray: Any) -> bool:
    """Returns whether a cluster may add nodes for waiting workers. Returns True if this is unknown."""
    try:  # Ray has no public function for this
        if ray._private.state.state.get_max_resources_from_cluster_config() is not None:
            return True
        status = json.loads(ray.experimental.internal_kv._internal_kv_get(STATUS_KEY) or "{}")
        kinds = (status.get("autoscaler_report") or {}).get("active_nodes") or {}
        return any(not kind.startswith(READ_ONLY) for kind in kinds)
    except Exception:
        return True
