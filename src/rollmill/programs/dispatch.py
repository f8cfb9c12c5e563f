"""Drives a program forward, one dispatch ahead of what the host has read.

The device never waits for the host: while the metrics of one window of iterations are read and recorded, the next
window is already running.
"""

import time
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from rollmill.core import operations
from rollmill.dataflow import State
from rollmill.programs.compiled import CompiledProgram

TARGET_SECONDS = 0.1
"""Windows grow until one takes about so long."""

FAR_TOO_LONG = 4.0
"""Times that long from which on a window makes the next ones smaller."""

MAX_WINDOW = 256


class Window(NamedTuple):
    """Consecutive iterations whose metrics were read in one transfer."""

    before: State
    """The state before the window's first iteration, gone if the program `loses_state`."""
    after: State
    """The state after its last, gone unless it is `kept`."""
    first: int
    """Number of iterations that came before the window."""
    metrics: list[dict[str, np.ndarray]]
    """Sums of metrics over one iteration, or over several in a row. Each value is a scalar, or `[seed]`."""
    counts: list[int]
    """Number of iterations of each entry of `metrics`."""

    kept: bool = True
    """Whether `after` still exists. A program that `loses_state` and was run ahead of the window deletes it."""

    @property
    def last(self) -> int:
        """Number of iterations done after the window."""
        return self.first + sum(self.counts)


class _Running(NamedTuple):
    before: State
    after: State
    first: int
    metrics: list[Array]
    counts: list[int]


def _all(first: int, count: int) -> int:
    return count


def _always(first: int) -> bool:
    return True


class Pauses(NamedTuple):
    """Describes when a program waits, and for what."""

    every: int
    """Iterations between two pauses."""
    run: Callable[[Window], None]
    """Called with the window that ends there, while nothing else is computed."""


def dispatch_ahead(
    program: CompiledProgram,
    state: State,
    *,
    first: int,
    until: int,
    strides: Sequence[int] = (),
    pauses: Pauses | None = None,
    span: int = 1,
    slower_from: int = 0,
    keeps: Callable[[int], bool] = _always,
    admit: Callable[[int, int], int] = _all,
    window_seconds: float = TARGET_SECONDS,
) -> Generator[Window]:
    """Runs the iterations after the `first` ones up to `until`, and yields them window by window.

    A consumer that stops early loses nothing: every window carries the state at its end. A window ends at every
    multiple of each of the `strides`, and at every pause. Unless the state is kept, the next window is dispatched
    right after a pause. A program that `loses_state` is not run ahead of a window whose state may be requested,
    according to `keeps`: it would be gone before anyone could save it.

    Windows grow until one takes about `window_seconds`, and anew from the iteration `slower_from`, after which
    iterations take longer (0: none). If the program supports it, metrics are summed over `span` iterations, up to
    multiples of it. `admit` returns how many further iterations may be dispatched. The training ends there if none
    may.
    """
    ahead, growing = None, _GrowingSize(window_seconds)
    span = span if program.sums_iterations else 1
    ends = [*strides, *([pauses.every] if pauses else [])]
    while first < until or ahead is not None:
        running, ahead, window = ahead, None, None
        if running is not None and pauses and first % pauses.every == 0:
            window = _read(program, running)
            pauses.run(window)
        holds = running is not None and program.loses_state and keeps(first)
        if first < until and not holds:
            to_end = min((every - first % every for every in ends), default=until)
            if first < slower_from:
                to_end = min(to_end, slower_from - first)
            elif first == slower_from > 0:
                growing.restart()
            count = admit(first, min(growing.size * span, until - first, to_end))
            until = until if count else first
            ahead = _dispatch(program, state, first, count, span) if count else None
        if ahead is not None:
            state, first = ahead.after, first + sum(ahead.counts)
        if running is not None:
            began = time.perf_counter()
            window = window or _read(program, running)
            waited = time.perf_counter() - began
            yield window._replace(kept=ahead is None or not program.loses_state)
            growing.note_window(waited)


class _GrowingSize:
    """The size of windows, which doubles until one takes about as long as it should.

    A window after one that took longer proves nothing: it was computed while the consumer was busy. But a much
    longer wait shrinks the next windows: iterations may become slower, for example when a filled replay memory
    lets learning begin.
    """

    def __init__(self, seconds: float) -> None:
        self.size = 1
        self._seconds = seconds
        self._since = time.perf_counter()
        self._was_short = True

    def restart(self) -> None:
        """Begins with windows of one iteration again."""
        self.size, self._was_short = 1, False

    def note_window(self, waited: float) -> None:
        """Records the seconds for which the consumer waited for a window's metrics."""
        now = time.perf_counter()
        is_short = now - self._since < self._seconds
        if waited > FAR_TOO_LONG * self._seconds:
            self.size = max(1, int(self.size * self._seconds / waited))
        elif is_short and self._was_short:
            self.size = min(2 * self.size, MAX_WINDOW)
        self._since, self._was_short = now, is_short


def _dispatch(program: CompiledProgram, state: State, first: int, size: int, span: int) -> _Running:
    before, metrics, counts = state, [], []
    state = program.to_be_overwritten(state)
    while sum(counts) < size:
        done = sum(counts)
        counts.append(min(span - (first + done) % span, size - done))
        with operations.span("dispatch", "dispatch"):
            state, vector = program.advance(state, counts[-1])
        metrics.append(vector)
    return _Running(before, state, first, metrics, counts)


def _read(program: CompiledProgram, running: _Running) -> Window:
    with operations.span("metrics of the device", "waiting"):
        values = jax.device_get(running.metrics)
    rows = [{name: row[..., i] for i, name in enumerate(program.metric_names)} for row in values]
    return Window(running.before, running.after, running.first, rows, running.counts)
