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

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np
from jaxtyping import PyTree

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
    """Version of the weights behind the payload: a number of iterations, or of a parameter server's updates."""
    iteration: int = 0
    flags: int = 0
    """Thirty-two bits whose meaning the sender and the receiver agree on."""
    payload_bytes: int = 0


class ChannelStatistics(NamedTuple):
    """Message counts at one end of a ring since the channel was first opened. Replacing the end keeps them.

    Between hosts, only the receiver counts messages of an earlier sender that never arrived. A replacement end
    waits until the other end reports how many messages came before it.
    """

    messages: int
    """Number of messages that a sender published, or that a receiver took."""
    depth: int
    """Number of messages that are published and not yet taken."""


class Gathered(NamedTuple):
    """Several messages concatenated along an axis, in the order of `headers`. The arrays belong to the caller.

    They are arrays of JAX if a message was in GPU memory.
    """

    tree: PyTree[np.ndarray | jax.Array]
    headers: tuple[Header, ...]


class Versioned(NamedTuple):
    """A message of a latest-value channel, with its version. The arrays belong to the caller."""

    tree: PyTree[np.ndarray]
    version: int


@runtime_checkable
class LatestReader(Protocol):
    """One reader of a latest-value channel. Readers never block the writer."""

    def version(self) -> int | None:
        """Returns the version of the newest message, or None before the first. Copies nothing."""
        ...

    def read(self, *, at_least: int | None = None, timeout: float | None = None) -> Versioned:
        """Copies the newest message, after waiting until its version is at least `at_least` (None: any version).

        Raises `TimedOut` after `timeout` seconds, and `ChannelClosed` if the writer closes before this version.
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
        """Makes the caller the holder of the channel end `name`. Returns its incarnation, 1 for the first holder.

        Incarnations increase and are never reused. A holder with a lower one has been replaced.

        Args:
            name: name of the end.
            segment: shared memory in which to publish the incarnation, or None not to publish it.
            word: position in that memory, in words of 64 bits.
        """
        ...

    def confirm(self, name: str, incarnation: int, *, segment: str, word: int) -> None:
        """Publishes in shared memory that a holder of the channel end `name` is ready, unless it was replaced.

        `segment` and `word` are the position given to `claim`.
        """
        ...

    def drop(self, name: str) -> None:
        """Releases the shared memory called `name`. Existing mappings stay valid."""
        ...

    def holder(self, name: str) -> int:
        """Returns the incarnation of the latest holder of the channel end `name`, or 0 if there was none."""
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
