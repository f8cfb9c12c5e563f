"""A bounded ring of fixed-size slots between one producer and one consumer, in memory that they share.

Three counters of 64 bits drive it, each written by one side:

    published   by the producer, when a slot is complete
    taken       by the consumer, before it looks at the slot
    released    by the consumer, when the slot may be overwritten

    released <= taken <= published <= released + capacity

They outlive both sides. A producer that dies in mid-write leaves `published` as it was, and its
replacement writes that slot anew; a consumer's replacement releases what the dead one held and goes on behind
it. So each message is taken once or not at all.

Each slot carries a stamp, zero while it is being written: it tells if an end that was believed dead still writes.
"""

import struct
import zlib
from types import TracebackType

import numpy as np
from jaxtyping import PyTree

from rollmill.channels.base import Header, Statistics
from rollmill.channels.doorbell import Doorbell
from rollmill.channels.errors import ChannelClosed, Damaged
from rollmill.channels.layout import Layout, fresh_buffer
from rollmill.channels.memory import Fence
from rollmill.core.errors import UsageError

# Words of the control block. A cache line is 8 words; no two sides write to the same one.
PUBLISHED, PRODUCER, ENDED, PRODUCER_WAITED, LOST = 0, 8, 9, 10, 11
TAKEN, RELEASED, CONSUMER, GONE, CONSUMER_WAITED = 16, 17, 24, 25, 26
CONTROL_BYTES = 32 * 8

HEADER = struct.Struct("<QqqQiIII")
"""Sequence, version, iteration, payload bytes, source, flags, checksum, and whether there is one."""

STAMP_BYTES = 64 - HEADER.size


class Slot:
    """Room for one message."""

    def __init__(self, memory: memoryview) -> None:
        self.stamp = memory[:8].cast("q")
        self.header = memory[STAMP_BYTES:64]
        self.payload = memory[64:]


class Ring:
    """The parts of a ring's memory.

    Args:
        memory: `ring_bytes(layout, capacity)` bytes, zeros at first.
        layout: of the payload.
        capacity: number of slots.
    """

    def __init__(self, memory: memoryview, layout: Layout, capacity: int) -> None:
        self.layout = layout
        self.capacity = capacity
        self.words = memory[:CONTROL_BYTES].cast("q")
        starts = range(CONTROL_BYTES, ring_bytes(layout, capacity), 64 + layout.nbytes)
        self.slots = [Slot(memory[start : start + 64 + layout.nbytes]) for start in starts]


def ring_bytes(layout: Layout, capacity: int) -> int:
    """Size of a ring.

    Raises:
        UsageError: it would hold nothing.
    """
    if capacity < 1:
        raise UsageError(f"capacity={capacity} must be at least 1 message.")
    return CONTROL_BYTES + capacity * (64 + layout.nbytes)


class RingWriter:
    """The producer's side; it takes the place of one that was there before.

    Args:
        ring: shared with the reader.
        source: rank that the headers name.
        doorbell: rung when a message is there, or will never be.
        checksum: whether payloads get a CRC-32.
        name: for errors.
    """

    def __init__(self, ring: Ring, *, source: int, doorbell: Doorbell, checksum: bool, name: str) -> None:
        self._ring = ring
        self._words = ring.words
        self._source = source
        self._doorbell = doorbell
        self._checksum = checksum
        self._name = name
        self._fence = Fence()
        self._views = [ring.layout.flat_views(slot.payload) for slot in ring.slots]
        self._words[PRODUCER] += 1
        self._owner = self._words[PRODUCER]
        self._words[ENDED] = 0

    @property
    def published(self) -> int:
        """Messages published since the ring exists."""
        return self._words[PUBLISHED]

    @property
    def released(self) -> int:
        """Messages whose slot is free again."""
        return self._words[RELEASED]

    @property
    def occupied(self) -> int:
        """Slots that are not free."""
        return self._words[PUBLISHED] - self._words[RELEASED]

    def has_room(self) -> bool:
        """Whether `views` may be written.

        Raises:
            ChannelClosed: the consumer is gone, or this producer was replaced.
        """
        if self._words[PRODUCER] != self._owner:
            raise ChannelClosed(f"{self._name}: another producer took this one's place.")
        if self._words[GONE] or self._words[ENDED]:
            raise ChannelClosed(f"{self._name}: the {'receiver' if self._words[GONE] else 'sender'} was closed.")
        return self.occupied < self._ring.capacity

    def views(self) -> list[np.ndarray]:
        """Writable leaves of the next slot, which must be free."""
        self._fence()  # the consumer has read what was there
        position = self._words[PUBLISHED] % self._ring.capacity
        self._ring.slots[position].stamp[0] = 0
        return self._views[position]

    def payload(self) -> memoryview:
        """All bytes of the next slot, for who writes them as they are."""
        self.views()
        return self._ring.slots[self._words[PUBLISHED] % self._ring.capacity].payload

    def publish(self, version: int, iteration: int, flags: int) -> None:
        """Hands the next slot over, which is complete."""
        slot = self._ring.slots[self._words[PUBLISHED] % self._ring.capacity]
        checksum = zlib.crc32(slot.payload) if self._checksum else 0
        sequence, size = self._words[PUBLISHED], self._ring.layout.nbytes
        fields = (sequence, version, iteration, size, self._source, flags, checksum, self._checksum)
        self.publish_raw(HEADER.pack(*fields))

    def publish_raw(self, header: bytes) -> None:
        """As `publish`, with a header that was made elsewhere."""
        position = self._words[PUBLISHED]
        slot = self._ring.slots[position % self._ring.capacity]
        slot.header[:] = header
        slot.stamp[0] = position + 1
        self._fence()
        self._words[PUBLISHED] = position + 1
        self._doorbell.ring()

    def add_wait(self, nanoseconds: int) -> None:
        """Counts time that the producer was blocked."""
        self._words[PRODUCER_WAITED] += nanoseconds

    def statistics(self, earlier: int = 0) -> Statistics:
        """The producer's side, after `earlier` messages that passed before the ring was there."""
        return _statistics(self._ring, PUBLISHED, PRODUCER_WAITED, earlier)

    def close(self) -> None:
        """Nothing more will come."""
        if self._words[PRODUCER] == self._owner:
            self._fence()
            self._words[ENDED] = 1
            self._doorbell.ring()


