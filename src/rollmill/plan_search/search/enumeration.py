"""Lists the candidate plans for a machine, cheap and promising ones first."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from rollmill.plan_search.search.candidate import Candidate
from rollmill.plan_search.search.machine import Machine, Objective, Workload

LIKELY_DEPTHS, OTHER_DEPTHS = ("off", "full"), ("rollout",)
"""Depths of fusion. The unfused program comes first, because others are judged by its times. Automatic fusion,
which times many kernels before it chooses among the same, comes last."""

MIN_WAITING = 0.2
"""Minimum share of a step spent waiting for which more processes than cores are tried. Less may be noise."""

MAX_CROWDING = 8
"""Maximum number of processes per core that are tried if environments wait."""

PROCESS_BYTES = 400_000_000
"""Bytes of a process that steps Python environments. JAX and Gymnasium take 300 to 350 MB of them."""

MAX_WIDENING = 10
"""Maximum number of times that the number of environments is doubled."""


def candidates(machine: Machine, workload: Workload, objective: Objective = "keep-batch") -> list[Candidate]:
    """Returns all candidates for a run on a machine, in the order in which they should be tried.

    A candidate may turn out to be impossible: the search checks whether it fits the graph and the machine, and
    records the reason. Within a branch, smaller candidates come first. If the batch may grow, likely placements
    are tried with all numbers of environments before other placements are tried.
    """
    narrow = list(dict.fromkeys(_placements(machine, workload)))
    if objective == "keep-batch":
        return narrow
    likely = [each for each in narrow if each.place == "program" and each.fusion in LIKELY_DEPTHS]
    others = [each for each in narrow if each not in likely]
    return [*_widen(likely, workload), *_widen(others, workload)]


def _widen(narrow: Sequence[Candidate], workload: Workload) -> Iterator[Candidate]:
    """Yields the candidates with each number of environments, smallest first."""
    for doublings in range(MAX_WIDENING + 1):
        for each in narrow:
            yield replace(each, num_envs=workload.num_envs * 2**doublings)


def widths_up_to(most: int) -> list[int]:
    """Returns the powers of two up to `most`, and `most` itself."""
    return sorted({*(2**power for power in range(most.bit_length()) if 2**power <= most), most} - {0})


def most_stepping(machine: Machine, workload: Workload) -> int:
    """Returns the largest number of processes that can usefully step environments side by side.

    Each process keeps a core busy only for the share of a step in which its environment does not wait.
    """
    if not workload.on_host or workload.waiting < MIN_WAITING:
        return machine.cores
    filling = math.ceil(machine.cores / max(1 - workload.waiting, 1e-3))
    holding = machine.memory // PROCESS_BYTES if machine.memory else filling
    most = min(filling, workload.num_envs, MAX_CROWDING * machine.cores, holding)
    return max(most, machine.cores)


def _placements(machine: Machine, workload: Workload) -> Iterator[Candidate]:
    if workload.asynchronous:
        compiled = not workload.on_host
        yield from _asynchronous(machine, most_stepping(machine, workload), on_gpus=compiled and machine.gpus > 0)
    elif workload.on_host:
        yield from _of_host_environments(machine, most_stepping(machine, workload))
    elif workload.num_seeds > 1:
        yield from _programs(machine, LIKELY_DEPTHS)
    else:
        yield from _programs(machine, LIKELY_DEPTHS)
        yield from _meshes(machine)
        yield from _likely_actors(machine)
        yield from _programs(machine, OTHER_DEPTHS)
        yield from _instances(machine)
        yield from _actors(machine)
        yield from _learners_on_cores(machine)
        yield from _apart(machine)
        yield from _programs(machine, ("auto",))


def _programs(machine: Machine, depths: Sequence[str]) -> Iterator[Candidate]:
    """Yields candidates with one compiled program, on the devices of one process."""
    for devices in widths_up_to(machine.gpus_per_host or machine.cores):
        for fusion in depths:
            yield Candidate(devices=devices, fusion=fusion, gpus=min(devices, machine.gpus))


def _meshes(machine: Machine) -> Iterator[Candidate]:
    """Yields candidates with a mesh of one process per GPU."""
    for gpus in widths_up_to(machine.gpus)[1:]:
        yield Candidate(place="mesh", learners=gpus, gpus=gpus)


def _instances(machine: Machine) -> Iterator[Candidate]:
    """Returns candidates with several processes per GPU, which average by NCCL or through the host's memory.

    They use all GPUs of the machine.
    """
    for instances in widths_up_to(machine.max_instances)[1:] if machine.gpus else ():
        for place in ("mesh", "processes"):
            learners = machine.gpus * instances
            yield Candidate(place=place, learners=learners, gpus=machine.gpus, instances=instances)


def _learners_on_cores(machine: Machine) -> Iterator[Candidate]:
    """Candidates with several learning processes, without a GPU."""
    for learners in () if machine.gpus else widths_up_to(machine.cores)[1:]:
        yield Candidate(place="processes", learners=learners)
        yield Candidate(place="mesh", learners=learners)


def _actors(machine: Machine) -> Iterator[Candidate]:
    """Yields candidates whose actors collect whole rollouts, apart from learning."""
    yield from _actors_apart(machine, machine.cores, on_gpus=machine.gpus > 0)
    for actors in widths_up_to(machine.cores):
        yield Candidate("central", "processes", actors=actors, gpus=min(1, machine.gpus))


def _actors_apart(
    machine: Machine, most: int, *, on_gpus: bool, asynchronous: bool = False
) -> Iterator[Candidate]:
    """Yields candidates with up to `most` actors on the cores, or a few actors on the learner's GPU."""
    gpus = min(1, machine.gpus)
    here = partial(Candidate, "single-learner-coarse", "processes", asynchronous=asynchronous, gpus=gpus)
    if not on_gpus:
        yield from (here(actors=actors) for actors in widths_up_to(most))
        return
    yield from (here(actors=actors, actors_on="gpu") for actors in widths_up_to(machine.max_instances))
    yield from (here(actors=actors, actors_on="cpu") for actors in widths_up_to(most))


