"""Where the workers of a run compute on GPUs: one each, or several that share one."""

import contextlib
import ctypes
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rollmill.core.errors import UsageError
from rollmill.core.machine import GpuSharing, visible_gpus
from rollmill.execution.instances import find_gpus, open_nvml, shared_gpus

LEAST_NCCL = (2, 30)
"""From this version on, NCCL joins several processes of one GPU, where they allow it."""
MOST_CHANNELS = 8
"""Blocks that NCCL's kernels take of a GPU, which its processes divide; others' practice for shared GPUs."""


class WorkerGpus(NamedTuple):
    """Where workers compute."""

    environments: Sequence[Mapping[str, str]] = ()
    """Environment variables of each worker that computes on a GPU; empty if they need none."""
    note: str = ""
    """How they share GPUs, for the user; empty if each has its own."""


@contextlib.contextmanager
def gpus_of_workers(workers: int, sharing: GpuSharing, *, mesh: bool) -> Iterator[WorkerGpus]:
    """Divides the GPUs among workers: each has its own if there are enough, otherwise they share them.

    Args:
        workers: that compute on GPUs.
        sharing: how several share one.
        mesh: they are one program, and NCCL takes their means.

    Raises:
        UsageError: the GPUs cannot be shared so, or NCCL is too old for a mesh of workers that share one.
    """
    names = visible_gpus()
    if workers <= len(names) or not names:
        # On a mesh each worker sees all GPUs, and takes that of its rank.
        yield WorkerGpus(() if mesh or len(names) < 2 else [{"CUDA_VISIBLE_DEVICES": name} for name in names])
        return
    if mesh:
        _check_nccl(workers, len(names))
    with open_nvml() as nvml:
        gpus = find_gpus(nvml)
    with shared_gpus(gpus, sharing) as shared:
        instances = shared.divide(workers)
        joined = _nccl_variables(-(-workers // len(gpus))) if mesh else {}
        environments = [instance.environment() | joined for instance in instances]
        on = "one GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"
        yield WorkerGpus(environments, f"{workers} workers share {on} by {shared.way} ({shared.reason})")


def nccl_version() -> tuple[int, int] | None:
    """Version of the NCCL that a process of JAX would load; None if there is none."""
    for library in _nccl_libraries():
        with contextlib.suppress(OSError, AttributeError):
            number = ctypes.c_int()
            ctypes.CDLL(library).ncclGetVersion(ctypes.byref(number))
            return number.value // 10000, number.value // 100 % 100
    return None


def _nccl_libraries() -> Iterator[str | None]:
    yield None  # one that was preloaded
    with contextlib.suppress(ModuleNotFoundError):
        found = importlib.util.find_spec("nvidia.nccl")
        for folder in (found and found.submodule_search_locations) or ():
            yield str(Path(folder) / "lib" / "libnccl.so.2")
    yield "libnccl.so.2"


def _check_nccl(workers: int, gpus: int) -> None:
    version = nccl_version()
    if version is None or version < LEAST_NCCL:
        had = "there is none" if version is None else f"there is {version[0]}.{version[1]}"
        raise UsageError(
            f"place=mesh with learners={workers} on {gpus} GPUs needs NCCL {LEAST_NCCL[0]}.{LEAST_NCCL[1]} or "
            f"newer, and {had}. hint: place=processes takes means through the host's memory; or learners={gpus}."
        )


def _nccl_variables(workers_per_gpu: int) -> dict[str, str]:
    channels = max(1, MOST_CHANNELS // workers_per_gpu)
    return {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": str(channels)}
