"""Anonymous shared memory. It is freed when the last process unmaps it, so nothing can leak."""

import mmap
import os
import sys
import tempfile
import threading

ON_LINUX = sys.platform == "linux"


def create_memory(nbytes: int) -> int:
    """Creates shared memory of `nbytes` zero bytes, and returns its file descriptor.

    The memory exists as long as the descriptor is open or a mapping exists in any process.
    """
    if ON_LINUX:
        fd = os.memfd_create("rollmill", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:  # the file has no name, so it disappears with its last mapping
            fd = os.dup(file.fileno())
    os.ftruncate(fd, nbytes)
    return fd


def map_memory(fd: int, nbytes: int) -> memoryview:
    """Maps the shared memory behind a file descriptor, writable. It stays mapped while a view of it exists."""
    flags = mmap.MAP_SHARED
    if ON_LINUX:
        flags |= mmap.MAP_POPULATE  # maps all pages now, so that the first messages are not delayed by page faults
    return memoryview(mmap.mmap(fd, nbytes, flags=flags))


def private_memory(nbytes: int) -> memoryview:
    """Allocates `nbytes` zero bytes of page-aligned memory that only this process can access."""
    return memoryview(mmap.mmap(-1, nbytes))


class Fence:
    """A memory fence: reads and writes before a call are not reordered with those after it.

    x86 hardly ever needs it, but ARM does. Python has no fence, but releasing and acquiring a lock acts as one.
    Nothing before it moves below the release, and nothing after it moves above the acquire. The acquire follows
    the release because it reads the value that the release wrote. A fence belongs to one thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def __call__(self) -> None:
        """Issues the fence, which takes about 0.1 microseconds."""
        self._lock.release()
        self._lock.acquire()
