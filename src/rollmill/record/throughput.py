"""Throughput of a training."""

import time
from collections import deque

SECONDS = 1.0
"""Shortest window over which throughput is measured: the metrics of several iterations may arrive at once."""


class Throughput:
    """Recent throughput in steps per second."""

    def __init__(self) -> None:
        self._marks = deque([(time.perf_counter(), 0)])

    def skip(self, seconds: float) -> None:
        """Excludes this much past time from the throughput."""
        now = time.perf_counter()
        self._marks = deque((min(time_of_mark + seconds, now), done) for time_of_mark, done in self._marks)

    def after(self, steps: int) -> float:
        """Adds `steps` steps that are done now, and returns the throughput."""
        now, done = time.perf_counter(), self._marks[-1][1] + steps
        self._marks.append((now, done))
        while now - self._marks[1][0] >= SECONDS:
            self._marks.popleft()
        start, done_at_start = self._marks[0]
        return (done - done_at_start) / max(now - start, 1e-9)
