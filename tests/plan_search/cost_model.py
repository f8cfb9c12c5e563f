"""A cost model: seconds of an iteration on machines that are not at hand, from measurements on smaller ones.

An iteration on one device takes a constant, for launches, and a time for each of its environments. Devices add the
all-reduces of the updates. In one process the host also dispatches to each device.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rollmill.plan_search.search.candidate import Candidate
from rollmill.plan_search.search.machine import Machine, Workload


class Collective(NamedTuple):
    """A measured all-reduce."""

    bytes: int
    gpus: int
    instances: int
    """Instances of each GPU."""
    hosts: int
    seconds: float


class CollectiveModel(NamedTuple):
    """Seconds of an all-reduce, as a sum of parts."""

    start: float
    """Seconds of any all-reduce, however small."""
    sharing: float
    """Seconds more, where instances share a GPU."""
    each_instance: float
    """Seconds for each further instance of a GPU."""
    each_gpu: float
    """Seconds for each further GPU of a host: a ring's latency."""
    each_doubling: float
    """Seconds for each doubling of hosts: a tree's latency."""
    each_byte: float
    """Seconds for each byte that passes a link of a ring within a host."""
    each_byte_between_hosts: float
    """Seconds for each byte that passes from one host to another."""

    def seconds(self, num_bytes: int, *, gpus: int, instances: int = 1, hosts: int = 1) -> float:
        """Returns the seconds of an all-reduce; 0 where there is one rank."""
        if gpus * instances <= 1:
            return 0.0
        parts = _parts(Collective(num_bytes, gpus, instances, hosts, 0.0))
        return float(np.dot(parts, np.asarray(self)))


def fit_collectives(measured: Sequence[Collective]) -> CollectiveModel:
    """Fits the model to measurements, by least squares of relative errors with no negative part.

    Parts that no measurement tells apart, such as bytes where all messages have one size, stay 0.
    """
    if not measured:
        raise ValueError("a model of collectives needs at least one measurement")
    rows = np.asarray([_parts(each) for each in measured])
    seconds = np.asarray([each.seconds for each in measured])
    varies = np.ptp(rows, axis=0) > 0
    varies[0] = True
    return CollectiveModel(*_non_negative(rows / seconds[:, None], np.ones(len(seconds)), varies))


class IterationModel(NamedTuple):
    """Seconds of an iteration, by placement."""

    start: float
    """Seconds of an iteration on one device, however few environments it has."""
    each_env: float
    """More, for each environment of a device."""
    collectives: CollectiveModel
    dispatch: float = 0.0
    """More, for each further device of one process."""
    crowding: float = 1.0
    """Share of an iteration on a GPU that its instances cannot overlap: 1, and they take turns; 0, and they do not
    disturb each other."""

    def seconds(self, candidate: Candidate, machine: Machine, workload: Workload) -> float:
        """Returns the seconds of an iteration of a candidate that computes everything together: `gpu-only`."""
        ranks, instances = candidate.ranks, candidate.instances
        gpus = max(ranks // instances, 1)
        envs = (candidate.num_envs or workload.num_envs) / ranks
        alone = self.start + self.each_env * envs
        waiting = self.crowding * (instances - 1) * alone
        reduce = self.collectives.seconds(
            workload.gradient_bytes, gpus=gpus, instances=instances, hosts=hosts_of(machine, gpus)
        )
        dispatch = self.dispatch * (ranks - 1) if candidate.place == "program" else 0.0
        return alone + waiting + workload.updates * reduce + dispatch

    def steps_per_second(self, candidate: Candidate, machine: Machine, workload: Workload) -> float:
        """Environment steps a second."""
        return workload.batch(candidate.num_envs) / self.seconds(candidate, machine, workload)


def fit_iteration(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Fits the seconds of an iteration without environments, and of each environment, to measured pairs of both.

    The two together explain relative errors best; neither is negative.
    """
    seconds = np.asarray([point[1] for point in points])
    rows = np.asarray([[1.0, float(point[0])] for point in points])
    start, each = _non_negative(rows / seconds[:, None], np.ones(len(seconds)), np.ones(2, bool))
    return start, each


def _parts(each: Collective) -> list[float]:
    """Returns how often each part of the model counts in an all-reduce."""
    gpus_of_a_host = each.gpus / each.hosts
    within = 2 * each.bytes * (gpus_of_a_host - 1) / gpus_of_a_host if gpus_of_a_host > 1 else 0.0
    between = 2 * each.bytes * (each.hosts - 1) / each.hosts
    return [
        1.0,
        float(each.instances > 1),
        each.instances - 1.0,
        max(gpus_of_a_host - 1.0, 0.0),
        float(np.log2(each.hosts)),
        within,
        between,
    ]


def _non_negative(rows: np.ndarray, targets: np.ndarray, free: np.ndarray) -> list[float]:
    """Least squares without negative parts: those that would be are fixed at 0, the worst first."""
    scale = np.where(np.abs(rows).max(axis=0) > 0, np.abs(rows).max(axis=0), 1.0)
    free = free.copy()
    found = np.zeros(rows.shape[1])
    while free.any():
        found[:] = 0.0
        found[free] = np.linalg.lstsq(rows[:, free] / scale[free], targets, rcond=None)[0]
        if found.min() >= 0:
            break
        free[found.argmin()] = False
    return [float(part) for part in np.maximum(found, 0.0) / scale]


def hosts_of(machine: Machine, gpus: int) -> int:
    """Returns the number of hosts over which `gpus` GPUs are spread."""
    return max(1, -(-gpus // machine.gpus_per_host)) if machine.gpus_per_host else 1
