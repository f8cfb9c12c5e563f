"""A bounded ring of fixed-size slots between one producer and one consumer, in memory that they share.

Each side is held by one *incarnation* after the other; the broker numbers them. What was believed dead may only
have been asleep, and go on at any instruction. So no word and no slot is ever written by two incarnations:

    root      which incarnations hold the two sides; written by the broker alone
    section   of one producer: its slots, and how many messages it has published in them
    ledger    of one consumer: how many messages were taken, and how many slots given back

Messages are counted through all sections: a section starts where the one before ended.

    released <= taken <= published <= released + capacity

A successor claims its side at the broker, which shows the new holder in the root; then it reads where its
predecessor is, and goes on from there in memory of its own; then it confirms that it is ready. And whoever
publishes or takes first writes so, then looks whether it holds its side still. Of the two sequences

    predecessor   writes its count, fence, reads the holder
    successor     (the broker) writes the holder, fence, reads the predecessor's count

at least one sees the other: either the successor counts the message, or the predecessor learns that it was
replaced and has neither sent nor taken it. So a message is taken once or not at all where

    the producer dies          in mid-write it has published nothing; what it published stays in its section
    the consumer dies          its successor gives back what it held, and goes on behind it
    both die                   counts outlive them: they are read from the memory of the dead
    a producer wakes up late   it writes to its own section, behind the end that its successor has noted
    a consumer wakes up late   it is closed before it takes anything; what it was reading may be overwritten,
                               which it finds out by looking at the holder once it has copied a message

Between hosts (`tcp_experience`) both sides of a ring are in one process, and are never replaced.
"""

import struct
import zlib
from types import TracebackType
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import PyTree

from rollmill.channels.errors import ChannelClosed, Damaged
from rollmill.channels.layout import Layout, fresh_buffer
from rollmill.channels.protocols import ChannelStatistics, Header
from rollmill.channels.shm.doorbell import Doorbell
from rollmill.channels.shm.memory import Fence
from rollmill.core.errors import UsageError

# Words of the root, of a section and of a ledger. Each is a cache line of its own.
PRODUCER, PRODUCER_READY, CONSUMER, CONSUMER_READY = 0, 1, 2, 3
PUBLISHED, ENDED, START, BEFORE = 0, 1, 2, 3
TAKEN, RELEASED, GONE = 0, 1, 2
LINE = 64

HEADER = struct.Struct("<QqqQiIII")
"""Sequence, version, iteration, payload bytes, source, flags, checksum, and whether there is one."""

STAMP_BYTES = 64 - HEADER.size


class Slot:
    """Room for one message."""

    def __init__(self, memory: memoryview) -> None:
        self.stamp = memory[:8].cast("q")
        self.header = memory[STAMP_BYTES:64]
        self.payload = memory[64:]


class Section:
    """The memory of one incarnation of the producer."""

    def __init__(self, memory: memoryview, layout: Layout, capacity: int, incarnation: int) -> None:
        self.incarnation = incarnation
        self.words = memory[:LINE].cast("q")
        starts = range(LINE, section_bytes(layout, capacity), 64 + layout.nbytes)
        self.slots = [Slot(memory[start : start + 64 + layout.nbytes]) for start in starts]

    @property
    def end(self) -> int:
        """Number of the first message that is not in it yet, or will be in its successor."""
        return self.words[START] + self.words[PUBLISHED]


class Ledger:
    """The memory of one incarnation of the consumer."""

    def __init__(self, memory: memoryview) -> None:
        self.words = memory[:LINE].cast("q")


@runtime_checkable
class Holders(Protocol):
    """Who holds the sides of one ring, and the memory of those who came after the first."""

    def claim(self, word: int) -> int:
        """Takes a side over; see `Broker.claim`."""
        ...

    def confirm(self, word: int, incarnation: int) -> None:
        """Shows in the root that this incarnation is ready, unless it was replaced."""
        ...

    def memory(self, word: int, incarnation: int, nbytes: int) -> memoryview:
        """The shared memory of one incarnation of the side that `word` names."""
        ...

    def drop(self, word: int, incarnation: int) -> None:
        """Nobody will ask for that memory any more."""
        ...


