"""Takes connections that know the token, and serves each in a thread of its own."""

import contextlib
import os
import secrets
import select
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from rollmill.channels.base import Address
from rollmill.channels.connection import Connection
from rollmill.channels.doorbell import Doorbell
from rollmill.channels.handshake import admit
from rollmill.core.errors import RollmillError, UsageError

BACKLOG = 128
HAS_ABSTRACT_PATHS = sys.platform == "linux"


class Listener:
    """Listens until it is closed.

    Args:
        sock: bound and listening; now the listener's.
        token: which diallers must know.
        serve: is called with each connection that does, in a new thread; when it returns or raises a
            `RollmillError`, the connection is closed.
    """

    def __init__(self, sock: socket.socket, token: str, serve: Callable[[Connection], None]) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._token = token
        self._serve = serve
        self._stop = Doorbell.create()
        self._lock = threading.Lock()
        self._open: dict[threading.Thread, Connection] = {}
        self._thread = threading.Thread(target=self._accept, name="rollmill-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends all connections and waits for their threads."""
        if not self._thread.is_alive():
            return
        self._stop.ring()
        self._thread.join()
        self._socket.close()
        self._stop.close()
        with self._lock:
            serving = dict(self._open)
        for connection in serving.values():
            connection.end()
        for thread in serving:
            thread.join()

    def _accept(self) -> None:
        poll = select.poll()
        for source in (self._socket, self._stop):
            poll.register(source.fileno(), select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll()]
            if self._stop.fileno() in ready:
                return
            with contextlib.suppress(OSError):  # the dialler may have gone again
                self._start(Connection(self._socket.accept()[0]))

    def _start(self, connection: Connection) -> None:
        thread = threading.Thread(target=self._run, args=(connection,), name="rollmill-connection", daemon=True)
        with self._lock:
            self._open[thread] = connection
        thread.start()

    def _run(self, connection: Connection) -> None:
        try:
            with contextlib.suppress(RollmillError):  # who is refused or gone needs no answer
                admit(connection, self._token)
                self._serve(connection)
        finally:
            with self._lock:
                del self._open[threading.current_thread()]
            connection.close()


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
