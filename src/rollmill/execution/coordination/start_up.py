"""How long a training with workers takes to start up: what is built and compiled before it learns.

Workers build and compile side by side and after one another, so neither a sum nor a maximum over them says how
long nothing was learned. Each worker reports the times at which it compiled; their union is what counts.
"""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax

COMPILING = "/jax/core/compile/"
"""Start of the names of the events by which JAX reports tracing, lowering and compiling."""

CLOSE_SECONDS = 0.05
"""Two intervals that are no further apart are reported as one."""

Interval: TypeAlias = tuple[float, float]
"""Its beginning and its end, in seconds of one clock."""


class CompileClock:
    """The times at which the thread that makes it compiles, from then on.

    As a context manager it listens for as long as the context lasts.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._intervals: list[Interval] = []

    def __enter__(self) -> "CompileClock":
        jax.monitoring.register_event_duration_secs_listener(self._hear)
        return self

    def __exit__(self, *error: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._hear)

    def report(self, iterating_since: float) -> dict[str, Any]:
        """A worker's message after its first iteration: ages in seconds, because the clocks of hosts differ.

        Args:
            iterating_since: when that iteration began, by `time.monotonic`.
        """
        now = time.monotonic()
        return {
            "compiled": [[now - begin, now - end] for begin, end in union(self._intervals, CLOSE_SECONDS)],
            "built": now - iterating_since,
        }

    def _hear(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event.startswith(COMPILING) and threading.get_ident() == self._thread:
            now = time.monotonic()
            self._intervals.append((now - duration_secs, now))


class Durations(NamedTuple):
    """Durations of a training's start, in seconds."""

    compiling: float
    """While at least one worker compiled."""
    total: float
    """While the training had not begun: workers were started, built environments, or compiled."""


class StartUp:
    """Puts the workers' reports together.

    Args:
        began: when workers were asked for, by `time.monotonic`.
    """

    def __init__(self, began: float) -> None:
        self._began = began
        self._compiled: list[Interval] = []
        self._built = began

    def add(self, report: Mapping[str, Any]) -> Durations:
        """The durations, including a report that has just arrived."""
        now = time.monotonic()
        self._compiled += [(now - begin, now - end) for begin, end in report["compiled"]]
        self._built = max(self._built, now - report["built"])
        return Durations(_length(self._compiled), _length([*self._compiled, (self._began, self._built)]))


def union(intervals: Iterable[Interval], close: float = 0.0) -> Sequence[Interval]:
    """The intervals in order, those joined that overlap or are no further apart than `close`."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1] + close:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def _length(intervals: Iterable[Interval]) -> float:
    return sum((end - begin for begin, end in union(intervals)), start=0.0)
