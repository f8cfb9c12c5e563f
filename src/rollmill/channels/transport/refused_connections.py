"""Reports refused connections to the user. Repeated refusals are combined in one line with the peers'
addresses.
"""

import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

GATHER_SECONDS = 1.0
"""Seconds for which refusals are collected before they are reported."""

IDLE_GATHER_SECONDS = 12.0
"""Seconds for which refusals of silent peers are collected before they are reported. It exceeds the time limit of
a handshake, so that peers that came together are reported together."""

REPEAT_SECONDS = 60.0
"""Minimum interval in seconds between reports of refusals with the same address and reason."""

SHOWN_ADDRESSES = 5
"""Maximum number of addresses in a report."""


class RefusedConnection(NamedTuple):
    """A connection that a listener refused."""

    address: str
    """IP address of the peer, or empty for a peer of this host."""
    reason: str
    idle: bool = False
    """Whether the peer stayed connected without sending anything. More of the kind may follow."""

    @property
    def key(self) -> tuple[str, str]:
        """Key that is equal for refusals that repeat each other."""
        return self.address, "" if self.idle else self.reason


class RefusalLog:
    """Collects refused connections, and reports each group in one line. Not thread-safe."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._gathered: list[RefusedConnection] = []
        self._shown_at: dict[tuple[str, str], float] = {}
        self.due: float | None = None
        """When `show_due` has something to show, in seconds of `time.monotonic`, or None if nothing was
        gathered."""

    def add(self, refusal: RefusedConnection) -> None:
        """Adds a refused connection to those that will be reported."""
        now = time.monotonic()
        again = self._shown_at.get(refusal.key, -REPEAT_SECONDS) + REPEAT_SECONDS
        due = max(again, now + (IDLE_GATHER_SECONDS if refusal.idle else GATHER_SECONDS))
        self._gathered.append(refusal)
        self.due = due if self.due is None else min(self.due, due)

    def show_due(self, *, everything: bool = False) -> None:
        """Reports the refused connections that have been collected for long enough."""
        if self.due is None or not (everything or time.monotonic() >= self.due):
            return
        gathered, self._gathered, self.due = self._gathered, [], None
        now = time.monotonic()
        shown = {key: at for key, at in self._shown_at.items() if now - at < REPEAT_SECONDS}
        self._shown_at = shown | {refusal.key: now for refusal in gathered}
        self._show(sentence(gathered))


def sentence(refusals: list[RefusedConnection]) -> str:
    """Describes one or more refused connections in one line."""
    last = refusals[-1].reason
    if len(refusals) == 1:
        return f"a connection{_from(refusals[0].address)} was rejected: {last}"
    reasons = Counter(refusal.reason for refusal in refusals).most_common()
    counted = "; ".join(f"{reason} ({count})" for reason, count in reasons[:SHOWN_ADDRESSES])
    peers = _count_addresses(Counter(refusal.address for refusal in refusals).most_common())
    return f"{len(refusals)} connections{peers} were rejected: {last if len(reasons) == 1 else counted}"


def _from(address: str) -> str:
    return f" from {address}" if address else ""


def _count_addresses(addresses: list[tuple[str, int]]) -> str:
    known = [(address, count) for address, count in addresses if address]
    if len(addresses) == 1:
        return _from(addresses[0][0])
    shown = ", ".join(f"{address} ({count})" for address, count in known[:SHOWN_ADDRESSES])
    more = f" and {len(known) - SHOWN_ADDRESSES} more addresses" if len(known) > SHOWN_ADDRESSES else ""
    return f" from {shown}{more}" if shown else ""
