"""Derives the health of one worker process from its messages, its heartbeats and its exit."""

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from rollmill.core.errors import UnfitHost
from rollmill.processes.connection import WorkerConnection
from rollmill.processes.events import (
    FINAL,
    Audible,
    Event,
    Finished,
    Hung,
    Leaving,
    Lost,
    Received,
    Silent,
    Started,
)
from rollmill.processes.heartbeat import Heartbeat
from rollmill.processes.jobs import Job
from rollmill.processes.launchers import Exit, status_text
from rollmill.processes.links import Link
from rollmill.processes.logs import WorkerLog
from rollmill.processes.messages import WorkerMessage

MISSED_BEATS = 5
"""Number of consecutive missed heartbeats after which the state of the process is checked."""

EXIT_SECONDS = 10.0
"""Maximum seconds for a process to end after its function has returned."""

DISCONNECTED_SECONDS = 2.0
"""Maximum seconds for a process to live on after its connection has broken."""

DRAIN_SECONDS = 1.0
"""Seconds to wait for messages and output of a dead worker if another process keeps its pipes open."""

UNKILLABLE_SECONDS = 5.0


class Timeouts(NamedTuple):
    """Time limits for workers, in seconds."""

    heartbeat_seconds: float
    hang_seconds: float
    start_seconds: float


