"""The content of heartbeats: the activity of a worker's thread, by its own note and its current source line."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from rollmill.processes.messages import Seconds
from rollmill.processes.stacks import current_line


class Heartbeat(NamedTuple):
    """The activity of a worker's thread at one moment, as a message to the coordinator carries it."""

    note: str
    expect: float
    """Seconds for which it said that nothing need be noted."""
    progress: int
    """Counts its notes."""
    idle_seconds: float
    """Seconds since the heartbeat that first had this progress."""
    where: str

    def hung_seconds(self, limit: float) -> float | None:
        """Returns the seconds without a note, if they exceed both the limit and `expect`, otherwise None."""
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
    """The last activity of one thread. That thread writes it, and another thread reads it."""

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._now = ("starting", 0.0, 0)
        self._seen = (-1, 0.0)

    def note(self, text: str, expect: Seconds = 0.0) -> None:
        """Implements `Control.at` by one assignment, so that a concurrent reader never sees a partial update."""
        self._now = (text, expect, self._now[2] + 1)

    def touch(self) -> None:
        """Progress, under the same note."""
        text, expect, progress = self._now
        self._now = (text, expect, progress + 1)

    @contextmanager
    def idle(self, text: str) -> Iterator[None]:
        """While the thread waits for its coordinator, which may take as long as it likes."""
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
        """Returns the thread's current activity. Only one thread may call it."""
        (note, expect, progress), now = self._now, time.monotonic()
        if progress != self._seen[0]:
            self._seen = (progress, now)
        return Heartbeat(note, expect, progress, now - self._seen[1], current_line(self._thread))