class RingMessage:
    """A taken message; see `rollmill.channels.Message`."""

    __slots__ = ("_position", "header", "reader")

    def __init__(self, reader: "RingReader", position: int, header: Header) -> None:
        self.reader = reader
        self._position = position
        self.header = header

    @property
    def views(self) -> list[np.ndarray]:
        """The leaves, read-only, where they lie."""
        return self.reader.views(self._position)

    @property
    def tree(self) -> PyTree[np.ndarray]:
        """The leaves in their tree, read-only, where they lie."""
        return self.reader.layout.unflatten(self.views)

    def copy(self) -> PyTree[np.ndarray]:
        """The tree in memory of its own."""
        layout = self.reader.layout
        buffer = fresh_buffer(layout.nbytes)
        np.copyto(buffer, self.reader.payload(self._position))
        return layout.unflatten(layout.flat_views(buffer))

    def release(self) -> None:
        """Gives the slot back."""
        self.reader.release(self._position)

    def __enter__(self) -> "RingMessage":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class RingReader:
    """The consumer's side; it takes the place of one that was there before.

    Args:
        ring: shared with the writer.
        doorbell: rung when a slot is free, or the consumer has gone.
        name: for errors.
    """

    def __init__(self, ring: Ring, *, doorbell: Doorbell, name: str) -> None:
        self.layout = ring.layout
        self._ring = ring
        self._words = ring.words
        self._doorbell = doorbell
        self._name = name
        self._fence = Fence()
        payloads = [slot.payload.toreadonly() for slot in ring.slots]
        self._payloads = [np.ndarray((payload.nbytes,), np.uint8, payload) for payload in payloads]
        self._views = [ring.layout.flat_views(payload) for payload in payloads]
        self._words[CONSUMER] += 1
        self._owner = self._words[CONSUMER]
        self._words[GONE] = 0
        self._released = self._words[RELEASED] = self._words[TAKEN]
        self._returned: set[int] = set()
        doorbell.ring()

    @property
    def ended(self) -> bool:
        """Whether the producer said that nothing more will come; ask before `take`."""
        return bool(self._words[ENDED])

    def take(self) -> RingMessage | None:
        """The next message, or None.

        Raises:
            ChannelClosed: this consumer was replaced.
            Damaged: the message is not whole; it counts as taken.
        """
        if self._words[GONE]:
            raise ChannelClosed(f"{self._name}: the receiver was closed.")
        if self._words[CONSUMER] != self._owner:
            raise ChannelClosed(f"{self._name}: another receiver took this one's place.")
        position = self._words[TAKEN]
        self._fence()
        if self._words[PUBLISHED] == position:
            return None
        self._words[TAKEN] = position + 1
        self._fence()
        return RingMessage(self, position, self._checked_header(position))

    def release(self, position: int) -> None:
        """Gives the slot of message `position` back; slots become free in their order."""
        if position < self._released or self._words[CONSUMER] != self._owner:
            return
        self._returned.add(position)
        while self._released in self._returned:
            self._returned.remove(self._released)
            self._released += 1
        self._fence()
        self._words[RELEASED] = self._released
        self._doorbell.ring()

    def views(self, position: int) -> list[np.ndarray]:
        """Read-only leaves of message `position`."""
        return self._views[position % self._ring.capacity]

    def payload(self, position: int) -> np.ndarray:
        """Its bytes, read-only."""
        return self._payloads[position % self._ring.capacity]

    def add_wait(self, nanoseconds: int) -> None:
        """Counts time that the consumer was blocked."""
        self._words[CONSUMER_WAITED] += nanoseconds

    def statistics(self, earlier: int = 0) -> Statistics:
        """The consumer's side, after `earlier` messages that passed before the ring was there."""
        return _statistics(self._ring, TAKEN, CONSUMER_WAITED, earlier)

    def close(self) -> None:
        """Nobody takes any more."""
        if self._words[CONSUMER] == self._owner:
            self._words[GONE] = 1
            self._doorbell.ring()

    def _checked_header(self, position: int) -> Header:
        slot = self._ring.slots[position % self._ring.capacity]
        sequence, version, iteration, size, source, flags, checksum, checked = HEADER.unpack(slot.header)
        whole = slot.stamp[0] == position + 1 and size == self.layout.nbytes
        if whole and checked:
            whole = zlib.crc32(slot.payload) == checksum
        if not whole:
            self.release(position)
            raise Damaged(f"{self._name}: message {position} is not whole. Does a dead worker still run?")
        return Header(sequence, source, version, iteration, flags, size)


def _statistics(ring: Ring, count: int, waited: int, earlier: int) -> Statistics:
    words = ring.words
    messages = earlier + words[count]
    depth = words[PUBLISHED] - words[TAKEN]
    return Statistics(messages, messages * ring.layout.nbytes, words[waited] / 1e9, depth, words[LOST])
