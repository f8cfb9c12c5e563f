"""Divides the machine among independent processes: each gets some of the cores, and a part of one GPU."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rollmill.core.errors import UsageError
from rollmill.core.machine import GpuSharing, usable_cores, visible_gpus
from rollmill.gpus.devices import Gpu, driver_is_there, find_computing_gpus, jax_has_cuda, open_nvml
from rollmill.gpus.sharing import MAX_CLIENTS, Instance, Way, divide_gpus, shared_gpus

GIBIBYTE = 2**30
MIN_GPU_MEMORY = 4 * GIBIBYTE
"""Minimum free GPU memory per process in bytes, with library handles, if the user does not set the number of
processes.
"""


@dataclass(frozen=True)
class MachinePart:
    """The cores and the part of a GPU that one process at a time may use."""

    cores: tuple[int, ...]
    """Numbers of the cores, empty for all."""
    environment: Mapping[str, str]
    """Environment variables that the process needs."""
    descriptors: tuple[int, ...] = ()
    """File descriptors that the process inherits. They hold the lock that keeps the MPS daemon of its
    GPU running.
    """


@dataclass(frozen=True)
class MachineParts:
    """The parts into which the machine is divided."""

    each: Sequence[MachinePart]
    note: str
    """Describes for the user how the machine is divided."""
    least: int = 1
    """Minimum number of parts that use the whole machine: one per GPU or MIG slice."""

    def __len__(self) -> int:
        return len(self.each)


@contextlib.contextmanager
def divide_machine(
    wanted: int | None, most: int, sharing: GpuSharing, *, enough: int | None = None
) -> Iterator[MachineParts]:
    """Context manager that divides the machine into parts, and runs the MPS daemons that the parts need.

    Args:
        wanted: number of parts, or None for the default. The default is one part per core. On GPUs, the default
            depends on the sharing: with MPS, the number that fits into memory, but at least one per GPU, with MIG,
            one per slice, and otherwise, one per GPU.
        most: maximum number of parts.
        sharing: how processes share a GPU.
        enough: maximum of the default number of parts on GPUs. The default is never less than one per GPU.

    Raises:
        UsageError: the GPUs cannot be shared in this way.
    """
    gpus = _gpus(sharing)
    if not gpus:
        yield parts_on_cores(min(wanted or usable_cores(), most))
        return
    is_divided = any(gpu.slices for gpu in gpus)
    if wanted is None and enough is not None and enough <= len(gpus) and sharing == "auto" and not is_divided:
        instances = divide_gpus(gpus, min(len(gpus), most), way="turns", daemons={})
        note = f"on one {gpus[0].name}" if len(gpus) == 1 else f"on {len(gpus)} GPUs, one on each"
        yield MachineParts(_parts_on(instances), note, least=len(gpus))
        return
    with shared_gpus(gpus, sharing) as shared:
        limits = _most_on_each(gpus, shared.way) if wanted is None else None
        least = len(_devices(gpus, shared.way))
        count = _default_count(gpus, shared.way) if wanted is None else wanted
        if wanted is None and enough is not None:
            count = min(count, max(enough, least))
        instances = shared.divide(min(count, most), limits=limits)
        count = f"one {gpus[0].name}" if len(gpus) == 1 else f"{len(gpus)} GPUs"
        note = f"{count} shared by {shared.way} ({shared.reason})"
        if shared.start_seconds:
            note += f", daemon started in {shared.start_seconds:.1f} s"
        yield MachineParts(_parts_on(instances), note, least=least)


def check_sharing(sharing: GpuSharing) -> None:
    """Raises a `UsageError` if a way to share GPUs is requested although JAX uses no GPU here."""
    if sharing != "auto":
        _gpus(sharing)


def parts_on_cores(count: int) -> MachineParts:
    """Divides the machine into `count` parts that have cores, but no GPU."""
    return MachineParts(
        [MachinePart(tuple(share_of_cores(number, count)), {}) for number in range(count)], "on the cores"
    )


def share_of_cores(number: int, parts: int) -> list[int]:
    """Returns the cores of part `number` of `parts`: equal shares, or shared cores if there are too few."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) <= parts:
        return [cores[number % len(cores)]] if cores else []
    return cores[number * len(cores) // parts : (number + 1) * len(cores) // parts]


def _parts_on(instances: Sequence[Instance]) -> list[MachinePart]:
    alone = len(instances) == 1  # then the memory share that JAX chooses is as good
    return [
        MachinePart(
            tuple(share_of_cores(number, len(instances))),
            {} if alone and instance.daemon is None else instance.environment(),
            instance.descriptors,
        )
        for number, instance in enumerate(instances)
    ]


def _gpus(sharing: GpuSharing) -> tuple[Gpu, ...]:
    """Returns the GPUs to share. Empty if the user asked for no sharing."""
    found = _usable_gpus(required=sharing != "auto")
    if sharing != "auto" and not found:
        raise UsageError(
            f"--gpu-sharing {sharing} has no effect, because JAX uses no GPU here. hint: leave it out."
        )
    return found


def _usable_gpus(*, required: bool) -> tuple[Gpu, ...]:
    """Returns the GPUs that processes will use, or none if JAX computes elsewhere and they are not `required`."""
    first = os.environ.get("JAX_PLATFORMS", "").split(",")[0].strip() or "cuda"
    if first not in ("cuda", "gpu") or not driver_is_there():
        return ()
    if not required and not (jax_has_cuda() and visible_gpus()):
        return ()
    with open_nvml() as nvml:
        return find_computing_gpus(nvml)


def _default_count(gpus: Sequence[Gpu], way: Way) -> int:
    """Chooses the number of parts."""
    if way == "mps":
        return max(len(gpus), min(usable_cores(), sum(_most_on_each(gpus, way).values())))
    return len(_devices(gpus, way))


def _devices(gpus: Sequence[Gpu], way: Way) -> list[str]:
    """Returns the UUIDs of the GPUs or slices that are assigned to processes in turn."""
    sliced = way == "mig"
    return [uuid for gpu in gpus for uuid in ([part.uuid for part in gpu.slices] if sliced else []) or [gpu.uuid]]


def _most_on_each(gpus: Sequence[Gpu], way: Way) -> dict[str, int]:
    """Returns the maximum number of processes per device. It is 1 without MPS, and depends on memory with MPS."""
    if way != "mps":
        return dict.fromkeys(_devices(gpus, way), 1)
    held = {gpu.uuid: (gpu.memory_bytes - gpu.used_bytes) // MIN_GPU_MEMORY for gpu in gpus}
    return {uuid: min(max(1, number), MAX_CLIENTS) for uuid, number in held.items()}
