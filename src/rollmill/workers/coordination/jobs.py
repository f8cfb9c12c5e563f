"""The jobs of a partition's replicas."""

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from rollmill.dataflow import Group, Partition
from rollmill.processes.jobs import Job

THREADS = "NPROC"
"""The environment variable that tells XLA how many threads a program on a CPU may have."""


def jobs_of(
    partition: Partition,
    entry: str,
    settings: dict[str, Any],
    *,
    processes: bool = True,
    cores: int | None = None,
    gpus: Sequence[Mapping[str, str]] = (),
) -> Sequence[Job]:
    """Returns a job for each replica. Processes on CPUs are kept off accelerators.

    Each replica calls `entry` with the settings. If all share a host with `cores` cores, XLA starts only its part
    of the threads in each: with all cores in every worker, threads that wait for the others' work take turns on
    them. `gpus` has environment variables for each replica that may compute on a GPU, possibly none.
    """
    replicas = list(partition.replicas)
    shared = {} if cores is None or THREADS in os.environ else {THREADS: str(max(1, cores // len(replicas)))}
    on_gpus = itertools.chain(gpus, itertools.repeat({}))

    def environment(group: Group) -> dict[str, str]:
        if not processes:
            return shared
        if group.device == "cpu":
            return shared | {"JAX_PLATFORMS": "cpu"}
        return shared | dict(next(on_gpus))

    return [
        Job(f"{group.name}/{replica}", group.name, replica, entry, settings, environment(group))
        for group, replica in replicas
    ]
