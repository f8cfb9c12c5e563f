"""The content of a worker's heartbeats: the reported activity and the current source line of its main thread."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from rollmill.processes.messages import Seconds
from rollmill.processes.stacks import current_line


class Heartbeat(NamedTuple):
    """The activity of a worker's thread at one moment, as it is sent to the coordinator."""

    note: str
    expect: float
    """Seconds without progress that the worker has announced as normal."""
    progress: int
    """Number of activities that the thread has reported so far."""
    idle_seconds: float
    """Seconds since the first heartbeat with this value of `progress`."""
    where: str

    def hung_seconds(self, limit: float) -> float | None:
        """Returns the seconds without progress if they exceed both `limit` and `expect`, otherwise None."""
        return self.idle_seconds if self.idle_seconds > max(limit, self.expect) else None

    def __str__(self) -> str:
        return f"{self.note}; {self.where}"

    @staticmethod
    def from_fields(fields: dict[str, Any]) -> "Heartbeat":
        """Reads the heartbeat from a message's fields."""
        number = lambda name: float(fields.get(name, 0.0))
        return Heartbeat(
            str(fields.get("note")),
            number("expect"),
            int(number("progress")),
            number("idle_seconds"),
            str(fields.get("where")),
        )


class Progress:
    """The last reported activity of one thread. This thread writes it, and another thread reads it."""

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._now = ("starting", 0.0, 0)
        self._seen = (-1, 0.0)

    def note(self, text: str, expect: Seconds = 0.0) -> None:
        """Records the next activity, for `Control.at`. A single assignment, so a concurrent reader never sees a
        partial update.
        """
        self._now = (text, expect, self._now[2] + 1)

    def touch(self) -> None:
        """Records progress without a new activity."""
        text, expect, progress = self._now
        self._now = (text, expect, progress + 1)

    @contextmanager
    def idle(self, text: str) -> Iterator[None]:
        """Context manager that marks the thread as idle, because it waits for the coordinator for as long as
        necessary.
        """
        if threading.get_ident() != self._thread:
            yield
            return
        before, expect, _ = self._now
        self.note(text, float("inf"))
        try:
            yield
        finally:
            self.note(before, expect)

    def look(self) -> Heartbeat:
        """Returns the thread's current activity as a heartbeat. Only one thread may call this method."""
        (note, expect, progress), now = self._now, time.monotonic()
        if progress != self._seen[0]:
            self._seen = (progress, now)
        return Heartbeat(note, expect, progress, now - self._seen[1], current_line(self._thread))
