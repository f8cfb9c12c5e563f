"""Watches the link to a worker's host: how long the host has been silent, and when this is reported."""

from rollmill.channels.transport.tcp_options import PROBE_SECONDS, SECONDS_UNTIL_LOST
from rollmill.processes.events import Audible, Silent
from rollmill.processes.jobs import Job

TOLD_SECONDS = SECONDS_UNTIL_LOST / 2
"""Seconds of silence after which the coordinator is notified."""

DOUBTED_SECONDS = PROBE_SECONDS + 2.0
"""Seconds of silence, enough for an unanswered probe, after which a stopping run ignores the host."""


class Link:
    """The link between the coordinator and the host of a worker."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._longest = 0.0
        self.host = ""
        self.silence = 0.0
        """Seconds since the kernel of the host acknowledged anything, or 0 for this host."""

    def look(self, silence: float, host: str) -> Silent | Audible | None:
        """Records the host's current silence in seconds. Returns an event if it has just become long or has just
        ended.
        """
        before, self.silence, self.host = self._longest, silence, host
        self._longest = max(before, silence) if silence > TOLD_SECONDS else 0.0
        if before == 0.0 and self._longest:
            return Silent(self._job, silence, host)
        if before and not self._longest:
            return Audible(self._job, before, host)
        return None

    @property
    def is_doubtful(self) -> bool:
        """True if the host may be unreachable."""
        return self.silence > DOUBTED_SECONDS

    @property
    def is_lost(self) -> bool:
        """True if the host has been silent for so long that its workers are replaced."""
        return self.silence >= SECONDS_UNTIL_LOST
