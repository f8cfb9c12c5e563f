"""Placement options of a run, and the counts that distribution policies read.

`distribution` names the policy that divides the algorithm into groups. `place` says whether groups run in one
program, threads, processes or Ray workers. `plan` names a file that replaces both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from rollmill.core.bounds import Count, Range
from rollmill.core.errors import UsageError
from rollmill.core.machine import GpuSharing
from rollmill.core.schema import check_fields, coerce
from rollmill.planning.plan import AllReduceOption, Place

DEFAULT_COUNTS: Mapping[str, Any] = {"workers": 2, "actors": 2, "learners": 1, "asynchronous": False}
"""Values of counts that the user does not set."""

COUNTS = tuple(DEFAULT_COUNTS)

MAX_REPLICAS = 2**14
"""Maximum number of replicas. No machine has more, so a larger number is a mistake or an attempt to use
up memory.
"""
Replicas: TypeAlias = Annotated[Count, Range(high=MAX_REPLICAS)]


@dataclass(frozen=True)
class PlacementOptions:
    """Options that determine where a run computes."""

    devices: Annotated[int, Range(0, finite=False), Range(high=MAX_REPLICAS)] = 1
    """Devices that share the environments. 0 takes all there are."""
    distribution: str = "gpu-only"
    """Distribution policy: which fragments of the algorithm are placed together. `rollmill plan` lists them."""
    place: Place | None = None
    """Where the groups run: in one program, threads of this process, processes of this host, a mesh over several
    processes, or on a Ray cluster. If left out, one program where it can be, and processes otherwise."""
    workers: Replicas | None = None
    """Replicas of groups that hold the environment alone, 2 if left out."""
    actors: Replicas | None = None
    """Replicas of groups that hold the policy, but not the update, 2 if left out."""
    learners: Replicas | None = None
    """Replicas of groups that hold gradients and update together, 1 if left out."""
    asynchronous: bool = False
    """Let actors continue with the newest weights there are, instead of waiting for those of their iteration."""
    gpu_sharing: GpuSharing = "auto"
    """How workers share a GPU, if there are fewer GPUs than workers: by `mps`, on slices of `mig`, or in `turns`.
    `auto` takes slices if there are some, then MPS if it can be had."""
    reduction: AllReduceOption = "auto"
    """How several GPUs take means: `flat`, by one all-reduce; `one-shot`, each GPU reads the memory of all others;
    where processes share GPUs, `hierarchical`, over those of each GPU first, or by the `host`. `auto` times them
    at the training's size, and takes the fastest."""
    plan: Path | None = None
    """File of a plan, instead of the options above."""
    cluster: str | None = None
    """Let Ray place the workers: `ray` on the cluster that this machine belongs to, or else on this machine alone;
    `auto` or `HOST:PORT` only on such a cluster; `ray://HOST:PORT` through the client server of another. With
    `place=mesh` they are one mesh. Or train without Ray on a mesh over `hosts`, on each of which srun or the like
    has started this command."""
    host: str | None = None
    """This machine's address as workers on other hosts reach it, found out if left out."""

    def __post_init__(self) -> None:
        check_fields(self)


PLACEMENT = tuple(field.name for field in fields(PlacementOptions))
"""Names of the options that only determine where a run computes."""


class Counts:
    """The numbers of replicas from `PlacementOptions`, as a distribution policy reads them. Each is at least 1.

    `workers` counts replicas that hold only the environment, `actors` replicas that hold the policy but not the
    update, and `learners` replicas that hold gradients and update. With `asynchronous`, actors continue with the
    newest weights. The object records which counts are read, so that options without effect can be rejected.
    """

    def __init__(
        self,
        *,
        workers: int = DEFAULT_COUNTS["workers"],
        actors: int = DEFAULT_COUNTS["actors"],
        learners: int = DEFAULT_COUNTS["learners"],
        asynchronous: bool = DEFAULT_COUNTS["asynchronous"],
    ) -> None:
        self._numbers = {"workers": workers, "actors": actors, "learners": learners}
        self._asynchronous = asynchronous
        self.used: set[str] = set()
        """Names of the counts that were read. The others have no effect."""
        for name, number in self._numbers.items():
            coerce(name, Replicas, number)

    @property
    def workers(self) -> int:
        """Number of replicas that hold the environment only."""
        return self._number("workers")

    @property
    def actors(self) -> int:
        """Number of replicas that hold the policy, but not the update."""
        return self._number("actors")

    @property
    def learners(self) -> int:
        """Number of replicas that hold gradients and update together."""
        return self._number("learners")

    @property
    def asynchronous(self) -> bool:
        """True if actors continue with the newest weights instead of waiting for the weights of their
        iteration.
        """
        self.used.add("asynchronous")
        return self._asynchronous

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name}={number}" for name, number in self._numbers.items())
        return f"Counts({numbers}, asynchronous={self._asynchronous})"

    def _number(self, name: str) -> int:
        self.used.add(name)
        return self._numbers[name]


def only_synchronous(counts: Counts, name: str) -> None:
    """Raises a `UsageError` if `counts` has asynchronous actors, for a policy with policy and update in
    one group.
    """
    if counts.asynchronous:
        raise UsageError(
            f"{name} cannot be asynchronous, because its policy belongs to the learner's group. hint: use "
            "single-learner-coarse, environments or central, or leave asynchronous out."
        )
