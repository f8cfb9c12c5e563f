"""Sums up refused connections for the user: many strangers are one line, which has their addresses."""

import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

GATHER_SECONDS = 1.0
"""How long refusals are gathered before they are shown."""

IDLE_GATHER_SECONDS = 12.0
"""The same for peers that said nothing, longer than a handshake may take, so that one line has all that came
together."""

REPEAT_SECONDS = 60.0
"""How often at most a refusal is shown that repeats one with the same address and reason."""

SHOWN_ADDRESSES = 5
"""Number of addresses that a line has."""


class RefusedConnection(NamedTuple):
    """A connection that the listener refused."""

    address: str
    """IP address of the peer, empty for a peer of this host."""
    reason: str
    idle: bool = False
    """Whether the peer said nothing and did not go away by itself, so that more like it may follow."""

    @property
    def key(self) -> tuple[str, str]:
        """Refusals with the same key repeat each other."""
        return self.address, "" if self.idle else self.reason


class RefusalLog:
    """Gathers refusals, and shows each group as one line. Not thread-safe."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._gathered: list[RefusedConnection] = []
        self._shown_at: dict[tuple[str, str], float] = {}
        self.due: float | None = None
        """When `show_due` has something to show, in seconds of `time.monotonic`, or None if nothing was
        gathered."""

    def add(self, refusal: RefusedConnection) -> None:
        """Gathers a refusal."""
        now = time.monotonic()
        again = self._shown_at.get(refusal.key, -REPEAT_SECONDS) + REPEAT_SECONDS
        due = max(again, now + (IDLE_GATHER_SECONDS if refusal.idle else GATHER_SECONDS))
        self._gathered.append(refusal)
        self.due = due if self.due is None else min(self.due, due)

    def show_due(self, *, everything: bool = False) -> None:
        """Shows the collected refusals if they are due."""
        if self.due is None or not (everything or time.monotonic() >= self.due):
            return
        gathered, self._gathered, self.due = self._gathered, [], None
        now = time.monotonic()
        shown = {key: at for key, at in self._shown_at.items() if now - at < REPEAT_SECONDS}
        self._shown_at = shown | {refusal.key: now for refusal in gathered}
        self._show(sentence(gathered))


def sentence(refusals: list[RefusedConnection]) -> str:
    """Describes one or more refusals in a line."""
    last = refusals[-1].reason
    if len(refusals) == 1:
        return f"a connection{_from(refusals[0].address)} was rejected: {last}"
    reasons = Counter(refusal.reason for refusal in refusals).most_common()
    counted = "; ".join(f"{reason} ({count})" for reason, count in reasons[:SHOWN_ADDRESSES])
    peers = _counted(Counter(refusal.address for refusal in refusals).most_common())
    return f"{len(refusals)} connections{peers} were rejected: {last if len(reasons) == 1 else counted}"


def _from(address: str) -> str:
    return f" from {address}" if address else ""


def _counted(addresses: list[tuple[str, int]]) -> str:
    known = [(address, count) for address, count in addresses if address]
    if len(addresses) == 1:
        return _from(addresses[0][0])
    shown = ", ".join(f"{address} ({count})" for address, count in known[:SHOWN_ADDRESSES])
    more = f" and {len(known) - SHOWN_ADDRESSES} more addresses" if len(known) > SHOWN_ADDRESSES else ""
    return f" from {shown}{more}" if shown else ""
