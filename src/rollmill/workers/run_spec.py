"""The run specification: the immutable description of a run that every worker receives as JSON."""

import importlib
from dataclasses import asdict, dataclass, field
from typing import Any

from rollmill.core.machine import GpuSharing, Numerics
from rollmill.core.membership import HOSTS
from rollmill.core.schema import read_as
from rollmill.dataflow import Graph
from rollmill.planning.plan import AllReduceOption, Plan
from rollmill.programs.kernels import Fusion


@dataclass(frozen=True)
class GraphRecipe:
    """Describes how a worker builds the graph of a run again."""

    factory: str
    """Function that builds the graph, as `module:function`. It is called with `described` and `imports`."""
    described: dict[str, Any] = field(default_factory=dict)
    """Names of the parts of the graph, and hyperparameters."""
    imports: tuple[str, ...] = ()
    """Modules that a worker imports first, because they register environments, networks or algorithms."""

    def build(self) -> Graph:
        """Builds the graph of the run and returns it."""
        module, _, name = self.factory.partition(":")
        return getattr(importlib.import_module(module), name)(self.described, self.imports)


@dataclass(frozen=True)
class KernelSettings:
    """Settings for the kernels of workers. Each group chooses kernels for its own fragments."""

    fusion: Fusion = "off"
    numerics: Numerics = "tf32"
    """Precision of matrix products in kernels."""
    launches: dict[str, Any] | None = None
    """Launches of the kernels chosen earlier in the run, or None. `groups` has several groups' launches."""


@dataclass(frozen=True)
class Tolerances:
    """Limits on failures and delays that do not end a run."""

    hang_seconds: float = 120.0
    """Seconds without progress after which a worker counts as hung."""
    start_seconds: float = 600.0
    """Seconds without progress after which a worker counts as hung while it starts."""
    max_failures: int = 5
    """Maximum number of consecutive failures of an environment, or losses of a worker that steps environments."""


@dataclass(frozen=True)
class GpuSettings:
    """Settings for the workers' GPUs: sharing, instances, and the all-reduce."""

    sharing: GpuSharing = "auto"
    """How workers share a GPU if there are fewer GPUs than workers."""
    reduction: AllReduceOption = "auto"
    """Name of the all-reduce of a mesh, or `auto`."""
    instances: int = 1
    """Number of processes of a mesh that share each GPU."""


@dataclass(frozen=True)
class ClusterSettings:
    """The Ray cluster on which workers are placed, if any."""

    address: str | None = None
    """Name or address of the Ray cluster, or None without Ray."""
    host: str | None = None
    """Address of this machine for workers on other hosts, or None to detect it."""

    @property
    def is_ray(self) -> bool:
        """True if the workers run on a Ray cluster."""
        return self.address not in (None, HOSTS)


@dataclass(frozen=True)
class RunSpec:
    """Describes a run for its workers: the graph, the plan, and settings."""

    graph: GraphRecipe
    plan: dict[str, Any]
    """JSON form of the `planning.plan.Plan`."""
    platform: str
    """JAX platform on which the run computes."""
    seed: int = 0
    unroll: int | None = None
    """Number of unrolled steps of the environment loop, or None to choose by platform."""
    checksums: bool = False
    """True if messages between groups carry a checksum."""
    kernels: KernelSettings = KernelSettings()
    tolerances: Tolerances = Tolerances()
    gpus: GpuSettings = GpuSettings()
    cluster: ClusterSettings = ClusterSettings()

    def read_plan(self) -> Plan:
        """Returns the plan of the run as a `planning.plan.Plan`."""
        return Plan.from_json(self.plan)


@dataclass(frozen=True)
class WorkerSettings:
    """Settings in the job of a worker: the run specification, and how to reach the coordinator."""

    run: RunSpec
    broker: str = ""
    """Address of the broker that the coordinator serves."""
    token: str = ""
    """Secret that the worker needs to connect to the broker and to other workers."""
    host: str = ""
    """Address of the coordinator, for workers on other hosts."""
    shared: str = ""
    """Key with which a worker that is a thread finds the graph (`workers.worker_entry.share_with_threads`)."""

    def to_json(self) -> dict[str, Any]:
        """Returns these settings as a JSON value, which `read_settings` reads."""
        return asdict(self)


def read_settings(settings: Any) -> WorkerSettings:
    """Reads the settings of a worker from the JSON value that `WorkerSettings.to_json` returns."""
    return read_as(WorkerSettings, settings, where="the worker's settings", error=ValueError)
