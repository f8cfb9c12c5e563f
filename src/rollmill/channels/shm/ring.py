"""A ring of fixed-size message slots between one producer and one consumer, in memory that they share.

Each side is held by one process after the other. The broker numbers these *incarnations*. A process that was
believed dead may only have been stopped, and may resume at any instruction. Therefore no word and no slot is ever
written by two incarnations:

    root      the incarnations that hold the two sides (only the broker writes it)
    section   memory of one producer: its slots, and how many messages it has published in them
    ledger    memory of one consumer: how many messages it has taken, and how many slots it has released

Messages are numbered across all sections. A section starts at the number at which the previous section ended.

    released <= taken <= published <= released + capacity

A successor claims its side at the broker, which writes the new holder to the root. Then it reads its predecessor's
counts, continues from there in its own memory, and confirms that it is ready. To publish or take a message, a
holder first writes its count, and then checks that it still holds its side. Of the two sequences

    predecessor   writes its count, fence, reads the holder
    successor     (the broker) writes the holder, fence, reads the predecessor's count

at least one sees the other. Either the successor counts the message, or the predecessor learns that it was
replaced and has neither sent nor taken the message. Each message is therefore taken at most once if

    the producer dies          a message that it was writing is not published, and the others stay in its section
    the consumer dies          its successor releases the messages that it held, and continues after them
    both die                   their counts outlive them in shared memory
    a producer wakes up late   it writes to its own section, past the end that its successor has recorded
    a consumer wakes up late   it is closed before it takes anything, and checks the holder after copying a
                               message, because the slot may have been overwritten

Between hosts (`channels.tcp.queue`), both sides of a ring are in one process, and are never replaced.
"""

import contextlib
import struct
import zlib
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import PyTree

from rollmill.channels.errors import ChannelClosed, Damaged
from rollmill.channels.layout import Layout, fresh_buffer
from rollmill.channels.protocols import ChannelStatistics, Header
from rollmill.channels.shm.doorbell import Doorbell
from rollmill.channels.shm.gpu_slots import (
    ANNOUNCED,
    ConsumerSlots,
    ProducerSlots,
    gpu_leaves,
    gpu_of,
    process_id,
)
from rollmill.channels.shm.memory import Fence
from rollmill.channels.transfers import to_host
from rollmill.core.errors import UsageError
from rollmill.gpus.cuda_memory import NoPeerMemory

# Indices of 64-bit words. The root, each section and each ledger have separate cache lines.
PRODUCER, PRODUCER_READY, CONSUMER, CONSUMER_READY = 0, 1, 2, 3
PUBLISHED, ENDED, START, BEFORE = 0, 1, 2, 3
TAKEN, RELEASED, GONE, ON_GPU, MAPPED = 0, 1, 2, 3, 4
LINE = 64

HEADER = struct.Struct("<QqqQiIII")
"""Binary header of a message: sequence, version, iteration, payload bytes, source, flags, checksum, and 1 if it
has a checksum."""

STAMP_BYTES = 64 - HEADER.size
"""Bytes of a slot before its header. The first 8 are the stamp, the number of the message plus 1, or 0 while the
message is being written. It shows a reader that a slot was overwritten. The next 8 are 1 if the payload is in GPU
memory (`gpu_slots`), and 0 if it follows the header."""

ANNOUNCEMENT_BYTES = 2 * LINE
"""Bytes of a section in which its producer announces its memory on a GPU."""


class Slot:
    """Memory of one message in a ring: stamp, header and payload."""

    def __init__(self, memory: memoryview) -> None:
        self.stamp = memory[:8].cast("q")
        self.on_gpu = memory[8:STAMP_BYTES].cast("q")
        self.header = memory[STAMP_BYTES:64]
        self.payload = memory[64:]


