"""The coordinator's connections to its workers. Peers without the token of the run are rejected."""

import contextlib
import errno
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from rollmill.channels.errors import Damaged, TimedOut
from rollmill.channels.transport.addresses import listen, remove_socket_file
from rollmill.channels.transport.handshake import Admission
from rollmill.channels.transport.listener import Listener, address_of
from rollmill.channels.transport.tcp_options import SECONDS_UNTIL_LOST, seconds_unacknowledged
from rollmill.processes import clocks
from rollmill.processes.clocks import ClockWatch
from rollmill.processes.framing import encode, receive_frame, send_frame
from rollmill.processes.handshake import Identity, claim_of, refuse, welcome
from rollmill.processes.messages import WorkerMessage

MAX_UNSENT = 8 * 2**30
UNREACHABLE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}
"""Error numbers of a connection whose other host has acknowledged nothing for too long."""

SMALL = 2**16
"""Bytes of a message that is queued even if the queue is full."""

Frame: TypeAlias = list[bytes | memoryview]


class WorkerConnection:
    """The coordinator's connection to one worker. Messages sent before the worker connects are queued."""

    def __init__(self, take: Callable[[WorkerMessage], None]) -> None:
        self.taken = False
        """Whether a worker has come to it, ever."""
        self.ended = threading.Event()
        """Set once nothing more can come from that worker."""
        self.last_heard = time.monotonic()
        self.watch = ClockWatch()
        self._take = take
        self.host = ""
        """Address of the worker's host, empty for this host."""
        self._timed_out = False
        self._peer: socket.socket | None = None
        self._unsent: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._unsent_bytes = 0
        self._counting = threading.Lock()

    def send(self, frame: Frame) -> None:
        """Queues a frame for the worker. Raises `TimedOut` if the worker has left gigabytes of messages unread."""
        nbytes = _size(frame)
        with self._counting:
            if nbytes > SMALL and self._unsent_bytes + nbytes > MAX_UNSENT:
                raise TimedOut(f"a worker does not read its messages: {self._unsent_bytes:,} bytes are waiting.")
            self._unsent_bytes += nbytes
        self._unsent.put(frame)

    def serve(self, peer: socket.socket) -> None:
        """Sends queued frames and receives messages until the worker closes the connection or violates the
        protocol.
        """
        self._peer = peer
        self._hear()
        sender = threading.Thread(target=self._send_all, args=(peer,), name="rollmill-send", daemon=True)
        sender.start()
        self.measure_clock()
        try:
            while (message := receive_frame(peer, heard=self._hear)) is not None:
                if message.kind == clocks.KIND:
                    self._ask(self.watch.take(message.fields))
                else:
                    self._take(message)
        except Damaged:
            pass
        except OSError as error:
            self._timed_out = error.errno in UNREACHABLE
        self.hang_up()
        sender.join()

    def measure_clock(self) -> None:
        """Measures the offset of the worker's clock, unless the worker is on this host."""
        if self.host and self._peer is not None:
            self._ask(self.watch.begin())

    def _ask(self, question: WorkerMessage | None) -> None:
        if question is not None:
            self.send(encode(question))

    def hang_up(self) -> None:
        """Closes the connection. If the worker is still alive, it exits as a result."""
        self._unsent.put(None)
        if self._peer is not None:
            with contextlib.suppress(OSError):
                self._peer.shutdown(socket.SHUT_RDWR)

    def silence(self) -> float:
        """Returns the seconds since the kernel of the worker's host last acknowledged anything. 0.0 for a worker
        on this host.
        """
        if self._timed_out:
            return float(SECONDS_UNTIL_LOST)
        return 0.0 if self._peer is None else seconds_unacknowledged(self._peer) or 0.0

    def _hear(self) -> None:
        self.last_heard = time.monotonic()

    def _send_all(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while (frame := self._unsent.get()) is not None:
                send_frame(peer, frame)
                with self._counting:
                    self._unsent_bytes -= _size(frame)


Admit: TypeAlias = Callable[[Identity], WorkerConnection | str]
"""Function that returns the connection of a peer that claims to be a worker, or the reason to reject it."""


class Acceptor:
    """Listens for workers, and serves each accepted worker in its own thread."""

    def __init__(
        self, address: str, token: bytes, admit: Admit, show: Callable[[str], None], **settings: float
    ) -> None:
        sock, self.address = listen(address)
        self._admit = admit
        self._show = show
        self._settings = settings
        self._listener = Listener(sock, token, self._receive, self._report)

    def close(self) -> None:
        """Stops listening for workers, and closes all connections."""
        self._listener.stop()
        remove_socket_file(self.address)
        self._listener.end_served()

    def _receive(self, peer: socket.socket, admission: Admission) -> None:
        try:
            connection = self._connection_of(peer, admission)
        except (OSError, Damaged) as error:
            self._report(f"a connection was rejected: {error}")
            return
        if connection is None:
            return
        try:
            welcome(peer, admission, **self._settings)
            connection.serve(peer)
        except (OSError, RuntimeError) as error:  # a RuntimeError means that no thread could be started
            self._report(f"a connection was lost: {error}")
        finally:
            connection.ended.set()

    def _connection_of(self, peer: socket.socket, admission: Admission) -> WorkerConnection | None:
        claim = claim_of(admission)._replace(host=address_of(peer.getpeername()))
        admitted = self._admit(claim)
        if isinstance(admitted, WorkerConnection):
            return admitted
        refuse(peer, admission, admitted)
        self._report(f"a connection was rejected: {claim.name!r}: {admitted}")
        return None

    def _report(self, line: str) -> None:
        with contextlib.suppress(Exception):
            self._show(f"{self.address}: {line}")


def _size(frame: Frame) -> int:
    return sum(memoryview(part).nbytes for part in frame)
