"""Opens channels between hosts. Each end uses private memory as in `MemoryWire`, and connections join the two.

sender -> local ring -> SenderThread ~ ReceiverEndpoint -> local ring -> receiver
writer -> local board -> BoardPublisher ~ TcpLatestReader -> local board -> reader
"""

import secrets
import time
from collections.abc import Callable, Sequence

from rollmill.channels.layout import Layout
from rollmill.channels.protocols import Address, Broker, Route, round_robin
from rollmill.channels.shm.allreduce import refuse_reopening
from rollmill.channels.shm.doorbell import Doorbell
from rollmill.channels.shm.latest import BoardReader, BoardWriter, SeqlockBoard, board_bytes
from rollmill.channels.shm.memory import private_memory
from rollmill.channels.shm.queue import QueueReceiver, QueueSender
from rollmill.channels.shm.ring import Ring, ring_bytes
from rollmill.channels.shm.ring_reader import RingReader
from rollmill.channels.shm.ring_writer import RingWriter
from rollmill.channels.shm.wire import check_rank, check_ranks, rank_bell
from rollmill.channels.tcp.allreduce import BranchReduction, RootReduction
from rollmill.channels.tcp.hub import Hub
from rollmill.channels.tcp.latest import BoardPublisher, TcpLatestReader
from rollmill.channels.tcp.queue import RingEnds
from rollmill.channels.tcp.receiving import ReceiverEndpoint
from rollmill.channels.tcp.sending import SenderThread
from rollmill.channels.waiting import Abandon, Deadline, Waiter, never
from rollmill.core.errors import UsageError

LINGER = 5.0
"""Seconds for which `close` keeps sending the remaining messages of closed senders and writers."""

NAP = 0.005


