"""The sender's half of a ring between hosts; see `tcp_experience` for the protocol."""

import select
import threading
import time
from typing import Any, NamedTuple

from rollmill.channels.errors import Refused
from rollmill.channels.shm.doorbell import Doorbell
from rollmill.channels.shm.ring import ENDED, GONE, HEADER, PRODUCER, PUBLISHED, RELEASED, TAKEN, Ring
from rollmill.channels.tcp.hub import Hub
from rollmill.channels.tcp.queue import END, LOOK_SECONDS, MESSAGE, NOBODY, WORD, ResumePoint, RingEnds
from rollmill.channels.transport.backoff import Backoff
from rollmill.channels.transport.connection import Connection
from rollmill.channels.transport.handshake import PATIENCE
from rollmill.core.errors import RollmillError


class PositionMap(NamedTuple):
    """Which messages of the local ring go to one receiver."""

    receiver: int
    """Its incarnation."""
    start: int
    """Position of the first of them."""


class SenderThread:
    """Empties a sender's ring into the receiver's, in a thread of its own.

    Args:
        ring: local; the sender is its producer.
        space: rung when a slot of it is free.
        published: rung by the sender.
        hub: reaches the receiver.
        ends: names of the two ends.
        source: rank of the sender.
    """

    def __init__(
        self,
        ring: Ring,
        *,
        space: Doorbell,
        published: Doorbell,
        hub: Hub,
        ends: RingEnds,
        source: int,
    ) -> None:
        self._ring = ring
        self._section = ring.section(1)
        self._producer, self._consumer = self._section.words, ring.ledger(1).words
        self._space = space
        self._published = published
        self._hub = hub
        self._ends = ends
        self._source = source
        self._pairing: PositionMap | None = None
        self._incarnation = hub.claim(ends.sender)
        self.earlier = ResumePoint()
        if self._incarnation == 1:
            self.earlier.learn(0)
        self._look_at = time.monotonic() + LOOK_SECONDS
        self._stop = threading.Event()
        self._connection: Connection | None = None
        self._thread = threading.Thread(target=self._run, name=f"rollmill-pump-{ends.receiver}", daemon=True)
        self._thread.start()

    def has_unsent(self) -> bool:
        """Whether something was published and not sent, and the receiver has not said that it wants no more."""
        return self._consumer[TAKEN] < self._producer[PUBLISHED] and self._thread.is_alive()

    def has_something_to_send(self) -> bool:
        """Whether the sender was closed and what it left is still being sent."""
        return bool(self._producer[ENDED]) and self._thread.is_alive()

    def close(self) -> None:
        """Stops, whether all was sent or not."""
        self._stop.set()
        self._published.ring()
        if (connection := self._connection) is not None:
            connection.end()
        self._thread.join()

    def _run(self) -> None:
        backoff = Backoff()
        while not self._stop.is_set() and not self._consumer[GONE]:
            sequence = self.earlier.sequence + self._consumer[TAKEN] if self.earlier.is_known else None
            hello = {"source": self._source, "sender": self._incarnation, "sequence": sequence}
            dialled = self._hub.dial(self._ends.receiver, **hello)
            if dialled is not None:
                if self._talk(*dialled):
                    return
                if self._pairing is not None:
                    backoff.reset()
            elif self._hub.is_replaced(self._ends.sender, self._incarnation):
                self._step_down()
                return
            self._stop.wait(backoff.seconds())

    def _talk(self, connection: Connection, answer: dict[str, Any]) -> bool:
        """Whether there is nothing more to say."""
        self._connection = connection
        try:
            if answer.get("gone"):
                return self._give_up()
            if answer.get("replaced"):
                return self._step_down()
            credit = self._pair(answer)
            return self._send_all(connection, credit)
        except RollmillError:  # lost; dial again
            return False
        finally:
            connection.close()

    def _pair(self, answer: dict[str, Any]) -> int:
        """Finds the message to go on with; returns how many of the receiver's slots were released."""
        receiver, arrived = int(answer["receiver"]), int(answer["arrived"])
        known = self._pairing
        if known is None or receiver > known.receiver:
            known = self._pairing = PositionMap(receiver, self._consumer[TAKEN])
            self._release(self._consumer[TAKEN])  # what was sent to the one before is not sent again
        if receiver < known.receiver or not 0 <= arrived <= self._consumer[TAKEN] - known.start:
            raise Refused(f"{self._ends.receiver}: a receiver that was replaced answered.")
        self._consumer[TAKEN] = known.start + arrived  # what was lost on the way is still in its slot
        self.earlier.learn(int(answer["sequence"]) - self._consumer[TAKEN])
        return int(answer["released"])

    def _send_all(self, connection: Connection, released: int) -> bool:
        incoming, connection.abandon = Incoming(connection), self._must_leave
        poll = select.poll()
        for source in (connection, self._published):
            poll.register(source.fileno(), select.POLLIN)
        while not self._must_leave():
            released = incoming.newest(released)
            if released == NOBODY:
                return self._give_up()
            ended = self._producer[ENDED]
            if self._send_next(connection, released):
                continue
            if ended and self._consumer[TAKEN] == self._producer[PUBLISHED]:
                connection.send(WORD.pack(END))
                incoming.drain()
                return True
            poll.poll(LOOK_SECONDS * 1000)
            self._published.silence()
        return self._stop.is_set()

    def _must_leave(self) -> bool:
        """Whether this pump was closed, or its receiver replaced; the broker is asked every two seconds."""
        if self._stop.is_set():
            return True
        if self._pairing is None or time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + LOOK_SECONDS
        return self._hub.is_replaced(self._ends.receiver, self._pairing.receiver)

    def _send_next(self, connection: Connection, released: int) -> bool:
        """Sends a message, where one is there and the receiver has a slot for it."""
        assert self._pairing is not None
        capacity, position = self._ring.capacity, self._consumer[TAKEN]
        released += self._pairing.start
        self._release(min(position, released))
        if position == self._producer[PUBLISHED] or position - released >= capacity:
            return False
        slot = self._section.slots[position % capacity]
        sequence, *others = HEADER.unpack(slot.header)
        header = HEADER.pack(self.earlier.sequence + sequence, *others)
        connection.send(WORD.pack(MESSAGE) + header, slot.payload)
        self._consumer[TAKEN] = position + 1
        return True

    def _release(self, position: int) -> None:
        if position > self._consumer[RELEASED]:
            self._consumer[RELEASED] = position
            self._space.ring()

    def _give_up(self) -> bool:
        self._consumer[GONE] = 1
        self._space.ring()
        return True

    def _step_down(self) -> bool:
        """Another sender took this one's place: the sender finds it out when it asks for room."""
        self._ring.root[PRODUCER] += 1
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
