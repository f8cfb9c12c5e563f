"""Options that say where a training runs, and the counts that distribution policies read.

`distribution` names the policy that makes the partition into groups, `place` says whether groups are one program,
threads, processes or Ray workers, and `plan` is a file with both, in place of these options.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from rollmill.core.bounds import Count, Range, check_bounds
from rollmill.core.errors import UsageError
from rollmill.core.machine import GpuSharing
from rollmill.planning.plan import AllReduceOption, Place

DEFAULT_COUNTS: Mapping[str, Any] = {"workers": 2, "actors": 2, "learners": 1, "asynchronous": False}
"""Values of the counts that are left out."""

COUNTS = tuple(DEFAULT_COUNTS)


@dataclass(frozen=True)
class PlacementOptions:
    """Where a training runs."""

    devices: Annotated[int, Range(0, finite=False)] = 1
    """Devices that share the environments; 0 takes all there are."""
    distribution: str = "gpu-only"
    """Distribution policy: which fragments of the algorithm are placed together; `rollmill plan` lists them."""
    place: Place | None = None
    """Where the groups run: in one program, threads of this process, processes of this host, a mesh over several
    processes, or on a Ray cluster; one program where it can be, and processes otherwise, if left out."""
    workers: Count | None = None
    """Replicas of groups that hold the environment alone; 2 if left out."""
    actors: Count | None = None
    """Replicas of groups that hold the policy, but not the update; 2 if left out."""
    learners: Count | None = None
    """Replicas of groups that hold gradients and update together; 1 if left out."""
    asynchronous: bool = False
    """Let actors go on with the newest weights there are, instead of waiting for those of their iteration."""
    gpu_sharing: GpuSharing = "auto"
    """How workers share a GPU, if there are fewer GPUs than workers: by `mps`, on slices of `mig`, or in `turns`;
    `auto` takes slices if there are some, then MPS if it can be had."""
    reduction: AllReduceOption = "auto"
    """How several GPUs take means: `flat`, by one all-reduce; `one-shot`, each GPU reads the memory of all others;
    where processes share GPUs, `hierarchical`, over those of each GPU first, or by the `host`. `auto` times them
    at the training's size, and takes the fastest."""
    plan: Path | None = None
    """File of a plan, instead of the options above."""
    cluster: str | None = None
    """Let Ray place the workers: `ray` on the cluster that this machine belongs to, or else on this machine alone;
    `auto` or `HOST:PORT` only on such a cluster; `ray://HOST:PORT` through the client server of another."""
    host: str | None = None
    """This machine's address as workers on other hosts reach it; found out if left out."""

    def __post_init__(self) -> None:
        check_bounds(self)


PLACEMENT = tuple(field.name for field in fields(PlacementOptions))
"""Options that say where a training runs, and nothing else."""


@dataclass(frozen=True)
class Counts:
    """The counts of `PlacementOptions`, which distribution policies read."""

    workers: Count = DEFAULT_COUNTS["workers"]
    actors: Count = DEFAULT_COUNTS["actors"]
    learners: Count = DEFAULT_COUNTS["learners"]
    asynchronous: bool = DEFAULT_COUNTS["asynchronous"]

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True)
class RecordedCounts(Counts):
    """Counts that record which of them a distribution policy reads: the others have no effect."""

    read: set[str] = field(default_factory=set, compare=False, repr=False)

    def __getattribute__(self, name: str) -> Any:
        if name in COUNTS:
            object.__getattribute__(self, "read").add(name)
        return object.__getattribute__(self, name)


def only_synchronous(counts: Counts, name: str) -> None:
    """Refuses asynchronous actors where the policy and the update are in one group.

    Raises:
        UsageError: if they were asked for.
    """
    if counts.asynchronous:
        raise UsageError(
            f"{name} has no asynchronous form, because its policy lies in the learner's group; use "
            "single-learner-coarse, environments or central, or leave asynchronous out."
        )
