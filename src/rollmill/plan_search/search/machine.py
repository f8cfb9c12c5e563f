"""Describes a machine and a run by numbers, from which candidates are enumerated."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Objective: TypeAlias = Literal["keep-batch", "grow-batch"]
"""`keep-batch`: the learning problem stays as it is, only where and how it runs is chosen. `grow-batch`: the
number of environments may grow, and the batch with it. That is another learning problem."""

DEFAULT_BUDGET = 90.0
"""Seconds that a search may take."""

DECIDED = (
    *("distribution", "place", "devices", "workers", "actors", "learners", "asynchronous"),
    "fusion",
)
"""Settings that a search chooses. One that is given narrows it."""

HOST_SHARE = 0.9
"""Share of a host's memory that a training may take. The rest is for the system and other processes."""


@dataclass(frozen=True)
class Machine:
    """Cores, GPUs and memory to compute with."""

    cores: int
    """Cores of each host."""
    memory: int | None = None
    """Bytes of each host, or None if unknown."""
    gpus_per_host: int = 0
    gpu_memory: int | None = None
    """Bytes that a process may take of a GPU, or None if unknown."""
    hosts: int = 1
    max_instances: int = 1
    """Most instances of a GPU, 1 where processes cannot share one."""

    @property
    def gpus(self) -> int:
        """Over all hosts."""
        return self.gpus_per_host * self.hosts

    @property
    def memory_limit(self) -> float | None:
        """Bytes that a candidate may use of each GPU, or of the host if there is none."""
        if self.gpus:
            return None if self.gpu_memory is None else float(self.gpu_memory)
        return None if self.memory is None else HOST_SHARE * self.memory


@dataclass(frozen=True)
class Workload:
    """Sizes of a run that determine its time and memory."""

    num_envs: int
    num_steps: int
    updates: int
    """Updates of an iteration."""
    on_host: bool = False
    """True if Python steps the environments, outside of compiled programs."""
    waiting: float = 0.0
    """Share of a step's time in which an environment of Python waits and keeps no core busy."""
    num_seeds: int = 1
    """Trainings side by side in one program."""
    asynchronous: bool = False
    """True if the user lets actors continue with older weights, which is another learning problem."""
    gradient_bytes: int = 0
    """Size of the gradients, which one all-reduce averages."""

    def batch(self, num_envs: int | None = None) -> int:
        """Environment steps of an iteration, of all seeds."""
        return (num_envs or self.num_envs) * self.num_steps * self.num_seeds
