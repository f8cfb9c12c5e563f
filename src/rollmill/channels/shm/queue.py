"""Queues from several producers to several consumers, with a ring for each pair and a doorbell for each end.

In Guo et al. ("GMI-DRL", USENIX ATC 2025), a route is called dispenser, `Layout.fill` into a ring's slot is called
packer, the ring migrator, and `gather` batcher.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import PyTree

from rollmill.channels.batching import BatchLayout, MessageBatch
from rollmill.channels.errors import ChannelClosed
from rollmill.channels.layout import Layout
from rollmill.channels.protocols import ChannelStatistics, Gathered, Route
from rollmill.channels.shm.ring_reader import RingMessage, RingReader
from rollmill.channels.shm.ring_writer import RingWriter
from rollmill.channels.waiting import Deadline, Waiter
from rollmill.core.errors import UsageError


def none_earlier(rank: int) -> int:
    """Returns 0. The default `earlier` of a queue end, because a ring in shared memory counts all its messages."""
    return 0


class QueueReservation:
    """A slot of a queue that the sender fills in place. If it is never published, nothing is sent."""

    def __init__(self, sender: "QueueSender", writer: RingWriter, target: int) -> None:
        self.target = target
        self.views = writer.views()
        self._sender = sender

    @property
    def tree(self) -> PyTree[np.ndarray]:
        """Writable, uninitialised views of the reserved slot, in which to write the message."""
        return self._sender.layout.unflatten(self.views)

    def publish(self, *, version: int = 0, iteration: int = 0, flags: int = 0) -> None:
        """Sends the message. `tree` must not be written to afterwards. Never blocks."""
        self._sender.publish(self, version, iteration, flags)


class QueueSender:
    """One producer's end of a queue, with one or more consumers.

    `writers` holds the rings by target rank, and `route` returns an index in their order. `earlier` returns the
    number of messages to a target before its ring existed. `waiter` waits for the doorbell that the targets ring.
    """

    def __init__(
        self,
        writers: Mapping[int, RingWriter],
        layout: Layout,
        route: Route,
        waiter: Waiter,
        earlier: Callable[[int], int] = none_earlier,
    ) -> None:
        self.layout = layout
        self._writers = writers
        self._targets = tuple(writers)
        self._route = route
        self._waiter = waiter
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
        """Copies `tree` into the ring of a target, and returns the target's rank. Blocks while the ring is full.

        Args:
            tree: JAX or NumPy arrays that match the layout exactly. Nothing is broadcast or converted.
            version: version of the weights, for the header.
            iteration: number of the iteration, for the header.
            flags: 32 bits for the receiver, in the header.
            target: rank of the target, instead of the rank that the route chooses.
            timeout: seconds to wait for a free slot, or None for no limit.

        Raises:
            TimedOut: no slot became free in time. Nothing was sent.
            UsageError: `tree` does not match the layout, or the target does not exist.
        """
        reservation = self.reserve(target=target, timeout=timeout)
        self._writers[reservation.target].fill(tree)
        self.publish(reservation, version, iteration, flags)
        return reservation.target

    def reserve(self, *, target: int | None = None, timeout: float | None = None) -> QueueReservation:
        """Reserves a slot in the ring of the next target, or of `target`, in which a message is written in place.

        Only the latest reservation can be published. Raises `TimedOut` if no slot becomes free within `timeout`
        seconds.
        """
        chosen = self._waiter.until(lambda: self._target_with_room(target), timeout=timeout)
        self._open = QueueReservation(self, self._writers[chosen], chosen)
        return self._open

    def publish(self, reservation: QueueReservation, version: int, iteration: int, flags: int) -> None:
        """Sends the message written to a reserved slot."""
        if reservation is not self._open:
            raise UsageError("this reservation has been published, or a newer reservation exists.")
        self._open = None
        self._writers[reservation.target].publish(version, iteration, flags)

    def statistics(self) -> dict[int, ChannelStatistics]:
        """Returns the message counts of each ring, by target rank."""
        return {target: writer.statistics(self._earlier(target)) for target, writer in self._writers.items()}

    def close(self) -> None:
        """Ends the stream. Receivers take the remaining messages and then get `ChannelClosed`."""
        for writer in self._writers.values():
            writer.close()

    def _target_with_room(self, target: int | None) -> int | None:
        chosen = self._next_target() if target is None else self._check_target(target)
        return chosen if self._writers[chosen].has_room() else None

    def _next_target(self) -> int:
        if len(self._targets) == 1:
            return self._targets[0]
        writers = self._writers.values()
        sent = sum(writer.published for writer in writers)  # the rings count, so a replacement continues the count
        return self._targets[self._route(sent, [writer.occupied for writer in writers])]

    def _check_target(self, target: int) -> int:
        if target not in self._writers:
            known = ", ".join(map(str, self._targets))
            raise UsageError(f"target={target} is not a target of this sender. Known: {known}.")
        return target


class QueueReceiver:
    """One consumer's end of a queue, with one or more producers.

    `readers` holds the rings by source rank. `earlier` returns the number of messages from a source before its
    ring existed. `waiter` waits for the doorbell that the sources ring. Error messages mention `name`.
    """

    def __init__(
        self,
        readers: Mapping[int, RingReader],
        layout: Layout,
        waiter: Waiter,
        name: str,
        earlier: Callable[[int], int] = none_earlier,
    ) -> None:
        self._readers = readers
        self._sources = tuple(readers)
        self._layout = layout
        self._waiter = waiter
        self._name = name
        self._earlier = earlier
        self._next_source = 0
        self._batch_layouts: dict[tuple[str, int], BatchLayout] = {}

    def receive(self, *, source: int | None = None, timeout: float | None = None) -> RingMessage:
        """Returns the next message of `source`, in the order sent. Without a `source`, serves all sources in turn.

        Several messages may be held at a time and released in any order. Each occupies a slot of its ring. Raises
        `TimedOut` if no message arrives within `timeout` seconds.
        """
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
        """Concatenates several messages. Each is copied once and then released.

        The batch is in one buffer on the host, or on the GPU if any message is in GPU memory.

        Args:
            axis: axis of concatenation, one integer for all leaves or a pytree (or a prefix of it) of integers.
            count: number of messages to take from any source, in order of arrival.
            sources: ranks from which one message each is taken, in this order. Without `count`, the default is all
                sources.
            timeout: seconds to wait for all messages together.

        Raises:
            TimedOut: some messages did not arrive in time. The messages that were already taken are lost.
        """
        if count is not None and sources is not None:
            raise UsageError(
                f"gather accepts either count={count} messages from any source, or one message from each of "
                f"sources={sources}."
            )
        order = [None] * count if count is not None else list(sources or self._sources)
        batch, deadline, headers = MessageBatch(self._batch_layout(axis, len(order))), Deadline(timeout), []
        for source in order:
            with self.receive(source=source, timeout=deadline.seconds()) as message:
                leaves = message.copy_on_gpu()
                batch.add(message.views if leaves is None else leaves)
                headers.append(message.header)
        return Gathered(batch.tree(), tuple(headers))

    def statistics(self) -> dict[int, ChannelStatistics]:
        """Returns the message counts of each ring, by source rank."""
        return {source: reader.statistics(self._earlier(source)) for source, reader in self._readers.items()}

    def close(self) -> None:
        """Stops receiving. Senders then get `ChannelClosed`."""
        for reader in self._readers.values():
            reader.close()

    def _candidates(self, source: int | None) -> tuple[int, ...]:
        if source is None:
            return self._sources
        if source not in self._readers:
            known = ", ".join(map(str, self._sources))
            raise UsageError(f"source={source} is not a source of this receiver. Known: {known}.")
        return (source,)

    def _take(self, candidates: tuple[int, ...]) -> RingMessage | None:
        closed = 0
        for offset in range(len(candidates)):
            index = (self._next_source + offset) % len(candidates)
            reader = self._readers[candidates[index]]
            ended = reader.ended  # read before taking, so that the last message is not missed
            if (message := reader.take()) is not None:
                self._next_source = index + 1 if len(candidates) > 1 else self._next_source
                return message
            closed += ended
        if closed == len(candidates):
            raise ChannelClosed(f"{self._name}: every sender closed the channel, and all messages were received.")
        return None

    def _batch_layout(self, axis: int | PyTree[int], count: int) -> BatchLayout:
        if not isinstance(axis, int):
            return BatchLayout.of(self._layout, axis, count)
        key = (str(axis), count)
        if key not in self._batch_layouts:
            self._batch_layouts[key] = BatchLayout.of(self._layout, axis, count)
        return self._batch_layouts[key]
