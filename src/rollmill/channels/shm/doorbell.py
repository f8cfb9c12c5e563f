"""Doorbells, file descriptors through which one end of a channel wakes the other, across processes."""

import contextlib
import os
import sys

HAS_EVENTFD = sys.platform == "linux"
CLOSED = -1
# an eventfd is a counter, and adds the 64-bit integers that are written to it
ONE = (1).to_bytes(8, sys.byteorder)


class Doorbell:
    """Wakes the single channel end that waits on it. Any process may ring. Rings before it wakes count as one.

    Uses an eventfd, or a pipe on systems without one. Wake-ups may be spurious, so the condition must be checked
    again.
    """

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd

    @staticmethod
    def create() -> "Doorbell":
        """Creates a doorbell with new file descriptors."""
        if HAS_EVENTFD:
            fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            return Doorbell(fd, fd)
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)
        return Doorbell(read_fd, write_fd)

    def descriptors(self) -> list[int]:
        """Returns the one or two file descriptors with which another process opens the same doorbell."""
        return [self._read_fd] if self._read_fd == self._write_fd else [self._read_fd, self._write_fd]

    def ring(self) -> None:
        """Wakes the end that waits now or next. Does nothing once closed."""
        if self._write_fd != CLOSED:
            with contextlib.suppress(BlockingIOError):  # the pipe is full, so the doorbell is ringing already
                os.write(self._write_fd, ONE)

    def silence(self) -> None:
        """Clears all rings so far, so that the next wait blocks."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_fd, 4096)

    def fileno(self) -> int:
        """Returns the file descriptor to wait on, which is readable while the doorbell rings."""
        return self._read_fd

    def close(self) -> None:
        """Closes the doorbell's file descriptors."""
        for fd in self.descriptors():
            if fd != CLOSED:
                os.close(fd)
        self._read_fd = self._write_fd = CLOSED
