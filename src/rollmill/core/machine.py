"""Describes this machine: versions, hardware, commit, cores, memory and GPUs. Also controls the memory
allocator.
"""

import ctypes
import gc
import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rollmill.core.git import commit_of, is_tracked

GpuSharing: TypeAlias = Literal["auto", "mps", "mig", "turns"]
"""How processes share a GPU. `mps` runs their kernels at the same time, `mig` gives each process a slice of the
hardware, and with `turns` one process computes at a time. `auto` uses slices if the GPU is divided into them, and
otherwise MPS if available."""

Numerics: TypeAlias = Literal["float32", "tf32", "bfloat16"]
"""Precision of matrix products and policy functions in kernels on GPUs: exact, or 10 or 7 bits of mantissa."""

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Options of `mallopt`, from glibc's malloc.h."""

MADV_DONTNEED = 4
"""Constant of `madvise` in Linux that releases pages. Code pages are never written to, so nothing is lost."""

COMPILERS = ("libjax_common", "libllvmlite")
"""Prefixes of the file names of libraries that contain compilers."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""File with an id that differs between hosts and between boots."""

PACKAGES = {
    "rollmill": "rollmill",
    "jax": "jax",
    "jaxlib": "jaxlib",
    "equinox": "equinox",
    "optax": "optax",
    "numpy": "numpy",
    "gymnasium": "gymnasium",
    "triton": "triton",
    "llvmlite": "llvmlite",
}


def versions() -> dict[str, str | None]:
    """Returns the versions of Python and of all packages that affect results, or None for a missing package."""
    return {"python": platform.python_version()} | {key: installed_version(name) for key, name in PACKAGES.items()}


def hardware() -> dict[str, Any]:
    """Returns the platform, processor, usable cores, memory in bytes and JAX devices. Starts the JAX backend."""
    return {
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "memory_bytes": memory_bytes(),
        "devices": _devices(),
    }


def own_commit() -> str | None:
    """Returns the commit of Rollmill, if it runs from a clone or was installed from a repository's URL."""
    if is_tracked(Path(__file__)):
        return commit_of(Path(__file__).parent)
    try:
        origin = json.loads(metadata.distribution("rollmill").read_text("direct_url.json") or "{}")
        return str(origin["vcs_info"]["commit_id"])
    except (metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        return None


def installed_version(distribution: str) -> str | None:
    """Returns the version of an installed package, or None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def describe_processor() -> str:
    """Returns the architecture and number of usable cores of this processor. Kernel launches are tuned for it."""
    return f"{platform.machine()} CPU, {usable_cores()} cores"


@cache
def identify_processor() -> tuple[str, ...]:
    """Returns the model of this processor and the instructions that it has. Machine code depends on them."""
    try:
        with open("/proc/cpuinfo") as file:
            first = file.read(2**14).partition("\n\n")[0]
    except OSError:
        return platform.machine(), platform.processor()
    parts = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU ")
    return platform.machine(), *(line for line in first.splitlines() if line.startswith(parts))


THREADS = "NPROC"
"""Environment variable that limits the number of threads of an XLA program on a CPU, and of C MuJoCo."""


def usable_cores() -> int:
    """Returns the number of cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS has no `sched_getaffinity`
        return os.cpu_count() or 1


def thread_share() -> int:
    """Returns how many threads this process computes with, as its share of the cores of its host."""
    share = os.environ.get(THREADS, "")
    return min(usable_cores(), int(share)) if share.isdecimal() and int(share) > 0 else usable_cores()


@contextmanager
def without_collection() -> Iterator[None]:
    """Pauses the garbage collector while imports or traces create many objects.

    Nearly all of these objects stay alive, so repeated collections would find nothing to free.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
"""Variables that tell OpenBLAS how many threads to start when NumPy is imported."""


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Makes NumPy start no BLAS threads when it is imported, unless an environment variable sets their number."""
    if any(name in os.environ for name in BLAS_THREADS):
        yield
        return
    os.environ[BLAS_THREADS[0]] = "1"
    try:
        yield
    finally:
        del os.environ[BLAS_THREADS[0]]


def keep_freed_memory() -> None:
    """Makes glibc's allocator keep freed memory for later allocations.

    XLA programs on CPUs allocate their arrays at each call, and getting new pages takes longer than computing on
    them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def return_freed_memory() -> None:
    """Makes glibc's allocator return unused memory to the system, such as memory that a compiler has freed."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if malloc_trim is not None:
        malloc_trim(0)


def leave_compilers() -> None:
    """Returns memory that compilers have freed, and the pages of their code, to the system."""
    return_freed_memory()
    leave_code_of(*COMPILERS)


def leave_code_of(*libraries: str) -> None:
    """Returns the code pages of libraries to the system, which loads them again from the file when needed.

    `libraries` are prefixes of the libraries' file names. Without `/proc/self/maps`, the function does nothing.
    """
    maps = Path("/proc/self/maps")
    lines = maps.read_text(errors="replace").splitlines() if sys.platform == "linux" and maps.exists() else []
    for line in lines:
        place, rights, *_, path = line.split(maxsplit=5) if line.count("/") else ("", "", "")
        if rights == "r-xp" and Path(path).name.startswith(libraries):
            begin, end = (int(address, 16) for address in place.split("-"))
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_DONTNEED)


def visible_gpus() -> list[str]:
    """Returns the NVIDIA GPUs visible to child processes, as in CUDA_VISIBLE_DEVICES, without asking a driver.

    As in CUDA, the list ends at the first invalid name, such as `-1`.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        names = (name.strip() for name in chosen.split(","))
        return list(takewhile(lambda name: name and not name.startswith("-"), names))
    return [str(number) for number in range(len(list(Path("/proc/driver/nvidia/gpus").glob("*"))))]


def leave_device_memory() -> None:
    """Disables preallocation of device memory for this process and its children, unless the user set it.

    The function has no effect after the JAX backend has started.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def memory_bytes() -> int | None:
    """Returns the size of this machine's memory in bytes, or None if it is unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _devices() -> list[dict[str, Any]]:
    import jax  # imported here, so that `versions` does not import it

    return [
        {"id": d.id, "kind": d.device_kind, "platform": d.platform, "memory_bytes": device_memory(d)}
        for d in jax.devices()
    ]


def device_memory(device: Any) -> int | None:
    """Returns how many bytes JAX may allocate on a device, or None if the number is unknown."""
    try:
        stats = device.memory_stats()
    except Exception:  # a backend without this call raises an error of its own type
        return None
    return stats.get("bytes_limit") if stats else None