class Alone:
    """`Holders` of a ring whose sides are never replaced, because one process has both."""

    def __init__(self, memory: memoryview) -> None:
        self._root = memory[:LINE].cast("q")

    def claim(self, word: int) -> int:
        """See `Holders`."""
        self._root[word] += 1
        assert self._root[word] == 1, "this ring's sides cannot be replaced"
        return 1

    def confirm(self, word: int, incarnation: int) -> None:
        """See `Holders`."""
        self._root[word + 1] = incarnation

    def memory(self, word: int, incarnation: int, nbytes: int) -> memoryview:
        """See `Holders`."""
        raise AssertionError("there is one incarnation")

    def drop(self, word: int, incarnation: int) -> None:
        """See `Holders`."""


class Ring:
    """The parts of a ring's memory.

    Args:
        memory: `ring_bytes(layout, capacity)` bytes, zeros at first: the root, and the first ledger and section.
        layout: of the payload.
        capacity: number of slots.
        holders: of its sides; None where both are in this process.
    """

    def __init__(self, memory: memoryview, layout: Layout, capacity: int, holders: Holders | None = None) -> None:
        self.layout = layout
        self.capacity = capacity
        self.root = memory[:LINE].cast("q")
        self.holders: Holders = holders or Alone(memory)
        self._ledgers = {1: Ledger(memory[LINE : 2 * LINE])}
        self._sections = {1: Section(memory[2 * LINE :], layout, capacity, 1)}

    def section(self, incarnation: int) -> Section:
        """The section that an incarnation of the producer writes."""
        if incarnation not in self._sections:
            nbytes = section_bytes(self.layout, self.capacity)
            memory = self.holders.memory(PRODUCER, incarnation, nbytes)
            self._sections[incarnation] = Section(memory, self.layout, self.capacity, incarnation)
        return self._sections[incarnation]

    def ledger(self, incarnation: int) -> Ledger:
        """The ledger that an incarnation of the consumer writes."""
        if incarnation not in self._ledgers:
            self._ledgers[incarnation] = Ledger(self.holders.memory(CONSUMER, incarnation, LINE))
        return self._ledgers[incarnation]

    def drop_section(self, incarnation: int) -> None:
        """All its messages were released; the first is part of the ring and stays."""
        if incarnation > 1 and self._sections.pop(incarnation, None) is not None:
            self.holders.drop(PRODUCER, incarnation)

    def drop_ledger(self, incarnation: int) -> None:
        """Its consumer was replaced, and its successor has noted what was there."""
        if incarnation > 1 and self._ledgers.pop(incarnation, None) is not None:
            self.holders.drop(CONSUMER, incarnation)

    def section_after(self, section: Section) -> Section | None:
        """That of the producer that followed, once it is ready."""
        incarnation = self.root[PRODUCER_READY]
        while incarnation > section.incarnation:  # earlier ones may have been dropped
            later = self.section(incarnation)
            incarnation = later.words[BEFORE]
            if incarnation == section.incarnation:
                return later
        return None

    def section_of(self, position: int) -> Section | None:
        """The section in which message number `position` is, or will be; None before there is a producer."""
        incarnation = self.root[PRODUCER_READY]
        while incarnation:
            section = self.section(incarnation)
            if section.words[START] <= position:
                return section
            incarnation = section.words[BEFORE]
        return None


def section_bytes(layout: Layout, capacity: int) -> int:
    """Size of a section."""
    return LINE + capacity * (64 + layout.nbytes)