class RingSection:
    """Memory of one holder of a ring's producer side: its slots, and how many messages it has published."""

    def __init__(self, memory: memoryview, layout: Layout, capacity: int, incarnation: int) -> None:
        self.incarnation = incarnation
        self.words = memory[:LINE].cast("q")
        self.announcement = memory[LINE : LINE + ANNOUNCEMENT_BYTES]
        starts = range(LINE + ANNOUNCEMENT_BYTES, section_bytes(layout, capacity), 64 + layout.nbytes)
        self.slots = [Slot(memory[start : start + 64 + layout.nbytes]) for start in starts]

    @property
    def end(self) -> int:
        """Number of the first message after those published in this section, where the next section starts."""
        return self.words[START] + self.words[PUBLISHED]


class Ledger:
    """Memory of one holder of a ring's consumer side, with its counts of taken and released messages."""

    def __init__(self, memory: memoryview) -> None:
        self.words = memory[:LINE].cast("q")


@runtime_checkable
class Holders(Protocol):
    """Protocol for changing the holder of either side of a ring, the producer's or the consumer's.

    Holders are numbered (*incarnations*), and all but the first of a side get memory of their own.
    """

    def claim(self, word: int) -> int:
        """Makes the caller the holder of side `word` (`PRODUCER` or `CONSUMER`). Returns the number of this
        holder, which starts at 1.
        """
        ...

    def confirm(self, word: int, incarnation: int) -> None:
        """Publishes in the ring's root that a side's holder number `incarnation` is ready, unless it is replaced.

        `word` is `PRODUCER` or `CONSUMER`. A new holder calls this after it has copied its predecessor's counts.
        """
        ...

    def memory(self, word: int, incarnation: int, nbytes: int) -> memoryview:
        """Returns the shared memory of one holder of a side of the ring. `word` is `PRODUCER` or `CONSUMER`."""
        ...

    def drop(self, word: int, incarnation: int) -> None:
        """Unlinks the memory of an earlier holder of a side, `PRODUCER` or `CONSUMER`. Mappings stay valid."""
        ...


class SingleProcessHolders:
    """`Holders` of a ring with both sides in one process, which are never replaced."""

    def __init__(self, memory: memoryview) -> None:
        self._root = memory[:LINE].cast("q")

    def claim(self, word: int) -> int:
        """Makes the caller the holder of a side of the ring, and returns its number, which is always 1."""
        self._root[word] += 1
        assert self._root[word] == 1, "the ends of this ring cannot be replaced"
        return 1

    def confirm(self, word: int, incarnation: int) -> None:
        """Publishes in the ring's root that the only holder of a side, `PRODUCER` or `CONSUMER`, is ready."""
        self._root[word + 1] = incarnation

    def memory(self, word: int, incarnation: int, nbytes: int) -> memoryview:
        """Raises an error, because a side that is never replaced has no second holder that needs memory."""
        raise AssertionError("there is only one incarnation")

    def drop(self, word: int, incarnation: int) -> None:
        """Does nothing, because the only holder's memory is part of the ring."""


