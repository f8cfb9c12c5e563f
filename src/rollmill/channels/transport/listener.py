"""Takes connections that know the token, and serves each in a thread of its own.

All listeners of Rollmill are this one: of the broker, of the ends of channels, of the supervisor and of the lines
of Ray's workers. One thread accepts, and leads the handshakes of all who have not proved themselves. A stranger
costs a file descriptor and no thread; it has a limit of time for the whole handshake, and where there are too many
of them the one that has taken longest must go.
"""

import contextlib
import os
import secrets
import selectors
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rollmill.channels.errors import ConnectionLost, TimedOut
from rollmill.channels.protocols import Address
from rollmill.channels.shm.doorbell import Doorbell
from rollmill.channels.transport.handshake import Admission, Dialogue, Step, admit
from rollmill.core.errors import RollmillError, UsageError

BACKLOG = 128
HAS_ABSTRACT_PATHS = sys.platform == "linux"

HANDSHAKE_SECONDS = 10.0
"""For the whole of it."""

MOST_HANDSHAKES = 64
"""That are under way at the same time."""

REST_SECONDS = 0.05
"""For which nobody is accepted where the system has no file descriptor to spare."""


class Handshake:
    """A connection whose other end has not proved itself yet."""

    def __init__(self, sock: socket.socket, dialogue: Dialogue[Admission]) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.deadline = time.monotonic() + HANDSHAKE_SECONDS
        self._dialogue = dialogue
        self._received = bytearray()
        self._unsent, self._wanted = next(dialogue)

    def fileno(self) -> int:
        """The socket's file descriptor."""
        return self.sock.fileno()

    @property
    def events(self) -> int:
        """The socket events that the peer waits for, as `selectors` names them."""
        return selectors.EVENT_WRITE if self._unsent else selectors.EVENT_READ

    def advance(self) -> Admission | None:
        """Goes on as far as it can without waiting; returns the result at the end.

        Raises:
            Refused: see `admit`.
            OSError: the other end is gone.
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
            more = self.sock.recv(self._wanted - len(self._received))
            if not more:
                raise ConnectionLost("it closed the connection before it had proved itself.")
            self._received += more
        return self._dialogue.send(bytes(self._received))


class Listener:
    """Listens until it is closed.

    Args:
        sock: bound and listening; now the listener's.
        token: which diallers must know.
        serve: is called with each connection that does, in a thread of its own, and sends the admission's answer
            first. When it returns or raises, the connection is closed.
        show: is given a sentence for each connection that was turned away, from any thread.
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
        self._show = show
        self._stop = Doorbell.create()
        self._handshakes: dict[int, Handshake] = {}  # by file descriptor, the oldest first
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._served: dict[threading.Thread, socket.socket] = {}
        self._thread = threading.Thread(target=self._run, name="rollmill-listener", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Takes nobody in any more; those who are served go on."""
        if not self._thread.is_alive():
            return
        self._stop.ring()
        self._thread.join()
        self._socket.close()
        self._stop.close()

    def end_served(self) -> list[threading.Thread]:
        """Ends all connections that are served; returns their threads."""
        with self._lock:
            served = dict(self._served)
        for sock in served.values():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        return list(served)

    def close(self) -> None:
        """Ends all connections and waits for their threads."""
        self.stop()
        for thread in self.end_served():
            thread.join()

    def _run(self) -> None:
        with self._selector:
            for source in (self._socket, self._stop):
                self._selector.register(source, selectors.EVENT_READ)
            while self._look():
                self._drop_late()
            for handshake in list(self._handshakes.values()):
                self._forget(handshake).close()

    def _look(self) -> bool:
        """Waits for something to happen and attends to it; whether to go on."""
        limit = min((each.deadline for each in self._handshakes.values()), default=None)
        timeout = None if limit is None else max(0.0, limit - time.monotonic())
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._stop:
                return False
            if key.fileobj is self._socket:
                self._accept()
            elif key.fd in self._handshakes:  # it may have had to make room just now
                self._advance(self._handshakes[key.fd])
        return True

    def _accept(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except BlockingIOError:  # the dialler has gone again
            return
        except OSError as error:  # most likely there is no file descriptor left
            self._make_room(error)
            time.sleep(REST_SECONDS)
            return
        if len(self._handshakes) >= MOST_HANDSHAKES:
            self._make_room(f"{MOST_HANDSHAKES} others wait to prove themselves")
        handshake = Handshake(sock, admit(self._token))
        self._handshakes[sock.fileno()] = handshake
        self._selector.register(handshake, handshake.events)
        self._advance(handshake)

    def _make_room(self, reason: object) -> None:
        for oldest in list(self._handshakes.values())[:1]:
            self._turn_away(oldest, reason)

    def _advance(self, handshake: Handshake) -> None:
        try:
            admission = handshake.advance()
        except Exception as error:  # a stranger may send anything, and the others must not suffer from it
            self._turn_away(handshake, error)
            return
        if admission is None:
            self._selector.modify(handshake, handshake.events)
        else:
            self._begin(self._forget(handshake), admission)

    def _drop_late(self) -> None:
        now = time.monotonic()
        for handshake in [each for each in self._handshakes.values() if each.deadline <= now]:
            self._turn_away(handshake, TimedOut(f"it did not prove itself within {HANDSHAKE_SECONDS:g} s."))

    def _turn_away(self, handshake: Handshake, reason: object) -> None:
        self._forget(handshake).close()
        self._tell(reason)

    def _forget(self, handshake: Handshake) -> socket.socket:
        self._selector.unregister(handshake)
        del self._handshakes[handshake.fileno()]
        return handshake.sock

    def _begin(self, sock: socket.socket, admission: Admission) -> None:
        thread = threading.Thread(
            target=self._serve_one, args=(sock, admission), name="rollmill-connection", daemon=True
        )
        with self._lock:
            self._served[thread] = sock
        try:
            thread.start()
        except RuntimeError as error:  # no more threads: the dialler, who has no answer yet, tries again
            with self._lock:
                del self._served[thread]
            sock.close()
            self._tell(error)

    def _serve_one(self, sock: socket.socket, admission: Admission) -> None:
        try:
            with contextlib.suppress(RollmillError, OSError):  # who is gone needs no answer
                self._serve(sock, admission)
        finally:
            with self._lock:
                del self._served[threading.current_thread()]
            sock.close()

    def _tell(self, reason: object) -> None:
        with contextlib.suppress(Exception):
            self._show(f"a connection was refused: {reason}")


def listen_on_host(host: str, port: int = 0) -> tuple[socket.socket, Address]:
    """A listening TCP socket, and where it is reached; port 0 takes a free one.

    Raises:
        UsageError: the host is none of this machine's addresses, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise UsageError(f"{host}:{port} cannot be listened on: {error}.") from error
    return sock, (host, sock.getsockname()[1])


def listen_in_host() -> tuple[socket.socket, str, Callable[[], None]]:
    """A listening Unix socket, its path, and what removes the path.

    On Linux the path is abstract ("@" stands for the zero byte): it is no file, and goes with the process.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if HAS_ABSTRACT_PATHS:
        path = f"@rollmill-{secrets.token_hex(8)}"
        sock.bind(path.replace("@", "\0", 1))
        sock.listen(BACKLOG)
        return sock, path, lambda: None
    directory = Path(tempfile.mkdtemp(prefix="rollmill-", dir="/tmp"))  # short: paths are limited to 104 bytes
    path = str(directory / "broker")
    sock.bind(path)
    sock.listen(BACKLOG)
    return sock, path, lambda: _remove(directory)


def _remove(directory: Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(directory / "broker")
        os.rmdir(directory)
