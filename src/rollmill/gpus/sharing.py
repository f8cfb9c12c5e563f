"""Chooses how several processes share each GPU, and returns the environment variables of each process."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import fsum
from typing import Literal, NamedTuple, TypeAlias, get_args

from rollmill.core.errors import UsageError
from rollmill.core.machine import GpuSharing
from rollmill.core.text import format_count
from rollmill.gpus.devices import Gpu
from rollmill.gpus.memory_limit import FRACTION, FRACTIONS, IN_USE, PREALLOCATE
from rollmill.gpus.mps import MpsDaemon, MpsUnavailable, mps_obstacle, shared_mps

SHARINGS: tuple[str, ...] = get_args(GpuSharing)
Way: TypeAlias = Literal["mps", "mig", "turns"]

MAX_CLIENTS = 48
"""Maximum number of clients of one MPS daemon, from Volta on (CUDA's documentation of MPS)."""
HANDLE_BYTES = 5 * 2**27
"""Bytes that each process needs beside its part of the memory for a CUDA context, kernels and libraries."""
MIN_PART = 0.25
"""Minimum fraction of its equal share that a process may allocate, if more processes run than fit."""


@dataclass(frozen=True)
class Instance:
    """The part of a GPU that one process may use."""

    gpu: Gpu
    device: str
    """UUID of the GPU or MIG slice, for CUDA_VISIBLE_DEVICES."""
    memory_bytes: int
    """Bytes of memory that the process may allocate."""
    memory_fraction: float
    """`memory_bytes` as a fraction of the device's memory."""
    share: float | None = None
    """Maximum share of the multiprocessors that the process may use, or None for all of them."""
    daemon: MpsDaemon | None = None

    @property
    def descriptors(self) -> tuple[int, ...]:
        """File descriptors that the process must inherit."""
        lock = None if self.daemon is None else self.daemon.lock
        return () if lock is None else (lock,)

    def environment(self) -> dict[str, str]:
        """Returns the environment variables of the process, except memory fractions that the user has set.

        Memory is allocated on demand, so that other processes can use the remaining memory.
        """
        shares = {}
        if not set(FRACTIONS) & set(os.environ):
            shares |= {FRACTION: f"{self.memory_fraction:.4f}", PREALLOCATE: "false"}
        if self.share is not None:
            shares["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{100 * self.share:.3g}"
        variables = {name: text for name, text in shares.items() if name not in os.environ}
        daemon = {} if self.daemon is None else self.daemon.environment
        return variables | {"CUDA_VISIBLE_DEVICES": self.device} | dict(daemon)


class SharedGpus(NamedTuple):
    """GPUs, and the way in which processes share them, while the context of `shared_gpus` lasts."""

    gpus: Sequence[Gpu]
    way: Way
    reason: str
    """Reason why this way of sharing was chosen."""
    daemons: Mapping[str, MpsDaemon]
    """MPS daemons, by the UUID of their GPU."""

    @property
    def start_seconds(self) -> float:
        """Seconds spent starting the MPS daemons."""
        return fsum(daemon.seconds for daemon in self.daemons.values())

    def divide(
        self, instances: int, *, share: float | None = None, limits: Mapping[str, int] | None = None
    ) -> list[Instance]:
        """Divides the GPUs among `instances` processes. See `divide_gpus`."""
        return divide_gpus(self.gpus, instances, way=self.way, daemons=self.daemons, share=share, limits=limits)


def choose_sharing(gpus: Sequence[Gpu], wanted: GpuSharing) -> tuple[Way, str]:
    """Chooses how processes share GPUs, and returns the reason for the choice.

    Raises a `UsageError` if the GPUs cannot be shared as wanted.
    """
    sliced, missing = any(gpu.slices for gpu in gpus), mps_obstacle()
    if wanted == "mig" and not sliced:
        raise UsageError(
            "gpu_sharing=mig needs MIG slices, but no GPU has any. hint: `rollmill gpu partition --slices 7` "
            "prints the commands that create slices. gpu_sharing=mps needs no slices."
        )
    if wanted == "mps" and missing is not None:
        raise UsageError(f"gpu_sharing=mps: {missing}. hint: use gpu_sharing=turns, which has no requirements.")
    if wanted != "auto":
        return wanted, "as asked"
    if sliced:
        return "mig", "MIG is enabled and has slices"
    return ("mps", "kernels of several processes run side by side") if missing is None else ("turns", missing)


@contextlib.contextmanager
def shared_gpus(gpus: Sequence[Gpu], wanted: GpuSharing) -> Iterator[SharedGpus]:
    """Context manager in which processes share GPUs. It runs the MPS daemons that sharing needs.

    If an MPS daemon does not start, processes take turns, unless MPS was requested. In that case, raises
    `MpsUnavailable`. Raises a `UsageError` if the GPUs cannot be shared as wanted.
    """
    way, reason = choose_sharing(gpus, wanted)
    with contextlib.ExitStack() as stack:
        daemons: dict[str, MpsDaemon] = {}
        try:
            for gpu in gpus if way == "mps" else ():
                daemons[gpu.uuid] = stack.enter_context(shared_mps(gpu.uuid))
        except MpsUnavailable as error:
            if wanted == "mps":
                raise
            stack.close()
            way, reason, daemons = "turns", str(error), {}
        yield SharedGpus(gpus, way, reason, daemons)


def divide_gpus(
    gpus: Sequence[Gpu],
    instances: int,
    *,
    way: Way,
    daemons: Mapping[str, MpsDaemon],
    share: float | None = None,
    limits: Mapping[str, int] | None = None,
) -> list[Instance]:
    """Divides GPUs into instances, each with an equal part of the free memory of its GPU.

    Args:
        gpus: the GPUs. Instances are assigned to them in turn.
        instances: number of instances.
        way: how processes share a GPU.
        daemons: MPS daemons, by the UUID of their GPU.
        share: maximum fraction of the multiprocessors of each instance. None for all.
        limits: maximum number of instances by UUID of a GPU or slice. They must add up to at least `instances`.

    Raises:
        UsageError: MPS does not support so many processes.
    """
    devices = [(gpu, *device) for gpu in gpus for device in _devices(gpu, way)]
    most = dict.fromkeys((device for _, device, *_ in devices), instances) if limits is None else limits
    in_turns = (each for turn in range(instances) for each in devices if turn < most[each[1]])
    ordered = list(islice(in_turns, instances))
    counts = {device: sum(other[1] == device for other in ordered) for _, device, *_ in devices}
    if way == "mps" and max(counts.values()) > MAX_CLIENTS:
        raise UsageError(
            f"{instances} processes on {format_count(len(gpus), 'GPU')} exceed the MPS limit of "
            f"{MAX_CLIENTS} per GPU."
        )
    made = []
    for gpu, device, memory, free in ordered:
        part = part_of(free, counts[device])
        made.append(Instance(gpu, device, int(part), part / memory, share, daemons.get(gpu.uuid)))
    return made


def part_of(free: int, processes: int) -> float:
    """Returns the bytes that each process may allocate, after memory for library handles."""
    share = free / processes
    return max(MIN_PART * share, min(IN_USE * share, share - HANDLE_BYTES))


def _devices(gpu: Gpu, way: Way) -> list[tuple[str, int, int]]:
    """Returns UUID, memory and free memory of each part of a GPU that CUDA sees as a device."""
    if way == "mig" and gpu.slices:
        return [(part.uuid, part.memory_bytes, part.memory_bytes) for part in gpu.slices]
    return [(gpu.uuid, gpu.memory_bytes, gpu.memory_bytes - gpu.used_bytes)]
