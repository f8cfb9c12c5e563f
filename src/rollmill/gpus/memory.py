"""Reads the memory of the GPUs that this process may use: how much is free, and which processes hold the rest.

The data comes from NVML, or from `nvidia-smi` if the NVML package is missing. In a container, the driver may list
no processes at all, or only those of the same container.
"""

import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rollmill.core.child_processes import run_program
from rollmill.core.text import format_bytes
from rollmill.gpus.devices import MEBIBYTE, Gpu, chosen_gpus, find_gpus, open_nvml

PROCESSES = (
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
)
SMI_SECONDS = 20.0
SMI_GPUS = ("--query-gpu=index,uuid,name,memory.total,memory.free", "--format=csv,noheader,nounits")
SMI_PROCESSES = ("--query-compute-apps=gpu_uuid,pid,used_memory,process_name", "--format=csv,noheader,nounits")
MAX_NAMED = 6
"""Maximum number of processes that a message names."""
MAX_NAME = 60
NOT_NAMED = 256 * MEBIBYTE
"""Bytes that the driver and its own processes may hold without being mentioned in a message."""

HINT = (
    "hint: wait for these processes or stop them; choose another GPU by CUDA_VISIBLE_DEVICES=NUMBER; or train on "
    "the CPU by JAX_PLATFORMS=cpu."
)


class Holder(NamedTuple):
    """A process that holds or has reserved GPU memory."""

    pid: int
    name: str
    bytes: int | None
    """Bytes that the process holds, or None if the driver does not report them."""
    by_claim: bool = False
    """True if the driver does not name the process, and its memory is known only from its claim."""

    def __str__(self) -> str:
        held = "an unknown amount" if self.bytes is None else format_bytes(self.bytes)
        if self.pid == os.getpid():
            return f"this process holds {held}"
        return (
            f"{self.name or 'a program'} (process {self.pid}) {'took about' if self.by_claim else 'holds'} {held}"
        )


class GpuMemory(NamedTuple):
    """The total and free memory of a GPU or a MIG slice, and the processes that hold the rest."""

    gpu: str
    """Number and name of the GPU."""
    uuid: str
    total: int
    """Total memory in bytes."""
    free: int
    """Bytes that no process holds."""
    holders: tuple[Holder, ...] = ()
    """Processes that hold memory, the largest first."""

    def __str__(self) -> str:
        return (
            f"{self.gpu} has {format_bytes(self.free)} of {format_bytes(self.total)} free; {self._name_holders()}"
        )

    def _name_holders(self) -> str:
        """Describes the processes that hold the rest."""
        named = [str(holder) for holder in self.holders[:MAX_NAMED]]
        if (others := len(self.holders) - len(named)) > 0:
            named.append(f"so do {others} other processes")
        rest = self.total - self.free - sum(holder.bytes or 0 for holder in self.holders)
        is_reported = all(holder.bytes is not None for holder in self.holders)
        if is_reported and rest > NOT_NAMED:
            named.append(f"processes that the driver does not name here hold {format_bytes(rest)}")
        return ", ".join(named) or "no process holds any of it"


def read_gpu_memory() -> tuple[GpuMemory, ...]:
    """Reads the memory of all devices that CUDA sees in this process. Returns an empty tuple if the driver does
    not answer.
    """
    try:
        with open_nvml() as nvml:
            return memory_by_nvml(nvml)
    except Exception:  # NVML or its package may be missing, too old, or not fit the driver
        return memory_by_smi()


def memory_by_nvml(nvml: Any) -> tuple[GpuMemory, ...]:
    """Reads the memory of each visible device through NVML.

    Raises a `UsageError` if there is no visible GPU.
    """
    return tuple(_of_device(nvml, gpu, *device) for gpu in find_gpus(nvml) for device in _devices(nvml, gpu))


def memory_by_smi() -> tuple[GpuMemory, ...]:
    """Reads the memory of each visible GPU from `nvidia-smi`. Returns an empty tuple if it does not answer."""
    rows = [_gpu_of_row(row) for row in _smi_rows(SMI_GPUS, 5)]
    gpus = chosen_gpus([gpu for gpu in rows if gpu is not None])
    held: dict[str, list[Holder]] = {}
    for uuid, pid, used, name in _smi_rows(SMI_PROCESSES, 4) if gpus else ():
        if pid.isdecimal():
            held.setdefault(uuid, []).append(Holder(int(pid), process_name(int(pid), name), _mebibytes(used)))
    return tuple(
        GpuMemory(
            _label(gpu),
            gpu.uuid,
            gpu.memory_bytes,
            gpu.memory_bytes - gpu.used_bytes,
            sort_by_memory(held.get(gpu.uuid, ())),
        )
        for gpu in gpus
    )


