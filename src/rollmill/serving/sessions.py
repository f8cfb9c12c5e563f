"""Maps the sessions of a served recurrent policy to rows of the memories on the device."""

import secrets
from collections import OrderedDict
from dataclasses import dataclass

from rollmill.serving.limits import ServerLimits
from rollmill.serving.responses import Refusal


@dataclass
class Session:
    """An episode of one client, with a memory on the server."""

    name: str
    """The random id that the client sends with each request."""
    slot: int
    """Row of the session in the memories on the device."""
    fresh: bool
    """True until the first request of the episode, which begins with an empty memory."""
    used: float
    """Time of the session's last request."""
    in_flight: int = 0
    """Number of the session's requests that have not been answered yet."""


class Sessions:
    """The sessions of a server, at most one for each slot of the memories."""

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._free = list(range(limits.sessions))[::-1]
        # the session that was used most recently comes last
        self._by_name: OrderedDict[str, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_name)

    def open(self, now: float) -> Session:
        """Opens a session in a free slot. Raises `Refusal` if all slots are in use."""
        self._give_up_unused(now)
        if not self._free:
            raise Refusal(
                503,
                f"the limit of {self._limits.sessions} open sessions is reached, with {len(self)} open. hint: "
                "close one with DELETE /sessions/ID, or try again later. Sessions without a request for "
                f"{self._limits.session_seconds:g} s are closed.",
                retry_after=1,
            )
        session = Session(secrets.token_urlsafe(16), self._free.pop(), fresh=True, used=now)
        self._by_name[session.name] = session
        return session

    def find(self, name: str, now: float) -> Session:
        """Returns the session with a name, and marks it as used. Raises `Refusal` if it does not exist."""
        session = self._by_name.get(name)
        if session is None:
            raise Refusal(
                404,
                f"unknown session {name[:60]!r}: it was ended, or closed after {self._limits.session_seconds:g} "
                "s without a request. hint: leave `session` out to begin one.",
            )
        session.used = now
        self._by_name.move_to_end(name)
        return session

    def end(self, name: str, now: float) -> None:
        """Ends a session and frees its slot.

        Raises `Refusal` if the session is unknown or has pending requests.
        """
        session = self.find(name, now)
        if session.in_flight:
            raise Refusal(
                409,
                f"the session has {session.in_flight} requests in flight. hint: end the session after they "
                "have been answered.",
            )
        self._remove(session)

    def clear(self) -> None:
        """Ends all sessions, for example after their memories were lost."""
        for session in list(self._by_name.values()):
            self._remove(session)

    def _give_up_unused(self, now: float) -> None:
        for session in list(self._by_name.values()):
            if now - session.used <= self._limits.session_seconds:
                return
            if not session.in_flight:
                self._remove(session)

    def _remove(self, session: Session) -> None:
        del self._by_name[session.name]
        self._free.append(session.slot)
