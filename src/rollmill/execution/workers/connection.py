"""The coordinator's side of the connections: whoever knows the token is taken in, all others are sent away."""

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from rollmill.channels import Damaged, Refused, TimedOut
from rollmill.execution.workers.frames import receive_frame, send_frame
from rollmill.execution.workers.handshake import Claim, ask, let_go, listen, refuse, welcome
from rollmill.execution.workers.messages import Message

MOST_STRANGERS = 64
"""Connections that may be in the middle of the handshake."""

MOST_UNSENT = 8 * 2**30
SMALL = 2**16
"""Bytes of a message that is queued however much lies there."""

Frame: TypeAlias = list[bytes | memoryview]


class Connection:
    """The line to one worker; what is sent before it comes waits for it.

    Args:
        take: is given each message of the worker, in a thread of the connection's.
    """

    def __init__(self, take: Callable[[Message], None]) -> None:
        self.taken = False
        """Whether a worker has come to it, ever."""
        self.ended = threading.Event()
        """Set once nothing more can come from that worker."""
        self.last_heard = time.monotonic()
        self._take = take
        self._peer: socket.socket | None = None
        self._unsent: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._unsent_bytes = 0
        self._counting = threading.Lock()

    def send(self, frame: Frame) -> None:
        """Queues a frame.

        Raises:
            TimedOut: the worker has left gigabytes unread.
        """
        nbytes = _size(frame)
        with self._counting:
            if nbytes > SMALL and self._unsent_bytes + nbytes > MOST_UNSENT:
                raise TimedOut(f"a worker has {self._unsent_bytes:,} bytes of messages to read, and reads none.")
            self._unsent_bytes += nbytes
        self._unsent.put(frame)

    def serve(self, peer: socket.socket) -> None:
        """Sends and takes until the worker closes the connection, or says what makes no sense."""
        self._peer = peer
        self._hear()
        sender = threading.Thread(target=self._send_all, args=(peer,), name="rollmill-send", daemon=True)
        sender.start()
        with contextlib.suppress(OSError, Damaged):
            while (message := receive_frame(peer, heard=self._hear)) is not None:
                self._take(message)
        self.hang_up()
        sender.join()

    def hang_up(self) -> None:
        """Closes the connection, which makes a worker that still lives exit."""
        self._unsent.put(None)
        if self._peer is not None:
            with contextlib.suppress(OSError):
                self._peer.shutdown(socket.SHUT_RDWR)

    def _hear(self) -> None:
        self.last_heard = time.monotonic()

    def _send_all(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while (frame := self._unsent.get()) is not None:
                send_frame(peer, frame)
                with self._counting:
                    self._unsent_bytes -= _size(frame)


Admit: TypeAlias = Callable[[Claim], Connection | str]
"""The connection of whoever claims to be a worker; or why it is refused."""


class Door:
    """Listens for workers; each that is admitted is served in a thread of its own.

    Args:
        address: to listen on; see `handshake`.
        token: what workers must know.
        admit: see `Admit`.
        show: is told whom the door was closed to.
        settings: that workers are told.
    """

    def __init__(
        self, address: str, token: bytes, admit: Admit, show: Callable[[str], None], **settings: float
    ) -> None:
        self._listener, self.address = listen(address)
        self._token = token
        self._admit = admit
        self._show = show
        self._settings = settings
        self._open = True
        self._strangers = threading.Semaphore(MOST_STRANGERS)
        self._guests: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._listen, name="rollmill-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Takes nobody in any more, and sends away whoever stands in the door."""
        self._open = False
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        let_go(self.address)
        self._thread.join()
        for guest in list(self._guests):
            with contextlib.suppress(OSError):
                guest.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        while self._open:
            try:
                guest, _ = self._listener.accept()
            except OSError:  # closed, or out of file descriptors for now
                time.sleep(0.05)
                continue
            if not self._strangers.acquire(blocking=False):
                guest.close()
                continue
            self._guests.add(guest)
            threading.Thread(target=self._receive, args=(guest,), name="rollmill-guest", daemon=True).start()

    def _receive(self, guest: socket.socket) -> None:
        connection = self._ask(guest)
        try:
            if connection is not None:
                welcome(guest, **self._settings)
                connection.serve(guest)
        except OSError as error:
            self._tell(error)
        finally:
            self._guests.discard(guest)
            guest.close()
            if connection is not None:
                connection.ended.set()

    def _ask(self, guest: socket.socket) -> Connection | None:
        try:
            claim = ask(guest, self._token)
            admitted = self._admit(claim)
            if isinstance(admitted, Connection):
                return admitted
            refuse(guest, admitted)
            self._tell(f"{claim.name!r} was not expected: {admitted}")
        except (OSError, Damaged, Refused, TypeError, ValueError) as error:  # a stranger may send anything
            self._tell(error)
        finally:
            self._strangers.release()
        return None

    def _tell(self, what: str | Exception) -> None:
        with contextlib.suppress(Exception):
            self._show(f"a connection to {self.address} was refused: {what}")


def _size(frame: Frame) -> int:
    return sum(memoryview(part).nbytes for part in frame)
