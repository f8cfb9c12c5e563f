"""Protocols of channels, whatever carries them: threads, shared memory or TCP.

A channel is an edge between two groups of fragments that run in different threads, processes or
hosts. Both ends know the `Layout` of its messages beforehand. An end is opened by name with a `Wire`. Ends with
the same name but another layout or size are rejected. Ends may be opened in any order. One opened again, after its
process died, replaces the dead one. Ranks number the replicas of a group from 0.

Every end belongs to one thread. A blocking call takes `timeout` in seconds (None: no limit, 0: do not
wait), and raises

    TimedOut        the timeout passed
    Abandoned       the wire's `abandon` returned True: the run is being stopped
    ChannelClosed   the other end closed, or this end was replaced

Arrays returned by a channel start at multiples of 64 bytes. On CPU `jax.device_put` shares memory with such
NumPy arrays instead of copying, so pass it `message.copy()`, never a view into a message yet to be released.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
from jaxtyping import PyTree

from rollmill.channels.layout import Layout
from rollmill.channels.shm.doorbell import Doorbell

Address: TypeAlias = tuple[str, int]
"""Host and port."""

Route: TypeAlias = Callable[[int, Sequence[int]], int]
"""(messages sent so far, occupied slots of each target's ring) -> index of the next message's target."""


class Header(NamedTuple):
    """Metadata of a message. The channel fills in `sequence`, `source` and `payload_bytes`."""

    sequence: int
    """Number of the message among those of one source to one target, from 0. Never repeated. Numbers may be
    missing where a connection between hosts was lost."""
    source: int
    """Rank of the sender."""
    version: int = 0
    """Version of the weights that the payload was computed with: the number of iterations, or of updates of a
    parameter server, that they have learned from."""
    iteration: int = 0
    flags: int = 0
    """32 bits whose meaning the user defines."""
    payload_bytes: int = 0


class ChannelStatistics(NamedTuple):
    """Counts of one end of a ring since the channel was first opened. They continue after a replacement.

    Between hosts, messages of an earlier sender that never arrived are counted by the receiver only, and a
    replacement blocks until the other end reports how many messages came before it.
    """

    messages: int
    """Messages published by a sender, or taken by a receiver."""
    depth: int
    """Messages that are published and not yet taken."""


@runtime_checkable
class Reservation(Protocol):
    """A slot of the channel that the sender fills in place. Nothing is sent if it is never published."""

    @property
    def tree(self) -> PyTree[np.ndarray]:
        """Writable arrays in the channel's memory, uninitialised."""
        ...

    @property
    def target(self) -> int:
        """Rank of the receiver."""
        ...

    def publish(self, *, version: int = 0, iteration: int = 0, flags: int = 0) -> None:
        """Makes the message visible to the receiver. `tree` must not be written afterwards. Never blocks."""
        ...


@runtime_checkable
class Sender(Protocol):
    """The end of one producer, for one or more consumers."""

    def send(
        self,
        tree: PyTree,
        *,
        version: int = 0,
        iteration: int = 0,
        flags: int = 0,
        target: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Copies `tree` into the channel and returns the target's rank, and blocks while the channel is full.

        Args:
            tree: JAX or NumPy arrays that match the layout exactly. Nothing is broadcast or converted.
            version: see `Header`.
            iteration: see `Header`.
            flags: see `Header`.
            target: rank of the target, instead of the one that the route chooses.
            timeout: see the module.

        Raises:
            UsageError: `tree` does not match the layout, or there is no such target.
        """
        ...

    def reserve(self, *, target: int | None = None, timeout: float | None = None) -> Reservation:
        """Reserves a slot for a message to be written in place. Only the latest reservation can be published."""
        ...

    def statistics(self) -> Mapping[int, ChannelStatistics]:
        """Statistics of each ring, by the rank at its other end."""
        ...

    def close(self) -> None:
        """Ends the stream: receivers take the remaining messages, then get `ChannelClosed`."""
        ...


@runtime_checkable
class ReceivedMessage(Protocol):
    """A message taken from the channel: no other receiver gets it, even if this process dies now.

    As a context manager it is released on exit.
    """

    @property
    def header(self) -> Header:
        """The header sent with the message."""
        ...

    @property
    def tree(self) -> PyTree[np.ndarray]:
        """Read-only arrays in the channel's memory, valid until `release`. The slot is reused afterwards."""
        ...

    def copy(self) -> PyTree[np.ndarray]:
        """Copies the tree for the caller, without releasing the slot."""
        ...

    def release(self) -> None:
        """Returns the slot to the sender. Further calls do nothing."""
        ...

    def __enter__(self) -> "ReceivedMessage":
        """Returns the message."""
        ...

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Releases the slot."""
        ...


class Gathered(NamedTuple):
    """Messages concatenated along an axis, in the order of `headers`. The arrays belong to the caller."""

    tree: PyTree[np.ndarray]
    headers: tuple[Header, ...]


@runtime_checkable
class Receiver(Protocol):
    """The end of one consumer of one or more producers."""

    def receive(self, *, source: int | None = None, timeout: float | None = None) -> ReceivedMessage:
        """Returns the next message of `source`, in the order sent. Without `source`, sources are served round-
        robin.

        Several messages may be held at a time and released in any order. Each occupies a slot of its ring.
        """
        ...

    def gather(
        self,
        *,
        axis: int | PyTree[int] = 0,
        count: int | None = None,
        sources: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> Gathered:
        """Concatenates several messages in one buffer. Each is copied once and released at once.

        Args:
            axis: axis of concatenation: one number for all leaves, or a tree (or a prefix of it) of numbers.
            count: number of messages to take from any source, in order of arrival.
            sources: ranks from each of which one message is taken, in this order. Default, without `count`: all
                sources.
            timeout: seconds to wait for all messages together. Messages taken before a timeout are lost.
        """
        ...

    def statistics(self) -> Mapping[int, ChannelStatistics]:
        """Statistics of each ring, by the rank at its other end."""
        ...

    def close(self) -> None:
        """Stops receiving: senders get `ChannelClosed`."""
        ...


class Versioned(NamedTuple):
    """A message of a latest-value channel and its version. The arrays belong to the caller."""

    tree: PyTree[np.ndarray]
    version: int


@runtime_checkable
class LatestWriter(Protocol):
    """The one writer of a latest-value channel, for example of the weights."""

    def publish(self, tree: PyTree, *, version: int) -> None:
        """Replaces the value that readers see, and never blocks.

        Versions rise, except when a run goes back to a checkpoint. Weights are versioned by iteration, parameters
        by update.
        """
        ...

    def close(self) -> None:
        """Ends the stream: readers that wait for a newer version get `ChannelClosed`, others the last value."""
        ...


@runtime_checkable
class LatestReader(Protocol):
    """One reader of a latest-value channel. Readers never block the writer."""

    def version(self) -> int | None:
        """Version of the newest message, or None before the first. Copies nothing."""
        ...

    def read(self, *, at_least: int | None = None, timeout: float | None = None) -> Versioned:
        """Copies the newest message. Blocks until its version is `at_least` or later (None: any)."""
        ...

    def close(self) -> None:
        """Closes this reader."""
        ...


@runtime_checkable
class Reduction(Protocol):
    """One rank's end of an all-reduce (mean) over the ranks of a group that shares no mesh."""

    def mean(self, tree: PyTree, *, step: int = 0, timeout: float | None = None) -> PyTree[np.ndarray]:
        """Averages floating-point arrays over ranks. The result has the same bits on every rank.

        Summed in the order of ranks, in float32 for narrower types and in the leaf's own type otherwise,
        divided by the number of ranks, then rounded to the leaf's type. Returned arrays belong to the caller.

        Args:
            tree: arrays that match the layout.
            step: number of this reduction, equal on all ranks.
            timeout: see the module. After any exception the reduction is closed on all ranks: each gets
                `ChannelClosed` from its next call. A group that lost a rank restarts under a new name.

        Raises:
            UsageError: ranks passed different `step`s.
        """
        ...

    def close(self) -> None:
        """Leaves the reduction. Ranks that wait for this one get `ChannelClosed`."""
        ...


@runtime_checkable
class Wire(Protocol):
    """Opens the ends of channels by name, over one transport."""

    def sender(
        self,
        name: str,
        *,
        source: int,
        targets: Sequence[int],
        layout: Layout,
        capacity: int = 2,
        route: Route | None = None,
        checksum: bool = False,
    ) -> Sender:
        """Opens the end of producer `source` of edge `name`.

        Args:
            name: name of the edge, unique within the run.
            source: rank of this producer.
            targets: ranks of the consumers that it may send to.
            layout: layout of one message.
            capacity: slots between one producer and one consumer. Held messages count.
            route: chooses the next target. None is `round_robin`.
            checksum: add a CRC-32 of the payload, which the receiver verifies (about 1 GB/s at each end).
        """
        ...

    def receiver(
        self, name: str, *, sources: Sequence[int], target: int, layout: Layout, capacity: int = 2
    ) -> Receiver:
        """Opens the end of consumer `target` of edge `name`, which receives from `sources`. See `sender`."""
        ...

    def latest_writer(self, name: str, *, layout: Layout, readers: int) -> LatestWriter:
        """Opens the writer of latest-value channel `name`, which has `readers` readers."""
        ...

    def latest_reader(self, name: str, *, layout: Layout, reader: int, readers: int) -> LatestReader:
        """Opens reader number `reader` of the `readers` of latest-value channel `name`."""
        ...

    def reduction(self, name: str, *, rank: int, size: int, layout: Layout) -> Reduction:
        """Opens rank `rank` of an all-reduce over `size` ranks.

        A name serves one incarnation of the group: a rank that opens it a second time is rejected, because it has
        lost its place in the sequence of reductions.
        """
        ...

    def close(self) -> None:
        """Closes all ends that this wire opened. The other ends see it as if this process had died."""
        ...


@runtime_checkable
class Broker(Protocol):
    """The coordinator's registry of the parts of channels. Each part is created at the first request."""

    def segment(self, name: str, *, nbytes: int, digest: str) -> memoryview:
        """Returns the shared memory called `name`, initially zero. Every caller gets the same memory.

        Raises:
            UsageError: it exists with another size or digest.
        """
        ...

    def agree(self, name: str, *, digest: str) -> None:
        """Declares the digest of `name`. Every end of a channel does so when it is opened.

        Raises:
            UsageError: another end declared a different digest.
        """
        ...

    def doorbell(self, name: str) -> Doorbell:
        """Returns the doorbell called `name`."""
        ...

    def claim(self, name: str, *, segment: str | None = None, word: int = 0) -> int:
        """Claims the end called `name` and returns the caller's incarnation, 1 for the first holder.

        Incarnations of a name increase and are never reused. A holder with a lower one has been replaced.

        Args:
            name: name of the end.
            segment: shared memory in which to publish the incarnation, or None for nowhere.
            word: position in the segment, in words of 64 bits.
        """
        ...

    def confirm(self, name: str, incarnation: int, *, segment: str, word: int) -> None:
        """Publishes in a segment that this incarnation is ready, unless a later incarnation has claimed the
        end.
        """
        ...

    def drop(self, name: str) -> None:
        """Forgets the segment `name`. Existing mappings stay valid."""
        ...

    def holder(self, name: str) -> int:
        """Returns the latest incarnation that claimed `name`, or 0 if none did."""
        ...

    def announce(self, name: str, address: Address, incarnation: int) -> None:
        """Registers the address of the end called `name`, unless a later incarnation has claimed it."""
        ...

    def lookup(self, name: str) -> Address | None:
        """Address at which the holder of `name` listens, or None until it is announced."""
        ...

    def close(self) -> None:
        """Closes files and connections. Mapped memory stays valid."""
        ...


def round_robin(turn: int, occupied: Sequence[int]) -> int:
    """Cycles through the targets. Waits while the next consumer is full, so that the assignment is
    deterministic.
    """
    return turn % len(occupied)
