"""Lets only one process of a machine compile a program, while the others that need it wait to load the result.

Trials of a sweep start at the same time, and would all compile the same program.
"""

import contextlib
import fcntl
import os
import time
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from rollmill.core.errors import CheckpointError
from rollmill.core.installation import cache_root, folder_in_cache

FOLDER, FILE = "compiling", "locks"
"""File of the cache with a lock for each program that is being compiled. Its bytes are locked, and it is empty."""

LOOK_SECONDS = 0.02
"""Time between two attempts to take a lock, in seconds."""

MAX_SECONDS = 600.0
"""Seconds after which a process compiles a program itself, because the one that compiles it may have been
stopped."""


class CompileLock(NamedTuple):
    """The lock of a program, held by the process that compiles it."""

    file: int | None
    """Descriptor of the file of locks, or None if this process holds no lock."""
    place: int = 0
    """Index of the byte that is locked."""

    def release(self) -> None:
        """Lets the other processes continue. A second call has no effect."""
        if self.file is not None:
            with contextlib.suppress(OSError):
                fcntl.lockf(self.file, fcntl.LOCK_UN, 1, self.place)


@contextlib.contextmanager
def compiling_once(name: str | None) -> Iterator[CompileLock]:
    """Waits while another process compiles the program with this digest, and holds its lock in the context.

    A process that has waited holds no lock: if it still finds no program, it compiles at the same time as others.
    Nothing is locked if `name` is None, or if the cache cannot be written.
    """
    file = None if name is None else _file_of_locks()
    if name is None or file is None:
        yield CompileLock(None)
        return
    lock = CompileLock(file, zlib.crc32(name.encode()))
    try:
        if _wait_for(lock):
            lock.release()
            yield CompileLock(None)
        else:
            yield lock
    finally:
        os.close(file)  # releases the lock


def _file_of_locks() -> int | None:
    folder = folder_in_cache(cache_root() / FOLDER / FILE)
    try:
        folder.make()
        return folder.open_to_append(FILE)
    except (OSError, CheckpointError):
        return None


def _wait_for(lock: CompileLock) -> bool:
    """Takes a lock, if that is possible. Returns whether another process had it."""
    assert lock.file is not None
    until, waited = time.monotonic() + MAX_SECONDS, False
    while time.monotonic() < until:
        try:
            fcntl.lockf(lock.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, lock.place)
            return waited
        except BlockingIOError:
            waited = True
            time.sleep(LOOK_SECONDS)
        except OSError:  # a file system without locks
            return waited
    return True