def _likely_actors(machine: Machine) -> Iterator[Candidate]:
    """Yields candidates for machines with a GPU, whose actors collect rollouts on half of the cores.

    They are fast if a rollout consists of many small steps, such as a tree search. The other cores remain for the
    learner and for the processes that send it data.
    """
    if machine.gpus and machine.cores > 1:
        actors = widths_up_to(machine.cores // 2)[-1]
        yield Candidate("single-learner-coarse", "processes", actors=actors, actors_on="cpu", gpus=1)


def _apart(machine: Machine) -> Iterator[Candidate]:
    """Yields candidates whose environments are in separate groups from the policy."""
    gpus = min(1, machine.gpus)
    for workers in widths_up_to(machine.cores):
        yield Candidate("single-learner-fine", "processes", workers=workers, gpus=gpus)
    for learners in widths_up_to(machine.gpus_per_host or machine.cores)[1:]:
        workers = max(machine.cores // learners, 1) * learners
        yield Candidate("multi-learner", "processes", workers=workers, learners=learners, gpus=gpus and learners)
    for workers in widths_up_to(machine.cores)[1:]:
        yield Candidate("environments", "processes", workers=workers, actors=1, gpus=gpus)


def _of_host_environments(machine: Machine, most: int) -> Iterator[Candidate]:
    """Yields candidates with several processes for Python environments, which each process steps one at a time."""
    gpus = min(1, machine.gpus)
    beyond = [width for width in widths_up_to(most) if width > machine.cores]
    if beyond:
        yield Candidate("single-learner-coarse", "processes", actors=most, gpus=gpus)
    yield Candidate(place="processes", learners=1, gpus=gpus)
    for count in reversed(beyond):
        if count < most:
            yield Candidate("single-learner-coarse", "processes", actors=count, gpus=gpus)
        yield Candidate("environments", "processes", workers=count, actors=1, gpus=gpus)
    for actors in widths_up_to(machine.cores):
        yield Candidate("single-learner-coarse", "processes", actors=actors, gpus=gpus)
    for learners in widths_up_to(machine.gpus_per_host or machine.cores)[1:]:
        yield Candidate(place="processes", learners=learners, gpus=gpus and learners)
    yield from _apart(machine)
    for actors in widths_up_to(machine.cores):
        yield Candidate("central", "processes", actors=actors, gpus=gpus)


def _asynchronous(machine: Machine, most: int, *, on_gpus: bool) -> Iterator[Candidate]:
    gpus = min(1, machine.gpus)
    yield from _actors_apart(machine, most, on_gpus=on_gpus, asynchronous=True)
    for actors in widths_up_to(most):
        yield Candidate("central", "processes", actors=actors, asynchronous=True, gpus=gpus)
    for workers in widths_up_to(most)[1:]:
        yield Candidate("environments", "processes", workers=workers, actors=1, asynchronous=True, gpus=gpus)
