"""The coordinator's broker: a registry of shared memory, doorbells and addresses of channel ends.

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
    """A named piece of shared memory: its file descriptor and its size in bytes."""

    fd: int
    nbytes: int


class LocalBroker:
    """The broker of the coordinator's process, an implementation of `channels.protocols.Broker`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._digests: dict[str, str] = {}
        self._segments: dict[str, MemorySegment] = {}
        self._mapped: dict[str, memoryview] = {}
        self._doorbells: dict[str, Doorbell] = {}
        self._addresses: dict[str, Address] = {}
        self._holders: dict[str, int] = {}

    def segment(self, name: str, *, nbytes: int, digest: str) -> memoryview:
        """Returns the shared memory called `name`, which is initially zero."""
        fd = self.segment_descriptor(name, nbytes=nbytes, digest=digest)
        with self._lock:
            if name not in self._mapped:
                self._mapped[name] = map_memory(fd, nbytes)
            return self._mapped[name]

    def segment_descriptor(self, name: str, *, nbytes: int, digest: str) -> int:
        """Returns the file descriptor of the shared memory called `name`. The broker closes it."""
        self.agree(name, digest=digest)
        with self._lock:
            if name not in self._segments:
                self._segments[name] = MemorySegment(create_memory(nbytes), nbytes)
            segment = self._segments[name]
        if segment.nbytes != nbytes:
            raise UsageError(f"{name} has {segment.nbytes} bytes, expected {nbytes}.")
        return segment.fd

    def agree(self, name: str, *, digest: str) -> None:
        """Checks that all ends of the channel `name` were opened with the same digest."""
        with self._lock:
            known = self._digests.setdefault(name, digest)
        if known != digest:
            raise UsageError(
                f"{name} was first opened with the digest {known} and now with {digest}. Both ends of a channel "
                "must have the same layout, capacity and number of ends."
            )

    def doorbell(self, name: str) -> Doorbell:
        """Returns the doorbell called `name`, which wakes one end of a channel."""
        with self._lock:
            if name not in self._doorbells:
                self._doorbells[name] = Doorbell.create()
            return self._doorbells[name]

    def claim(self, name: str, *, segment: str | None = None, word: int = 0) -> int:
        """Makes the caller the holder of the channel end `name`, and returns its incarnation, which increases with
        every holder.

        The incarnation is also written to word number `word` of the shared memory called `segment`, if given.
        """
        with self._lock:
            self._holders[name] = self._holders.get(name, 0) + 1
            self._addresses.pop(name, None)  # forgets the address of the previous holder
            if segment is not None:
                self._publish(segment, word, self._holders[name])
            return self._holders[name]

    def confirm(self, name: str, incarnation: int, *, segment: str, word: int) -> None:
        """Publishes that a holder of the channel end `name` is ready, unless it has been replaced.

        Its incarnation is written to word number `word` of the shared memory called `segment`.
        """
        with self._lock:
            if incarnation == self._holders.get(name):
                self._publish(segment, word, incarnation)

    def drop(self, name: str) -> None:
        """Releases the shared memory called `name`. Existing mappings stay valid."""
        with self._lock:
            self._mapped.pop(name, None)
            self._digests.pop(name, None)
            if (segment := self._segments.pop(name, None)) is not None:
                os.close(segment.fd)

    def holder(self, name: str) -> int:
        """Returns the incarnation of the latest holder of the channel end `name`, or 0 if there was none."""
        with self._lock:
            return self._holders.get(name, 0)

    def announce(self, name: str, address: Address, incarnation: int) -> None:
        """Registers the address at which the channel end `name` listens."""
        with self._lock:
            if incarnation == self._holders.get(name):
                self._addresses[name] = address

    def lookup(self, name: str) -> Address | None:
        """Returns the address at which the channel end `name` listens, or None if it has not been announced."""
        with self._lock:
            return self._addresses.get(name)

    def _publish(self, segment: str, word: int, incarnation: int) -> None:
        if segment not in self._segments:
            raise UsageError(
                f"the segment {segment}, which should record the holder of a channel's end, does not exist."
            )
        if not 0 <= word < self._segments[segment].nbytes // WORD.size:
            raise UsageError(f"{segment} has no word {word}.")
        os.pwrite(self._segments[segment].fd, WORD.pack(incarnation), word * WORD.size)

    def close(self) -> None:
        """Closes all file descriptors. Mapped memory stays valid."""
        with self._lock:
            for segment in self._segments.values():
                os.close(segment.fd)
            for doorbell in self._doorbells.values():
                doorbell.close()
            for register in (self._segments, self._mapped, self._doorbells):
                register.clear()
