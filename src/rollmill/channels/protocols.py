"""What the user of channels may rely on, whoever carries them: threads, shared memory or TCP.

A channel is an edge between two groups of fragments that run in different threads, processes or
hosts. Both ends know beforehand what travels on it: a `Layout`. An end is opened by name with a
`Wire`; ends that open the same name with another layout or size are refused. Ends may be opened in
any order, and one opened again, after its process died, takes the place of the dead one. Ranks number
the replicas of a group from 0.

Every end belongs to one thread. A call that must wait takes `timeout` in seconds (None: as long as it
takes, 0: not at all), and raises

    TimedOut        the timeout passed
    Abandoned       the wire's `abandon` said that the run is being stopped
    ChannelClosed   the other end closed, or this end was replaced

Arrays that a channel hands out start at multiples of 64 bytes. `jax.device_put` on CPU takes such NumPy arrays
over without a copy, so give it `message.copy()` and never a view into a message that is still to be released.
"""

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
from jaxtyping import PyTree

from rollmill.channels.layout import Layout
from rollmill.channels.shm.doorbell import Doorbell

Address: TypeAlias = tuple[str, int]
"""Host and port."""

Route: TypeAlias = Callable[[int, Sequence[int]], int]
"""(messages sent so far, messages that lie before each target) -> index of the target of the next one."""


class Header(NamedTuple):
    """What travels with each message; the channel fills in `sequence`, `source` and `payload_bytes`."""

    sequence: int
    """Counts the messages of one source to one target, from 0. Never repeated; where a connection
    between hosts was lost, some may be missing."""
    source: int
    """Rank of the sender."""
    version: int = 0
    """The version of the weights that the payload was made with."""
    iteration: int = 0
    flags: int = 0
    """32 bits for the user."""
    payload_bytes: int = 0


class ChannelStatistics(NamedTuple):
    """Of one end's side of one ring, since the channel exists: replaced ends go on counting.

    Between hosts, what an earlier holder had sent and did not arrive counts for the receiver alone; and an end
    that took another's place has to wait until it is told, by the other end, how many messages came before.
    """

    messages: int
    """Messages published by a sender, or taken by a receiver."""
    depth: int
    """Messages that are published and not yet taken."""


@runtime_checkable
class Reservation(Protocol):
    """A slot of the channel that a sender fills in place. Dropped unpublished, it never was."""

    @property
    def tree(self) -> PyTree[np.ndarray]:
        """Writable arrays that lie in the channel; their content is undefined until it is written."""
        ...

    @property
    def target(self) -> int:
        """Rank of the receiver that the message goes to."""
        ...

    def publish(self, *, version: int = 0, iteration: int = 0, flags: int = 0) -> None:
        """Hands the slot over, whole; `tree` must not be touched after. Never blocks."""
        ...


@runtime_checkable
class Sender(Protocol):
    """The end of one producer, towards one or more consumers."""

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
        """Copies `tree` into the channel, waiting while it is full; returns the target's rank.

        Args:
            tree: arrays of JAX or NumPy as the layout says; nothing is broadcast or converted.
            version: see `Header`.
            iteration: see `Header`.
            flags: see `Header`.
            target: goes there, whatever the route says.
            timeout: see the module.

        Raises:
            UsageError: `tree` is not as the layout says, or there is no such target.
        """
        ...

    def reserve(self, *, target: int | None = None, timeout: float | None = None) -> Reservation:
        """Room for one message, to be written in place; only one reservation is open at a time."""
        ...

    def statistics(self) -> Mapping[int, ChannelStatistics]:
        """Statistics of each ring, by the replica at its other end."""
        ...

    def close(self) -> None:
        """Says that nothing more will come: receivers take what is there, then get `ChannelClosed`."""
        ...


@runtime_checkable
class ReceivedMessage(Protocol):
    """One package, which was taken: nobody else gets it, even if this process dies now.

    As a context manager it releases itself.
    """

    @property
    def header(self) -> Header:
        """What was sent with it."""
        ...

    @property
    def tree(self) -> PyTree[np.ndarray]:
        """Read-only arrays that lie in the channel: valid until `release`, after which they change."""
        ...

    def copy(self) -> PyTree[np.ndarray]:
        """The tree in memory of its own, which nobody else writes; does not release."""
        ...

    def release(self) -> None:
        """Gives the slot back to the sender; a second time does nothing."""
        ...

    def __enter__(self) -> "ReceivedMessage":
        """Itself."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Releases."""
        ...


class Gathered(NamedTuple):
    """Packages joined along an axis, in the order of `headers`; the arrays belong to the caller."""

    tree: PyTree[np.ndarray]
    headers: tuple[Header, ...]


