"""Measures how far the clocks of workers on other hosts differ from the coordinator's clock.

The coordinator asks a worker for its time. The answer is taken to refer to the middle of the round trip, with an
error of at most half the round trip. Of several round trips, the shortest counts. The threads that read the
sockets ask and answer the questions.
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
    """The offset of a worker's clock from the coordinator's clock."""

    ahead_ns: int = 0
    """Nanoseconds by which the worker's `time.monotonic_ns` is ahead of the coordinator's."""
    wall_ahead_ns: int = 0
    """Nanoseconds by which the worker's `time.time_ns` is ahead of the coordinator's. Negative if it is behind."""
    round_trip_ns: int = 0
    """Nanoseconds of the round trip that measured the offset. 0 for a worker on the coordinator's own host."""


def answer(question: WorkerMessage) -> WorkerMessage:
    """Returns a worker's answer to a coordinator's question for the time of its clock."""
    now = {"monotonic": time.monotonic_ns(), "wall": time.time_ns()}
    return WorkerMessage(KIND, {"asked": int(question.fields["asked"]), **now}, {})


class ClockWatch:
    """Measures the clock offset of one worker by several questions in a row."""

    def __init__(self) -> None:
        self.clock = Clock()
        self._left = 0
        self._best: Clock | None = None
        self._changing = threading.Lock()

    def begin(self) -> WorkerMessage | None:
        """Returns the first question of a new measurement, or None if a measurement is already under way."""
        with self._changing:
            if self._left:
                return None
            self._left, self._best = ROUND_TRIPS, None
        return _question()

    def take(self, fields: Mapping[str, Any]) -> WorkerMessage | None:
        """Processes an answer as soon as it arrives. Returns the next question, or None after the last.

        Raises `Damaged` if the answer is malformed.
        """
        measured = _measure(fields, time.monotonic_ns(), time.time_ns())
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


def _measure(fields: Mapping[str, Any], now: int, wall: int) -> Clock:
    match fields:
        case {"asked": int(asked), "monotonic": int(monotonic), "wall": int(theirs)}:
            trip = now - asked
            known = lambda ahead: 0 if abs(ahead) <= trip else ahead
            return Clock(known(monotonic - (asked + now) // 2), known(theirs - (wall - trip // 2)), trip)
    raise Damaged("an answer about a worker's clock contains no times.")