class Ring:
    """The memory of a ring of messages between one producer and one consumer: root, ledgers and sections.

    `memory` has `ring_bytes(layout, capacity)` bytes, initially zero, for the root, the first ledger and the first
    section. `holders` is None if both sides are in this process.
    """

    def __init__(self, memory: memoryview, layout: Layout, capacity: int, holders: Holders | None = None) -> None:
        self.layout = layout
        self.capacity = capacity
        self.root = memory[:LINE].cast("q")
        self.holders: Holders = holders or SingleProcessHolders(memory)
        self._ledgers = {1: Ledger(memory[LINE : 2 * LINE])}
        self._sections = {1: RingSection(memory[2 * LINE :], layout, capacity, 1)}

    def section(self, incarnation: int) -> RingSection:
        """Returns the part of a ring's memory that one holder of the producer's side writes."""
        if incarnation not in self._sections:
            nbytes = section_bytes(self.layout, self.capacity)
            memory = self.holders.memory(PRODUCER, incarnation, nbytes)
            self._sections[incarnation] = RingSection(memory, self.layout, self.capacity, incarnation)
        return self._sections[incarnation]

    def ledger(self, incarnation: int) -> Ledger:
        """Returns the part of a ring's memory that one holder of the consumer's side writes."""
        if incarnation not in self._ledgers:
            self._ledgers[incarnation] = Ledger(self.holders.memory(CONSUMER, incarnation, LINE))
        return self._ledgers[incarnation]

    def drop_section(self, incarnation: int) -> None:
        """Releases the section of a replaced producer, after the consumer has read all of it.

        Its memory is freed when the last mapping is gone, so messages that are still in use stay valid. Does
        nothing for the first producer, whose section is part of the ring.
        """
        if incarnation > 1 and self._sections.pop(incarnation, None) is not None:
            self.holders.drop(PRODUCER, incarnation)

    def drop_ledger(self, incarnation: int) -> None:
        """Frees the memory of a replaced consumer once its successor has copied the counts."""
        if incarnation > 1 and self._ledgers.pop(incarnation, None) is not None:
            self.holders.drop(CONSUMER, incarnation)

    def section_after(self, section: RingSection) -> RingSection | None:
        """Returns the memory of the producer's successor, or None until the successor is ready."""
        incarnation = self.root[PRODUCER_READY]
        # goes backwards from the newest section, because older sections may have been dropped
        while incarnation > section.incarnation:
            candidate = self.section(incarnation)
            incarnation = candidate.words[BEFORE]
            if incarnation == section.incarnation:
                return candidate
        return None

    def section_of(self, position: int) -> RingSection | None:
        """Returns the section that holds message number `position`, or None before there is a producer."""
        incarnation = self.root[PRODUCER_READY]
        while incarnation:
            section = self.section(incarnation)
            if section.words[START] <= position:
                return section
            incarnation = section.words[BEFORE]
        return None


def section_bytes(layout: Layout, capacity: int) -> int:
    """Returns the size in bytes of a section, the memory of one producer."""
    return LINE + ANNOUNCEMENT_BYTES + capacity * (64 + layout.nbytes)


def ring_bytes(layout: Layout, capacity: int) -> int:
    """Returns the size in bytes of a ring. Raises a `UsageError` if `capacity` is less than 1."""
    if capacity < 1:
        raise UsageError(f"capacity={capacity} must be at least 1 message.")
    return 2 * LINE + section_bytes(layout, capacity)


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


class RingMessage:
    """A message taken from a ring. No other receiver gets it, even if this process dies now.

    As a context manager, it is released on exit.
    """

    __slots__ = ("_position", "_section", "header", "reader")

    def __init__(self, reader: "RingReader", section: "SectionViews", position: int, header: Header) -> None:
        self.reader = reader
        self._section = section
        self._position = position
        self.header = header

    @property
    def views(self) -> list[np.ndarray]:
        """The leaves of the message, as read-only views of its slot, or as copies if they are in GPU memory."""
        if (leaves := self.copy_on_gpu()) is not None:
            return to_host(leaves)
        return self._section.leaves[self._section.slot_of(self._position)]

    def copy_on_gpu(self) -> list[jax.Array] | None:
        """Copies the leaves of the message on the GPU, or returns None if they are in shared memory."""
        return self._section.copy_on_gpu(self._position)

    @property
    def tree(self) -> PyTree[np.ndarray]:
        """The message as a pytree of read-only views of its slot, valid until `release`."""
        return self.reader.layout.unflatten(self.views)

    def copy(self) -> PyTree[np.ndarray]:
        """Copies the message into new memory, without releasing its slot."""
        layout = self.reader.layout
        if (leaves := self.copy_on_gpu()) is None:
            buffer = fresh_buffer(layout.nbytes)
            np.copyto(buffer, self._section.payloads[self._section.slot_of(self._position)])
            copied = layout.flat_views(buffer)
        else:
            copied = to_host(leaves)
        # if this consumer was replaced, the slot may have been overwritten during the copy
        self.reader.check_owner()
        return layout.unflatten(copied)

    def release(self) -> None:
        """Returns the message's slot to the producer. Further calls do nothing."""
        self.reader.release(self._position)

    def __enter__(self) -> "RingMessage":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.release()
        if kind is None:
            self.reader.check_owner()  # as in `copy`, because data read from the views may be corrupt


