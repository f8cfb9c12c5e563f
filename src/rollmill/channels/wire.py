"""The protocol of wires, which open the ends of channels over one transport each."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from rollmill.channels.layout import Layout
from rollmill.channels.protocols import LatestReader, Reduction, Route
from rollmill.channels.shm.latest import BoardWriter
from rollmill.channels.shm.queue import QueueReceiver, QueueSender


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
    ) -> QueueSender:
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
        self,
        name: str,
        *,
        sources: Sequence[int],
        target: int,
        layout: Layout,
        capacity: int = 2,
        gpu: int | None = None,
    ) -> QueueReceiver:
        """Opens the end of the queue `name` for consumer `target`, which receives from `sources`. See `sender`.

        If messages will be used on GPU number `gpu` of this process, a producer on the same host may leave them in
        GPU memory.
        """
        ...

    def latest_writer(self, name: str, *, layout: Layout, readers: int) -> BoardWriter:
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
