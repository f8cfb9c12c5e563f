"""A namespace of a broker: each start or restart of a run has its own."""

from rollmill.channels.protocols import Address, Broker
from rollmill.channels.shm.doorbell import Doorbell


class ScopedBroker:
    """A `Broker` that prefixes all names, so that a restarted run opens new channels."""

    def __init__(self, broker: Broker, name: str) -> None:
        self._broker, self._name = broker, name

    def segment(self, name: str, *, nbytes: int, digest: str) -> memoryview:
        """See `Broker`."""
        return self._broker.segment(self._scoped(name), nbytes=nbytes, digest=digest)

    def agree(self, name: str, *, digest: str) -> None:
        """See `Broker`."""
        self._broker.agree(self._scoped(name), digest=digest)

    def doorbell(self, name: str) -> Doorbell:
        """See `Broker`."""
        return self._broker.doorbell(self._scoped(name))

    def claim(self, name: str, *, segment: str | None = None, word: int = 0) -> int:
        """See `Broker`."""
        scoped_segment = None if segment is None else self._scoped(segment)
        return self._broker.claim(self._scoped(name), segment=scoped_segment, word=word)

    def confirm(self, name: str, incarnation: int, *, segment: str, word: int) -> None:
        """See `Broker`."""
        self._broker.confirm(self._scoped(name), incarnation, segment=self._scoped(segment), word=word)

    def drop(self, name: str) -> None:
        """See `Broker`."""
        self._broker.drop(self._scoped(name))

    def holder(self, name: str) -> int:
        """See `Broker`."""
        return self._broker.holder(self._scoped(name))

    def announce(self, name: str, address: Address, incarnation: int) -> None:
        """See `Broker`."""
        self._broker.announce(self._scoped(name), address, incarnation)

    def lookup(self, name: str) -> Address | None:
        """See `Broker`."""
        return self._broker.lookup(self._scoped(name))

    def close(self) -> None:
        """See `Broker`."""
        self._broker.close()

    def _scoped(self, name: str) -> str:
        return f"{self._name}/{name}"
