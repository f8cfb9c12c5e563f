"""The sending half of rings between hosts. See `channels.tcp.queue` for the protocol."""

import select
import threading
import time
from typing import Any, NamedTuple

from rollmill.channels.errors import Refused
from rollmill.channels.shm.doorbell import Doorbell
from rollmill.channels.shm.ring import ENDED, GONE, HEADER, PRODUCER, PUBLISHED, RELEASED, TAKEN, Ring
from rollmill.channels.tcp.hub import Hub
from rollmill.channels.tcp.queue import END, MESSAGE, NOBODY, POLL_SECONDS, WORD, ResumePoint, RingEnds
from rollmill.channels.transport.connection import Connection
from rollmill.channels.transport.dialling import Backoff
from rollmill.channels.transport.handshake import PATIENCE
from rollmill.core.errors import RollmillError


class PositionMap(NamedTuple):
    """Maps positions in the sender's local ring to the messages for one holder of the receiving end."""

    receiver: int
    """Number (incarnation) of the process that holds the receiving end."""
    start: int
    """Position in the local ring of the first message for this holder."""


class SenderThread:
    """Sends the messages of a local ring to a receiver on another host, in a thread of its own."""

    def __init__(
        self, ring: Ring, *, space: Doorbell, published: Doorbell, hub: Hub, ends: RingEnds, source: int
    ) -> None:
        self._ring = ring
        self._section = ring.section(1)
        self._producer, self._consumer = self._section.words, ring.ledger(1).words
        self._space = space
        self._published = published
        self._hub = hub
        self._ends = ends
        self._source = source
        self._positions: PositionMap | None = None
        self._incarnation = hub.claim(ends.sender)
        self.earlier = ResumePoint()
        if self._incarnation == 1:
            self.earlier.learn(0)
        self._next_poll = time.monotonic() + POLL_SECONDS
        self._stop = threading.Event()
        self._connection: Connection | None = None
        self._thread = threading.Thread(target=self._run, name=f"rollmill-sender-{ends.receiver}", daemon=True)
        self._thread.start()

    def has_unsent(self) -> bool:
        """Returns whether published messages are still unsent and the receiver still accepts them."""
        return self._consumer[TAKEN] < self._producer[PUBLISHED] and self._thread.is_alive()

    def is_draining(self) -> bool:
        """Returns whether the sender was closed and its remaining messages are still being sent."""
        return bool(self._producer[ENDED]) and self._thread.is_alive()

    def close(self) -> None:
        """Stops the thread. Messages that are still unsent are lost."""
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
                if self._serve(*dialled):
                    return
                if self._positions is not None:
                    backoff.reset()
            elif self._hub.is_replaced(self._ends.sender, self._incarnation):
                self._step_down()
                return
            self._stop.wait(backoff.seconds())

    def _serve(self, connection: Connection, answer: dict[str, Any]) -> bool:
        """Sends over one connection until it is lost, and returns True when there is nothing left to do."""
        self._connection = connection
        try:
            if answer.get("gone"):
                return self._give_up()
            if answer.get("replaced"):
                return self._step_down()
            released = self._resume(answer)
            return self._send_all(connection, released)
        except RollmillError:  # the connection was lost, so dial again
            return False
        finally:
            connection.close()

    def _resume(self, answer: dict[str, Any]) -> int:
        """Sets the next message to send, and returns how many of the receiver's slots were released."""
        receiver, arrived = int(answer["receiver"]), int(answer["arrived"])
        positions = self._positions
        if positions is None or receiver > positions.receiver:
            positions = self._positions = PositionMap(receiver, self._consumer[TAKEN])
            self._release(self._consumer[TAKEN])  # rule 1: messages sent to the previous receiver are not resent
        if receiver < positions.receiver or not 0 <= arrived <= self._consumer[TAKEN] - positions.start:
            raise Refused(f"{self._ends.receiver}: the answer came from a receiver that has been replaced.")
        self._consumer[TAKEN] = positions.start + arrived  # messages lost in transit still occupy their slots
        released = int(answer["released"])
        if not self.earlier.is_known:
            # Less than 0 if messages of the previous sender still occupy slots at the receiver.
            self._consumer[RELEASED] = min(self._consumer[RELEASED], released)
        self.earlier.learn(int(answer["sequence"]) - self._consumer[TAKEN])
        return released

    def _send_all(self, connection: Connection, released: int) -> bool:
        credit, connection.abandon = CreditStream(connection), self._must_disconnect
        poll = select.poll()
        for source in (connection, self._published):
            poll.register(source.fileno(), select.POLLIN)
        while not self._must_disconnect():
            released = credit.newest(released)
            if released == NOBODY:
                return self._give_up()
            ended = self._producer[ENDED]
            if self._send_next(connection, released):
                continue
            if ended and self._consumer[TAKEN] == self._producer[PUBLISHED]:
                connection.send(WORD.pack(END))
                credit.drain()
                return True
            poll.poll(POLL_SECONDS * 1000)
            self._published.silence()
        return self._stop.is_set()

    def _must_disconnect(self) -> bool:
        """Returns whether this thread was stopped or the receiver replaced. Polls the broker every two seconds."""
        if self._stop.is_set():
            return True
        if self._positions is None or time.monotonic() < self._next_poll:
            return False
        self._next_poll = time.monotonic() + POLL_SECONDS
        return self._hub.is_replaced(self._ends.receiver, self._positions.receiver)

    def _send_next(self, connection: Connection, released: int) -> bool:
        """Sends a message if one is published and the receiver has a free slot, and returns True if it did."""
        assert self._positions is not None
        capacity, position = self._ring.capacity, self._consumer[TAKEN]
        released += (
            self._positions.start
        )  # converts the receiver's count of this sender to positions in the local ring
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
        """Marks the sender as replaced: it gets `ChannelClosed` when it next checks for room."""
        self._ring.root[PRODUCER] += 1
        self._space.ring()
        return True


class CreditStream:
    """Reads a receiver's credit: the number of messages that it has released. Only the newest number matters."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._buffer = bytearray(WORD.size)
        self._filled = 0

    def newest(self, known: int) -> int:
        """Returns the newest number of released messages, or `known` if none has arrived."""
        while count := self._connection.receive_some(memoryview(self._buffer)[self._filled :]):
            self._filled += count
            if self._filled == WORD.size:
                self._filled = 0
                (known,) = WORD.unpack(self._buffer)
        return known

    def drain(self) -> None:
        """Reads until the other end has closed. Closing first could discard data that it has not yet read."""
        try:
            while True:
                self._connection.receive(1, timeout=PATIENCE)
        except RollmillError:
            return
