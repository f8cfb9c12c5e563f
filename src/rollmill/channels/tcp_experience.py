"""A ring at each end of a connection: the sender's is emptied into the receiver's.

`Pump` sends what the local producer publishes, and keeps each slot until the far consumer has released it: so
the capacity holds end to end. `Inlet` puts what arrives in the receiver's rings, and tells how much was
released (the sender's credit). A message that did not arrive whole never was. When a connection is
lost and both processes live, the receiver says what it has and the sender goes on behind it; when the
receiver was replaced, what had been sent to the old one is lost, and the rest goes to the new one.

    pump -> inlet   MESSAGE, header, payload;  or END
    inlet -> pump   released messages, as one number;  or GONE
"""

import secrets
import select
import struct
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from rollmill.channels.connection import Connection
from rollmill.channels.doorbell import Doorbell
from rollmill.channels.errors import Abandoned, ConnectionLost, Refused
from rollmill.channels.handshake import PATIENCE
from rollmill.channels.ring import ENDED, GONE, HEADER, PUBLISHED, RELEASED, TAKEN, Ring, RingWriter
from rollmill.channels.switchboard import Switchboard, Turn
from rollmill.channels.waiting import NAP_MS, Abandon
from rollmill.core.errors import RollmillError

WORD = struct.Struct("<q")
MESSAGE, END, NOBODY = 1, 2, -1
FIRST_NAP, LONGEST_NAP = 0.02, 0.5  # seconds between two tries to reach the other end


class Pairing(NamedTuple):
    """How positions of the local ring relate to those of the ring of one receiver."""

    incarnation: str
    """Of the receiver: a replacement has another."""
    shift: int
    """Add to a local position."""


class Earlier:
    """How many messages passed before this end took the place of another: the far end tells when it is reached."""

    def __init__(self) -> None:
        self.messages = 0
        self._known = threading.Event()

    def learn(self, messages: int) -> bool:
        """Takes the number; False where it was known already."""
        if self._known.is_set():
            return False
        self.messages = messages
        self._known.set()
        return True

    def wait(self, abandon: Abandon, what: str) -> int:
        """The number, as soon as it is known.

        Raises:
            Abandoned: the run is being stopped.
        """
        while not self._known.wait(NAP_MS / 1000):
            if abandon():
                raise Abandoned(f"{what} was given up, because the run is being stopped.")
        return self.messages


class Pump:
    """Empties a sender's ring into the receiver's, in a thread of its own.

    Args:
        ring: local; the sender is its producer.
        space: rung when a slot of it is free.
        published: rung by the sender.
        switchboard: reaches the receiver.
        end: name of the receiver's end.
        source: rank of the sender.
    """

    def __init__(
        self, ring: Ring, *, space: Doorbell, published: Doorbell, switchboard: Switchboard, end: str, source: int
    ) -> None:
        self._ring = ring
        self._words = ring.words
        self._space = space
        self._published = published
        self._switchboard = switchboard
        self._end = end
        self._source = source
        self._pairing: Pairing | None = None
        self.earlier = Earlier()
        self._stop = threading.Event()
        self._connection: Connection | None = None
        self._thread = threading.Thread(target=self._run, name=f"rollmill-pump-{end}", daemon=True)
        self._thread.start()

    def has_unsent(self) -> bool:
        """Whether something was published and not sent, and the receiver has not said that it wants no more."""
        return self._words[TAKEN] < self._words[PUBLISHED] and self._thread.is_alive()

    def has_something_to_send(self) -> bool:
        """Whether the sender was closed and what it left is still being sent."""
        return bool(self._words[ENDED]) and self._thread.is_alive()

    def close(self) -> None:
        """Stops, whether all was sent or not."""
        self._stop.set()
        self._published.ring()
        if (connection := self._connection) is not None:
            connection.end()
        self._thread.join()

    def _run(self) -> None:
        nap = FIRST_NAP
        while not self._stop.is_set() and not self._words[GONE]:
            sent = self.earlier.messages + self._words[TAKEN]
            dialled = self._switchboard.dial(self._end, source=self._source, sent=sent)
            if dialled is None:
                self._stop.wait(nap)
                nap = min(2 * nap, LONGEST_NAP)
                continue
            nap = FIRST_NAP
            if self._talk(*dialled):
                return

    def _talk(self, connection: Connection, answer: dict[str, Any]) -> bool:
        """Whether there is nothing more to say."""
        self._connection = connection
        try:
            if answer.get("gone"):
                return self._give_up()
            credit = self._pair(answer)
            return self._send_all(connection, credit)
        except RollmillError:  # lost; dial again
            return False
        finally:
            connection.close()

    def _pair(self, answer: dict[str, Any]) -> int:
        """Finds the message to go on with; returns how many of the receiver's slots were released."""
        incarnation, published = str(answer["incarnation"]), int(answer["published"])
        known = self._pairing
        if known is not None and known.incarnation == incarnation:
            arrived = published - known.shift
            if self._words[RELEASED] <= arrived <= self._words[TAKEN]:
                self._words[TAKEN] = arrived  # what was lost on the way is still in its slot
                return int(answer["released"])
        self._pairing = Pairing(incarnation, published - self._words[TAKEN])
        self._release(self._words[TAKEN])
        self.earlier.learn(int(answer["sequence"]) - self._words[TAKEN])
        return int(answer["released"])

    def _send_all(self, connection: Connection, released: int) -> bool:
        incoming = Incoming(connection)
        poll = select.poll()
        for source in (connection, self._published):
            poll.register(source.fileno(), select.POLLIN)
        while not self._stop.is_set():
            released = incoming.newest(released)
            if released == NOBODY:
                return self._give_up()
            ended = self._words[ENDED]
            if self._send_next(connection, released):
                continue
            if ended and self._words[TAKEN] == self._words[PUBLISHED]:
                connection.send(WORD.pack(END))
                incoming.drain()
                return True
            poll.poll()
            self._published.silence()
        return True

    def _send_next(self, connection: Connection, released: int) -> bool:
        assert self._pairing is not None
        shift, capacity = self._pairing.shift, self._ring.capacity
        position = self._words[TAKEN]
        self._release(min(position, released - shift))
        if position == self._words[PUBLISHED] or position + shift - released >= capacity:
            return False
        slot = self._ring.slots[position % capacity]
        sequence, *others = HEADER.unpack(slot.header)
        header = HEADER.pack(self.earlier.messages + sequence, *others)
        connection.send(WORD.pack(MESSAGE) + header, slot.payload)
        self._words[TAKEN] = position + 1
        return True

    def _release(self, position: int) -> None:
        if position > self._words[RELEASED]:
            self._words[RELEASED] = position
            self._space.ring()

    def _give_up(self) -> bool:
        self._words[GONE] = 1
        self._space.ring()
        return True


