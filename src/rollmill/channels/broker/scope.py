"""A namespace of a broker: each start or restart of a run has its own."""

from rollmill.channels.protocols import Address, Broker
from rollmill.channels.shm.doorbell import Doorbell


class ScopedBroker:
    """A `Broker` that prefixes all names, so that a restarted run opens new channels."""

    def __init__(self, broker: Broker, name: str) -> None:
        self._broker, self._name = broker, name

    def segment(self, name: str, *, nbytes: int, digest: str) -> memoryview:
        """Returns the shared memory called `name`, initially zero."""
        return self._broker.segment(self._scoped(name), nbytes=nbytes, digest=digest)

    def agree(self, name: str, *, digest: str) -> None:
        """Declares the digest of `name`."""
        self._broker.agree(self._scoped(name), digest=digest)

    def doorbell(self, name: str) -> Doorbell:
        """Returns the doorbell called `name`."""
        return self._broker.doorbell(self._scoped(name))

    def claim(self, name: str, *, segment: str | None = None, word: int = 0) -> int:
        """Claims the end called `name` and returns the caller's incarnation, 1 for the first holder."""
        scoped_segment = None if segment is None else self._scoped(segment)
        return self._broker.claim(self._scoped(name), segment=scoped_segment, word=word)

    def confirm(self, name: str, incarnation: int, *, segment: str, word: int) -> None:
        """Publishes in a segment that this incarnation is ready, unless a later incarnation has claimed the
        end.
        """
        self._broker.confirm(self._scoped(name), incarnation, segment=self._scoped(segment), word=word)

    def drop(self, name: str) -> None:
        """Forgets the segment `name`."""
        self._broker.drop(self._scoped(name))

    def holder(self, name: str) -> int:
        """Returns the latest incarnation that claimed `name`, or 0 if none did."""
        return self._broker.holder(self._scoped(name))

    def announce(self, name: str, address: Address, incarnation: int) -> None:
        """Registers the address of the end called `name`, unless a later incarnation has claimed it."""
        self._broker.announce(self._scoped(name), address, incarnation)

    def lookup(self, name: str) -> Address | None:
        """Address at which the holder of `name` listens, or None until it is announced."""
        return self._broker.lookup(self._scoped(name))

    def close(self) -> None:
        """Closes files and connections."""
        self._broker.close()

    def _scoped(self, name: str) -> str:
        return f"{self._name}/{name}"