def process_name(pid: int, named: str = "") -> str:
    """Returns a short name of a process for messages: its program, and the arguments before the first option.

    Options are left out because they may contain secrets. A Python interpreter is replaced by its script or
    module. `named` is used if the command line of the process cannot be read.
    """
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        words = [named]
    program = Path(words[0]).name
    rest = list(words[1:])
    if program.startswith("python"):
        rest = [word for word in rest if word not in ("-P", "-I", "-S", "-u", "-m")]
        if rest and not rest[0].startswith("-"):
            program = Path(rest.pop(0)).name
    said = [program]
    for word in rest:
        if not word or word.startswith("-"):
            break
        said.append(word)
    text = "".join(each if each.isprintable() else "?" for each in " ".join(said))
    return text if len(text) <= MAX_NAME else f"{text[: MAX_NAME - 3]}..."


def _devices(nvml: Any, gpu: Gpu) -> Iterator[tuple[str, str, Any]]:
    """Yields label, UUID and handle of each device that CUDA sees of a GPU."""
    if not gpu.slices:
        yield _label(gpu), gpu.uuid, nvml.nvmlDeviceGetHandleByIndex(gpu.index)
    for part in gpu.slices:
        yield f"the slice {part.uuid} of {_label(gpu)}", part.uuid, nvml.nvmlDeviceGetHandleByUUID(part.uuid)


def _of_device(nvml: Any, gpu: Gpu, label: str, uuid: str, device: Any) -> GpuMemory:
    memory = nvml.nvmlDeviceGetMemoryInfo(device)
    return GpuMemory(label, uuid, int(memory.total), int(memory.free), _holders(nvml, device))


def _holders(nvml: Any, device: Any) -> tuple[Holder, ...]:
    found: dict[int, int | None] = {}
    for process in (process for name in PROCESSES for process in _query(nvml, name, device)):
        used = getattr(process, "usedGpuMemory", None)
        known = [each for each in (found.get(process.pid), used) if isinstance(each, int)]
        found[int(process.pid)] = max(known, default=None)
    return sort_by_memory(
        Holder(pid, process_name(pid, _driver_name(nvml, pid)), used) for pid, used in found.items()
    )


def _query(nvml: Any, name: str, device: Any) -> Sequence[Any]:
    """Returns the processes that a function of the library lists, or none if it fails."""
    try:
        return getattr(nvml, name)(device)
    except (AttributeError, nvml.NVMLError):
        return ()


def _driver_name(nvml: Any, pid: int) -> str:
    try:
        name = nvml.nvmlSystemGetProcessName(pid)
    except (AttributeError, nvml.NVMLError):
        return ""
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)


def sort_by_memory(holders: Iterable[Holder]) -> tuple[Holder, ...]:
    """Sorts processes by the GPU memory that they hold, the largest first."""
    return tuple(sorted(holders, key=lambda holder: -(holder.bytes or 0)))


def _label(gpu: Gpu) -> str:
    return f"GPU {gpu.index} ({gpu.name})"


def _smi_rows(query: Sequence[str], columns: int) -> list[list[str]]:
    try:
        asked = run_program("nvidia-smi", *query, capture_output=True, text=True, timeout=SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[cell.strip() for cell in line.split(",", columns - 1)] for line in asked.stdout.splitlines()]
    return [row for row in rows if len(row) == columns] if asked.returncode == 0 else []


def _gpu_of_row(row: Sequence[str]) -> Gpu | None:
    index, uuid, name, total, free = row
    if not index.isdecimal() or (known := (_mebibytes(total), _mebibytes(free)))[0] is None or known[1] is None:
        return None
    return Gpu(int(index), uuid, name, known[0], known[0] - known[1])


def _mebibytes(text: str) -> int | None:
    return int(text) * MEBIBYTE if text.isdecimal() else None
