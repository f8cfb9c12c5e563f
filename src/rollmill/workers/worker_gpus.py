"""Assigns GPUs to the workers of a run: one GPU per worker, or one GPU shared by several workers."""

import contextlib
import ctypes
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rollmill.core.errors import UsageError
from rollmill.core.machine import GpuSharing, visible_gpus
from rollmill.core.text import format_count
from rollmill.gpus.devices import find_computing_gpus, open_nvml
from rollmill.gpus.sharing import shared_gpus
from rollmill.planning.plan import AllReduceOption

MIN_NCCL = (2, 30)
"""First version of NCCL that lets several processes on one GPU join a communicator."""
MAX_CHANNELS = 8
"""Total number of thread blocks for NCCL's kernels on a GPU, divided among the processes that share it."""


class WorkerGpus(NamedTuple):
    """Describes the GPUs on which the workers of a run compute."""

    environments: Sequence[Mapping[str, str]] = ()
    """Environment variables of each worker that computes on a GPU. Empty if none are needed."""
    note: str = ""
    """Describes for the user how workers share GPUs. Empty if each has its own."""
    instances: int = 1
    """Number of workers on each GPU if it is the same on all GPUs, otherwise 1."""
    reduction: AllReduceOption = "auto"
    """Name of the all-reduce for a mesh of these workers."""


@contextlib.contextmanager
def gpus_of_workers(
    workers: int, sharing: GpuSharing, *, mesh: bool, reduction: AllReduceOption = "auto"
) -> Iterator[WorkerGpus]:
    """Context manager that divides the GPUs among workers. If there are too few GPUs, workers share them.

    Raises a `UsageError` if the GPUs cannot be shared as requested, or if the requested all-reduce is not
    possible.
    """
    names = visible_gpus()
    if reduction == "one-shot" and not (workers and names):
        raise UsageError(
            "reduction=one-shot reads the memory of other GPUs, but no worker has a GPU. hint: use reduction=auto."
        )
    if workers <= len(names) or not names:
        # A process is slower if it also sees GPUs that it does not use.
        own = () if len(names) < 2 else [{"CUDA_VISIBLE_DEVICES": name} for name in names]
        unused = reduction in ("hierarchical", "host")
        note = (
            (f"reduction={reduction} has no effect, because no two of these processes share a GPU")
            if unused
            else ""
        )
        yield WorkerGpus(own, note, reduction="auto" if unused else reduction)
        return
    chosen, reason = _reduction_of(workers, len(names), reduction) if mesh else (reduction, "")
    with open_nvml() as nvml:
        gpus = find_computing_gpus(nvml)
    with shared_gpus(gpus, sharing) as shared:
        channels = max(1, MAX_CHANNELS // -(-workers // len(gpus)))
        joined = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": str(channels)} if mesh else {}
        environments = [instance.environment() | joined for instance in shared.divide(workers)]
        on = "one GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"
        note = f"{workers} workers share {on} by {shared.way} ({shared.reason})"
        instances = workers // len(gpus) if workers % len(gpus) == 0 else 1
        yield WorkerGpus(environments, f"{note}; {reason}" if reason else note, instances, chosen)


def nccl_version() -> tuple[int, int] | None:
    """Returns the version of NCCL that JAX would load, as `(major, minor)`, or None without NCCL."""
    for library in _nccl_libraries():
        with contextlib.suppress(OSError, AttributeError):
            number = ctypes.c_int()
            ctypes.CDLL(library).ncclGetVersion(ctypes.byref(number))
            return number.value // 10000, number.value // 100 % 100
    return None


def _nccl_libraries() -> Iterator[str | None]:
    yield None  # a library that is already loaded into the process
    with contextlib.suppress(ModuleNotFoundError):
        found = importlib.util.find_spec("nvidia.nccl")
        for folder in (found and found.submodule_search_locations) or ():
            yield str(Path(folder) / "lib" / "libnccl.so.2")
    yield "libnccl.so.2"


def _reduction_of(workers: int, gpus: int, wanted: AllReduceOption) -> tuple[AllReduceOption, str]:
    """Returns the all-reduce of workers that share GPUs, and why the requested one is not possible."""
    if wanted == "one-shot":
        raise UsageError(
            f"reduction=one-shot with {workers} processes on {format_count(gpus, 'GPU')}: processes on the "
            f"same GPU would wait for each other. hint: use reduction=auto, or learners={gpus}."
        )
    version = nccl_version()
    if version is None or version < MIN_NCCL:
        had = "it is not installed" if version is None else f"there is {version[0]}.{version[1]}"
        needed = f"NCCL {MIN_NCCL[0]}.{MIN_NCCL[1]} or newer is needed for several processes on one GPU, but {had}"
        if wanted in ("flat", "hierarchical"):
            raise UsageError(
                f"reduction={wanted} with {workers} processes on {format_count(gpus, 'GPU')}: {needed}. hint: use "
                f"reduction=host, or learners={gpus}."
            )
        return "host", "" if wanted == "host" else f"means are computed in host memory: {needed}"
    if wanted == "auto" and workers % gpus:
        return "flat", ""
    if wanted == "hierarchical" and (gpus == 1 or workers % gpus):
        return "flat", "means are flat, because only several GPUs with equally many processes form a hierarchy"
    return wanted, ""
