"""Protocols of channels, independent of the transport: threads, shared memory or TCP.

A channel connects two groups of fragments that run in different threads, processes or hosts. Both ends know the
`Layout` of its messages beforehand. A `Wire` opens an end by name, and the two ends in any order. Ends with the
same name but another layout or size are rejected. An end that is opened again, after its process died, replaces
the dead one. Ranks number the replicas of a group from 0.

Every end belongs to one thread. A blocking call takes `timeout` in seconds (None: no limit, 0: do not wait), and
raises

    TimedOut        the timeout passed
    Abandoned       the wire's `abandon` returned True: the run is being stopped
    ChannelClosed   the other end closed, or this end was replaced

Arrays returned by a channel start at multiples of 64 bytes. On CPU `jax.device_put` shares memory with such NumPy
arrays instead of copying, so pass it `message.copy()`, never a view of a message that will be released.
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
"""Function that chooses the next target of a sender: `(messages sent so far, occupied slots of each target's ring)
-> index of the target`."""


class Header(NamedTuple):
    """Metadata of a message. The channel fills in `sequence`, `source` and `payload_bytes`."""

    sequence: int
    """Number of the message among those from its source to its target, from 0. It is never repeated. Numbers may
    be missing after a connection between hosts was lost."""
    source: int
    """Rank of the sender."""
    version: int = 0
    """Version of the weights that the payload was computed with. It counts iterations, or updates of a parameter
    server."""
    iteration: int = 0
    flags: int = 0
    """Thirty-two bits whose meaning the sender and the receiver agree on."""
    payload_bytes: int = 0


class ChannelStatistics(NamedTuple):
    """Message counts at one end of a ring since the channel was first opened. They survive a replacement of the
    end.

    Between hosts, only the receiver counts messages of an earlier sender that never arrived. A replacement end
    waits until the other end reports how many messages came before it.
    """

    messages: int
    """Number of messages that a sender published, or that a receiver took."""
    depth: int
    """Number of messages that are published and not yet taken."""


@runtime_checkable
class Reservation(Protocol):
    """A slot of a channel that the sender fills in place. If it is never published, nothing is sent."""

    @property
    def tree(self) -> PyTree[np.ndarray]:
        """Writable, uninitialised arrays in the channel's memory, in which to write the message."""
        ...

    @property
    def target(self) -> int:
        """Rank of the receiver that will get the message."""
        ...

    def publish(self, *, version: int = 0, iteration: int = 0, flags: int = 0) -> None:
        """Sends the message. `tree` must not be written to afterwards. Never blocks."""
        ...


@runtime_checkable
class Sender(Protocol):
    """One producer's end of a queue, with one or more consumers."""

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
        """Copies `tree` into the channel, and returns the target's rank. Blocks while the channel is full.

        Args:
            tree: JAX or NumPy arrays that match the layout exactly. Nothing is broadcast or converted.
            version: version of the weights, for the header.
            iteration: number of the iteration, for the header.
            flags: 32 bits for the receiver, in the header.
            target: rank of the target, instead of the one that the route chooses.
            timeout: seconds to wait, or None for no limit.

        Raises:
            UsageError: `tree` does not match the layout, or the target does not exist.
        """
        ...

    def reserve(self, *, target: int | None = None, timeout: float | None = None) -> Reservation:
        """Reserves a slot, in which a message is then written in place. Only the latest reservation can be
        published.
        """
        ...

    def statistics(self) -> Mapping[int, ChannelStatistics]:
        """Returns the message counts of each ring, by the rank of its receiver."""
        ...

    def close(self) -> None:
        """Ends the stream. Receivers take the remaining messages and then get `ChannelClosed`."""
        ...


