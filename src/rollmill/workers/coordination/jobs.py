"""Creates the jobs of the workers, one for each replica of a partition."""

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from rollmill.core.machine import THREADS
from rollmill.dataflow import Group, Partition
from rollmill.processes.jobs import Job


def jobs_of(
    partition: Partition,
    entry: str,
    settings: dict[str, Any],
    *,
    processes: bool = True,
    cores: int | None = None,
    gpus: Sequence[Mapping[str, str]] = (),
) -> Sequence[Job]:
    """Returns one job for each replica of a partition, which calls `entry` with `settings`.

    Processes that compute on CPUs are kept off accelerators. If all replicas share a host with `cores` cores, XLA
    starts only a share of the threads in each process. If every worker had a thread for each core, threads that
    wait for each other would compete for the cores. `gpus` contains the environment variables of each replica that
    may compute on a GPU.
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
