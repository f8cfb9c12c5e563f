"""Decides when repeated losses of workers end a run, and how long to wait before each restart.

Losses of a replica that steps environments are consecutive unless it has worked between them for longer than it
takes to notice a hang, and for longer than a minute. An environment that fails is likely to fail again and again,
even if training progresses between two failures. Losses of other replicas are consecutive unless training has
progressed further than ever between them.
"""

import time

from rollmill.processes.restarts import LossCounter

FIRST_PAUSE_SECONDS = 1.0
"""Seconds to wait before the second consecutive restart. The first is immediate, and later pauses double."""

MAX_PAUSE_SECONDS = 10.0

MIN_WORK_SECONDS = 60.0
"""Minimum seconds of work between losses that are not consecutive, since work begins with compilation."""


class Recovery:
    """Counts the consecutive losses of each replica.

    If a replica steps environments, its count is reset after it has worked for `enough_seconds`, at least
    `MIN_WORK_SECONDS`.
    """

    def __init__(self, enough_seconds: float) -> None:
        self._of_environments = LossCounter(max(enough_seconds, MIN_WORK_SECONDS))
        self._of_others = LossCounter()
        self._began: dict[str, float] = {}

    def started(self, name: str) -> None:
        """Records that the worker of this replica has started its work."""
        self._began[name] = time.monotonic()

    def advanced(self) -> None:
        """Records progress of training. Resets the loss counts of replicas that do not step environments."""
        self._of_others.clear()

    def add(self, name: str, *, environments: bool, idle_seconds: float = 0.0) -> int:
        """Counts a loss of a replica. Returns the number of its consecutive losses.

        `environments` says whether the replica steps environments. `idle_seconds` do not count as work.
        """
        now = time.monotonic()
        worked = now - self._began.get(name, now) - idle_seconds
        counter = self._of_environments if environments else self._of_others
        return counter.add(name, worked_seconds=worked)


def pause_before(count: int) -> float:
    """Returns the seconds to wait before a restart, after `count` consecutive losses."""
    return min(FIRST_PAUSE_SECONDS * 2.0 ** (count - 2), MAX_PAUSE_SECONDS) if count > 1 else 0.0
