"""A broker's names of one beginning of a run, apart from those of earlier beginnings."""

from rollmill.channels.protocols import Address, Broker
from rollmill.channels.shm.doorbell import Doorbell


class ScopedBroker:
    """`Broker` under a name: a run that begins again opens channels that nobody has used."""

    def __init__(self, broker: Broker, name: str) -> None:
        self._broker, self._name = broker, name

    def segment(self, name: str, *, nbytes: int, digest: str) -> memoryview:
        """See `Broker`."""
        return self._broker.segment(self._under(name), nbytes=nbytes, digest=digest)

    def agree(self, name: str, *, digest: str) -> None:
        """See `Broker`."""
        self._broker.agree(self._under(name), digest=digest)

    def doorbell(self, name: str) -> Doorbell:
        """See `Broker`."""
        return self._broker.doorbell(self._under(name))

    def claim(self, name: str, *, segment: str | None = None, word: int = 0) -> int:
        """See `Broker`."""
        shown = None if segment is None else self._under(segment)
        return self._broker.claim(self._under(name), segment=shown, word=word)

    def confirm(self, name: str, incarnation: int, *, segment: str, word: int) -> None:
        """See `Broker`."""
        self._broker.confirm(self._under(name), incarnation, segment=self._under(segment), word=word)

    def drop(self, name: str) -> None:
        """See `Broker`."""
        self._broker.drop(self._under(name))

    def holder(self, name: str) -> int:
        """See `Broker`."""
        return self._broker.holder(self._under(name))

    def announce(self, name: str, address: Address, incarnation: int) -> None:
        """See `Broker`."""
        self._broker.announce(self._under(name), address, incarnation)

    def lookup(self, name: str) -> Address | None:
        """See `Broker`."""
        return self._broker.lookup(self._under(name))

    def close(self) -> None:
        """See `Broker`."""
        self._broker.close()

    def _under(self, name: str) -> str:
        return f"{self._name}/{name}"