@runtime_checkable
class Receiver(Protocol):
    """The end of one consumer, which takes from one or more producers."""

    def receive(self, *, source: int | None = None, timeout: float | None = None) -> ReceivedMessage:
        """The next message, in the order sent, of `source`, or of any: sources take turns.

        Several may be held at a time and released in any order, but each takes a slot of its ring.
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
        """Several packages joined into one buffer, each copied once and released at once.

        Args:
            axis: along which the leaves are joined: one number, or a tree (or its prefix) of them.
            count: this many messages of any source, as they come.
            sources: one message of each, in this order; all sources, where `count` is left out too.
            timeout: of the whole; what was taken before it passed is lost (taken once or not at all).
        """
        ...

    def statistics(self) -> Mapping[int, ChannelStatistics]:
        """Statistics of each ring, by the replica at its other end."""
        ...

    def close(self) -> None:
        """Says that nobody takes any more: senders get `ChannelClosed`."""
        ...


class Versioned(NamedTuple):
    """What a reader of the newest-wins channel gets; the arrays belong to the caller."""

    tree: PyTree[np.ndarray]
    version: int


@runtime_checkable
class LatestWriter(Protocol):
    """The one writer of a channel in which the newest message wins, such as the weights."""

    def publish(self, tree: PyTree, *, version: int) -> None:
        """Replaces what readers see; never waits for them.

        Versions should not fall, but may, when a run goes back to a checkpoint.
        """
        ...

    def close(self) -> None:
        """Says that nothing newer will come: waiting readers get `ChannelClosed`, others the last one."""
        ...


@runtime_checkable
class LatestReader(Protocol):
    """One of the readers, which never hold the writer up."""

    def version(self) -> int | None:
        """The version of the newest message; None before the first. Cheap: nothing is copied."""
        ...

    def read(self, *, at_least: int | None = None, timeout: float | None = None) -> Versioned:
        """A copy of the newest message, whole, as soon as its version is `at_least` (None: any)."""
        ...

    def close(self) -> None:
        """Lets go of the channel."""
        ...


@runtime_checkable
class Reduction(Protocol):
    """One rank's end of a mean over all ranks of a group that shares no mesh."""

    def mean(self, tree: PyTree, *, step: int = 0, timeout: float | None = None) -> PyTree[np.ndarray]:
        """The mean over ranks of floating-point arrays: bit for bit the same in every rank.

        Summed in the order of ranks, in float32 for narrower types and in the leaf's own otherwise,
        divided by the number of ranks, then rounded to the leaf's type. Returned arrays belong to the caller.

        Args:
            tree: as the layout says.
            step: which mean this is; all ranks must say the same.
            timeout: see the module. Whatever this raises, the reduction is over for all its ranks: each
                gets `ChannelClosed` at the next call. A group that lost a rank restarts under a new name.

        Raises:
            UsageError: ranks disagree about `step`.
        """
        ...

    def close(self) -> None:
        """Says that this rank takes no further part: ranks that wait for it get `ChannelClosed`."""
        ...


@runtime_checkable
class Wire(Protocol):
    """Opens ends of channels by name. What carries them, the caller does not see."""

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
        """The producer `source` of edge `name`.

        Args:
            name: of the edge; unique within the run.
            source: rank of this producer.
            targets: ranks of the consumers that it may send to.
            layout: of one package.
            capacity: messages that fit between one producer and one consumer, the ones held included.
            route: chooses the next target; None is `round_robin`.
            checksum: adds a CRC-32 of the payload, which the receiver checks (about 1 GB/s at each end).
        """
        ...

    def receiver(
        self, name: str, *, sources: Sequence[int], target: int, layout: Layout, capacity: int = 2
    ) -> Receiver:
        """The consumer `target` of edge `name`, which takes from `sources`; see `sender`."""
        ...

    def newest_writer(self, name: str, *, layout: Layout, readers: int) -> LatestWriter:
        """The writer of channel `name`, for as many readers."""
        ...

    def newest_reader(self, name: str, *, layout: Layout, reader: int, readers: int) -> LatestReader:
        """Reader number `reader` of as many."""
        ...

    def reduction(self, name: str, *, rank: int, size: int, layout: Layout) -> Reduction:
        """Rank `rank` of a mean over `size` ranks.

        A name serves one incarnation of the group: a rank that opens it a second time is refused,
        because the others cannot know what it has forgotten.
        """
        ...

    def close(self) -> None:
        """Lets go of everything that this wire opened; other ends see it as if this process died."""
        ...


@runtime_checkable
class Broker(Protocol):
    """The coordinator's register of the parts that channels are made of; each is made when first asked for."""

    def segment(self, name: str, *, nbytes: int, digest: str) -> memoryview:
        """Shared memory, all zeros when made; whoever asks for the same name gets the same memory.

        Raises:
            UsageError: it exists with another size or digest.
        """
        ...

    def agree(self, name: str, *, digest: str) -> None:
        """Says what `name` is to be; every end of a channel does when it is opened.

        Raises:
            UsageError: somebody else said something else.
        """
        ...

    def doorbell(self, name: str) -> Doorbell:
        """The doorbell of that name."""
        ...

    def claim(self, name: str, *, segment: str | None = None, word: int = 0) -> int:
        """Takes the end called `name` over: returns the caller's incarnation, 1 for the first holder.

        Incarnations of a name rise and are never handed out twice; whoever holds a lower one has been replaced.

        Args:
            name: of the end.
            segment: shared memory that shows the incarnation from now on; None: it is not shown.
            word: where, in words of 64 bits.
        """
        ...

    def confirm(self, name: str, incarnation: int, *, segment: str, word: int) -> None:
        """Shows in a segment that this incarnation is ready; does nothing where a later one claimed the end."""
        ...

    def drop(self, name: str) -> None:
        """Nobody will ask for the segment of that name again; it stays while somebody uses it."""
        ...

    def holder(self, name: str) -> int:
        """The incarnation that claimed `name` last; 0 where nobody did."""
        ...

    def announce(self, name: str, address: Address, incarnation: int) -> None:
        """Says where the end called `name` listens; does nothing where a later incarnation has claimed it."""
        ...

    def lookup(self, name: str) -> Address | None:
        """Where the holder of `name` listens; None where it has not announced it."""
        ...

    def close(self) -> None:
        """Lets go of files and connections; memory stays while somebody uses it."""
        ...
