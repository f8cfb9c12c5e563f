"""The run specification: the immutable description of a run that every worker receives, with a JSON form."""

from dataclasses import asdict, dataclass
from typing import Any

from rollmill.core.machine import GpuSharing
from rollmill.core.schema import read_as
from rollmill.fusion import Numerics
from rollmill.planning.plan import AllReduceOption, Plan
from rollmill.programs.kernels import Fusion


@dataclass(frozen=True)
class RunSpec:
    """The graph that is trained, its plan and its timeouts."""

    graph: dict[str, Any]
    """Names and hyperparameters that `graph_factory` builds the graph from."""
    graph_factory: str
    """`module:function` that is called with `graph` and `imports`, and returns a `dataflow.Graph`."""
    plan: dict[str, Any]
    """JSON form of the `planning.Plan`."""
    platform: str
    """JAX's name of the platform that trains."""
    imports: tuple[str, ...] = ()
    """Modules that a worker imports first, because they register environments, networks or algorithms."""
    seed: int = 0
    unroll: int | None = None
    """Steps of the environment loop that are compiled as one; None chooses by platform."""
    fusion: Fusion = "off"
    """How deep a mesh is fused; other workers compute parts of iterations, of which there are no kernels."""
    numerics: Numerics = "tf32"
    """Precision of matrix products in kernels."""
    launches: dict[str, Any] | None = None
    """Launches of the kernels, as they were chosen when the run began."""
    checksums: bool = False
    """Whether messages between groups carry a checksum."""
    hang_seconds: float = 120.0
    """Time without progress after which a worker counts as hung."""
    start_seconds: float = 600.0
    """The same while a worker starts."""
    max_failures: int = 5
    """Failures in a row of an environment, or of a worker that steps environments, that do not end the run."""
    gpu_sharing: GpuSharing = "auto"
    """How workers share a GPU, where there are fewer GPUs than workers."""
    reduction: AllReduceOption = "auto"
    """How a mesh takes means on GPUs."""
    cluster: str | None = None
    """The Ray cluster, where Ray places the workers."""
    host: str | None = None
    """This machine's address for workers on other hosts; None finds it out."""

    def read_plan(self) -> Plan:
        """The plan as a value."""
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
    instances: int = 1
    """Processes of a mesh that share each GPU."""
    shared: str = ""
    """Name under which a thread finds what its process holds already (`workers.worker_entry.share`)."""

    def to_json(self) -> dict[str, Any]:
        """The settings as JSON; `read_settings` reads them."""
        return asdict(self)


def read_settings(settings: Any) -> WorkerSettings:
    """The settings that `to_json` wrote."""
    return read_as(WorkerSettings, settings, where="the worker's settings", error=ValueError)