class SectionViews:
    """Read-only views of a producer's section of a ring, for the consumer."""

    def __init__(self, section: RingSection, layout: Layout) -> None:
        self.section = section
        payloads = [slot.payload.toreadonly() for slot in section.slots]
        self.payloads = [np.ndarray((payload.nbytes,), np.uint8, payload) for payload in payloads]
        self.leaves = [layout.flat_views(payload) for payload in payloads]
        self._layout = layout
        self._has_tried = False  # to map the producer's GPU memory
        self._on_gpu: ConsumerSlots | None = None

    def map_gpu_memory(self, gpu: int) -> bool:
        """Maps the producer's slots in GPU memory, if there are any. Returns whether they are mapped.

        The first failure is final.
        """
        if not self._has_tried:
            self._has_tried, handle = ANNOUNCED.unpack_from(self.section.announcement)
            with contextlib.suppress(NoPeerMemory):
                self._on_gpu = ConsumerSlots(gpu, self._layout, handle) if self._has_tried else None
        return self._on_gpu is not None

    def copy_on_gpu(self, position: int) -> list[jax.Array] | None:
        """Copies message number `position` on the GPU, or returns None if it is in shared memory."""
        slot = self.slot_of(position)
        if not self.section.slots[slot].on_gpu[0]:
            return None
        assert self._on_gpu is not None, "a message in GPU memory is only taken once it is mapped"
        return self._on_gpu.copy(slot)

    def slot_of(self, position: int) -> int:
        """Returns the index of the slot that holds message number `position`."""
        return (position - self.section.words[START]) % len(self.payloads)


