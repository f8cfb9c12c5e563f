"""Placement options of a run, and the counts that distribution policies read.

`distribution` names the policy that divides the algorithm into groups. `place` says whether groups run in one
program, threads, processes or Ray workers. `plan` names a file that replaces both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from rollmill.core.bounds import Count, Range
from rollmill.core.errors import UsageError
from rollmill.core.imports import function_of_file
from rollmill.core.machine import GpuSharing
from rollmill.core.options import Arg
from rollmill.core.schema import check_fields, coerce
from rollmill.dataflow.partition import DeviceKind
from rollmill.planning.plan import AllReduceOption, Place

DEFAULT_COUNTS: Mapping[str, Any] = {
    "workers": 2,
    "actors": 2,
    "learners": 1,
    "asynchronous": False,
    "actors_on": "cpu",
}
"""Values of counts that are not given to `Counts`."""

ActorDevice = Literal["cpu", "gpu"]

COUNTS = tuple(DEFAULT_COUNTS)

MAX_REPLICAS = 2**14
"""Maximum number of replicas. A larger number is a mistake, or an attempt to use up memory."""
Replicas: TypeAlias = Annotated[Count, Range(high=MAX_REPLICAS)]


@dataclass(frozen=True)
class PlacementOptions:
    """Options that determine where a run computes."""

    devices: Annotated[int, Range(0, finite=False), Range(high=MAX_REPLICAS)] = 1
    """Number of devices that share the environments. 0 uses all devices."""
    distribution: Annotated[str, Arg(convert=function_of_file)] = "gpu-only"
    """Distribution policy, which determines the fragments of the algorithm that are placed together.
    `rollmill plan` lists all policies. MODULE:FUNCTION or FILE.py:FUNCTION is a policy of your own."""
    place: Place | None = None
    """Where the groups run: in one program, in threads of this process, in processes of this host, in a mesh over
    several processes, or on a Ray cluster. Default: one program if possible, and processes otherwise."""
    workers: Replicas | None = None
    """Number of replicas of groups that hold only the environment. Default: 2."""
    actors: Replicas | None = None
    """Number of replicas of groups that hold the policy, but not the update. Default: 2."""
    learners: Replicas | None = None
    """Number of replicas of groups that hold gradients and update. Default: 1."""
    asynchronous: bool = False
    """Let actors continue with the newest available weights, instead of waiting for the weights of their
    iteration."""
    actors_on: ActorDevice | None = None
    """Device of actors that collect whole rollouts for a separate learner. Default: GPUs if the run uses GPUs and
    the environment is compiled, and otherwise CPUs. On Ray, the default is CPUs."""
    gpu_sharing: GpuSharing = "auto"
    """How workers share a GPU if there are fewer GPUs than workers: with `mps`, on slices of `mig`, or in `turns`.
    `auto` uses slices if there are any, and otherwise MPS if it is available."""
    reduction: AllReduceOption = "auto"
    """How several GPUs compute means: `flat` uses one all-reduce, and with `one-shot` each GPU reads the memory of
    all others. If processes share GPUs, `hierarchical` first reduces over the processes of each GPU, and `host`
    reduces on the host. `auto` times them at the size of the run, and uses the fastest."""
    plan: Path | None = None
    """File of a plan, which replaces the options above."""
    cluster: str | None = None
    """Place the workers on several hosts with Ray: `ray` uses the cluster that this machine belongs to, or
    otherwise this machine. `auto` or `HOST:PORT` requires such a cluster, and `ray://HOST:PORT` connects to
    another cluster. With `place=mesh`, the workers form one mesh. `hosts` trains on a mesh without Ray, if a
    launcher such as srun starts this command on each host."""
    host: str | None = None
    """Address at which workers on other hosts reach this machine. Default: found automatically."""

    def __post_init__(self) -> None:
        check_fields(self)


PLACEMENT = tuple(field.name for field in fields(PlacementOptions))
"""Names of the options that only determine where a run computes."""


class Counts:
    """The numbers of replicas from `PlacementOptions`, as a distribution policy reads them. Each is at least 1.

    `workers` counts replicas that hold only the environment, `actors` replicas that hold the policy but not the
    update, and `learners` replicas that hold gradients and update. With `asynchronous`, actors continue with the
    newest weights. `actors_on` is the device of actors that collect whole rollouts. The object records which of
    them are read, so that options without effect can be rejected.
    """

    def __init__(
        self,
        *,
        workers: int = DEFAULT_COUNTS["workers"],
        actors: int = DEFAULT_COUNTS["actors"],
        learners: int = DEFAULT_COUNTS["learners"],
        asynchronous: bool = DEFAULT_COUNTS["asynchronous"],
        actors_on: ActorDevice = DEFAULT_COUNTS["actors_on"],
    ) -> None:
        self._numbers = {"workers": workers, "actors": actors, "learners": learners}
        self._asynchronous = asynchronous
        self._actors_on: ActorDevice = actors_on
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
        """True if actors continue with the newest weights instead of waiting for their iteration's weights."""
        self.used.add("asynchronous")
        return self._asynchronous

    @property
    def actors_on(self) -> DeviceKind:
        """Device for a group that collects whole rollouts: `cpu`, or `any` for a GPU where the run has one."""
        self.used.add("actors_on")
        return "cpu" if self._actors_on == "cpu" else "any"

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name}={number}" for name, number in self._numbers.items())
        return f"Counts({numbers}, asynchronous={self._asynchronous}, actors_on={self._actors_on})"

    def _number(self, name: str) -> int:
        self.used.add(name)
        return self._numbers[name]


def only_synchronous(counts: Counts, name: str) -> None:
    """Raises a `UsageError` if `counts` has asynchronous actors, but policy and update are in one group."""
    if counts.asynchronous:
        raise UsageError(
            f"{name} cannot be asynchronous, because its policy belongs to the learner's group. hint: use "
            "single-learner-coarse, environments or central, or leave asynchronous out."
        )
