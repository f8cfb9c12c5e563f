"""Namespaces of a broker. Each start or restart of a run has its own namespace."""

from rollmill.channels.protocols import Address, Broker
from rollmill.channels.shm.doorbell import Doorbell


class ScopedBroker:
    """A `Broker` that adds a prefix to all names, so that a restarted run opens new channels."""

    def __init__(self, broker: Broker, name: str) -> None:
        self._broker, self._name = broker, name

    def segment(self, name: str, *, nbytes: int, digest: str) -> memoryview:
        """Returns the shared memory called `name` in this namespace, which is initially zero."""
        return self._broker.segment(self._scope_name(name), nbytes=nbytes, digest=digest)

    def agree(self, name: str, *, digest: str) -> None:
        """Checks that all ends of the channel `name` in this namespace were opened with the same digest."""
        self._broker.agree(self._scope_name(name), digest=digest)

    def doorbell(self, name: str) -> Doorbell:
        """Returns the doorbell called `name` in this namespace."""
        return self._broker.doorbell(self._scope_name(name))

    def claim(self, name: str, *, segment: str | None = None, word: int = 0) -> int:
        """Makes the caller the holder of the channel end `name`. Returns its incarnation, 1 for the first holder.

        The incarnation is also written to word number `word` of the shared memory called `segment`, if given.
        """
        scoped_segment = None if segment is None else self._scope_name(segment)
        return self._broker.claim(self._scope_name(name), segment=scoped_segment, word=word)

    def confirm(self, name: str, incarnation: int, *, segment: str, word: int) -> None:
        """Publishes that a holder of the channel end `name` is ready, unless it has been replaced.

        Its incarnation is written to word number `word` of the shared memory called `segment`.
        """
        self._broker.confirm(self._scope_name(name), incarnation, segment=self._scope_name(segment), word=word)

    def drop(self, name: str) -> None:
        """Releases the shared memory called `name` in this namespace."""
        self._broker.drop(self._scope_name(name))

    def holder(self, name: str) -> int:
        """Returns the incarnation of the latest holder of the channel end `name`, or 0 if there was none."""
        return self._broker.holder(self._scope_name(name))

    def announce(self, name: str, address: Address, incarnation: int) -> None:
        """Registers the address at which the channel end `name` listens, unless a later holder has claimed it."""
        self._broker.announce(self._scope_name(name), address, incarnation)

    def lookup(self, name: str) -> Address | None:
        """Returns the address at which the channel end `name` listens, or None if it has not been announced."""
        return self._broker.lookup(self._scope_name(name))

    def close(self) -> None:
        """Closes the files and connections of the underlying broker."""
        self._broker.close()

    def _scope_name(self, name: str) -> str:
        return f"{self._name}/{name}"