class RingReader:
    """The consumer's side of a ring. It replaces the previous consumer, if any.

    If it is on GPU number `gpu`, the producer may send messages in GPU memory.
    """

    def __init__(self, ring: Ring, *, doorbell: Doorbell, name: str, gpu: int | None = None) -> None:
        self.layout = ring.layout
        self._ring = ring
        self._doorbell = doorbell
        self._name = name
        self._fence = Fence()
        self._owner = ring.holders.claim(CONSUMER)
        self._words = ring.ledger(self._owner).words
        if previous := ring.root[CONSUMER_READY]:
            # Releases the messages that the replaced consumer held, even if it had not used them.
            self._words[TAKEN] = self._words[RELEASED] = ring.ledger(previous).words[TAKEN]
        self._gpu = gpu
        self._words[ON_GPU] = 0 if gpu is None else process_id()
        self._released = self._words[RELEASED]
        self._returned: set[int] = set()
        self._sections: list[SectionViews] = []
        ring.holders.confirm(CONSUMER, self._owner)
        if ring.root[CONSUMER_READY] == self._owner:  # nobody will read the previous ledger any more
            ring.drop_ledger(previous)
        doorbell.ring()

    @property
    def ended(self) -> bool:
        """Whether the current producer has closed. Check this before `take`, or the last message may be missed."""
        section = self._section()
        return (
            section is not None and bool(section.words[ENDED]) and self._ring.root[PRODUCER] == section.incarnation
        )

    def take(self) -> RingMessage | None:
        """Takes the next message, or returns None if there is none yet.

        Raises `ChannelClosed` if this consumer was closed or replaced. Raises `Damaged` for a corrupt message,
        which counts as taken.
        """
        if self._words[GONE]:
            raise ChannelClosed(f"{self._name}: the receiver was closed.")
        self.check_owner()
        position = self._words[TAKEN]
        if not self._is_published(position):
            return None
        self._words[TAKEN] = position + 1
        self._fence()  # writes the count before reading the holder (see the module's docstring)
        self.check_owner()
        views = self._sections[-1]
        self._map_gpu_memory(views, position)
        return RingMessage(self, views, position, self._check_header(views, position))

    def release(self, position: int) -> None:
        """Releases the slot of message number `position`. Slots become free in the order of messages."""
        if position < self._released:
            return
        self._returned.add(position)
        while self._released in self._returned:
            self._returned.remove(self._released)
            self._released += 1
        self._fence()  # reads of the slots must precede the producer's next writes
        self._words[RELEASED] = self._released
        self._doorbell.ring()

    def check_owner(self) -> None:
        """Raises `ChannelClosed` if this consumer was replaced, since its slots may have been overwritten."""
        self._fence()
        if self._ring.root[CONSUMER] != self._owner:
            raise ChannelClosed(f"{self._name}: another receiver has replaced this one.")

    def statistics(self, earlier: int = 0) -> ChannelStatistics:
        """Returns the consumer's message counts. `earlier` messages were taken before this ring existed."""
        newest = self._ring.section(self._ring.root[PRODUCER_READY] or 1)
        return ChannelStatistics(earlier + self._words[TAKEN], newest.end - self._words[TAKEN])

    def close(self) -> None:
        """Stops receiving. The producer then gets `ChannelClosed`."""
        self._words[GONE] = 1
        self._doorbell.ring()

    def _section(self) -> RingSection | None:
        """Returns the section that this consumer reads at present, or None before the first producer is ready."""
        if not self._sections:
            section = self._ring.section_of(self._words[TAKEN])
            if section is None:
                return None
            self._sections.append(SectionViews(section, self.layout))
        return self._sections[-1].section

    def _is_published(self, position: int) -> bool:
        """Returns whether that message was published, and moves on to the section that holds it."""
        while (section := self._section()) is not None:
            end = section.end
            self._fence()
            # It was still the holder after its count was read, so a successor, if any, starts at `end` or later.
            if self._ring.root[PRODUCER] == section.incarnation:
                return position < end
            # It was replaced. Its count may still rise, but only messages before its successor's start are valid.
            successor = self._ring.section_after(section)
            if successor is None or position < successor.words[START]:
                return successor is not None
            self._sections.append(SectionViews(successor, self.layout))
            self._drop_sections()
        return False

    def _map_gpu_memory(self, views: SectionViews, position: int) -> None:
        """Maps GPU memory that the producer has announced, and confirms it.

        Raises `Damaged` if the message is in memory that cannot be mapped.
        """
        if self._gpu is None:
            return
        if views.map_gpu_memory(self._gpu):
            self._words[MAPPED] = views.section.incarnation
        elif views.section.slots[views.slot_of(position)].on_gpu[0]:
            self.release(position)
            raise Damaged(
                f"{self._name}: message {position} was in the GPU memory of a worker that no longer runs."
            )

    def _drop_sections(self) -> None:
        """Drops the sections read to their end. Messages still held keep the memory alive by their views."""
        for views in self._sections[:-1]:
            self._ring.drop_section(views.section.incarnation)
        del self._sections[:-1]

    def _check_header(self, views: SectionViews, position: int) -> Header:
        slot = views.section.slots[views.slot_of(position)]
        sequence, version, iteration, size, source, flags, checksum, checked = HEADER.unpack(slot.header)
        intact = slot.stamp[0] == position + 1 and size == self.layout.nbytes
        if intact and checked:
            intact = zlib.crc32(slot.payload) == checksum
        if not intact:
            self.release(position)
            raise Damaged(f"{self._name}: message {position} is corrupt. Is a replaced worker still running?")
        return Header(sequence, source, version, iteration, flags, size)
