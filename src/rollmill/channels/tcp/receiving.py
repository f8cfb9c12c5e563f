"""The receiving half of rings between hosts. See `channels.tcp.queue` for the protocol."""

import select
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from rollmill.channels.errors import ConnectionLost, Refused
from rollmill.channels.shm.doorbell import Doorbell
from rollmill.channels.shm.ring import CONSUMER, GONE, HEADER, Ring
from rollmill.channels.shm.ring_writer import RingWriter
from rollmill.channels.tcp.hub import Hub, LatestConnection
from rollmill.channels.tcp.queue import END, NOBODY, POLL_SECONDS, RANGE, WORD, ResumePoint, RingEnds
from rollmill.channels.transport.connection import Connection
from rollmill.channels.transport.handshake import PATIENCE


class Arrivals(NamedTuple):
    """The newest known sender of a queue, and the position in the receiver's ring at which its messages begin."""

    sender: int = 0
    """Number (incarnation) of the process that holds the sending end."""
    start: int = 0
    """Position of the sender's first message in the receiver's ring."""


class ReceiverEndpoint:
    """Writes messages that arrive over TCP, from all sources of one receiver, to the receiver's rings."""

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
        self._next_poll = time.monotonic() + POLL_SECONDS
        self._arrivals = dict.fromkeys(rings, Arrivals())
        self._latest_connection = {source: LatestConnection() for source in rings}
        self.earlier = {source: ResumePoint() for source in rings}
        self.incarnations = {source: hub.claim(ends[source].receiver) for source in rings}
        for source, incarnation in self.incarnations.items():
            if incarnation == 1:
                self.earlier[source].learn(0)

    def serve(self, connection: Connection, hello: dict[str, Any]) -> None:
        """Receives messages over the connection of one source, after ending its older connection."""
        source, sender = int(hello["source"]), int(hello["sender"])
        replaced = self._hub.is_replaced(self._ends[source].sender, sender)
        if replaced or sender < self._arrivals[source].sender:
            connection.send_json({"replaced": True}, timeout=PATIENCE)
            return
        try:
            with self._latest_connection[source].take_over(connection, sender) as is_latest:
                if is_latest and not self._step_down(source):
                    self._connected.add(source)
                    self._receive(connection, source, sender, hello["sequence"])
        finally:
            self._connected.discard(source)
            self._step_down(source)

    def poll_broker(self) -> None:
        """Asks the broker at intervals whether this receiver was replaced, while a source is not connected."""
        if time.monotonic() > self._next_poll:
            self._next_poll = time.monotonic() + POLL_SECONDS
            for source in self._rings.keys() - self._connected:
                self._step_down(source)

    def _step_down(self, source: int) -> bool:
        """Returns whether this receiver was replaced. It then gets `ChannelClosed` from its next receive."""
        if not self._hub.is_replaced(self._ends[source].receiver, self.incarnations[source]):
            return False
        self._rings[source].root[CONSUMER] += 1
        self._arrived.ring()
        return True

    def _new_range(self, source: int) -> int:
        """Returns the first sequence number of a range that was never used."""
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
        if not earlier.is_known:  # rule 3: a sender that is older than this receiver knows the number
            earlier.learn(self._new_range(source) if sequence is None else int(sequence))
        start = self._arrivals[source].start
        answer = {
            "receiver": self.incarnations[source],
            "sequence": earlier.sequence + writer.published,
            "arrived": writer.published - start,
            "released": writer.released - start,
        }
        connection.send_json(answer, timeout=PATIENCE)
        stream = Stream(connection, writer, ring, self._space[source], start)
        while (header := stream.header()) is not None:
            number, _, _, size, rank, *_ = HEADER.unpack(header)
            if (number, size, rank) != (earlier.sequence + writer.published, ring.layout.nbytes, source):
                raise Refused(f"{self._name}: {source} sent data that is not the next message of this channel.")
            if not writer.has_room():
                raise Refused(f"{self._name}: {source} sent more messages than this channel has free slots.")
            stream.receive_into(writer.payload())
            writer.publish_raw(header)
        writer.close()


class Stream:
    """Reads messages from a sender, and grants credit: the number of messages released since `start`."""

    def __init__(
        self, connection: Connection, writer: RingWriter, ring: Ring, space: Doorbell, start: int
    ) -> None:
        self._start = start
        self._connection = connection
        self._writer = writer
        self._ring = ring
        self._space = space
        self._reported = writer.released
        self._poll = select.poll()
        for source in (connection, space):
            self._poll.register(source.fileno(), select.POLLIN)

    def header(self) -> bytes | None:
        """Receives the next message's header, or returns None at the end of the stream."""
        word = bytearray(WORD.size)
        self.receive_into(memoryview(word))
        if WORD.unpack(word) == (END,):
            return None
        header = bytearray(HEADER.size)
        self.receive_into(memoryview(header))
        return bytes(header)

    def receive_into(self, view: memoryview) -> None:
        """Fills `view` with received bytes, blocking until all of them have arrived."""
        self._report()
        while len(view):
            count = self._connection.receive_some(view)
            view = view[count:]
            if count == 0:
                self._poll.poll()
                self._space.silence()
                self._report()

    def _report(self) -> None:
        if self._ring.ledger(1).words[GONE]:
            self._connection.send(WORD.pack(NOBODY))
            raise ConnectionLost("the receiver was closed.")
        if self._writer.released > self._reported:
            self._reported = self._writer.released
            self._connection.send(WORD.pack(self._reported - self._start))
