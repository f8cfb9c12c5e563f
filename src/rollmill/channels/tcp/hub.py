"""A process's connections to other hosts: a listener for all its channel ends, and a dialler for remote ends.

The dialler names the end that it wants in a JSON object with the key "to". The answer has the key "absent" if this
process has no such end, or no longer has it. Otherwise the end itself writes the answer.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from rollmill.channels.errors import Refused
from rollmill.channels.protocols import Address, Broker
from rollmill.channels.transport.addresses import listen
from rollmill.channels.transport.connection import Connection
from rollmill.channels.transport.handshake import PATIENCE, Admission, converse, present
from rollmill.channels.transport.listener import Listener
from rollmill.core.errors import RollmillError

DIAL_SECONDS = 3.0

Serve: TypeAlias = Callable[[Connection, dict[str, Any]], None]
"""Function that serves a connection to a channel end until it returns, given the dialler's greeting. It must first
send the answer."""


class Hub:
    """Listens for connections to all channel ends of a process until it is closed, and dials remote ends."""

    def __init__(self, broker: Broker, token: str, *, host: str, port: int) -> None:
        self._broker = broker
        self._token = token
        self._lock = threading.Lock()
        self._ends: dict[str, Serve] = {}
        sock, _ = listen(f"tcp:{host}:{port}")
        self.address: Address = (host, sock.getsockname()[1])
        self._listener = Listener(sock, token.encode(), self._connect)

    def claim(self, end: str) -> int:
        """Makes this process the holder of the channel end `end`, and returns its incarnation, a number that
        increases with every holder.
        """
        return self._broker.claim(end)

    def is_replaced(self, end: str, incarnation: int) -> bool:
        """Returns whether a later process has claimed the channel end. False if the broker is unreachable."""
        try:
            return self._broker.holder(end) > incarnation
        except RollmillError:  # without a coordinator, no end is replaced any more
            return False

    def announce(self, end: str, serve: Serve, incarnation: int) -> None:
        """Serves each connection to a channel end with `serve` in its own thread, and publishes the address."""
        with self._lock:
            self._ends[end] = serve
        self._broker.announce(end, self.address, incarnation)

    def dial(self, end: str, **hello: Any) -> tuple[Connection, dict[str, Any]] | None:
        """Connects to a remote channel end. Returns the connection and the answer, or None if it cannot be reached
        now.
        """
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
        except RollmillError:  # the end has been closed, or another program uses its port now
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
        """Stops listening, and ends the connections that it has accepted."""
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


class LatestConnection:
    """Serves only the latest of several connections to one channel end, and closes the others.

    A connection of a later incarnation of the dialling end replaces all connections of earlier incarnations.
    """

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._serving = threading.Lock()
        self._latest: Connection | None = None
        self._incarnation = 0

    @contextmanager
    def take_over(self, connection: Connection, incarnation: int = 0) -> Iterator[bool]:
        """Waits until the current connection has ended. Yields whether `connection` is now the latest."""
        with self._changing:
            if incarnation >= self._incarnation:
                previous, self._latest = self._latest, connection
                self._incarnation = incarnation
                if previous is not None:
                    previous.end()
        with self._serving:
            yield self._latest is connection
