"""The broker as seen from worker processes, which reach it over a socket."""

import os
import socket
import threading
from typing import Any

from rollmill.channels.errors import ChannelClosed, ConnectionLost, TimedOut
from rollmill.channels.protocols import Address
from rollmill.channels.shm.doorbell import Doorbell
from rollmill.channels.shm.memory import map_memory
from rollmill.channels.transport.addresses import connect
from rollmill.channels.transport.connection import Connection
from rollmill.channels.transport.dialling import REACH_SECONDS, reach
from rollmill.core.errors import UsageError

PATIENCE = 30.0


class RemoteBroker:
    """Client of the coordinator's broker (`BrokerServer`), a `channels.protocols.Broker`. Thread-safe.

    Raises `Refused` for a wrong token, and `ChannelClosed` if nothing listens at the address or answers in time.
    Open channels keep working after the coordinator has gone. Further requests then raise `ChannelClosed`.
    """

    def __init__(self, address: str, token: str, *, patience: float = REACH_SECONDS) -> None:
        self._lock = threading.Lock()
        self._mapped: dict[str, memoryview] = {}
        self._doorbells: dict[str, Doorbell] = {}
        self._connection = Connection(_reach(address, token.encode(), patience))

    def segment(self, name: str, *, nbytes: int, digest: str) -> memoryview:
        """Returns the shared memory called `name`, which is initially zero."""
        with self._lock:
            _, descriptors = self._ask(ask="segment", name=name, nbytes=nbytes, digest=digest)
            try:
                if name not in self._mapped:
                    self._mapped[name] = map_memory(descriptors[0], nbytes)
            finally:
                os.close(descriptors[0])  # the mapping keeps its own reference
            return self._mapped[name]

    def agree(self, name: str, *, digest: str) -> None:
        """Checks that all ends of the channel `name` were opened with the same digest."""
        with self._lock:
            self._ask(ask="agree", name=name, digest=digest)

    def doorbell(self, name: str) -> Doorbell:
        """Returns the doorbell called `name`, which wakes one end of a channel."""
        with self._lock:
            if name not in self._doorbells:
                _, descriptors = self._ask(ask="doorbell", name=name)
                self._doorbells[name] = Doorbell(descriptors[0], descriptors[-1])
            return self._doorbells[name]

    def claim(self, name: str, *, segment: str | None = None, word: int = 0) -> int:
        """Makes the caller the holder of the channel end `name`, and returns its incarnation, which increases with
        every holder.

        The incarnation is also written to word number `word` of the shared memory called `segment`, if given.
        """
        with self._lock:
            answer, _ = self._ask(ask="claim", name=name, segment=segment, word=word)
        return int(answer["incarnation"])

    def confirm(self, name: str, incarnation: int, *, segment: str, word: int) -> None:
        """Publishes that a holder of the channel end `name` is ready, unless it has been replaced.

        Its incarnation is written to word number `word` of the shared memory called `segment`.
        """
        with self._lock:
            self._ask(ask="confirm", name=name, incarnation=incarnation, segment=segment, word=word)

    def drop(self, name: str) -> None:
        """Releases the shared memory called `name`. Existing mappings stay valid."""
        with self._lock:
            self._mapped.pop(name, None)
            self._ask(ask="drop", name=name)

    def holder(self, name: str) -> int:
        """Returns the incarnation of the latest holder of the channel end `name`, or 0 if there was none."""
        with self._lock:
            answer, _ = self._ask(ask="holder", name=name)
        return int(answer["incarnation"])

    def announce(self, name: str, address: Address, incarnation: int) -> None:
        """Registers the address at which the channel end `name` listens."""
        with self._lock:
            self._ask(ask="announce", name=name, address=list(address), incarnation=incarnation)

    def lookup(self, name: str) -> Address | None:
        """Returns the address at which the channel end `name` listens, or None if it has not been announced."""
        with self._lock:
            answer, _ = self._ask(ask="lookup", name=name)
        return None if answer["address"] is None else (str(answer["address"][0]), int(answer["address"][1]))

    def close(self) -> None:
        """Closes the connection and file descriptors. Mapped memory stays valid."""
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
            self._connection.close()  # otherwise a late answer would be taken for the answer to the next request
            raise ChannelClosed("the connection to the coordinator's broker was lost.") from error
        if "error" in answer:
            raise UsageError(str(answer["error"]))
        return answer, descriptors


def _reach(address: str, token: bytes, patience: float) -> socket.socket:
    try:
        return reach(lambda: connect(address, timeout=PATIENCE), token, timeout=patience)
    except (OSError, ConnectionLost, TimedOut) as error:
        raise ChannelClosed(f"no broker answers at {address}: {str(error).removesuffix('.')}.") from error