class WorkerHealth:
    """The health of one worker, which does one attempt at a job. Not thread-safe: callers hold the supervisor's
    lock.
    """

    def __init__(self, job: Job, handle: Any, log: WorkerLog) -> None:
        self.job = job
        self.handle = handle
        self.log = log
        self.connection = WorkerConnection(lambda message: None)
        self.dismissed = False
        """Whether the coordinator has dismissed the worker, so that no further event of it is reported."""
        self.link = Link(job)
        self.unread_bytes = 0
        self.blocked = False
        """Whether it has to wait until the coordinator has read."""
        self.exit: Exit | None = None
        self._asked_at = time.monotonic()
        self._started = False
        self._beat: Heartbeat | None = None
        self._last: WorkerMessage | None = None
        self._kill_reason = ""
        self._left_behind = False
        self._refusal: UnfitHost | None = None
        self._since: dict[str, float] = {}
        self._reported: object = None
        self._is_leaving = False

    def take(self, message: WorkerMessage) -> Event | None:
        """Processes a message of the worker. Returns an event for the coordinator, or None."""
        match message.kind:
            case ".beat":
                self._beat = Heartbeat.from_fields(message.fields)
            case ".calling":
                self._started = True
                return Started(self.job, time.monotonic() - self._asked_at)
            case ".finished" | ".failed":
                self._last = message
            case _:
                return Received(self.job, message)
        return None

    def refuse(self, problem: str) -> None:
        """Treats the worker as ended, because the coordinator has rejected it for a reason that applies to every
        attempt.
        """
        self._refusal = UnfitHost(problem)
        self.exit = self.exit or Exit(None, problem)

    def look_at_link(self) -> Silent | Audible | None:
        """Checks how long the worker's host has been silent. Returns an event if this must be reported, otherwise
        None.
        """
        return self.link.look(self.connection.silence(), self.connection.host)

    def leave_behind(self) -> None:
        """Treats the worker as ended, because its host is unreachable."""
        self._kill_reason = f"its host {self.link.host} has acknowledged nothing for {self.link.silence:.0f} s"
        self._left_behind = True
        self.exit = self.exit or Exit(None)

    def has_ended(self, now: float) -> bool:
        """Returns whether the process is gone, and all its messages and output have arrived."""
        if self._left_behind or self._refusal is not None:
            return True
        if self._kill_reason and self._wait_time("killed", now) > UNKILLABLE_SECONDS:
            self.exit = self.exit or Exit(None)
        if self.exit is None:
            return False
        late = self._wait_time("exit", now) > DRAIN_SECONDS and not self.blocked
        heard = self.connection.ended.is_set() or not self.connection.taken
        return late or (heard and self.log.ended.is_set())

    def outcome(self) -> Event:
        """Returns the final event of a worker that has ended."""
        status, lines = self.exit.status if self.exit else None, "\n".join(self.log.last_lines)
        if self._last is None:
            final = self._refusal or (self.exit.final if self.exit else None)
            return Lost(self.job, self._reason(), status, raised=False, details=lines, final=final)
        if self._last.kind == ".finished":
            return Finished(self.job)
        fields = self._last.fields
        reason, details, name, text = (str(fields.get(key)) for key in ("reason", "details", "final", "text"))
        final = next((kind(text) for kind in FINAL if kind.__name__ == name), None)
        return Lost(self.job, reason, status, raised=True, details=details, final=final)

    def overdue(self, now: float, timeouts: Timeouts) -> bool:
        """Returns whether the worker must be killed, because it has not started or ended in time. Returns True
        only once.
        """
        if self._kill_reason:
            return False
        if self._last is not None:
            self._kill_reason = "its process did not end" if self._wait_time("exiting", now) > EXIT_SECONDS else ""
        elif self.connection.ended.is_set():
            wordless = self._wait_time("wordless", now) > DISCONNECTED_SECONDS
            self._kill_reason = "it closed its connection, but did not end" if wordless else ""
        elif not self._started and now - self._asked_at > timeouts.start_seconds:
            what = f"; last activity: {self._beat}" if self._beat else ", and its process did not report"
            self._kill_reason = f"its function did not start within {timeouts.start_seconds:g} s{what}"
        return bool(self._kill_reason)

    @property
    def doing(self) -> str:
        """The activity that the worker has reported last."""
        return str(self._beat) if self._beat else "starting"

    def hung(self, now: float, timeouts: Timeouts, condition: Callable[[], str]) -> Hung | None:
        """Returns a `Hung` event if the worker makes no progress or cannot run. The same state is reported only
        once.

        Missing heartbeats are not enough. A call into C that holds the GIL, for example to load a simulator's
        assets, silences a healthy worker, and may last as long as any other work. If the operating system reports
        that the process cannot run, it counts as hung at once.
        """
        if not self.connection.taken or self.connection.ended.is_set() or self._last is not None:
            return None
        if self._silent(now, timeouts):
            return self._report_silence(now, timeouts, condition)
        idle = self._beat.hung_seconds(timeouts.hang_seconds) if self._beat and self._started else None
        if idle is None or self._beat is None:
            self._reported = None
            return None
        return self._report_once(("idle", self._beat.progress), idle, str(self._beat))

    def leaving(self, reason: Callable[[], str]) -> Leaving | None:
        """Returns a `Leaving` event if the worker has started and its host is about to be removed. It is reported
        once.
        """
        if self._is_leaving or not self._started or self._last is not None or not (text := reason()):
            return None
        self._is_leaving = True
        return Leaving(self.job, text)

    def _silent(self, now: float, timeouts: Timeouts) -> bool:
        """Returns whether heartbeats are missing, at two looks: the coordinator itself may have been asleep."""
        missing = now - self.connection.last_heard > MISSED_BEATS * timeouts.heartbeat_seconds
        if self.blocked or not missing:
            self._since.pop("silent", None)
            return False
        return self._wait_time("silent", now) >= timeouts.heartbeat_seconds

    def _report_silence(self, now: float, timeouts: Timeouts, condition: Callable[[], str]) -> Hung | None:
        seconds, what = now - self.connection.last_heard, condition()
        if not what and seconds <= self._silence_limit(timeouts):
            return None
        stuck = _innermost(self.log.last_lines, "Thread 0x", "Current thread 0x")
        what = what or f"a call prevents all of its threads from running{stuck}"
        last = f"; last seen at: {self._beat}" if self._beat else ""
        return self._report_once("silent", seconds, what + last)

    def _silence_limit(self, timeouts: Timeouts) -> float:
        """Returns the seconds of silence that count as a hang. Waiting for the coordinator is not work that takes
        longer.
        """
        if not self._started:
            return timeouts.start_seconds
        expect = self._beat.expect if self._beat else 0.0
        return max(timeouts.hang_seconds, expect if expect < float("inf") else 0.0)

    def _report_once(self, what: object, seconds: float, where: str) -> Hung | None:
        if self._reported == what:
            return None
        self._reported = what
        return Hung(self.job, seconds, where)

    def _reason(self) -> str:
        if self._kill_reason or self.exit is None:
            return self._kill_reason
        if self.exit.reason or self.exit.status is None:
            crashed = _innermost(self.log.last_lines, "Current thread 0x")
            return (self.exit.reason or "it is unknown how its process ended") + crashed
        ended = status_text(self.exit.status)
        if self.exit.status < 0:
            return ended + _innermost(self.log.last_lines, "Current thread 0x")
        return ended if self.exit.status else f"{ended}, before its function returned"

    def _wait_time(self, what: str, now: float) -> float:
        """Returns the seconds since the first call with this `what`."""
        return now - self._since.setdefault(what, now)


def _innermost(lines: Iterable[str], *threads: str) -> str:
    """Finds the last of these threads in the tracebacks of a stuck or crashing process, and returns its innermost
    line.
    """
    innermost, expected = "", False
    for line in lines:
        if line.startswith(threads):
            expected = True
        elif expected:
            innermost, expected = f" ({line.strip()})", False
    return innermost
