"""Many producers to many consumers: one ring for each pair, one doorbell for each end.

What Guo et al. ("GMI-DRL", USENIX ATC 2025) call dispenser, packer, migrator and batcher are here a
route, `Layout.pack` straight into a ring's slot, the ring, and `gather`.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import PyTree

from rollmill.channels.batching import BatchLayout
from rollmill.channels.errors import ChannelClosed
from rollmill.channels.layout import Layout
from rollmill.channels.protocols import ChannelStatistics, Gathered, Route
from rollmill.channels.shm.ring import RingMessage, RingReader, RingWriter
from rollmill.channels.waiting import Deadline, Waiter
from rollmill.core.errors import UsageError


def nothing() -> None:
    """What closing an end needs besides."""


def none_earlier(rank: int) -> int:
    """Messages with that rank that its ring has not seen: a ring in shared memory has seen all."""
    return 0


class QueueReservation:
    """A slot to be filled in place; see `rollmill.channels.Reservation`."""

    def __init__(self, sender: "QueueSender", writer: RingWriter, target: int) -> None:
        self.target = target
        self.views = writer.views()
        self._sender = sender

    @property
    def tree(self) -> PyTree[np.ndarray]:
        """Writable arrays that lie in the slot."""
        return self._sender.layout.unflatten(self.views)

    def publish(self, *, version: int = 0, iteration: int = 0, flags: int = 0) -> None:
        """Hands the slot over."""
        self._sender.publish(self, version, iteration, flags)


class QueueSender:
    """One producer's end; see `rollmill.channels.Sender`.

    Args:
        writers: by rank of the target, in the order that `route` counts them.
        layout: of one package.
        route: which target is next.
        waiter: on the doorbell that the targets ring.
        on_close: what to do when this end was closed.
        earlier: how many messages went to a target before its ring existed.
    """

    def __init__(
        self,
        writers: Mapping[int, RingWriter],
        layout: Layout,
        route: Route,
        waiter: Waiter,
        on_close: Callable[[], None] = nothing,
        earlier: Callable[[int], int] = none_earlier,
    ) -> None:
        self.layout = layout
        self._writers = writers
        self._targets = tuple(writers)
        self._route = route
        self._waiter = waiter
        self._on_close = on_close
        self._earlier = earlier
        self._open: QueueReservation | None = None

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
        """Copies `tree` into the ring of the next target."""
        reservation = self.reserve(target=target, timeout=timeout)
        self.layout.fill(reservation.views, tree)
        self.publish(reservation, version, iteration, flags)
        return reservation.target

    def reserve(self, *, target: int | None = None, timeout: float | None = None) -> QueueReservation:
        """Room for one message."""
        free = self._waiter.until(lambda: self._free(target), timeout=timeout)
        self._open = QueueReservation(self, self._writers[free], free)
        return self._open

    def publish(self, reservation: QueueReservation, version: int, iteration: int, flags: int) -> None:
        """What `reservation.publish` does."""
        if reservation is not self._open:
            raise UsageError("this reservation was published already, or another one was made since.")
        self._open = None
        self._writers[reservation.target].publish(version, iteration, flags)

    def statistics(self) -> dict[int, ChannelStatistics]:
        """Statistics of each ring, by the replica at its other end."""
        return {target: writer.statistics(self._earlier(target)) for target, writer in self._writers.items()}

    def close(self) -> None:
        """Nothing more will come."""
        for writer in self._writers.values():
            writer.close()
        self._on_close()

    def _free(self, target: int | None) -> int | None:
        chosen = self._next_target() if target is None else self._known(target)
        return chosen if self._writers[chosen].has_room() else None

    def _next_target(self) -> int:
        if len(self._targets) == 1:
            return self._targets[0]
        writers = self._writers.values()
        turn = sum(writer.published for writer in writers)  # a replacement takes up where the dead one was
        return self._targets[self._route(turn, [writer.occupied for writer in writers])]

    def _known(self, target: int) -> int:
        if target not in self._writers:
            raise UsageError(f"target={target} is none of this sender's: {', '.join(map(str, self._targets))}.")
        return target


class QueueReceiver:
    """One consumer's end; see `rollmill.channels.Receiver`.

    Args:
        readers: by rank of the source.
        layout: of one package.
        waiter: on the doorbell that the sources ring.
        name: for errors.
        on_close: what to do when this end was closed.
        earlier: how many messages of a source were sent before its ring existed.
    """

    def __init__(
        self,
        readers: Mapping[int, RingReader],
        layout: Layout,
        waiter: Waiter,
        name: str,
        on_close: Callable[[], None] = nothing,
        earlier: Callable[[int], int] = none_earlier,
    ) -> None:
        self._readers = readers
        self._sources = tuple(readers)
        self._layout = layout
        self._waiter = waiter
        self._name = name
        self._on_close = on_close
        self._earlier = earlier
        self._turn = 0
        self._joinings: dict[tuple[str, int], BatchLayout] = {}

    def receive(self, *, source: int | None = None, timeout: float | None = None) -> RingMessage:
        """The next message."""
        candidates = self._candidates(source)
        return self._waiter.until(lambda: self._take(candidates), timeout=timeout)

    def gather(
        self,
        *,
        axis: int | PyTree[int] = 0,
        count: int | None = None,
        sources: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> Gathered:
        """Several messages in one batch."""
        if count is not None and sources is not None:
            raise UsageError(f"gather count={count} messages of any source, or one of each in sources={sources}.")
        order = [None] * count if count is not None else list(sources or self._sources)
        batch, places = self._joining(axis, len(order)).places()
        deadline, headers = Deadline(timeout), []
        for source, place in zip(order, places, strict=True):
            with self.receive(source=source, timeout=deadline.seconds()) as message:
                for destination, leaf in zip(place, message.views, strict=True):
                    np.copyto(destination, leaf, casting="no")
                headers.append(message.header)
        return Gathered(batch, tuple(headers))

    def statistics(self) -> dict[int, ChannelStatistics]:
        """Statistics of each ring, by the replica at its other end."""
        return {source: reader.statistics(self._earlier(source)) for source, reader in self._readers.items()}

    def close(self) -> None:
        """Nobody takes any more."""
        for reader in self._readers.values():
            reader.close()
        self._on_close()

    def _candidates(self, source: int | None) -> tuple[int, ...]:
        if source is None:
            return self._sources
        if source not in self._readers:
            raise UsageError(f"source={source} is none of this receiver's: {', '.join(map(str, self._sources))}.")
        return (source,)

    def _take(self, candidates: tuple[int, ...]) -> RingMessage | None:
        ended = 0
        for step in range(len(candidates)):
            index = (self._turn + step) % len(candidates)
            reader = self._readers[candidates[index]]
            over = reader.ended  # before taking: what was sent before the end is still taken
            if (message := reader.take()) is not None:
                self._turn = index + 1 if len(candidates) > 1 else self._turn
                return message
            ended += over
        if ended == len(candidates):
            raise ChannelClosed(f"{self._name}: every sender closed the channel, and all was taken.")
        return None

    def _joining(self, axis: int | PyTree[int], count: int) -> BatchLayout:
        if not isinstance(axis, int):
            return BatchLayout.of(self._layout, axis, count)
        key = (str(axis), count)
        if key not in self._joinings:
            self._joinings[key] = BatchLayout.of(self._layout, axis, count)
        return self._joinings[key]
