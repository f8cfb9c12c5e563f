"""Lists the GPUs of this host, as described by the NVIDIA management library (NVML).

Functions take `nvml`, an object with the functions of the module `pynvml`, so that tests can pass recorded
answers.
"""

import contextlib
import importlib.util
import os
import pkgutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rollmill.core.errors import UsageError
from rollmill.core.installation import install_command

MEBIBYTE = 2**20


class Slice(NamedTuple):
    """A MIG slice: a part of a GPU with its own multiprocessors and memory."""

    uuid: str
    """UUID of the slice, as in CUDA_VISIBLE_DEVICES."""
    memory_bytes: int
    multiprocessors: int


class Gpu(NamedTuple):
    """A GPU of this host, as NVML describes it."""

    index: int
    """Number of the GPU in NVML, which counts by PCI bus."""
    uuid: str
    """UUID of the GPU, as in CUDA_VISIBLE_DEVICES."""
    name: str
    memory_bytes: int
    used_bytes: int
    """Bytes of memory in use by all processes."""
    mig: bool = False
    """True if MIG is enabled, so that programs can run only on slices."""
    slices: tuple[Slice, ...] = ()


def jax_has_cuda() -> bool:
    """Returns whether the JAX plugin for NVIDIA GPUs is installed."""
    plugins = importlib.util.find_spec("jax_plugins")
    folders = (plugins and plugins.submodule_search_locations) or ()
    return any(module.name.startswith("xla_cuda") for module in pkgutil.iter_modules(folders))


def driver_is_there() -> bool:
    """Returns whether the NVIDIA driver is loaded."""
    return Path("/dev/nvidiactl").exists()


@contextlib.contextmanager
def open_nvml() -> Iterator[Any]:
    """Opens the NVIDIA management library. Raises a `UsageError` if it or its Python package is missing."""
    try:
        import pynvml
    except ImportError as error:
        raise UsageError(
            f"the package nvidia-ml-py, which queries the driver, is not installed: {install_command('cuda')}"
        ) from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise UsageError(
            f"this process cannot use an NVIDIA GPU: {error}. hint: install the NVIDIA driver, and make one of "
            "the GPUs that `nvidia-smi` lists visible to this process."
        ) from error
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def read_gpus(nvml: Any) -> tuple[Gpu, ...]:
    """Reads all GPUs of the host."""
    return tuple(_read_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))


def find_gpus(nvml: Any, *, visible: str | None = None) -> tuple[Gpu, ...]:
    """Returns the GPUs that this process may use (see `chosen_gpus`). Raises a `UsageError` if there is none."""
    gpus = chosen_gpus(read_gpus(nvml), visible)
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
    if not gpus:
        raise UsageError("there is no GPU to share" + (f" in CUDA_VISIBLE_DEVICES={chosen}." if chosen else "."))
    return gpus


def chosen_gpus(gpus: Sequence[Gpu], visible: str | None = None) -> tuple[Gpu, ...]:
    """Returns the GPUs among `gpus` that this process may use, in the order of `visible`.

    `visible` is `$CUDA_VISIBLE_DEVICES` by default, and all GPUs if the variable is not set. As in CUDA, the list
    ends at the first entry that is not a GPU.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
    return tuple(gpus) if chosen is None else _select(gpus, [word.strip() for word in chosen.split(",")])


def find_computing_gpus(nvml: Any) -> tuple[Gpu, ...]:
    """Returns the GPUs that this process may use, except GPUs in MIG mode without slices.

    Raises a `UsageError` if there is none.
    """
    gpus = find_gpus(nvml)
    computing = tuple(gpu for gpu in gpus if gpu.slices or not gpu.mig)
    if not computing:
        raise UsageError(
            f"GPU {gpus[0].index} has MIG enabled but no slices, so no program can run on it. hint: `rollmill "
            "gpu partition --slices 7` prints the commands that create slices, and `nvidia-smi -mig 0` disables "
            "MIG."
        )
    return computing


def _select(gpus: Sequence[Gpu], words: Sequence[str]) -> tuple[Gpu, ...]:
    """Selects the GPUs that the words name, each with its named slices."""
    found: dict[str, Gpu] = {}
    for word in words:
        named = [part for gpu in gpus if (part := _find_named(word, gpu)) is not None]
        if not named:
            break
        for gpu in named:
            before = found[gpu.uuid].slices if gpu.uuid in found else ()
            found[gpu.uuid] = gpu._replace(slices=tuple(dict.fromkeys((*before, *gpu.slices))))
    return tuple(found.values())


def _find_named(word: str, gpu: Gpu) -> Gpu | None:
    """Returns the GPU if `word` is its index or begins its UUID, or else with the slices whose UUID it begins."""
    if word and (str(gpu.index) == word or gpu.uuid.startswith(word)):
        return gpu
    slices = tuple(part for part in gpu.slices if word and part.uuid.startswith(word))
    return gpu._replace(slices=slices) if slices else None


def _read_gpu(nvml: Any, index: int) -> Gpu:
    device = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(device)
    mig = _mig_is_on(nvml, device)
    slices = tuple(_slices(nvml, device)) if mig else ()
    uuid, name = nvml.nvmlDeviceGetUUID(device), nvml.nvmlDeviceGetName(device)
    return Gpu(index, uuid, name, int(memory.total), int(memory.used), mig, slices)


def _mig_is_on(nvml: Any, device: Any) -> bool:
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(device)
    except nvml.NVMLError:  # a GPU without MIG
        return False
    return current == nvml.NVML_DEVICE_MIG_ENABLE


def _slices(nvml: Any, device: Any) -> Iterator[Slice]:
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(device)):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, index)
        except nvml.NVMLError:  # no slice has this index
            continue
        attributes = nvml.nvmlDeviceGetAttributes(part)
        yield Slice(
            nvml.nvmlDeviceGetUUID(part),
            int(attributes.memorySizeMB) * MEBIBYTE,
            int(attributes.multiprocessorCount),
        )
