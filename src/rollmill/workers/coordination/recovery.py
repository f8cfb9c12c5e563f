"""Decides when repeated losses of workers end a run, and how long to wait before each retry.

Losses of a replica are consecutive

    if it steps environments    unless it has worked in between for longer than a hang takes to be noticed, and for
                                longer than a minute: an environment that fails is likely to fail again and again,
                                although the training progresses between two failures
    if it does not              unless the training has come further than ever since the last loss
"""

import time

from rollmill.processes.restarts import LossCounter

FIRST_PAUSE_SECONDS = 1.0
"""Before the second try in a row. The first try comes at once, and each later one waits twice as long."""

MAX_PAUSE_SECONDS = 10.0

MIN_WORK_SECONDS = 60.0
"""Shortest work that counts as done, because part of it is compilation and the first steps."""


class Recovery:
    """Counts the losses of each replica. They are consecutive until it has worked for `enough_seconds`.

    The time is at least `MIN_WORK_SECONDS`.
    """

    def __init__(self, enough_seconds: float) -> None:
        self._of_environments = LossCounter(max(enough_seconds, MIN_WORK_SECONDS))
        self._of_others = LossCounter()
        self._began: dict[str, float] = {}

    def started(self, name: str) -> None:
        """Notes that the function of this replica's worker is being called."""
        self._began[name] = time.monotonic()

    def advanced(self) -> None:
        """Records new progress, which resets the count of losses."""
        self._of_others.clear()

    def add(self, name: str, *, environments: bool, idle_seconds: float = 0.0) -> int:
        """Counts a loss, and returns the number of consecutive losses."""
        now = time.monotonic()
        worked = now - self._began.get(name, now) - idle_seconds
        counter = self._of_environments if environments else self._of_others
        return counter.add(name, worked_seconds=worked)


def pause_before(count: int) -> float:
    """Returns the seconds to wait before restarting a worker after this number of consecutive losses."""
    return min(FIRST_PAUSE_SECONDS * 2.0 ** (count - 2), MAX_PAUSE_SECONDS) if count > 1 else 0.0
