"""When workers that are lost again and again end a training, and how long to wait before each next try.

A loss counts as one more in a row

    of a replica that steps environments    unless it has worked for longer than a hang takes to be seen, and for
                                            longer than a minute, because an environment that fails is likely to
                                            do so again and again, and between two failures the training may well
                                            get on
    of any other                            unless the training has come further than ever since the last one
"""

import time
from typing import NamedTuple

FIRST_PAUSE_SECONDS = 1.0
"""Before the second try in a row; the first comes at once, and each later one waits twice as long."""

MAX_PAUSE_SECONDS = 10.0

MIN_WORK_SECONDS = 60.0
"""Work that is counted as done lasts at least so long: part of it is compilation and the first steps."""


class ConsecutiveLosses(NamedTuple):
    """Losses of one replica in a row."""

    count: int
    environments: bool
    """Whether it steps environments."""


class Recovery:
    """Counts the losses of each replica.

    Args:
        enough_seconds: after which work counts as done, if more than `MIN_WORK_SECONDS`.
    """

    def __init__(self, enough_seconds: float) -> None:
        self._enough_seconds = max(enough_seconds, MIN_WORK_SECONDS)
        self._streaks: dict[str, ConsecutiveLosses] = {}
        self._began: dict[str, float] = {}

    def started(self, name: str) -> None:
        """The function of this replica's worker is being called."""
        self._began[name] = time.monotonic()

    def advanced(self) -> None:
        """The training has come further than ever."""
        self._streaks = {name: streak for name, streak in self._streaks.items() if streak.environments}

    def add(self, name: str, *, environments: bool, idle_seconds: float = 0.0) -> int:
        """One more loss; how many there are in a row now.

        Args:
            name: name of the replica.
            environments: whether it steps environments.
            idle_seconds: how long it had hung.
        """
        now = time.monotonic()
        worked = now - self._began.get(name, now) - idle_seconds
        before = self._streaks.get(name, ConsecutiveLosses(0, environments)).count
        count = 1 if environments and worked > self._enough_seconds else before + 1
        self._streaks[name] = ConsecutiveLosses(count, environments)
        return count


def pause_before(count: int) -> float:
    """Seconds to wait before a worker that was lost so many times in a row is started again."""
    return min(FIRST_PAUSE_SECONDS * 2.0 ** (count - 2), MAX_PAUSE_SECONDS) if count > 1 else 0.0
