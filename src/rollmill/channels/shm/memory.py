"""Memory that several processes share and that no name leaks: it is gone when the last of them is."""

import mmap
import os
import sys
import tempfile
import threading

ON_LINUX = sys.platform == "linux"


def create_memory(nbytes: int) -> int:
    """File descriptor of `nbytes` bytes of zeros, which exist as long as somebody holds it or maps it."""
    if ON_LINUX:
        fd = os.memfd_create("rollmill", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:  # has lost its name already
            fd = os.dup(file.fileno())
    os.ftruncate(fd, nbytes)
    return fd


def map_memory(fd: int, nbytes: int) -> memoryview:
    """The bytes behind `fd`, writable; they stay mapped while a view of them exists."""
    flags = mmap.MAP_SHARED
    if ON_LINUX:
        flags |= mmap.MAP_POPULATE  # now, and not page by page while the first messages are written
    return memoryview(mmap.mmap(fd, nbytes, flags=flags))


def private_memory(nbytes: int) -> memoryview:
    """As many bytes of zeros that only this process sees, from the beginning of a page."""
    return memoryview(mmap.mmap(-1, nbytes))


class Fence:
    """Orders memory: what was read and written before a call stays before what comes after it.

    x86 needs it hardly ever, ARM does. Python has no fence, but a lock that is given back and taken again is one:
    nothing before sinks below the release, nothing after rises above the acquire, and the acquire
    follows the release because it reads what that wrote. Belongs to one thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def __call__(self) -> None:
        """Takes about 0.1 microseconds."""
        self._lock.release()
        self._lock.acquire()
