"""How fast a training goes."""

import time
from collections import deque

SECONDS = 1.0
"""A speed is that of at least so much time: what several iterations have left in a queue arrives at once."""


class Throughput:
    """Steps a second, of late."""

    def __init__(self) -> None:
        self._marks = deque([(time.perf_counter(), 0)])

    def skip(self, seconds: float) -> None:
        """Takes so much time, which has passed, out of all speeds to come."""
        now = time.perf_counter()
        self._marks = deque((min(at + seconds, now), done) for at, done in self._marks)

    def after(self, steps: int) -> float:
        """The speed after so many steps more."""
        now, done = time.perf_counter(), self._marks[-1][1] + steps
        self._marks.append((now, done))
        while now - self._marks[1][0] >= SECONDS:
            self._marks.popleft()
        began, before = self._marks[0]
        return (done - before) / max(now - began, 1e-9)
