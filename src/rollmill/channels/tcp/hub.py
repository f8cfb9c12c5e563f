"""One process's connections to other hosts: a listener for all its ends, and how to reach theirs.

Who dials says which end it wants by a JSON object with the name of that end in "to". The answer has
"absent" where this process has no such end (any more), and what the end says otherwise.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from rollmill.channels.errors import Refused
from rollmill.channels.protocols import Broker
from rollmill.channels.transport.connection import Connection
from rollmill.channels.transport.handshake import PATIENCE, Admission, converse, present
from rollmill.channels.transport.listener import Listener, listen_on_host
from rollmill.core.errors import RollmillError

DIAL_SECONDS = 3.0

Serve: TypeAlias = Callable[[Connection, dict[str, Any]], None]
"""Talks with who dialled, until it returns; the answer to the dialler is its first word."""


class Hub:
    """Listens until it is closed.

    Args:
        broker: knows which end listens where.
        token: of the run.
        host: this host's address, as others reach it.
        port: 0 takes a free one.
    """

    def __init__(self, broker: Broker, token: str, *, host: str, port: int) -> None:
        self._broker = broker
        self._token = token
        self._lock = threading.Lock()
        self._ends: dict[str, Serve] = {}
        sock, self.address = listen_on_host(host, port)
        self._listener = Listener(sock, token.encode(), self._connect)

    def claim(self, end: str) -> int:
        """Takes `end` over; see `Broker.claim`."""
        return self._broker.claim(end)

    def is_replaced(self, end: str, incarnation: int) -> bool:
        """Whether a later incarnation has claimed `end`, as far as the broker can be asked."""
        try:
            return self._broker.holder(end) > incarnation
        except RollmillError:  # without a coordinator nobody is replaced any more
            return False

    def announce(self, end: str, serve: Serve, incarnation: int) -> None:
        """From now on `serve` talks with who dials `end`, each in a thread of its own."""
        with self._lock:
            self._ends[end] = serve
        self._broker.announce(end, self.address, incarnation)

    def dial(self, end: str, **hello: Any) -> tuple[Connection, dict[str, Any]] | None:
        """A connection to `end` and its answer; None where it cannot be reached, now."""
        try:
            address = self._broker.lookup(end)
            sock = None if address is None else socket.create_connection(address, timeout=DIAL_SECONDS)
        except (OSError, RollmillError):
            return None
        if sock is None:
            return None
        try:
            converse(sock, present(self._token.encode()), timeout=PATIENCE)
            connection = Connection(sock)
        except RollmillError:  # gone again, or another program has its port now
            sock.close()
            return None
        try:
            connection.send_json({"to": end, **hello}, timeout=PATIENCE)
            answer, _ = connection.receive_json(timeout=PATIENCE)
        except RollmillError:
            connection.close()
            return None
        if "absent" in answer:
            connection.close()
            return None
        return connection, answer

    def close(self) -> None:
        """Ends the connections that others dialled."""
        self._listener.close()

    def _connect(self, peer: socket.socket, admission: Admission) -> None:
        connection = Connection(peer)
        connection.send(admission.answer, timeout=PATIENCE)
        hello, _ = connection.receive_json(timeout=PATIENCE)
        with self._lock:
            serve = self._ends.get(str(hello.get("to")))
        if serve is None:
            connection.send_json({"absent": True}, timeout=PATIENCE)
            return
        try:
            serve(connection, hello)
        except (KeyError, TypeError, ValueError) as error:
            raise Refused(f"not a greeting: {error!r}.") from error


class ConnectionNumber:
    """Lets only the newest of several connections to one end speak: those before it are ended.

    Connections of a later incarnation of the peer are newer than all those of earlier ones.
    """

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._speaking = threading.Lock()
        self._newest: Connection | None = None
        self._incarnation = 0

    @contextmanager
    def of(self, connection: Connection, incarnation: int = 0) -> Iterator[bool]:
        """Waits until those before are silent; whether `connection` is still the newest then."""
        with self._changing:
            if incarnation >= self._incarnation:
                before, self._newest = self._newest, connection
                self._incarnation = incarnation
                if before is not None:
                    before.end()
        with self._speaking:
            yield self._newest is connection
