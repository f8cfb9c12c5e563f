"""Records when each thread compiles, for reports of the time that a run takes to start."""

import threading
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import jax

COMPILING = "/jax/core/compile/"
"""Common beginning of the names of the events with which JAX reports tracing, lowering and compiling."""

CLOSE_SECONDS = 0.05
"""Maximum gap, in seconds, between two intervals of compilation that are reported as one."""

Interval: TypeAlias = tuple[float, float]
"""Beginning and end of an interval, in seconds of one clock."""


class CompileTimes(NamedTuple):
    """The times at which a worker compiled, as ages in seconds before the report.

    Ages are used instead of points in time, because the clocks of different hosts differ.
    """

    compiled: Sequence[Interval]
    """Ages in seconds at which each compilation began and ended."""
    built: float
    """Age in seconds at which everything was built and the first iteration began."""


class CompileClock:
    """Context manager that records when the thread that created it compiles."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._intervals: list[Interval] = []

    def __enter__(self) -> "CompileClock":
        jax.monitoring.register_event_duration_secs_listener(self._hear)
        return self

    def __exit__(self, *error: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._hear)

    def report(self, iterating_since: float) -> CompileTimes:
        """Returns the compilations so far, given the time at which the first iteration
        began (`time.monotonic`).
        """
        now = time.monotonic()
        compiled = [(now - begin, now - end) for begin, end in union(self._intervals, CLOSE_SECONDS)]
        return CompileTimes(compiled, now - iterating_since)

    def _hear(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event.startswith(COMPILING) and threading.get_ident() == self._thread:
            now = time.monotonic()
            self._intervals.append((now - duration_secs, now))


def union(intervals: Iterable[Interval], close: float = 0.0) -> Sequence[Interval]:
    """Sorts intervals, and joins those that overlap or are at most `close` apart."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1] + close:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined
