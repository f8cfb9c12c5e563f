"""The coordinator's broker, seen from another process."""

import os
import socket
import threading
from typing import Any

from rollmill.channels.errors import ChannelClosed, ConnectionLost, TimedOut
from rollmill.channels.protocols import Address
from rollmill.channels.shm.doorbell import Doorbell
from rollmill.channels.shm.memory import map_memory
from rollmill.channels.transport.connection import Connection
from rollmill.channels.transport.dialling import REACH_SECONDS, reach
from rollmill.core.errors import UsageError

PATIENCE = 30.0


class RemoteBroker:
    """See `rollmill.channels.Broker`. Any thread may call it.

    What was opened goes on working when the coordinator is gone; asking for more then raises `ChannelClosed`.

    Args:
        address: `BrokerServer.address` or `BrokerServer.tcp_address`.
        token: of the run.
        patience: seconds for which it is tried to reach a broker that is slow.

    Raises:
        Refused: the token is not that of the run.
        ChannelClosed: nobody listens at the address, or answers in time.
        UsageError: `address` is none.
    """

    def __init__(self, address: str, token: str, *, patience: float = REACH_SECONDS) -> None:
        self._lock = threading.Lock()
        self._mapped: dict[str, memoryview] = {}
        self._doorbells: dict[str, Doorbell] = {}
        self._connection = Connection(_reach(address, token.encode(), patience))

    def segment(self, name: str, *, nbytes: int, digest: str) -> memoryview:
        """The memory of that name, made of zeros when first asked for."""
        with self._lock:
            _, descriptors = self._ask(ask="segment", name=name, nbytes=nbytes, digest=digest)
            try:
                if name not in self._mapped:
                    self._mapped[name] = map_memory(descriptors[0], nbytes)
            finally:
                os.close(descriptors[0])  # the mapping has its own
            return self._mapped[name]

    def agree(self, name: str, *, digest: str) -> None:
        """Both ends of a channel call it when they open it."""
        with self._lock:
            self._ask(ask="agree", name=name, digest=digest)

    def doorbell(self, name: str) -> Doorbell:
        """The doorbell of that name."""
        with self._lock:
            if name not in self._doorbells:
                _, descriptors = self._ask(ask="doorbell", name=name)
                self._doorbells[name] = Doorbell(descriptors[0], descriptors[-1])
            return self._doorbells[name]

    def claim(self, name: str, *, segment: str | None = None, word: int = 0) -> int:
        """Takes the end of that name over."""
        with self._lock:
            answer, _ = self._ask(ask="claim", name=name, segment=segment, word=word)
        return int(answer["incarnation"])

    def confirm(self, name: str, incarnation: int, *, segment: str, word: int) -> None:
        """Shows that this incarnation is ready."""
        with self._lock:
            self._ask(ask="confirm", name=name, incarnation=incarnation, segment=segment, word=word)

    def drop(self, name: str) -> None:
        """Forgets the segment of that name."""
        with self._lock:
            self._mapped.pop(name, None)
            self._ask(ask="drop", name=name)

    def holder(self, name: str) -> int:
        """The incarnation that claimed the name last."""
        with self._lock:
            answer, _ = self._ask(ask="holder", name=name)
        return int(answer["incarnation"])

    def announce(self, name: str, address: Address, incarnation: int) -> None:
        """Says where the end called `name` listens."""
        with self._lock:
            self._ask(ask="announce", name=name, address=list(address), incarnation=incarnation)

    def lookup(self, name: str) -> Address | None:
        """Where the holder listens."""
        with self._lock:
            answer, _ = self._ask(ask="lookup", name=name)
        return None if answer["address"] is None else (str(answer["address"][0]), int(answer["address"][1]))

    def close(self) -> None:
        """Gives file descriptors back; memory that is mapped stays."""
        with self._lock:
            self._connection.close()
            for doorbell in self._doorbells.values():
                doorbell.close()
            self._doorbells.clear()
            self._mapped.clear()

    def _ask(self, **request: Any) -> tuple[dict[str, Any], list[int]]:
        try:
            self._connection.send_json(request, timeout=PATIENCE)
            answer, descriptors = self._connection.receive_json(timeout=PATIENCE)
        except (ConnectionLost, TimedOut) as error:
            self._connection.close()  # an answer that comes later must not pass for that to the next question
            raise ChannelClosed("the coordinator's broker is gone.") from error
        if "error" in answer:
            raise UsageError(str(answer["error"]))
        return answer, descriptors


def _reach(address: str, token: bytes, patience: float) -> socket.socket:
    try:
        return reach(lambda: _dial(address), token, timeout=patience)
    except (OSError, ConnectionLost, TimedOut) as error:
        raise ChannelClosed(f"no broker answers at {address}: {str(error).removesuffix('.')}.") from error


def _dial(address: str) -> socket.socket:
    kind, _, place = address.partition(":")
    host, _, port = place.rpartition(":")
    if kind == "unix" and place:
        return _dial_in_host("\0" + place[1:] if place.startswith("@") else place)
    if kind == "tcp" and port.isdecimal():
        return socket.create_connection((host, int(port)), timeout=PATIENCE)
    raise UsageError(f"{address!r} is no address of a broker: unix:PATH or tcp:HOST:PORT.")


def _dial_in_host(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock
