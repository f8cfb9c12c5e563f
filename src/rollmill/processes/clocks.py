"""The clocks of workers on other hosts against the coordinator's: each host counts from a time of its own.

A question and its answer pass between the threads that read the sockets. The worker's time belongs to the middle
of the round trip, to within half of its length. Of several round trips the shortest counts.
"""

import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from rollmill.channels.errors import Damaged
from rollmill.processes.messages import WorkerMessage

KIND = ".clock"
ROUND_TRIPS = 8


class Clock(NamedTuple):
    """The clock of a worker."""

    ahead_ns: int = 0
    """Nanoseconds by which its `time.monotonic_ns` is ahead of the coordinator's, negative if it is behind."""
    wall_ahead_ns: int = 0
    """The same of `time.time_ns`."""
    round_trip_ns: int = 0
    """Length of the round trip that told, or 0 where nothing was asked, because there is one clock."""


def answer(question: WorkerMessage) -> WorkerMessage:
    """Returns a worker's answer to a question for its clock."""
    now = {"monotonic": time.monotonic_ns(), "wall": time.time_ns()}
    return WorkerMessage(KIND, {"asked": int(question.fields["asked"]), **now}, {})


class ClockWatch:
    """Measures the clock of one worker by several questions in a row."""

    def __init__(self) -> None:
        self.clock = Clock()
        self._left = 0
        self._best: Clock | None = None
        self._changing = threading.Lock()

    def begin(self) -> WorkerMessage | None:
        """Returns the first question of a new series, or None if one is under way."""
        with self._changing:
            if self._left:
                return None
            self._left, self._best = ROUND_TRIPS, None
        return _question()

    def take(self, fields: Mapping[str, Any]) -> WorkerMessage | None:
        """Takes an answer at the moment when it comes, and returns the next question, or None after the last.

        Raises `Damaged` if it is malformed.
        """
        measured = _measured(fields, time.monotonic_ns(), time.time_ns())
        with self._changing:
            self._left = max(0, self._left - 1)
            if self._best is None or measured.round_trip_ns < self._best.round_trip_ns:
                self._best = measured
            if self._left:
                return _question()
            self.clock = self._best
            return None


def _question() -> WorkerMessage:
    return WorkerMessage(KIND, {"asked": time.monotonic_ns()}, {})


def _measured(fields: Mapping[str, Any], now: int, wall: int) -> Clock:
    match fields:
        case {"asked": int(asked), "monotonic": int(monotonic), "wall": int(theirs)}:
            trip = now - asked
            known = lambda ahead: 0 if abs(ahead) <= trip else ahead
            return Clock(known(monotonic - (asked + now) // 2), known(theirs - (wall - trip // 2)), trip)
    raise Damaged("an answer about a worker's clock contains no times.")