@runtime_checkable
class ReceivedMessage(Protocol):
    """A message taken from a channel. No other receiver gets it, even if this process dies now.

    As a context manager, it is released on exit.
    """

    @property
    def header(self) -> Header:
        """The header sent with the message."""
        ...

    @property
    def tree(self) -> PyTree[np.ndarray]:
        """Read-only arrays in the channel's memory. They are valid until `release`, after which the slot is
        reused.
        """
        ...

    def copy(self) -> PyTree[np.ndarray]:
        """Copies the message for the caller, without releasing its slot."""
        ...

    def release(self) -> None:
        """Returns the message's slot to the sender. Further calls do nothing."""
        ...

    def __enter__(self) -> "ReceivedMessage":
        """Returns the message."""
        ...

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Releases the slot."""
        ...


class Gathered(NamedTuple):
    """Several messages concatenated along an axis, in the order of `headers`. The arrays belong to the caller."""

    tree: PyTree[np.ndarray]
    headers: tuple[Header, ...]


@runtime_checkable
class Receiver(Protocol):
    """One consumer's end of a queue, with one or more producers."""

    def receive(self, *, source: int | None = None, timeout: float | None = None) -> ReceivedMessage:
        """Returns the next message of `source`, in the order sent. Without a `source`, it serves all sources in
        turn.

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
        """Concatenates several messages in one buffer. Each is copied once and then released.

        Args:
            axis: axis of concatenation, one integer for all leaves or a pytree (or a prefix of it) of integers.
            count: number of messages to take from any source, in order of arrival.
            sources: ranks from which one message each is taken, in this order. Without `count`, the default is all
                sources.
            timeout: seconds to wait for all messages together. Messages taken before a timeout are lost.
        """
        ...

    def statistics(self) -> Mapping[int, ChannelStatistics]:
        """Returns the message counts of each ring, by the rank of its sender."""
        ...

    def close(self) -> None:
        """Stops receiving. Senders then get `ChannelClosed`."""
        ...


class Versioned(NamedTuple):
    """A message of a latest-value channel, with its version. The arrays belong to the caller."""

    tree: PyTree[np.ndarray]
    version: int


@runtime_checkable
class LatestWriter(Protocol):
    """The only writer of a latest-value channel, which publishes weights, for example."""

    def publish(self, tree: PyTree, *, version: int) -> None:
        """Replaces the value that readers see, and never blocks.

        Versions increase, except when a run goes back to a checkpoint. The version of weights counts iterations,
        and that of a parameter server's parameters counts updates.
        """
        ...

    def close(self) -> None:
        """Ends the stream. Readers that wait for a newer version get `ChannelClosed`, and others still get the
        last value.
        """
        ...


@runtime_checkable
class LatestReader(Protocol):
    """One reader of a latest-value channel. Readers never block the writer."""

    def version(self) -> int | None:
        """Returns the version of the newest message, or None before the first. Copies nothing."""
        ...

    def read(self, *, at_least: int | None = None, timeout: float | None = None) -> Versioned:
        """Copies the newest message, after waiting until its version is at least `at_least` (None: any
        version).
        """
        ...

    def close(self) -> None:
        """Closes this reader of a latest-value channel."""
        ...


@runtime_checkable
class Reduction(Protocol):
    """One rank's end of an all-reduce, which computes the mean over ranks that do not share a mesh."""

    def mean(self, tree: PyTree, *, step: int = 0, timeout: float | None = None) -> PyTree[np.ndarray]:
        """Averages floating-point arrays over all ranks. The result has the same bits on every rank.

        Values are summed in the order of ranks, in float32 for narrower types and in the leaf's own type
        otherwise. The sum is divided by the number of ranks and rounded to the leaf's type. The returned arrays
        belong to the caller.

        Args:
            tree: arrays that match the layout.
            step: number of this reduction, equal on all ranks.
            timeout: seconds to wait, or None for no limit. After any exception the reduction is closed on all
                ranks, and the next call on each of them raises `ChannelClosed`. A group that lost a rank restarts
                under a new name.

        Raises:
            UsageError: ranks passed different `step`s.
        """
        ...

    def close(self) -> None:
        """Leaves the all-reduce. Ranks that wait for this one get `ChannelClosed`."""
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
        """Opens the sending end of the queue `name` for producer `source`.

        Args:
            name: name of the queue, unique within the run.
            source: rank of this producer.
            targets: ranks of the consumers to send to.
            layout: layout of one message.
            capacity: number of slots between a producer and a consumer. Messages that the consumer holds occupy
                slots.
            route: chooses the target of each message. None is `round_robin`.
            checksum: add a CRC-32 of the payload, which the receiver verifies (about 1 GB/s at each end).
        """
        ...

    def receiver(
        self, name: str, *, sources: Sequence[int], target: int, layout: Layout, capacity: int = 2
    ) -> Receiver:
        """Opens the receiving end of the queue `name` for consumer `target`, which receives from `sources`. See
        `sender`.
        """
        ...

    def latest_writer(self, name: str, *, layout: Layout, readers: int) -> LatestWriter:
        """Opens the writer of the latest-value channel `name`, which has `readers` readers."""
        ...

    def latest_reader(self, name: str, *, layout: Layout, reader: int, readers: int) -> LatestReader:
        """Opens reader number `reader` of the `readers` of the latest-value channel `name`."""
        ...

    def reduction(self, name: str, *, rank: int, size: int, layout: Layout) -> Reduction:
        """Opens one rank's end of the all-reduce `name` over `size` ranks.

        A name serves only one start of the group. A rank that opens it a second time is rejected, because it has
        lost its place in the sequence of reductions.
        """
        ...

    def close(self) -> None:
        """Closes all ends that this wire opened. To the other ends it looks as if this process had died."""
        ...


