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

This module has the shared memory, `ring_writer` the producer's side, and `ring_reader` the consumer's side.
Between hosts (`channels.tcp.queue`), both sides of a ring are in one process, and are never replaced.
"""

import struct
from typing import Protocol, runtime_checkable

from rollmill.channels.layout import Layout
from rollmill.core.errors import UsageError

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
