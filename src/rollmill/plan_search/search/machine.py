"""Describes the machine and the sizes of a run, from which candidate plans are listed."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Objective: TypeAlias = Literal["keep-batch", "grow-batch"]
"""What a plan search may change. `keep-batch`: only where and how the run computes, so the learning problem stays
the same. `grow-batch`: also the number of environments, and with it the batch, which is another learning problem.
"""

DEFAULT_BUDGET = 90.0
"""Default budget of a plan search in seconds."""

DECIDED = (
    *("distribution", "place", "devices", "workers", "actors", "learners", "asynchronous"),
    "fusion",
)
"""Names of the options that a plan search chooses. If the user sets one, it narrows the search."""

HOST_SHARE = 0.9
"""Share of a host's memory that a run may take. The rest is left to the system and other processes."""


@dataclass(frozen=True)
class Machine:
    """The hosts, cores, GPUs and memory that a plan search may use."""

    cores: int
    """Number of cores of each host."""
    memory: int | None = None
    """Bytes of memory of each host, or None if unknown."""
    gpus_per_host: int = 0
    gpu_memory: int | None = None
    """Bytes that a process may allocate on each GPU, or None if unknown."""
    hosts: int = 1
    max_instances: int = 1
    """Maximum number of processes on each GPU, 1 if processes cannot share a GPU."""

    @property
    def gpus(self) -> int:
        """Number of GPUs over all hosts."""
        return self.gpus_per_host * self.hosts

    @property
    def memory_limit(self) -> float | None:
        """Bytes that a candidate may use on each GPU, or on the host if there is no GPU."""
        if self.gpus:
            return None if self.gpu_memory is None else float(self.gpu_memory)
        return None if self.memory is None else HOST_SHARE * self.memory


@dataclass(frozen=True)
class Workload:
    """Sizes of a run that determine its time and its memory."""

    num_envs: int
    num_steps: int
    updates: int
    """Number of updates in an iteration."""
    on_host: bool = False
    """True if Python steps the environments, outside of compiled programs."""
    waiting: float = 0.0
    """Share of a step in which a Python environment waits and keeps no core busy, from 0 to 1."""
    num_seeds: int = 1
    """Number of seeds that are trained side by side in one program."""
    asynchronous: bool = False
    """True if the user lets actors continue with older weights, which is another learning problem."""
    gradient_bytes: int = 0
    """Bytes of the gradients, which each all-reduce averages."""

    def batch(self, num_envs: int | None = None) -> int:
        """Returns the environment steps of an iteration over all seeds."""
        return (num_envs or self.num_envs) * self.num_steps * self.num_seeds