@runtime_checkable
class Broker(Protocol):
    """Protocol of the coordinator's registry, through which the ends of channels find each other.

    A channel end is held by one process after the other. Each holder has an *incarnation*, a number that increases
    with every holder. Shared memory and doorbells are created at the first request.
    """

    def segment(self, name: str, *, nbytes: int, digest: str) -> memoryview:
        """Returns the shared memory called `name`, which is initially zero. Every caller gets the same memory.

        Raises:
            UsageError: it exists with another size or digest.
        """
        ...

    def agree(self, name: str, *, digest: str) -> None:
        """Checks that all ends of the channel `name` were opened with the same digest.

        Raises:
            UsageError: another end was opened with a different digest.
        """
        ...

    def doorbell(self, name: str) -> Doorbell:
        """Returns the doorbell called `name`, which wakes one end of a channel."""
        ...

    def claim(self, name: str, *, segment: str | None = None, word: int = 0) -> int:
        """Makes the caller the holder of the channel end `name`, and returns its incarnation, 1 for the first
        holder.

        Incarnations increase and are never reused. A holder with a lower one has been replaced.

        Args:
            name: name of the end.
            segment: shared memory in which to publish the incarnation, or None not to publish it.
            word: position in that memory, in words of 64 bits.
        """
        ...

    def confirm(self, name: str, incarnation: int, *, segment: str, word: int) -> None:
        """Publishes in shared memory that a holder of the channel end `name` is ready, unless a later one has
        claimed it.
        """
        ...

    def drop(self, name: str) -> None:
        """Forgets the shared memory called `name`. Existing mappings stay valid."""
        ...

    def holder(self, name: str) -> int:
        """Returns the number (incarnation) of the latest holder of the channel end `name`, or 0 if there
        is none.
        """
        ...

    def announce(self, name: str, address: Address, incarnation: int) -> None:
        """Registers the address at which the channel end `name` listens, unless a later holder has claimed it."""
        ...

    def lookup(self, name: str) -> Address | None:
        """Returns the address at which the channel end `name` listens, or None if it has not been announced."""
        ...

    def close(self) -> None:
        """Closes the broker's files and connections. Mapped memory stays valid."""
        ...


def round_robin(turn: int, occupied: Sequence[int]) -> int:
    """Chooses the targets of a sender in turn, as a `Route`.

    It waits while the next target's ring is full, so that the assignment of messages is deterministic.
    """
    return turn % len(occupied)
