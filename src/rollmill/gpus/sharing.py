"""Several processes on each GPU: which way of sharing it, and the environment variables of each process."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import fsum
from typing import Literal, NamedTuple, TypeAlias, get_args

from rollmill.core.errors import UsageError
from rollmill.core.machine import GpuSharing
from rollmill.gpus.devices import Gpu
from rollmill.gpus.mps import MpsDaemon, MpsUnavailable, find_mps, shared_mps
from rollmill.gpus.share import FRACTION, FRACTIONS, IN_USE, PREALLOCATE

SHARINGS: tuple[str, ...] = get_args(GpuSharing)
Way: TypeAlias = Literal["mps", "mig", "turns"]

MAX_CLIENTS = 48
"""Clients of one MPS daemon, from Volta on (CUDA's documentation of MPS)."""
HANDLE_BYTES = 5 * 2**27
"""Bytes of each process outside of its part: a CUDA context, kernels and handles of libraries on an H100."""
MIN_PART = 0.25
"""Least part of its equal share that a process may allocate, where there are more than fit."""


@dataclass(frozen=True)
class Instance:
    """A process's part of a GPU."""

    gpu: Gpu
    device: str
    """UUID of the GPU or of a slice, for CUDA_VISIBLE_DEVICES."""
    memory_bytes: int
    """Memory that it may allocate."""
    memory_fraction: float
    """The same as a fraction of the device's memory."""
    share: float | None = None
    """Share of the multiprocessors that it may use at most, or None for all of them."""
    daemon: MpsDaemon | None = None

    @property
    def descriptors(self) -> tuple[int, ...]:
        """File descriptors to be inherited by the process."""
        lock = None if self.daemon is None else self.daemon.lock
        return () if lock is None else (lock,)

    def environment(self) -> dict[str, str]:
        """Environment variables of the process, except fractions set by the user.

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
    """GPUs, and how processes share them while the context of `shared_gpus` lasts."""

    gpus: Sequence[Gpu]
    way: Way
    reason: str
    """Why so."""
    daemons: Mapping[str, MpsDaemon]
    """Daemons of MPS by the GPU's UUID."""

    @property
    def start_seconds(self) -> float:
        """Time that starting daemons took."""
        return fsum(daemon.seconds for daemon in self.daemons.values())

    def divide(
        self, instances: int, *, share: float | None = None, limits: Mapping[str, int] | None = None
    ) -> list[Instance]:
        """Divides these GPUs as `divide_gpus` does."""
        return divide_gpus(self.gpus, instances, way=self.way, daemons=self.daemons, share=share, limits=limits)


def choose_sharing(gpus: Sequence[Gpu], wanted: GpuSharing) -> tuple[Way, str]:
    """Chooses how GPUs are shared, and gives the reason.

    Raises a `UsageError` if they cannot be shared as wanted.
    """
    sliced, missing = any(gpu.slices for gpu in gpus), find_mps()
    if wanted == "mig" and not sliced:
        raise UsageError(
            "gpu_sharing=mig: no GPU has slices. hint: `rollmill gpu partition --slices 7` prints the commands "
            "that create them, and gpu_sharing=mps needs none."
        )
    if wanted == "mps" and missing is not None:
        raise UsageError(f"gpu_sharing=mps: {missing}. hint: gpu_sharing=turns has no requirements.")
    if wanted != "auto":
        return wanted, "as asked"
    if sliced:
        return "mig", "MIG is enabled and has slices"
    return ("mps", "kernels of several processes run side by side") if missing is None else ("turns", missing)


@contextlib.contextmanager
def shared_gpus(gpus: Sequence[Gpu], wanted: GpuSharing) -> Iterator[SharedGpus]:
    """Lets processes share GPUs. Daemons of MPS run until the context ends.

    Where MPS was not requested and its daemon does not start, processes take turns. If it was, raises
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
    """Divides GPUs into instances, of every GPU in turns, each with an equal part of its GPU's free memory.

    Daemons and the `limits`, the maximum instances of each GPU or slice, are by UUID. Limits add up to `instances`
    at least. `share` is the fraction of the multiprocessors that each may use at most. Raises a `UsageError` if
    MPS cannot serve that number of processes.
    """
    devices = [(gpu, *device) for gpu in gpus for device in _devices(gpu, way)]
    most = dict.fromkeys((device for _, device, *_ in devices), instances) if limits is None else limits
    in_turns = (each for turn in range(instances) for each in devices if turn < most[each[1]])
    ordered = list(islice(in_turns, instances))
    counts = {device: sum(other[1] == device for other in ordered) for _, device, *_ in devices}
    if way == "mps" and max(counts.values()) > MAX_CLIENTS:
        raise UsageError(
            f"{instances} processes on {len(gpus)} GPUs exceed the MPS limit of {MAX_CLIENTS} per GPU."
        )
    made = []
    for gpu, device, memory, free in ordered:
        part = part_of(free, counts[device])
        made.append(Instance(gpu, device, int(part), part / memory, share, daemons.get(gpu.uuid)))
    return made


def part_of(free: int, processes: int) -> float:
    """Returns the bytes of free memory that each of several processes may allocate, beside its handles."""
    share = free / processes
    return max(MIN_PART * share, min(IN_USE * share, share - HANDLE_BYTES))


def _devices(gpu: Gpu, way: Way) -> list[tuple[str, int, int]]:
    """UUID, memory and free memory of the parts of a GPU that CUDA sees as devices."""
    if way == "mig" and gpu.slices:
        return [(part.uuid, part.memory_bytes, part.memory_bytes) for part in gpu.slices]
    return [(gpu.uuid, gpu.memory_bytes, gpu.memory_bytes - gpu.used_bytes)]
