"""Supports MIG slices: uses slices that exist, and prints the commands with which the user can create them."""

import shlex
from collections.abc import Iterator
from typing import Any, NamedTuple

from rollmill.core.errors import UsageError
from rollmill.gpus.devices import MEBIBYTE, Gpu

MAX_SLICES = 7


class MigLayout(NamedTuple):
    """A division of one GPU into equal MIG slices."""

    gpu: Gpu
    profile: int
    """Number of the slice profile, as in `nvidia-smi mig`."""
    slices: int
    memory_bytes: int
    """Bytes of memory of each slice."""
    multiprocessors: int
    """Number of multiprocessors of each slice."""

    def __str__(self) -> str:
        return (
            f"GPU {self.gpu.index} ({self.gpu.name}) in {self.slices} slices of "
            f"{self.memory_bytes / 2**30:.0f} GiB and {self.multiprocessors} multiprocessors"
        )


def check_slices(slices: int) -> None:
    """Raises a `UsageError` if MIG cannot divide any GPU into this number of equal slices."""
    if not 1 <= slices <= MAX_SLICES:
        raise UsageError(
            f"--slices {slices} must be between 1 and {MAX_SLICES}, the maximum number of MIG slices."
        )


def mig_layout(nvml: Any, gpu: Gpu, slices: int) -> MigLayout:
    """Returns the layout with the given number of slices that makes the slices as large as possible.

    Raises a `UsageError` if the GPU does not support MIG, or cannot hold that many slices.
    """
    check_slices(slices)
    layouts = list(_layouts(nvml, gpu, slices))
    if not layouts:
        raise UsageError(
            f"GPU {gpu.index} ({gpu.name}) cannot be divided into {slices} equal slices: it does not support "
            "MIG, or has no such profile. hint: `rollmill sweep` can share the GPU through MPS without MIG."
        )
    return max(layouts, key=lambda layout: (layout.multiprocessors, layout.memory_bytes))


def mig_commands(layout: MigLayout) -> list[str]:
    """Returns the commands that enable MIG, remove existing slices, and create the slices of `layout`."""
    gpu = ["-i", str(layout.gpu.index)]
    profiles = ",".join([str(layout.profile)] * layout.slices)
    turn_on = [] if layout.gpu.mig else [["nvidia-smi", *gpu, "-mig", "1"]]
    remove = (
        [["nvidia-smi", "mig", *gpu, "-dci"], ["nvidia-smi", "mig", *gpu, "-dgi"]] if layout.gpu.slices else []
    )
    return list(map(shlex.join, [*turn_on, *remove, ["nvidia-smi", "mig", *gpu, "-cgi", profiles, "-C"]]))


def _layouts(nvml: Any, gpu: Gpu, slices: int) -> Iterator[MigLayout]:
    device = nvml.nvmlDeviceGetHandleByIndex(gpu.index)
    for profile in range(nvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            info = nvml.nvmlDeviceGetGpuInstanceProfileInfo(device, profile)
        except nvml.NVMLError:  # this GPU does not have the profile
            continue
        if info.instanceCount >= slices:
            memory = int(info.memorySizeMB) * MEBIBYTE
            yield MigLayout(gpu, int(info.id), slices, memory, int(info.multiprocessorCount))
