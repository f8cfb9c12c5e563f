"""Accepts connections, authenticates them, and serves each in a thread of its own.

The broker, the ends of channels, the supervisor, and workers placed by Ray all use this listener. One thread
accepts connections and runs all handshakes, so an unauthenticated peer costs a file descriptor and no thread. A
handshake has a time limit, and if too many are in progress, the oldest is dropped.
"""

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable

from rollmill.channels.errors import ConnectionLost, TimedOut
from rollmill.channels.shm.doorbell import Doorbell
from rollmill.channels.transport.handshake import Admission, Dialogue, Step, admit
from rollmill.channels.transport.refused_connections import RefusalLog, RefusedConnection
from rollmill.core.errors import RollmillError

HANDSHAKE_SECONDS = 10.0
"""Time limit for a whole handshake in seconds."""

MAX_HANDSHAKES = 64
"""Maximum number of handshakes in progress."""

REST_SECONDS = 0.05
"""Seconds for which no connection is accepted after the system has run out of file descriptors."""


class Handshake:
    """A connection whose peer is not authenticated yet."""

    def __init__(self, sock: socket.socket, address: str, dialogue: Dialogue[Admission]) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.address = address
        """IP address of the other end, empty if it is on this host."""
        self.silent = True
        """Whether the other end has sent nothing."""
        self.deadline = time.monotonic() + HANDSHAKE_SECONDS
        self._dialogue = dialogue
        self._received = bytearray()
        self._unsent, self._wanted = next(dialogue)

    def fileno(self) -> int:
        """Returns the file descriptor of the connection's socket."""
        return self.sock.fileno()

    @property
    def events(self) -> int:
        """The socket event to wait for next, as a flag of `selectors`."""
        return selectors.EVENT_WRITE if self._unsent else selectors.EVENT_READ

    def advance(self) -> Admission | None:
        """Continues the handshake as far as possible without blocking. Returns the result of a complete handshake,
        and otherwise None.

        Raises `Refused` if the handshake fails, and an `OSError` if the connection was lost.
        """
        try:
            while True:
                step = self._exchange()
                self._received.clear()
                self._unsent, self._wanted = step
        except BlockingIOError:
            return None
        except StopIteration as end:
            return end.value

    def _exchange(self) -> Step:
        while self._unsent:
            self._unsent = self._unsent[self.sock.send(self._unsent) :]
        while len(self._received) < self._wanted:
            chunk = self.sock.recv(self._wanted - len(self._received))
            if not chunk:
                raise ConnectionLost("the connecting process closed the connection before authentication.")
            self._received += chunk
            self.silent = False
        return self._dialogue.send(bytes(self._received))


