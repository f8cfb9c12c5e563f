"""How one end of a channel wakes the other: a file descriptor to wait on, across processes."""

import contextlib
import os
import sys

HAS_EVENTFD = sys.platform == "linux"
CLOSED = -1
ONE = (1).to_bytes(8, sys.byteorder)  # what an eventfd adds up


class Doorbell:
    """Rung by anybody, waited on by one end. Rings that nobody heard yet are heard as one.

    An eventfd where the system has it, otherwise a pipe. Waking up promises nothing: look again.
    """

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd

    @staticmethod
    def create() -> "Doorbell":
        """A new one."""
        if HAS_EVENTFD:
            fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            return Doorbell(fd, fd)
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)
        return Doorbell(read_fd, write_fd)

    def descriptors(self) -> list[int]:
        """One or two file descriptors, from which another process makes the same doorbell."""
        return [self._read_fd] if self._read_fd == self._write_fd else [self._read_fd, self._write_fd]

    def ring(self) -> None:
        """Wakes whoever waits, now or later; a closed one wakes nobody."""
        if self._write_fd != CLOSED:
            with contextlib.suppress(BlockingIOError):  # full: it rings anyway
                os.write(self._write_fd, ONE)

    def silence(self) -> None:
        """Forgets the rings so far."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_fd, 4096)

    def fileno(self) -> int:
        """Readable while it rings."""
        return self._read_fd

    def close(self) -> None:
        """Gives the file descriptors back."""
        for fd in self.descriptors():
            if fd != CLOSED:
                os.close(fd)
        self._read_fd = self._write_fd = CLOSED
