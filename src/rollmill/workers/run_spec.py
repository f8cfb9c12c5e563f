"""The run specification: the immutable description of a run that every worker receives, with a JSON form."""

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
    """How a worker builds the graph again."""

    factory: str
    """`module:function`, called with `described` and `imports`."""
    described: dict[str, Any] = field(default_factory=dict)
    """Names and hyperparameters."""
    imports: tuple[str, ...] = ()
    """Modules that a worker imports first, because they register environments, networks or algorithms."""

    def build(self) -> Graph:
        """Builds the graph."""
        module, _, name = self.factory.partition(":")
        return getattr(importlib.import_module(module), name)(self.described, self.imports)


@dataclass(frozen=True)
class KernelSettings:
    """The kernels of workers. Each group chooses kernels for its own fragments."""

    fusion: Fusion = "off"
    numerics: Numerics = "tf32"
    """Precision of matrix products."""
    launches: dict[str, Any] | None = None
    """Launches of the kernels, if the run has chosen them before. Those of several groups are in `groups`."""


@dataclass(frozen=True)
class Tolerances:
    """Failures and delays that do not end a run."""

    hang_seconds: float = 120.0
    """Time without progress after which a worker counts as hung."""
    start_seconds: float = 600.0
    """The same while a worker starts."""
    max_failures: int = 5
    """Consecutive failures of an environment, or of a worker that steps environments."""


@dataclass(frozen=True)
class GpuSettings:
    """Settings of the workers' GPUs: sharing, instances and the all-reduce."""

    sharing: GpuSharing = "auto"
    """How workers share a GPU if there are fewer GPUs than workers."""
    reduction: AllReduceOption = "auto"
    """The all-reduce of a mesh."""
    instances: int = 1
    """Processes of a mesh that share each GPU."""


@dataclass(frozen=True)
class ClusterSettings:
    """Where Ray places the workers."""

    address: str | None = None
    """The Ray cluster. None without Ray."""
    host: str | None = None
    """This machine's address for workers on other hosts. None chooses one."""

    @property
    def is_ray(self) -> bool:
        """Whether a Ray cluster is named."""
        return self.address not in (None, HOSTS)


@dataclass(frozen=True)
class RunSpec:
    """The graph to train, its plan, and the settings that workers read."""

    graph: GraphRecipe
    plan: dict[str, Any]
    """JSON form of the `planning.Plan`."""
    platform: str
    """JAX's name of the platform that trains."""
    seed: int = 0
    unroll: int | None = None
    """Steps of the environment loop to compile as one. None chooses by platform."""
    checksums: bool = False
    """Whether messages between groups carry a checksum."""
    kernels: KernelSettings = KernelSettings()
    tolerances: Tolerances = Tolerances()
    gpus: GpuSettings = GpuSettings()
    cluster: ClusterSettings = ClusterSettings()

    def read_plan(self) -> Plan:
        """Returns the plan as a value."""
        return Plan.from_json(self.plan)


@dataclass(frozen=True)
class WorkerSettings:
    """The settings of a worker's job."""

    run: RunSpec
    broker: str = ""
    """Address of the broker that the coordinator serves."""
    token: str = ""
    """The secret that the broker and other workers ask for."""
    host: str = ""
    """The coordinator's address, for workers on other hosts."""
    shared: str = ""
    """Key under which a thread finds the graph that its process holds (`workers.worker_entry.share`)."""

    def to_json(self) -> dict[str, Any]:
        """Returns the settings as JSON, which `read_settings` reads."""
        return asdict(self)


def read_settings(settings: Any) -> WorkerSettings:
    """Reads the settings that `to_json` wrote."""
    return read_as(WorkerSettings, settings, where="the worker's settings", error=ValueError)
