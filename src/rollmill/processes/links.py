"""The link to a worker's host: how long it has been silent, and when the coordinator is notified."""

from rollmill.channels.transport.tcp_options import PROBE_SECONDS, SECONDS_UNTIL_LOST
from rollmill.processes.events import Audible, Silent
from rollmill.processes.jobs import Job

TOLD_SECONDS = SECONDS_UNTIL_LOST / 2
"""Silence after which the coordinator is told."""

DOUBTED_SECONDS = PROBE_SECONDS + 2.0
"""Silence after which nothing is waited for any more when the training is to stop: a probe was not answered."""


class Link:
    """The link to the host of a worker."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._longest = 0.0
        self.host = ""
        self.silence = 0.0
        """Seconds since the kernel of the host acknowledged anything, or 0 for this host."""

    def look(self, silence: float, host: str) -> Silent | Audible | None:
        """Records the current silence in seconds. Returns an event if it has just become long or just ended."""
        before, self.silence, self.host = self._longest, silence, host
        self._longest = max(before, silence) if silence > TOLD_SECONDS else 0.0
        if before == 0.0 and self._longest:
            return Silent(self._job, silence, host)
        if before and not self._longest:
            return Audible(self._job, before, host)
        return None

    @property
    def is_doubtful(self) -> bool:
        """Whether the host may be out of reach."""
        return self.silence > DOUBTED_SECONDS

    @property
    def is_lost(self) -> bool:
        """Whether the silence of the host has exceeded the limit after which its workers are replaced."""
        return self.silence >= SECONDS_UNTIL_LOST