def ring_bytes(layout: Layout, capacity: int) -> int:
    """Size of a ring.

    Raises:
        UsageError: it would hold nothing.
    """
    if capacity < 1:
        raise UsageError(f"capacity={capacity} must be at least 1 message.")
    return 2 * LINE + section_bytes(layout, capacity)


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
        self._ledger = ring.ledger(1)  # until one is ready nothing was taken, and that is what it says
        if before := ring.root[PRODUCER_READY]:
            predecessor = ring.section(before)
            self._words[BEFORE] = before
            self._words[START] = predecessor.end
        ring.holders.confirm(PRODUCER, self._owner)
        doorbell.ring()

    @property
    def published(self) -> int:
        """Messages published since the ring exists."""
        return self._words[START] + self._words[PUBLISHED]

    @property
    def released(self) -> int:
        """Messages whose slot is free again."""
        return self._reader().words[RELEASED]

    @property
    def occupied(self) -> int:
        """Slots that are not free."""
        return self.published - self.released

    def has_room(self) -> bool:
        """Whether `views` may be written.

        Raises:
            ChannelClosed: the consumer is gone, or this producer was replaced.
        """
        self._check_owner()
        gone = self._reader().words[GONE]
        if gone or self._words[ENDED]:
            raise ChannelClosed(f"{self._name}: the {'receiver' if gone else 'sender'} was closed.")
        return self.occupied < self._ring.capacity

    def views(self) -> list[np.ndarray]:
        """Writable leaves of the next slot, which must be free."""
        self._fence()  # the consumer has read what was there
        position = self._words[PUBLISHED] % self._ring.capacity
        self._section.slots[position].stamp[0] = 0
        return self._views[position]

    def payload(self) -> memoryview:
        """All bytes of the next slot, for who writes them as they are."""
        self.views()
        return self._slot().payload

    def publish(self, version: int, iteration: int, flags: int) -> None:
        """Hands the next slot over, which is complete.

        Raises:
            ChannelClosed: this producer was replaced.
        """
        checksum = zlib.crc32(self._slot().payload) if self._checksum else 0
        size = self._ring.layout.nbytes
        fields = (self.published, version, iteration, size, self._source, flags, checksum, self._checksum)
        self.publish_raw(HEADER.pack(*fields))

    def publish_raw(self, header: bytes) -> None:
        """As `publish`, with a header that was made elsewhere."""
        slot = self._slot()
        slot.header[:] = header
        slot.stamp[0] = self.published + 1
        self._fence()
        self._words[PUBLISHED] += 1
        self._fence()  # before looking who holds this side; see the module
        self._check_owner()
        self._doorbell.ring()

    def statistics(self, earlier: int = 0) -> ChannelStatistics:
        """The producer's side, after `earlier` messages that passed before the ring was there."""
        return ChannelStatistics(earlier + self.published, self.published - self._reader().words[TAKEN])

    def reopen(self) -> None:
        """More will come after all."""
        self._words[ENDED] = 0

    def close(self) -> None:
        """Nothing more will come."""
        self._fence()
        self._words[ENDED] = 1
        self._doorbell.ring()

    def _slot(self) -> Slot:
        return self._section.slots[self._words[PUBLISHED] % self._ring.capacity]

    def _reader(self) -> Ledger:
        """The ledger of the consumer that is ready; slots it released stay released after its replacement."""
        if (ready := self._ring.root[CONSUMER_READY]) != self._consumer:
            self._ledger, before = self._ring.ledger(ready), self._consumer
            self._consumer = ready
            self._ring.drop_ledger(before)
        return self._ledger

    def _check_owner(self) -> None:
        if self._ring.root[PRODUCER] != self._owner:
            raise ChannelClosed(f"{self._name}: another producer took this one's place.")


class RingMessage:
    """A taken message; see `rollmill.channels.Message`."""

    __slots__ = ("_position", "_section", "header", "reader")

    def __init__(self, reader: "RingReader", section: "SectionViews", position: int, header: Header) -> None:
        self.reader = reader
        self._section = section
        self._position = position
        self.header = header

    @property
    def views(self) -> list[np.ndarray]:
        """The leaves, read-only, where they lie."""
        return self._section.leaves[self._section.slot_of(self._position)]

    @property
    def tree(self) -> PyTree[np.ndarray]:
        """The leaves in their tree, read-only, where they lie."""
        return self.reader.layout.unflatten(self.views)

    def copy(self) -> PyTree[np.ndarray]:
        """The tree in memory of its own."""
        layout = self.reader.layout
        buffer = fresh_buffer(layout.nbytes)
        np.copyto(buffer, self._section.payloads[self._section.slot_of(self._position)])
        self.reader.check_owner()  # otherwise the slot may have been overwritten meanwhile
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
        if kind is None:
            self.reader.check_owner()  # as in `copy`: what was read from the views may be wrong