class Listener:
    """Accepts connections of peers that know the token, until it is closed.

    It takes ownership of a listening socket. `serve` is called with each authenticated connection, in a thread of
    its own, and must first send the admission's answer. When it returns or raises an exception, the connection is
    closed. `show` receives sentences about refused connections, in the listener's thread.
    """

    def __init__(
        self,
        sock: socket.socket,
        token: bytes,
        serve: Callable[[socket.socket, Admission], None],
        show: Callable[[str], None] = lambda line: None,
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._token = token
        self._serve = serve
        self._refusals = RefusalLog(show)
        self._stop = Doorbell.create()
        self._handshakes: dict[int, Handshake] = {}  # by file descriptor, oldest first
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._served: dict[threading.Thread, socket.socket] = {}
        self._thread = threading.Thread(target=self._run, name="rollmill-listener", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops accepting connections. Those that are being served continue."""
        if not self._thread.is_alive():
            return
        self._stop.ring()
        self._thread.join()
        self._socket.close()
        self._stop.close()

    def end_served(self) -> list[threading.Thread]:
        """Shuts down all connections that are being served, and returns their threads."""
        with self._lock:
            served = dict(self._served)
        for sock in served.values():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        return list(served)

    def close(self) -> None:
        """Stops accepting connections, shuts down all of them, and waits for their threads."""
        self.stop()
        for thread in self.end_served():
            thread.join()

    def _run(self) -> None:
        with self._selector:
            for source in (self._socket, self._stop):
                self._selector.register(source, selectors.EVENT_READ)
            while self._process_events():
                self._drop_late()
                self._show_refusals()
            for handshake in list(self._handshakes.values()):
                self._forget(handshake).close()
            self._show_refusals(everything=True)

    def _process_events(self) -> bool:
        """Waits for events until the next deadline and handles them, or False once the listener is stopped."""
        deadlines = [handshake.deadline for handshake in self._handshakes.values()]
        deadlines += [] if self._refusals.due is None else [self._refusals.due]
        timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._stop:
                return False
            if key.fileobj is self._socket:
                self._accept()
            elif key.fd in self._handshakes:  # it may just have been dropped to make room
                self._advance(self._handshakes[key.fd])
        return True

    def _accept(self) -> None:
        try:
            sock, peer = self._socket.accept()
        except BlockingIOError:  # the dialler has already disconnected
            return
        except OSError as error:  # most likely, no file descriptors are left
            self._make_room(error)
            time.sleep(REST_SECONDS)
            return
        if len(self._handshakes) >= MAX_HANDSHAKES:
            self._make_room(f"{MAX_HANDSHAKES} other connections are waiting to authenticate")
        handshake = Handshake(sock, address_of(peer), admit(self._token))
        self._handshakes[sock.fileno()] = handshake
        self._selector.register(handshake, handshake.events)
        self._advance(handshake)

    def _make_room(self, reason: object) -> None:
        for oldest in list(self._handshakes.values())[:1]:
            self._refuse(oldest, reason)

    def _advance(self, handshake: Handshake) -> None:
        try:
            admission = handshake.advance()
        except Exception as error:  # an unauthenticated peer may send anything, and must not disturb others
            self._refuse(handshake, error, idle=False)
            return
        if admission is None:
            self._selector.modify(handshake, handshake.events)
        else:
            self._begin(self._forget(handshake), handshake.address, admission)

    def _drop_late(self) -> None:
        now = time.monotonic()
        for handshake in [candidate for candidate in self._handshakes.values() if candidate.deadline <= now]:
            self._refuse(handshake, TimedOut(f"it did not authenticate within {HANDSHAKE_SECONDS:g} s."))

    def _refuse(self, handshake: Handshake, reason: object, *, idle: bool = True) -> None:
        self._forget(handshake).close()
        self._refusals.add(RefusedConnection(handshake.address, str(reason), idle=idle and handshake.silent))

    def _forget(self, handshake: Handshake) -> socket.socket:
        self._selector.unregister(handshake)
        del self._handshakes[handshake.fileno()]
        return handshake.sock

    def _begin(self, sock: socket.socket, address: str, admission: Admission) -> None:
        thread = threading.Thread(
            target=self._serve_one, args=(sock, admission), name="rollmill-connection", daemon=True
        )
        with self._lock:
            self._served[thread] = sock
        try:
            thread.start()
        # no threads are left, and the dialler tries again because it has received no answer
        except RuntimeError as error:
            with self._lock:
                del self._served[thread]
            sock.close()
            self._refusals.add(RefusedConnection(address, str(error)))

    def _serve_one(self, sock: socket.socket, admission: Admission) -> None:
        try:
            # the peer has disconnected, so nobody needs the answer
            with contextlib.suppress(RollmillError, OSError):
                self._serve(sock, admission)
        finally:
            with self._lock:
                del self._served[threading.current_thread()]
            sock.close()

    def _show_refusals(self, *, everything: bool = False) -> None:
        with contextlib.suppress(Exception):
            self._refusals.show_due(everything=everything)


def address_of(peer: object) -> str:
    """Returns the IP address of a peer, or an empty string for a peer on a Unix socket."""
    return str(peer[0]) if isinstance(peer, tuple) else ""
