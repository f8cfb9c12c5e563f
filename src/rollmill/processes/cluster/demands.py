"""The resources that each worker requires of its node."""

from collections.abc import Mapping
from typing import NamedTuple

from rollmill.dataflow import Partition


class Demand(NamedTuple):
    """Ray's logical resources: they decide where a worker fits, and which GPUs it sees."""

    cpus: float = 1.0
    gpus: float = 0.0

    def __str__(self) -> str:
        return f"{self.cpus:g} CPU" + (f" and {self.gpus:g} GPU" if self.gpus else "")


def demands_of(partition: Partition, resources: Mapping[str, float]) -> dict[str, Demand]:
    """Returns the demand of each group's workers: a core, and a GPU if the group can use one and there are enough.

    Groups that may run anywhere get GPUs all or none, so that no two of them compute with different rounding.
    """
    wanting = sum(group.replicas for group in partition.groups if group.device != "cpu")
    enough = resources.get("GPU", 0.0) >= wanting
    return {
        group.name: Demand(gpus=1.0 if group.device == "gpu" or (group.device == "any" and enough) else 0.0)
        for group in partition.groups
    }
