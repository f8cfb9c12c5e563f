"""The consumer's side of a ring, which takes messages and releases their slots (see `channels.shm.ring`)."""

import contextlib
import zlib

import jax
import numpy as np
from jaxtyping import PyTree

from rollmill.channels.errors import ChannelClosed, Damaged
from rollmill.channels.layout import Layout, fresh_buffer
from rollmill.channels.protocols import ChannelStatistics, Header
from rollmill.channels.shm.doorbell import Doorbell
from rollmill.channels.shm.gpu_slots import ANNOUNCED, ConsumerSlots, process_id
from rollmill.channels.shm.memory import Fence
from rollmill.channels.shm.ring import (
    CONSUMER,
    CONSUMER_READY,
    ENDED,
    GONE,
    HEADER,
    MAPPED,
    ON_GPU,
    PRODUCER,
    PRODUCER_READY,
    RELEASED,
    START,
    TAKEN,
    Ring,
    RingSection,
)
from rollmill.channels.transfers import to_host
from rollmill.gpus.cuda_memory import NoPeerMemory


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