class Incoming:
    """Numbers that arrive in a connection, of which only the newest matters."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._buffer = bytearray(WORD.size)
        self._filled = 0

    def newest(self, known: int) -> int:
        """The newest number; `known` where none arrived."""
        while count := self._connection.receive_some(memoryview(self._buffer)[self._filled :]):
            self._filled += count
            if self._filled == WORD.size:
                self._filled = 0
                (known,) = WORD.unpack(self._buffer)
        return known

    def drain(self) -> None:
        """Reads on until the other end has read all and closed: closing first could destroy what it has not."""
        try:
            while True:
                self._connection.receive(1, timeout=PATIENCE)
        except RollmillError:
            return


class Inlet:
    """Puts what arrives from all sources of one receiver in its rings.

    Args:
        rings: by source; local, the receiver is their consumer.
        space: by source; rung when the receiver releases.
        arrived: the receiver's doorbell.
        name: for errors.
    """

    def __init__(
        self, rings: Mapping[int, Ring], *, space: Mapping[int, Doorbell], arrived: Doorbell, name: str
    ) -> None:
        self._rings = rings
        self._space = space
        self._arrived = arrived
        self._name = name
        self._incarnation = secrets.token_hex(8)
        self._sequences = dict.fromkeys(rings, 0)
        self.earlier = {source: Earlier() for source in rings}
        self._turns = {source: Turn() for source in rings}

    def serve(self, connection: Connection, hello: dict[str, Any]) -> None:
        """Talks with one source's pump; an older connection of the same source is ended first."""
        source = int(hello["source"])
        with self._turns[source].of(connection) as is_newest:
            if is_newest:
                self._begin(source, int(hello.get("sent", 0)))
                self._receive(connection, source)

    def _begin(self, source: int, sent: int) -> None:
        """What was sent before this receiver was there went to another one, or was lost with it."""
        if self.earlier[source].learn(sent):
            self._sequences[source] = sent

    def _receive(self, connection: Connection, source: int) -> None:
        ring = self._rings[source]
        if ring.words[GONE]:
            connection.send_json({"gone": True}, timeout=PATIENCE)
            return
        writer = RingWriter(ring, source=source, doorbell=self._arrived, checksum=False, name=self._name)
        places = {"published": writer.published, "released": writer.released, "sequence": self._sequences[source]}
        connection.send_json({"incarnation": self._incarnation, **places}, timeout=PATIENCE)
        stream = Stream(connection, writer, ring, self._space[source])
        while (header := stream.header()) is not None:
            sequence, _, _, size, sender, *_ = HEADER.unpack(header)
            if size != ring.layout.nbytes or sender != source or not writer.has_room():
                raise Refused(f"{self._name}: what came from {source} is no message of this channel.")
            stream.fill(writer.payload())
            self._sequences[source] = sequence + 1
            writer.publish_raw(header)
        writer.close()


class Stream:
    """Reads messages from a connection, and tells the other end meanwhile what was released."""

    def __init__(self, connection: Connection, writer: RingWriter, ring: Ring, space: Doorbell) -> None:
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
        if self._ring.words[GONE]:
            self._connection.send(WORD.pack(NOBODY))
            raise ConnectionLost("the receiver was closed.")
        if self._writer.released > self._told:
            self._told = self._writer.released
            self._connection.send(WORD.pack(self._told))
