"""Runs a compiled program, one window of iterations ahead of the metrics that the host has read.

While the host reads and records the metrics of one window, the device already computes the next window, so the
device never waits for the host.
"""

import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from rollmill.core import operations
from rollmill.dataflow import State
from rollmill.programs.compiled import CompiledProgram

TARGET_SECONDS = 0.1
"""Duration in seconds up to which windows of iterations grow."""

FAR_TOO_LONG = 4.0
"""Factor by which a window may exceed the target duration before the next windows become smaller."""

MAX_WINDOW = 256


class Window(NamedTuple):
    """Consecutive iterations whose metrics were read in one transfer from the device."""

    before: State
    """The training state before the first iteration of the window. Deleted if the program `loses_state`."""
    after: State
    """The training state after the last iteration of the window. Deleted unless `kept`."""
    first: int
    """Number of iterations before the window."""
    metrics: list[dict[str, np.ndarray]]
    """Metrics of the window, an entry per iteration or per group of summed iterations: scalars, or `[seed]`."""
    counts: list[int]
    """Number of iterations that each entry of `metrics` sums."""

    kept: bool = True
    """True if `after` still exists. A program that `loses_state` deletes it once it begins the next window."""

    @property
    def last(self) -> int:
        """Number of iterations done when the window ends."""
        return self.first + sum(self.counts)


class _Running(NamedTuple):
    before: State
    after: State
    first: int
    metrics: list[Array]
    """Metrics that each call of the program returned."""
    calls: list[int]
    """Number of iterations of each call."""

    @property
    def size(self) -> int:
        return sum(self.calls)


def _all(first: int, count: int) -> int:
    return count


def _always(first: int) -> bool:
    return True


class Pauses(NamedTuple):
    """Pauses between windows. The device is idle while the host calls a function, such as an evaluation."""

    every: int
    """Number of iterations between two pauses."""
    run: Callable[[Window], None]
    """Function that is called in each pause with the window that ends there, while the device is idle."""


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
    """Runs a program from iteration `first` to iteration `until`, and yields windows of iterations.

    The device computes the next window while the consumer handles the last one. A window ends at every multiple of
    each of the `strides` and of `pauses.every`. In a pause, `pauses.run` is called before the next window begins.

    `keeps(n)` returns whether the state after iteration `n` may be requested. If the program `loses_state`, the
    next window begins only after the consumer has handled a window with such a state, and the states of other
    windows are deleted.

    Before each window, `admit(n, count)` returns how many of the next `count` iterations, after the first `n`, may
    begin. Training ends when it returns 0. Windows grow until one takes about `window_seconds`, and grow anew from
    iteration `slower_from` on, when iterations take longer (0: never). If the program can sum metrics, they are
    summed over `span` iterations, up to multiples of `span`.
    """
    ahead, growing = None, _GrowingSize(window_seconds)
    per_call = span if program.sums_iterations else program.iterations_per_call
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
            count = admit(first, min(growing.size * per_call, until - first, to_end))
            until = until if count else first
            ahead = _dispatch(program, state, first, count, per_call) if count else None
        if ahead is not None:
            state, first = ahead.after, first + ahead.size
        if running is not None:
            began = time.perf_counter()
            window = window or _read(program, running)
            waited = time.perf_counter() - began
            with _finishing(ahead):
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


def _dispatch(program: CompiledProgram, state: State, first: int, size: int, per_call: int) -> _Running:
    before, metrics, calls, done = state, [], [], 0
    state = program.to_be_overwritten(state)
    while done < size:
        # metrics that a program sums are those of iterations between two multiples of `per_call`
        most = per_call - (first + done) % per_call if program.sums_iterations else per_call
        calls.append(min(most, size - done))
        with operations.span("dispatch", "dispatch"):
            state, returned = program.advance(state, calls[-1])
        metrics.append(returned)
        done += calls[-1]
    return _Running(before, state, first, metrics, calls)


@contextlib.contextmanager
def _finishing(ahead: _Running | None) -> Iterator[None]:
    """Waits for the next window if the consumer stops and will not read it.

    A program that calls functions of Python on a CPU, such as MuJoCo Warp, would wait forever if the interpreter
    ended first. With several processes, others may have died, so that the window would never end.
    """
    try:
        yield
    except GeneratorExit:
        if ahead is not None and jax.process_count() == 1:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                jax.block_until_ready(ahead.metrics)
        raise


def _read(program: CompiledProgram, running: _Running) -> Window:
    with operations.span("metrics of the device", "waiting"):
        values = jax.device_get(running.metrics)
    each = [program.metrics_of_each(*call) for call in zip(values, running.calls, strict=True)]
    rows = [{name: row[..., i] for i, name in enumerate(program.metric_names)} for rows in each for row in rows]
    counts = running.calls if program.sums_iterations else [1] * running.size
    return Window(running.before, running.after, running.first, rows, counts)
