"""The receiver's half of rings between hosts; see `tcp_experience` for the protocol."""

import select
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from rollmill.channels.errors import ConnectionLost, Refused
from rollmill.channels.shm.doorbell import Doorbell
from rollmill.channels.shm.ring import CONSUMER, GONE, HEADER, Ring, RingWriter
from rollmill.channels.tcp.hub import ConnectionNumber, Hub
from rollmill.channels.tcp.queue import END, LOOK_SECONDS, NOBODY, RANGE, WORD, ResumePoint, RingEnds
from rollmill.channels.transport.connection import Connection
from rollmill.channels.transport.handshake import PATIENCE


class Arrivals(NamedTuple):
    """Messages that have arrived from the latest sender of one source."""

    sender: int = 0
    """Its incarnation."""
    start: int = 0
    """Position in the receiver's ring of its first message."""


class ReceiverEndpoint:
    """Puts what arrives from all sources of one receiver in its rings.

    Args:
        rings: by source; local, the receiver is their consumer.
        space: by source; rung when the receiver releases.
        arrived: the receiver's doorbell.
        hub: knows who was replaced.
        ends: by source; names of the two ends.
        name: for errors.
    """

    def __init__(
        self,
        rings: Mapping[int, Ring],
        *,
        space: Mapping[int, Doorbell],
        arrived: Doorbell,
        hub: Hub,
        ends: Mapping[int, RingEnds],
        name: str,
    ) -> None:
        self._rings = rings
        self._space = space
        self._arrived = arrived
        self._hub = hub
        self._ends = ends
        self._name = name
        self._writers = {
            source: RingWriter(ring, source=source, doorbell=arrived, checksum=False, name=name)
            for source, ring in rings.items()
        }
        self._connected: set[int] = set()
        self._look_at = time.monotonic() + LOOK_SECONDS
        self._arrivals = dict.fromkeys(rings, Arrivals())
        self._turns = {source: ConnectionNumber() for source in rings}
        self.earlier = {source: ResumePoint() for source in rings}
        self.incarnations = {source: hub.claim(ends[source].receiver) for source in rings}
        for source, incarnation in self.incarnations.items():
            if incarnation == 1:
                self.earlier[source].learn(0)

    def serve(self, connection: Connection, hello: dict[str, Any]) -> None:
        """Talks with one source's pump; an older connection of the same source is ended first."""
        source, sender = int(hello["source"]), int(hello["sender"])
        replaced = self._hub.is_replaced(self._ends[source].sender, sender)
        if replaced or sender < self._arrivals[source].sender:
            connection.send_json({"replaced": True}, timeout=PATIENCE)
            return
        try:
            with self._turns[source].of(connection, sender) as is_newest:
                if is_newest and not self._step_down(source):
                    self._connected.add(source)
                    self._receive(connection, source, sender, hello["sequence"])
        finally:
            self._connected.discard(source)
            self._step_down(source)

    def look(self) -> None:
        """Asks the broker now and then whether this receiver was replaced, where no pump has reached it."""
        if time.monotonic() > self._look_at:
            self._look_at = time.monotonic() + LOOK_SECONDS
            for source in self._rings.keys() - self._connected:
                self._step_down(source)

    def _step_down(self, source: int) -> bool:
        """Whether another receiver took this one's place: then this one notices when it looks for messages."""
        if not self._hub.is_replaced(self._ends[source].receiver, self.incarnations[source]):
            return False
        self._rings[source].root[CONSUMER] += 1
        self._arrived.ring()
        return True

    def _unused(self, source: int) -> int:
        """The first number of a range that the broker has handed out to nobody before."""
        return self._hub.claim(self._ends[source].ranges) * RANGE

    def _receive(self, connection: Connection, source: int, sender: int, sequence: int | None) -> None:
        ring, earlier = self._rings[source], self.earlier[source]
        if ring.ledger(1).words[GONE]:
            connection.send_json({"gone": True}, timeout=PATIENCE)
            return
        writer = self._writers[source]
        writer.reopen()
        if sender > self._arrivals[source].sender:
            self._arrivals[source] = Arrivals(sender, writer.published)
        if not earlier.is_known:  # the sender does where it is older than this receiver; otherwise nobody does
            earlier.learn(self._unused(source) if sequence is None else int(sequence))
        start = self._arrivals[source].start
        places = {"arrived": writer.published - start, "released": writer.released - start}
        expected = earlier.sequence + writer.published
        connection.send_json(
            {"receiver": self.incarnations[source], "sequence": expected, **places}, timeout=PATIENCE
        )
        stream = Stream(connection, writer, ring, self._space[source], start)
        while (header := stream.header()) is not None:
            number, _, _, size, rank, *_ = HEADER.unpack(header)
            if (number, size, rank) != (earlier.sequence + writer.published, ring.layout.nbytes, source):
                raise Refused(f"{self._name}: what came from {source} is not the next message of this channel.")
            if not writer.has_room():
                raise Refused(f"{self._name}: {source} sent more messages than fit.")
            stream.fill(writer.payload())
            writer.publish_raw(header)
        writer.close()


class Stream:
    """Reads messages from a connection, and tells the other end meanwhile how many were released since `start`."""

    def __init__(
        self, connection: Connection, writer: RingWriter, ring: Ring, space: Doorbell, start: int
    ) -> None:
        self._start = start
        self._connection = connection
        self._writer = writer
        self._ring = ring
        self._space = space
        self._told = writer.released
        self._poll = select.poll()
        for source in (connection, space):
            self._poll.register(source.fileno(), select.POLLIN)

    def header(self) -> bytes | None:
        """The next message's; None when the sender says that there is none."""
        word = bytearray(WORD.size)
        self.fill(memoryview(word))
        if WORD.unpack(word) == (END,):
            return None
        header = bytearray(HEADER.size)
        self.fill(memoryview(header))
        return bytes(header)

    def fill(self, view: memoryview) -> None:
        """Fills `view`, waiting for what has not arrived."""
        self._tell()
        while len(view):
            count = self._connection.receive_some(view)
            view = view[count:]
            if count == 0:
                self._poll.poll()
                self._space.silence()
                self._tell()

    def _tell(self) -> None:
        if self._ring.ledger(1).words[GONE]:
            self._connection.send(WORD.pack(NOBODY))
            raise ConnectionLost("the receiver was closed.")
        if self._writer.released > self._told:
            self._told = self._writer.released
            self._connection.send(WORD.pack(self._told - self._start))