class SectionViews:
    """A section as its consumer sees it: nothing can be written."""

    def __init__(self, section: Section, layout: Layout) -> None:
        self.section = section
        payloads = [slot.payload.toreadonly() for slot in section.slots]
        self.payloads = [np.ndarray((payload.nbytes,), np.uint8, payload) for payload in payloads]
        self.leaves = [layout.flat_views(payload) for payload in payloads]

    def slot_of(self, position: int) -> int:
        """Index of the slot of message number `position`."""
        return (position - self.section.words[START]) % len(self.payloads)


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
        self._doorbell = doorbell
        self._name = name
        self._fence = Fence()
        self._owner = ring.holders.claim(CONSUMER)
        self._words = ring.ledger(self._owner).words
        if before := ring.root[CONSUMER_READY]:
            # What the replaced consumer held is given back, whether or not it had used it.
            self._words[TAKEN] = self._words[RELEASED] = ring.ledger(before).words[TAKEN]
        self._released = self._words[RELEASED]
        self._returned: set[int] = set()
        self._sections: list[SectionViews] = []
        ring.holders.confirm(CONSUMER, self._owner)
        if ring.root[CONSUMER_READY] == self._owner:  # from now on nobody goes back to the one before
            ring.drop_ledger(before)
        doorbell.ring()

    @property
    def ended(self) -> bool:
        """Whether the producer said that nothing more will come; ask before `take`."""
        section = self._section()
        return (
            section is not None and bool(section.words[ENDED]) and self._ring.root[PRODUCER] == section.incarnation
        )

    def take(self) -> RingMessage | None:
        """The next message, or None.

        Raises:
            ChannelClosed: this consumer was replaced.
            Damaged: the message is not whole; it counts as taken.
        """
        if self._words[GONE]:
            raise ChannelClosed(f"{self._name}: the receiver was closed.")
        self.check_owner()
        position = self._words[TAKEN]
        if not self._is_there(position):
            return None
        self._words[TAKEN] = position + 1
        self._fence()  # before looking who holds this side; see the module
        self.check_owner()
        views = self._sections[-1]
        return RingMessage(self, views, position, self._checked_header(views, position))

    def release(self, position: int) -> None:
        """Gives the slot of message `position` back; slots become free in their order."""
        if position < self._released:
            return
        self._returned.add(position)
        while self._released in self._returned:
            self._returned.remove(self._released)
            self._released += 1
        self._fence()
        self._words[RELEASED] = self._released
        self._doorbell.ring()

    def check_owner(self) -> None:
        """Returns where this consumer was not replaced.

        Raises:
            ChannelClosed: it was; so slots that it holds may have been overwritten.
        """
        self._fence()
        if self._ring.root[CONSUMER] != self._owner:
            raise ChannelClosed(f"{self._name}: another receiver took this one's place.")

    def statistics(self, earlier: int = 0) -> ChannelStatistics:
        """The consumer's side, after `earlier` messages that passed before the ring was there."""
        newest = self._ring.section(self._ring.root[PRODUCER_READY] or 1)
        return ChannelStatistics(earlier + self._words[TAKEN], newest.end - self._words[TAKEN])

    def close(self) -> None:
        """Nobody takes any more."""
        self._words[GONE] = 1
        self._doorbell.ring()

    def _section(self) -> Section | None:
        """The section of the next message, as far as this consumer has come; None before there is a producer."""
        if not self._sections:
            section = self._ring.section_of(self._words[TAKEN])
            if section is None:
                return None
            self._sections.append(SectionViews(section, self.layout))
        return self._sections[-1].section

    def _is_there(self, position: int) -> bool:
        """Whether that message was published; on the way, goes on to the section that it is in."""
        while (section := self._section()) is not None:
            end = section.end
            self._fence()
            if self._ring.root[PRODUCER] == section.incarnation:  # its successor, if any, will count these
                return position < end
            following = self._ring.section_after(section)
            if following is None or position < following.words[START]:
                return following is not None
            self._sections.append(SectionViews(following, self.layout))
            self._drop_sections()
        return False

    def _drop_sections(self) -> None:
        """Messages of earlier sections may still be held; those are kept alive by their views."""
        for views in self._sections[:-1]:
            self._ring.drop_section(views.section.incarnation)
        del self._sections[:-1]

    def _checked_header(self, views: SectionViews, position: int) -> Header:
        slot = views.section.slots[views.slot_of(position)]
        sequence, version, iteration, size, source, flags, checksum, checked = HEADER.unpack(slot.header)
        whole = slot.stamp[0] == position + 1 and size == self.layout.nbytes
        if whole and checked:
            whole = zlib.crc32(slot.payload) == checksum
        if not whole:
            self.release(position)
            raise Damaged(f"{self._name}: message {position} is not whole. Does a dead worker still run?")
        return Header(sequence, source, version, iteration, flags, size)
