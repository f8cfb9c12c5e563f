"""Opens channels through memory, between threads of one process or processes of one host.

Threads, and the process of the coordinator, use a `LocalBroker`. Worker processes use a `RemoteBroker`.
"""

import contextlib
from collections.abc import Sequence

from rollmill.channels.layout import Layout
from rollmill.channels.protocols import Broker, Route, round_robin
from rollmill.channels.shm.allreduce import MemoryReduction, reduction_bytes
from rollmill.channels.shm.latest import BoardReader, BoardWriter, SeqlockBoard, board_bytes
from rollmill.channels.shm.queue import QueueReceiver, QueueSender
from rollmill.channels.shm.ring import CONSUMER, PRODUCER, Ring, ring_bytes
from rollmill.channels.shm.ring_reader import RingReader
from rollmill.channels.shm.ring_writer import RingWriter
from rollmill.channels.waiting import Abandon, Waiter, never
from rollmill.core.errors import RollmillError, UsageError

SIDES = {PRODUCER: "producer", CONSUMER: "consumer"}


class BrokerHolders:
    """Holders of a ring's two sides, recorded by a broker."""

    def __init__(self, broker: Broker, ring: str, digest: str) -> None:
        self._broker = broker
        self._ring = ring
        self._digest = digest

    def claim(self, word: int) -> int:
        """Makes the caller the holder of side `word` (`PRODUCER` or `CONSUMER`). Returns its incarnation."""
        return self._broker.claim(f"{self._ring}/{SIDES[word]}", segment=self._ring, word=word)

    def confirm(self, word: int, incarnation: int) -> None:
        """Publishes that a holder of side `word` (`PRODUCER` or `CONSUMER`) is ready, unless it was replaced."""
        self._broker.confirm(f"{self._ring}/{SIDES[word]}", incarnation, segment=self._ring, word=word + 1)

    def memory(self, word: int, incarnation: int, nbytes: int) -> memoryview:
        """Returns the shared memory of one holder of a side of the ring. `word` is `PRODUCER` or `CONSUMER`."""
        return self._broker.segment(self._segment_name(word, incarnation), nbytes=nbytes, digest=self._digest)

    def drop(self, word: int, incarnation: int) -> None:
        """Unlinks the shared memory of an earlier holder of side `word`. Existing mappings stay valid."""
        with contextlib.suppress(RollmillError):  # without a broker, nobody can request this memory
            self._broker.drop(self._segment_name(word, incarnation))

    def _segment_name(self, word: int, incarnation: int) -> str:
        return f"{self._ring}/{SIDES[word]} {incarnation}"


class MemoryWire:
    """Opens channels in shared memory that a broker allocates, an implementation of `channels.wire.Wire`.

    Ends that wait call `abandon` about ten times a second, and stop waiting once it returns True.
    """

    def __init__(self, broker: Broker, *, abandon: Abandon = never) -> None:
        self._broker = broker
        self._abandon = abandon

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
        writers = {
            target: RingWriter(
                self._ring(name, source, target, layout, capacity),
                source=source,
                doorbell=self._broker.doorbell(target_bell(name, target)),
                checksum=checksum,
                name=f"{name} from {source} to {target}",
            )
            for target in targets
        }
        waiter = self._waiter(source_bell(name, source), f"sending {name} from {source}")
        return QueueSender(writers, layout, route or round_robin, waiter)

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
        check_ranks(sources, name, "sources")
        readers = {
            source: RingReader(
                self._ring(name, source, target, layout, capacity),
                doorbell=self._broker.doorbell(source_bell(name, source)),
                name=f"{name} from {source} to {target}",
                gpu=gpu,
            )
            for source in sources
        }
        waiter = self._waiter(target_bell(name, target), f"receiving {name} at {target}")
        return QueueReceiver(readers, layout, waiter, f"{name} at {target}")

    def latest_writer(self, name: str, *, layout: Layout, readers: int) -> BoardWriter:
        """Opens the writer of the latest-value channel `name`."""
        doorbells = [self._broker.doorbell(reader_bell(name, reader)) for reader in range(readers)]
        return BoardWriter(self._board(name, layout, readers), doorbells, name)

    def latest_reader(self, name: str, *, layout: Layout, reader: int, readers: int) -> BoardReader:
        """Opens reader number `reader` of the latest-value channel `name`."""
        check_rank(reader, readers, name, "reader")
        waiter = self._waiter(reader_bell(name, reader), f"reading {name} at {reader}")
        return BoardReader(self._board(name, layout, readers), waiter, name)

    def reduction(self, name: str, *, rank: int, size: int, layout: Layout) -> MemoryReduction:
        """Opens one rank's end of the all-reduce `name` over `size` ranks."""
        check_rank(rank, size, name, "rank")
        digest = f"mean over {size} of {layout.digest}"
        return MemoryReduction(
            self._broker.segment(f"{name}/mean", nbytes=reduction_bytes(layout, size), digest=digest),
            layout,
            rank=rank,
            doorbells=[self._broker.doorbell(rank_bell(name, other)) for other in range(size)],
            waiter=self._waiter(rank_bell(name, rank), f"the mean {name} at rank {rank}"),
            name=name,
        )

    def close(self) -> None:
        """Does nothing, because shared memory is freed with its last user."""

    def _ring(self, name: str, source: int, target: int, layout: Layout, capacity: int) -> Ring:
        nbytes, ring = ring_bytes(layout, capacity), f"{name}/{source} to {target}"
        digest = f"ring of {capacity} of {layout.digest}"
        memory = self._broker.segment(ring, nbytes=nbytes, digest=digest)
        return Ring(memory, layout, capacity, BrokerHolders(self._broker, ring, digest))

    def _board(self, name: str, layout: Layout, readers: int) -> SeqlockBoard:
        digest = f"newest for {readers} of {layout.digest}"
        memory = self._broker.segment(f"{name}/newest", nbytes=board_bytes(layout), digest=digest)
        return SeqlockBoard(memory, layout)

    def _waiter(self, bell: str, what: str) -> Waiter:
        return Waiter(self._broker.doorbell(bell), self._abandon, what)


def source_bell(name: str, source: int) -> str:
    """Returns the name of a producer's doorbell, which consumers ring when they release a slot."""
    return f"{name}/source {source}"


def target_bell(name: str, target: int) -> str:
    """Returns the name of a consumer's doorbell, which producers ring when they publish a message."""
    return f"{name}/target {target}"


def reader_bell(name: str, reader: int) -> str:
    """Returns the name of a reader's doorbell, which the writer rings when it publishes."""
    return f"{name}/reader {reader}"


def rank_bell(name: str, rank: int) -> str:
    """Returns the name of a rank's doorbell in an all-reduce, rung when all ranks have arrived or one has left."""
    return f"{name}/rank {rank}"


def check_rank(rank: int, count: int, name: str, what: str) -> None:
    """Raises a `UsageError` if a rank is outside of `range(count)`."""
    if not 0 <= rank < count:
        raise UsageError(f"{name}: {what}={rank} must be from 0 to {count - 1}.")


def check_ranks(ranks: Sequence[int], name: str, what: str) -> None:
    """Raises a `UsageError` if `ranks` is empty or has duplicates."""
    if not ranks or len(set(ranks)) < len(ranks):
        raise UsageError(
            f"{name}: {what}={list(ranks)} must contain at least one rank, and no rank more than once."
        )
