"""Latest-value channels between hosts. Each end of a connection holds the newest message, copied from writer to
readers.

reader -> writer   nothing
writer -> reader   MESSAGE, version, payload, or END
"""

import select
import struct
import threading
from collections.abc import Sequence
from typing import Any

from rollmill.channels.errors import ConnectionLost
from rollmill.channels.layout import fresh_buffer
from rollmill.channels.protocols import Versioned
from rollmill.channels.shm.doorbell import Doorbell
from rollmill.channels.shm.latest import ENDED, BoardReader, BoardWriter, SeqlockBoard
from rollmill.channels.tcp.hub import Hub, LatestConnection
from rollmill.channels.transport.connection import Connection
from rollmill.channels.transport.dialling import MAX_SECONDS, Backoff
from rollmill.channels.transport.handshake import PATIENCE
from rollmill.channels.waiting import Waiter, never

FRAME = struct.Struct("<qq")
MESSAGE, END = 1, 2


class BoardPublisher:
    """The writer of a latest-value channel between hosts, which sends the newest message to each reader.

    A slow reader skips messages.
    """

    def __init__(self, board: SeqlockBoard, doorbells: Sequence[Doorbell], name: str) -> None:
        self._board = board
        self._doorbells = doorbells
        self._name = name
        self._latest_connections = [LatestConnection() for _ in doorbells]
        self._serving: set[int] = set()

    def serve(self, connection: Connection, hello: dict[str, Any]) -> None:
        """Serves the connection of one reader. An older connection of that reader is ended first."""
        index = int(hello["reader"])
        with self._latest_connections[index].take_over(connection) as is_latest:
            if is_latest:
                connection.send_json({}, timeout=PATIENCE)
                self._serving.add(index)
                try:
                    self._send_newest(connection, self._doorbells[index])
                finally:
                    self._serving.discard(index)

    def is_draining(self) -> bool:
        """Returns whether the writer was closed and a connected reader has not yet received the end of the
        stream.
        """
        return bool(self._board.words[ENDED]) and bool(self._serving)

    def _send_newest(self, connection: Connection, doorbell: Doorbell) -> None:
        reader = BoardReader(self._board, Waiter(doorbell, never, self._name), self._name)
        buffer = fresh_buffer(self._board.layout.nbytes)
        poll = select.poll()
        for source in (connection, doorbell):
            poll.register(source.fileno(), select.POLLIN)
        sent = 0
        while True:
            ended, newest = reader.ended(), reader.newest()
            if newest is not None and newest.number > sent:
                if reader.copy_into(buffer, newest):
                    connection.send(FRAME.pack(MESSAGE, newest.version), buffer.data)
                    sent = newest.number
            elif ended:
                connection.send(FRAME.pack(END, 0))
                return
            else:
                poll.poll()
                doorbell.silence()
                connection.check_silent()


class TcpLatestReader:
    """One reader's end of a latest-value channel between hosts, an implementation of
    `channels.protocols.LatestReader`.

    A thread keeps its copy of the newest message up to date.
    """

    def __init__(
        self, board: SeqlockBoard, doorbell: Doorbell, reader: BoardReader, *, hub: Hub, end: str, index: int
    ) -> None:
        self._board = board
        self._doorbell = doorbell
        self._reader = reader
        self._hub = hub
        self._end = end
        self._index = index
        self._stop = threading.Event()
        self._connection: Connection | None = None
        self._thread = threading.Thread(target=self._run, name=f"rollmill-{end}", daemon=True)
        self._thread.start()

    def version(self) -> int | None:
        """Returns the version of the newest message that has arrived, or None before the first."""
        return self._reader.version()

    def read(self, *, at_least: int | None = None, timeout: float | None = None) -> Versioned:
        """Copies the newest message that has arrived, after waiting until its version is at least `at_least`.

        Raises `TimedOut` after `timeout` seconds.
        """
        return self._reader.read(at_least=at_least, timeout=timeout)

    def close(self) -> None:
        """Ends the connection to the writer."""
        self._stop.set()
        if (connection := self._connection) is not None:
            connection.end()
        self._thread.join()

    def _run(self) -> None:
        backoff = Backoff()
        while not self._stop.is_set():
            dialled = self._hub.dial(self._end, reader=self._index)
            if dialled is None:
                self._stop.wait(backoff.seconds())
                continue
            backoff.reset()
            self._connection = dialled[0]
            self._receive(dialled[0])

    def _receive(self, connection: Connection) -> None:
        writer = BoardWriter(self._board, [self._doorbell], self._end)
        try:
            while not self._stop.is_set():
                kind, version = FRAME.unpack(connection.receive(FRAME.size))
                if kind == END:
                    writer.close()
                    # waits before dialling again, because another writer may replace this one
                    self._stop.wait(MAX_SECONDS)
                    return
                connection.receive_into(writer.begin())
                writer.finish(version)
        except ConnectionLost:
            return
        finally:
            connection.close()