class TcpWire:
    """Opens channels over TCP, an implementation of `channels.wire.Wire`.

    `send` returns before the message has left this process. Unsent messages are lost if the process dies. A
    sender's statistics count unsent messages as part of the depth.

    The broker knows the addresses of channel ends, and peers without the token are rejected. `host` is the address
    at which other hosts reach this one. The default address is reachable from this host only. Port 0 picks a free
    port. Ends that wait call `abandon` about ten times a second, and stop waiting once it returns True. Raises a
    `UsageError` if it cannot listen at this host and port.
    """

    def __init__(
        self, broker: Broker, token: str, *, host: str = "127.0.0.1", port: int = 0, abandon: Abandon = never
    ) -> None:
        self._broker = broker
        self._abandon = abandon
        self._hub = Hub(broker, token, host=host, port=port)
        self._sender_threads: list[SenderThread] = []
        self._senders: list[QueueSender] = []
        self._publishers: list[BoardPublisher] = []
        self._closing: list[Callable[[], None]] = []
        self._doorbells: list[Doorbell] = []

    @property
    def address(self) -> Address:
        """Address at which other hosts can reach this wire."""
        return self._hub.address

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
        """Opens the sending end of the queue `name` for producer `source`."""
        check_ranks(targets, name, "targets")
        space = self._doorbell()
        writers, earlier = {}, {}
        for target in targets:
            ring, published = self._ring(name, source, target, layout, capacity), self._doorbell()
            described = f"{name} from {source} to {target}"
            writers[target] = RingWriter(
                ring, source=source, doorbell=published, checksum=checksum, name=described
            )
            ends = _ends(name, source, target)
            thread = SenderThread(ring, space=space, published=published, hub=self._hub, ends=ends, source=source)
            self._sender_threads.append(thread)
            earlier[target] = thread.earlier
        described = f"sending {name} from {source}"
        waiter = Waiter(space, self._abandon, described)
        count_earlier = lambda target: earlier[target].wait(self._abandon, described)
        self._senders.append(QueueSender(writers, layout, route or round_robin, waiter, earlier=count_earlier))
        return self._senders[-1]

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
        """Opens the receiving end of the queue `name` for consumer `target`."""
        del gpu  # messages between hosts are never in GPU memory
        check_ranks(sources, name, "sources")
        described, arrived = f"{name} at {target}", self._doorbell()
        rings = {source: self._ring(name, source, target, layout, capacity) for source in sources}
        space = {source: self._doorbell() for source in sources}
        readers = {
            source: RingReader(ring, doorbell=space[source], name=f"{name} from {source} to {target}")
            for source, ring in rings.items()
        }
        ends = {source: _ends(name, source, target) for source in sources}
        endpoint = ReceiverEndpoint(rings, space=space, arrived=arrived, hub=self._hub, ends=ends, name=described)
        for source in sources:
            self._hub.announce(ends[source].receiver, endpoint.serve, endpoint.incarnations[source])
        waiter = Waiter(arrived, lambda: endpoint.poll_broker() or self._abandon(), f"receiving {described}")
        count_earlier = lambda source: endpoint.earlier[source].wait(self._abandon, described)
        return QueueReceiver(readers, layout, waiter, described, earlier=count_earlier)

    def latest_writer(self, name: str, *, layout: Layout, readers: int) -> BoardWriter:
        """Opens the writer of the latest-value channel `name`."""
        board, doorbells = self._board(name, layout, readers), [self._doorbell() for _ in range(readers)]
        publisher = BoardPublisher(board, doorbells, name)
        self._publishers.append(publisher)
        end = f"{name}/newest"
        self._hub.announce(end, publisher.serve, self._hub.claim(end))
        return BoardWriter(board, doorbells, name)

    def latest_reader(self, name: str, *, layout: Layout, reader: int, readers: int) -> TcpLatestReader:
        """Opens reader number `reader` of the latest-value channel `name`."""
        check_rank(reader, readers, name, "reader")
        board, doorbell = self._board(name, layout, readers), self._doorbell()
        waiter = Waiter(doorbell, self._abandon, f"reading {name} at {reader}")
        remote_reader = TcpLatestReader(
            board,
            doorbell,
            BoardReader(board, waiter, name),
            hub=self._hub,
            end=f"{name}/newest",
            index=reader,
        )
        self._closing.append(remote_reader.close)
        return remote_reader

    def reduction(self, name: str, *, rank: int, size: int, layout: Layout) -> RootReduction | BranchReduction:
        """Opens one rank's end of the all-reduce `name` over `size` ranks."""
        check_rank(rank, size, name, "rank")
        self._broker.agree(f"{name}/mean", digest=f"mean over {size} of {layout.digest}")
        try:
            self._broker.agree(rank_bell(name, rank), digest=secrets.token_hex(8))
        except UsageError:
            refuse_reopening(True, name, rank)
        end = f"{name}/mean"
        if rank == 0:
            reduction = RootReduction(layout, size=size, abandon=self._abandon, name=name)
            self._hub.announce(end, reduction.serve, self._hub.claim(end))
        else:
            reduction = BranchReduction(
                layout,
                rank=rank,
                size=size,
                hub=self._hub,
                end=end,
                abandon=self._abandon,
                name=name,
            )
        self._closing.append(reduction.close)
        return reduction

    def finish(self) -> None:
        """Closes the senders, waits without limit until their messages are sent, and then closes this wire."""
        for sender in self._senders:
            sender.close()
        while any(thread.has_unsent() for thread in self._sender_threads) and not self._abandon():
            time.sleep(NAP)
        self.close()

    def close(self) -> None:
        """Sends the messages of closed senders and writers for a few more seconds, then ends all connections."""
        deadline = Deadline(LINGER)
        while any(end.is_draining() for end in (*self._sender_threads, *self._publishers)):
            if deadline.left() <= 0 or self._abandon():
                break
            time.sleep(NAP)
        for thread in self._sender_threads:
            thread.close()
        for close in self._closing:
            close()
        self._hub.close()
        for doorbell in self._doorbells:
            doorbell.close()
        for resources in (
            self._sender_threads,
            self._senders,
            self._publishers,
            self._closing,
            self._doorbells,
        ):
            resources.clear()

    def _ring(self, name: str, source: int, target: int, layout: Layout, capacity: int) -> Ring:
        nbytes = ring_bytes(layout, capacity)
        self._broker.agree(f"{name}/{source} to {target}", digest=f"ring of {capacity} of {layout.digest}")
        return Ring(private_memory(nbytes), layout, capacity)

    def _board(self, name: str, layout: Layout, readers: int) -> SeqlockBoard:
        self._broker.agree(f"{name}/newest", digest=f"newest for {readers} of {layout.digest}")
        return SeqlockBoard(private_memory(board_bytes(layout)), layout)

    def _doorbell(self) -> Doorbell:
        self._doorbells.append(Doorbell.create())
        return self._doorbells[-1]


def _ends(name: str, source: int, target: int) -> RingEnds:
    """Returns the names of both ends of the ring between a source and a receiver."""
    ring = f"{name}/{source} to {target}"
    return RingEnds(f"{ring}/sender", f"{ring}/receiver")
