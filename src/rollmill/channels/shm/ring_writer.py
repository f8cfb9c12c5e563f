"""The producer's side of a ring, which publishes messages in its own section (see `channels.shm.ring`)."""

import zlib

import numpy as np
from jaxtyping import PyTree

from rollmill.channels.errors import ChannelClosed
from rollmill.channels.protocols import ChannelStatistics
from rollmill.channels.shm.doorbell import Doorbell
from rollmill.channels.shm.gpu_slots import ANNOUNCED, ProducerSlots, gpu_leaves, gpu_of, process_id
from rollmill.channels.shm.memory import Fence
from rollmill.channels.shm.ring import (
    BEFORE,
    CONSUMER_READY,
    ENDED,
    GONE,
    HEADER,
    MAPPED,
    ON_GPU,
    PRODUCER,
    PRODUCER_READY,
    PUBLISHED,
    RELEASED,
    START,
    TAKEN,
    Ledger,
    Ring,
    Slot,
)
from rollmill.gpus.cuda_memory import NoPeerMemory


class RingWriter:
    """The producer's side of a ring. It replaces the previous producer, if any."""

    def __init__(self, ring: Ring, *, source: int, doorbell: Doorbell, checksum: bool, name: str) -> None:
        self._ring = ring
        self._source = source
        self._doorbell = doorbell
        self._checksum = checksum
        self._name = name
        self._fence = Fence()
        self._owner = ring.holders.claim(PRODUCER)
        self._section = ring.section(self._owner)
        self._words = self._section.words
        self._views = [ring.layout.flat_views(slot.payload) for slot in self._section.slots]
        self._consumer = 0
        self._on_gpu: ProducerSlots | None = None
        self._shares = True  # until the driver refuses to share memory
        # all zeros until a consumer is ready, which is correct because nothing has been taken
        self._ledger = ring.ledger(1)
        if previous := ring.root[PRODUCER_READY]:
            self._words[BEFORE] = previous
            self._words[START] = ring.section(previous).end
        ring.holders.confirm(PRODUCER, self._owner)
        doorbell.ring()

    @property
    def published(self) -> int:
        """Number of messages published since the ring was created."""
        return self._words[START] + self._words[PUBLISHED]

    @property
    def released(self) -> int:
        """Number of messages whose slots the consumer has released."""
        return self._reader().words[RELEASED]

    @property
    def occupied(self) -> int:
        """Number of slots whose messages have not been released."""
        return self.published - self.released

    def has_room(self) -> bool:
        """Returns whether a slot is free, so that `views` may be written.

        Raises `ChannelClosed` if either side was closed or this producer was replaced.
        """
        self._check_owner()
        gone = self._reader().words[GONE]
        if gone or self._words[ENDED]:
            raise ChannelClosed(f"{self._name}: the {'receiver' if gone else 'sender'} was closed.")
        return self.occupied < self._ring.capacity

    def views(self) -> list[np.ndarray]:
        """Returns writable leaves of the next slot, which must be free, and marks the slot as being written."""
        self._fence()  # the consumer's reads of the slot must precede these writes
        position = self._words[PUBLISHED] % self._ring.capacity
        self._section.slots[position].stamp[0] = 0
        self._section.slots[position].on_gpu[0] = 0
        return self._views[position]

    def fill(self, tree: PyTree) -> None:
        """Copies a message into the slot that `views` has marked, in GPU memory if the consumer has mapped it.

        Raises a `UsageError` if structure, shape or dtype differ from the layout.
        """
        if not self._fill_on_gpu(tree):
            self._ring.layout.fill(self._views[self._words[PUBLISHED] % self._ring.capacity], tree)

    def payload(self) -> memoryview:
        """Returns all payload bytes of the next slot, for a caller that writes raw bytes."""
        self.views()
        return self._slot().payload

    def publish(self, version: int, iteration: int, flags: int) -> None:
        """Publishes the next slot, once its payload is complete.

        Raises `ChannelClosed` if this producer was replaced.
        """
        checksum = zlib.crc32(self._slot().payload) if self._checksum else 0  # then nothing is in GPU memory
        size = self._ring.layout.nbytes
        fields = (self.published, version, iteration, size, self._source, flags, checksum, self._checksum)
        self.publish_raw(HEADER.pack(*fields))

    def publish_raw(self, header: bytes) -> None:
        """Publishes the next slot like `publish`, with a header that is already packed."""
        slot = self._slot()
        slot.header[:] = header
        slot.stamp[0] = self.published + 1
        self._fence()  # the consumer must see payload, header and stamp before the count
        self._words[PUBLISHED] += 1
        self._fence()  # writes the count before reading the holder (see the module's docstring)
        self._check_owner()
        self._doorbell.ring()

    def statistics(self, earlier: int = 0) -> ChannelStatistics:
        """Returns the producer's message counts. `earlier` messages were sent before this ring existed."""
        return ChannelStatistics(earlier + self.published, self.published - self._reader().words[TAKEN])

    def reopen(self) -> None:
        """Reverts `close`, because more messages to the consumer will follow."""
        self._words[ENDED] = 0

    def close(self) -> None:
        """Ends the stream of messages to the consumer."""
        self._fence()  # a consumer that sees the end must see all messages before it
        self._words[ENDED] = 1
        self._doorbell.ring()

    def _fill_on_gpu(self, tree: PyTree) -> bool:
        """Copies a message into the next slot's GPU memory, unless one of the two ends cannot use it."""
        reader = self._reader().words
        if not self._shares or self._checksum or reader[ON_GPU] in (0, process_id()):
            return False
        leaves = gpu_leaves(self._ring.layout, tree)
        if leaves is None:
            return False
        if self._on_gpu is None:
            self._shares = self._announce(gpu_of(leaves[0]))
        if self._on_gpu is None or reader[MAPPED] != self._owner or gpu_of(leaves[0]) != self._on_gpu.gpu:
            return False
        self._on_gpu.write(self._words[PUBLISHED] % self._ring.capacity, leaves)
        self._slot().on_gpu[0] = 1
        return True

    def _announce(self, gpu: int) -> bool:
        """Allocates slots in GPU memory, and announces them to the consumer. Returns whether this was possible."""
        try:
            self._on_gpu = ProducerSlots(gpu, self._ring.layout, self._ring.capacity)
        except NoPeerMemory:
            return False
        ANNOUNCED.pack_into(self._section.announcement, 0, 0, self._on_gpu.handle)
        self._fence()  # the consumer must see the handle before it sees that it is complete
        self._section.announcement[:8].cast("q")[0] = 1
        return True

    def _slot(self) -> Slot:
        return self._section.slots[self._words[PUBLISHED] % self._ring.capacity]

    def _reader(self) -> Ledger:
        """Returns the ledger of the current consumer, which continues the counts of its predecessors."""
        if (ready := self._ring.root[CONSUMER_READY]) != self._consumer:
            self._ledger, previous = self._ring.ledger(ready), self._consumer
            self._consumer = ready
            self._ring.drop_ledger(previous)
        return self._ledger

    def _check_owner(self) -> None:
        if self._ring.root[PRODUCER] != self._owner:
            raise ChannelClosed(f"{self._name}: another producer has replaced this one.")
