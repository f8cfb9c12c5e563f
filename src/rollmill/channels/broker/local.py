"""The coordinator's registry of segments, doorbells and addresses, for the threads of one process.

`BrokerServer` serves it to other processes.
"""

import os
import struct
import threading
from dataclasses import dataclass

from rollmill.channels.protocols import Address
from rollmill.channels.shm.doorbell import Doorbell
from rollmill.channels.shm.memory import create_memory, map_memory
from rollmill.core.errors import UsageError

WORD = struct.Struct("@q")


@dataclass(frozen=True)
class MemorySegment:
    """A named shared memory: its file descriptor and its size in bytes."""

    fd: int
    nbytes: int


class LocalBroker:
    """The broker of one process. See `rollmill.channels.Broker`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._digests: dict[str, str] = {}
        self._segments: dict[str, MemorySegment] = {}
        self._mapped: dict[str, memoryview] = {}
        self._doorbells: dict[str, Doorbell] = {}
        self._addresses: dict[str, Address] = {}
        self._holders: dict[str, int] = {}

    def segment(self, name: str, *, nbytes: int, digest: str) -> memoryview:
        """Returns the shared memory called `name`, initially zero."""
        fd = self.segment_descriptor(name, nbytes=nbytes, digest=digest)
        with self._lock:
            if name not in self._mapped:
                self._mapped[name] = map_memory(fd, nbytes)
            return self._mapped[name]

    def segment_descriptor(self, name: str, *, nbytes: int, digest: str) -> int:
        """Returns the file descriptor of the segment `name`, which belongs to the broker."""
        self.agree(name, digest=digest)
        with self._lock:
            if name not in self._segments:
                self._segments[name] = MemorySegment(create_memory(nbytes), nbytes)
            segment = self._segments[name]
        if segment.nbytes != nbytes:
            raise UsageError(f"{name} has {segment.nbytes} bytes, expected {nbytes}.")
        return segment.fd

    def agree(self, name: str, *, digest: str) -> None:
        """Declares the digest of `name`. Every end of a channel does so when it is opened."""
        with self._lock:
            known = self._digests.setdefault(name, digest)
        if known != digest:
            raise UsageError(
                f"{name} was first opened as {known} and now as {digest}. Both ends of a channel must have the "
                "same layout, capacity and number of ends."
            )

    def doorbell(self, name: str) -> Doorbell:
        """Returns the doorbell called `name`."""
        with self._lock:
            if name not in self._doorbells:
                self._doorbells[name] = Doorbell.create()
            return self._doorbells[name]

    def claim(self, name: str, *, segment: str | None = None, word: int = 0) -> int:
        """Claims the end `name` and returns the caller's incarnation."""
        with self._lock:
            self._holders[name] = self._holders.get(name, 0) + 1
            self._addresses.pop(name, None)  # the previous holder's
            if segment is not None:
                self._publish(segment, word, self._holders[name])
            return self._holders[name]

    def confirm(self, name: str, incarnation: int, *, segment: str, word: int) -> None:
        """Publishes that this incarnation is ready."""
        with self._lock:
            if incarnation == self._holders.get(name):
                self._publish(segment, word, incarnation)

    def drop(self, name: str) -> None:
        """Forgets the segment `name`."""
        with self._lock:
            self._mapped.pop(name, None)
            self._digests.pop(name, None)
            if (segment := self._segments.pop(name, None)) is not None:
                os.close(segment.fd)

    def holder(self, name: str) -> int:
        """Returns the latest incarnation that claimed the name."""
        with self._lock:
            return self._holders.get(name, 0)

    def announce(self, name: str, address: Address, incarnation: int) -> None:
        """Registers the address of the end called `name`."""
        with self._lock:
            if incarnation == self._holders.get(name):
                self._addresses[name] = address

    def lookup(self, name: str) -> Address | None:
        """Address at which the holder of `name` listens, or None until it is announced."""
        with self._lock:
            return self._addresses.get(name)

    def _publish(self, segment: str, word: int, incarnation: int) -> None:
        if segment not in self._segments:
            raise UsageError(f"the segment {segment}, in which to publish the holder of an end, does not exist.")
        if not 0 <= word < self._segments[segment].nbytes // WORD.size:
            raise UsageError(f"{segment} has no word {word}.")
        os.pwrite(self._segments[segment].fd, WORD.pack(incarnation), word * WORD.size)

    def close(self) -> None:
        """Closes file descriptors. Mapped memory stays valid."""
        with self._lock:
            for segment in self._segments.values():
                os.close(segment.fd)
            for doorbell in self._doorbells.values():
                doorbell.close()
            for register in (self._segments, self._mapped, self._doorbells):
                register.clear()
