"""Reserves GPU memory for this user's processes, so that runs started at the same time fit together.

A process compiles for seconds or minutes between its check of the free memory and its first iteration. During this
time, its claim reserves the memory. A claim is a file that the process keeps locked, and the kernel releases the
lock however the process ends. Memory claimed by other processes counts as used.
"""

import contextlib
import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rollmill.core.errors import DataError, DeviceMemoryError
from rollmill.core.folder import Folder, ForeignFileError
from rollmill.core.json_data import parse_object
from rollmill.core.schema import read_as
from rollmill.core.text import format_bytes
from rollmill.gpus.memory import HINT, MAX_NAMED, GpuMemory, Holder, process_name, read_gpu_memory, sort_by_memory

LOCK, SUFFIX = "lock", ".claim"
MAX_BYTES = 2**16
ROOM = 2**29
"""Bytes of a GPU that a claim leaves free, for the handles of CUDA libraries in the claiming process."""


@dataclass(frozen=True)
class Claim:
    """GPU memory that a process has reserved on each of several GPUs."""

    pid: int
    program: str
    bytes: int
    gpus: tuple[str, ...]
    """UUIDs of the GPUs."""
    taken: bool = False
    """True once the process has allocated the memory, so that the driver already counts it as used."""

    def __str__(self) -> str:
        return (
            f"{self.program or 'a program'} (process {self.pid}) is about to allocate {format_bytes(self.bytes)}"
        )


@dataclass
class _Own:
    """The claim of this process, and the descriptor that keeps its file locked."""

    claim: Claim
    descriptor: int


_own: _Own | None = None


def claim_memory(need: int, *, what: str, devices: int, folder: Path | None = None) -> None:
    """Reserves `need` bytes on each of the first `devices` visible GPUs, and replaces this process's earlier
    claim.

    The bytes come in addition to the memory that this process already holds. `folder` holds the claims, by default
    this user's folder among the temporary files. Nothing happens if the free memory is unknown or if there is no
    such folder.

    Raises a `DeviceMemoryError` if less memory is free. Its message begins with `what`, and names the processes
    that hold or have reserved the memory.
    """
    release_claim()
    with contextlib.suppress(OSError, ForeignFileError), _lock(folder or _default_folder()) as claims:
        memory = ask_gpu_memory()[:devices]
        if not memory:
            return
        _check(need, what, memory, list(_living(claims)))
        _write(
            claims, Claim(os.getpid(), process_name(os.getpid()), need + ROOM, tuple(one.uuid for one in memory))
        )


def ask_gpu_memory() -> tuple[GpuMemory, ...]:
    """Reads the memory of all devices that CUDA sees in this process. Returns an empty tuple if the driver does
    not answer.

    In a container, the driver may not name some processes. The claims of this user's runs then provide the names.
    """
    memory = read_gpu_memory()
    claims = [claim for claim in living_claims() if claim.taken and claim.pid != os.getpid()] if memory else []
    return tuple(
        each._replace(holders=sort_by_memory([*each.holders, *_list_claimed(each, claims)])) for each in memory
    )


def living_claims(folder: Path | None = None) -> list[Claim]:
    """Returns the memory claims of running processes. Returns an empty list if the folder cannot be read."""
    folder = folder or _default_folder()
    try:
        _check_folder(folder)
        return list(_living(Folder(folder), removes=False))
    except (OSError, ForeignFileError):
        return []


def settle_claim() -> None:
    """Marks this process's claimed memory as allocated, so that others no longer subtract it from free memory."""
    if _own is not None and not _own.claim.taken:
        _own.claim = replace(_own.claim, taken=True)
        with contextlib.suppress(OSError):
            _write_text(_own)


def release_claim() -> None:
    """Removes this process's memory claim, if it has one."""
    global _own
    if _own is not None:
        # closing releases the lock, and the next process that reads the folder deletes the file
        os.close(_own.descriptor)
        _own = None


def _check(need: int, what: str, memory: Sequence[GpuMemory], claims: Sequence[Claim]) -> None:
    for each in memory:
        waiting = [claim for claim in claims if each.uuid in claim.gpus and not claim.taken]
        if need + ROOM > each.free - sum(claim.bytes for claim in waiting):
            listed = "".join(f", {claim}" for claim in waiting[:MAX_NAMED])
            at_least = format_bytes(need)
            raise DeviceMemoryError(f"{what} at least {at_least} of each GPU, and {each}{listed}. {HINT}")


def _list_claimed(memory: GpuMemory, claims: Iterable[Claim]) -> Iterator[Holder]:
    """Yields the processes of claims that the driver does not name."""
    named = {holder.pid for holder in memory.holders}
    for claim in claims:
        if memory.uuid in claim.gpus and claim.pid not in named:
            yield Holder(claim.pid, claim.program, claim.bytes, by_claim=True)


def _living(folder: Folder, *, removes: bool = True) -> Iterator[Claim]:
    """Returns the claims of living processes. The holder of the lock may remove the other files."""
    for name in sorted(name for name, kind in folder.kinds().items() if kind == "file" and name.endswith(SUFFIX)):
        descriptor = folder.open_to_append(name)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if removes:
                folder.remove(name)
        except BlockingIOError:
            with contextlib.suppress(DataError, ForeignFileError):
                text = folder.read(name, limit=MAX_BYTES)
                yield read_as(Claim, parse_object(text, where=name, limit=MAX_BYTES), where=name)
        finally:
            os.close(descriptor)


def _write(folder: Folder, claim: Claim) -> None:
    global _own
    descriptor = os.open(
        folder.path / f"{claim.pid}{SUFFIX}", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600
    )
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # waits for a process that holds it for a moment to read
    _own = _Own(claim, descriptor)
    _write_text(_own)


def _write_text(own: _Own) -> None:
    os.ftruncate(own.descriptor, 0)
    os.lseek(own.descriptor, 0, os.SEEK_SET)
    os.write(own.descriptor, json.dumps(asdict(own.claim)).encode())


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[Folder]:
    """Locks the folder of claims against other processes."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    _check_folder(folder)
    claims = Folder(folder)
    descriptor = claims.open_to_append(LOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield claims
    finally:
        os.close(descriptor)


def _check_folder(folder: Path) -> None:
    """Raises a PermissionError if others could write into a folder, or it is a link."""
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise PermissionError(f"{folder} is a link, or other users can write to it")


def _default_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"rollmill-gpus-{os.getuid()}"
