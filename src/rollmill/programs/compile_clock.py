"""Measures compilation by thread, for reports of start-up time."""

import threading
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import jax

COMPILING = "/jax/core/compile/"
"""Start of the names of the events by which JAX reports tracing, lowering and compiling."""

CLOSE_SECONDS = 0.05
"""Two intervals that are no further apart are reported as one."""

Interval: TypeAlias = tuple[float, float]
"""Its beginning and its end, in seconds of one clock."""


class CompileTimes(NamedTuple):
    """Ages in seconds instead of times, because the clocks of hosts differ."""

    compiled: Sequence[Interval]
    """How long ago each compilation began and ended."""
    built: float
    """How long ago everything was built, and the first iteration began."""


class CompileClock:
    """Records when the thread that created it compiles, while it is used as a context manager."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._intervals: list[Interval] = []

    def __enter__(self) -> "CompileClock":
        jax.monitoring.register_event_duration_secs_listener(self._hear)
        return self

    def __exit__(self, *error: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._hear)

    def report(self, iterating_since: float) -> CompileTimes:
        """Returns the compilations so far."""
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
