"""Names of a run's files, and the lock file that keeps two processes from training the same run."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollmill.core.errors import RollmillError, UsageError
from rollmill.core.folder import Folder
from rollmill.record.json_files import write_failure

CONFIG, SUMMARY, VERSIONS, METRICS = "config.json", "summary.json", "versions.json", "metrics.jsonl"
LOCK, EVALUATIONS = ".lock", "evaluations.jsonl"
SWEEP = "sweep.json"
"""Name of the specification of a sweep, by which its directory is recognised."""
MAX_LOCK_BYTES = 32
"""Maximum size of a lock file, which contains a process id."""

_HELD: set[Path] = set()
"""Directories whose lock this process holds."""


@contextmanager
def lock_run(root: Path) -> Iterator[None]:
    """Context manager that locks a run, so that no other process can write it.

    The lock excludes processes, not threads, so enter it only once within a process. Raises a `UsageError` if
    another process holds the lock, a `StorageError` if the lock file cannot be written, and a `ForeignFileError`
    if it is a link or not a regular file.
    """
    try:
        descriptor = Folder(root).open_to_append(LOCK)
    except OSError as error:
        raise write_failure(root / LOCK, error) from error
    held = root.resolve()
    try:
        _lock_or_refuse(root, descriptor)
        _HELD.add(held)
        try:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
        except OSError as error:
            raise write_failure(root / LOCK, error) from error
        yield
    finally:
        os.close(descriptor)
        _HELD.discard(held)


def is_held(root: Path) -> bool:
    """Returns True if this process trains the run in `root`."""
    return root.resolve() in _HELD


def is_locked(root: Path) -> bool:
    """Returns True if another process trains the run in `root`."""
    if is_held(root):  # opening and closing the lock file would release the lock
        return False
    try:
        with Folder(root).reading(LOCK) as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except (BlockingIOError, PermissionError):
        return True
    return False


def _lock_or_refuse(root: Path, descriptor: int) -> None:
    try:
        # A record lock, which forked environment workers do not inherit, unlike a lock by `flock`.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise UsageError(f"{being_written(root)} hint: wait for that process to end, or stop it first.") from error


def being_written(root: Path) -> str:
    """Returns a sentence that names the process that holds the lock of a run."""
    try:
        owner = Folder(root).read(LOCK, limit=MAX_LOCK_BYTES).decode("ascii", errors="replace").strip()
    except (OSError, RollmillError):
        owner = ""
    return f"{f'process {owner}' if owner.isdecimal() else 'another process'} is writing to {root}."
