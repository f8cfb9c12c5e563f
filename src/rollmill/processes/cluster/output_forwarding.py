"""Sends the standard output and error of workers on other hosts to the coordinator.

A worker's standard output and error are one connection to the coordinator. The kernel therefore still sends the
last output of a crashing process, and the end of the connection marks the end of the process. The coordinator
passes each connection on through a pipe, as for a process on its own host.
"""

import contextlib
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from rollmill.channels.errors import Damaged
from rollmill.channels.transport.addresses import listen
from rollmill.channels.transport.handshake import Admission
from rollmill.channels.transport.listener import Listener
from rollmill.processes.handshake import Identity, claim_of, connect_as, refuse, welcome
from rollmill.processes.jobs import Job

CHUNK = 1 << 16


class Origin(NamedTuple):
    """The host and node on which a worker runs."""

    host: str
    pid: int
    node: str = ""
    """Id of the worker's node in a Ray cluster."""


class OutputStream:
    """The standard output and error of one worker on another host."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.output, self._sink = os.pipe()
        self.origin: Origin | None = None
        """None before the worker has come."""
        self.ended = threading.Event()
        """Set when nothing more will come."""
        self._peer: socket.socket | None = None
        self._changing = threading.Lock()

    def relay(self, peer: socket.socket) -> None:
        """Passes on the output of a worker until its process, and all processes that inherited the output, have
        ended.
        """
        with self._changing:
            if self.ended.is_set():
                return
            self._peer = peer
        with contextlib.suppress(OSError):
            while data := peer.recv(CHUNK):
                os.write(self._sink, data)
        self._end()

    def cut(self) -> None:
        """Stops waiting for more output of the worker."""
        with self._changing:
            if self._peer is None and not self.ended.is_set():
                self._end()
        if self._peer is not None:
            with contextlib.suppress(OSError):
                self._peer.shutdown(socket.SHUT_RDWR)

    def _end(self) -> None:
        os.close(self._sink)
        self.ended.set()


class OutputListener:
    """Listens for connections with the output of workers on other hosts."""

    def __init__(self, host: str, arrived: Callable[[OutputStream], None]) -> None:
        sock, self.address = listen(f"tcp:{host}:0")
        self.token = secrets.token_bytes(32)
        self._arrived = arrived
        self._expected: dict[tuple[str, int], OutputStream] = {}
        self._listener = Listener(sock, self.token, self._receive)

    def expect(self, job: Job) -> OutputStream:
        """Prepares for the output of a worker that is being started, and returns its stream."""
        stream = self._expected[job.name, job.attempt] = OutputStream(job)
        return stream

    def close(self) -> None:
        """Stops accepting new connections. Open connections continue."""
        self._listener.stop()

    def _receive(self, peer: socket.socket, admission: Admission) -> None:
        claim = claim_of(admission)
        origin = _origin_of(claim)
        stream = self._expected.pop((claim.name, claim.attempt), None)
        if stream is None:
            refuse(peer, admission, "no worker with this name and attempt is expected")
            return
        welcome(peer, admission)
        try:
            stream.origin = origin
            self._arrived(stream)
        finally:
            stream.relay(peer)


def _origin_of(claim: Identity) -> Origin:
    match claim.details:
        case {"host": str(host), "pid": int(pid), "node": str(node)}:
            return Origin(host, pid, node)
    raise Damaged("a worker's claim does not give its host.")


def redirect_output(address: str, token: bytes, job: Job, host: str, node: str = "") -> None:
    """Redirects the standard output and error of a worker on this node to the coordinator.

    Raises `Refused` if the coordinator does not expect this worker or has another token, `Damaged` if something
    else listens there, and an `OSError` if nothing does.
    """
    peer, _ = connect_as(address, token, job, host=host, pid=os.getpid(), node=node)
    for descriptor in (1, 2):
        os.dup2(peer.fileno(), descriptor)
    peer.close()
    sys.stdout, sys.stderr = _text_of(1), _text_of(2)


def _text_of(descriptor: int) -> Any:
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
