"""Detects environments that leak, by the growth of this process's memory while it steps them."""

import math
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

MIN_STRIDE = 16
"""Minimum number of steps per measurement of memory. More steps if a measurement takes long."""

MAX_SHARE = 0.01
"""Maximum share of the time that measurements may take. One takes 2 microseconds, or 200 in some sandboxes."""

FIRST_MARK = 64
"""Number of steps of all environments before the first mark. Each later mark follows after twice the steps.

A large leak is reported after the fifth mark, before it fills the memory.
"""

MIN_GROWTH = 64 * 2**20
"""Minimum bytes of growth between two marks. Less growth is not reported."""

MIN_SHARE = 0.5
"""Minimum share of the growth within steps. The rest belongs to a replay memory, or to compilation."""

INTERVALS, STEADY = 4, 0.5
"""Intervals in a row that are compared, and their smallest growth a step, relative to the largest: a cache that
fills grows less and less."""

STATISTICS = Path("/proc/self/statm")
PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class Growth(NamedTuple):
    """Steady growth of a process's memory while it steps environments."""

    bytes_per_step: float
    """Bytes of growth per step of one environment."""
    resident: int
    """Bytes that the process holds, without memory that it shares with other processes."""


class _Mark(NamedTuple):
    steps: int
    resident: int
    inside: int
    """Growth so far within the steps that were looked at."""
    looks: int


def private_memory() -> int:
    """Returns this process's resident bytes without pages of files and shared memory, or 0 if the system does not
    report them. Pages that a forked process still shares with its parent are counted.
    """
    try:
        _, resident, shared, *_ = STATISTICS.read_bytes().split()
    except (OSError, ValueError):
        return 0
    return PAGE * (int(resident) - int(shared))


class MemoryWatch:
    """Detects growth of the memory, which it measures before and after some steps of the environments."""

    def __init__(
        self,
        num_envs: int,
        *,
        memory: Callable[[], int] = private_memory,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._num_envs, self._memory, self._clock = num_envs, memory, clock
        self._last_look = clock()
        self._draws = random.Random(0)
        self._steps, self._last_steps, self._next_look, self._next_mark = 0, 0, 1, FIRST_MARK
        self._look_seconds = 0.0
        self._inside, self._looks = 0, 0
        self._marks: list[_Mark] = []
        self._is_reported = False

    def before(self) -> int | None:
        """Returns the memory in use before a step, in bytes, or None if this step is not measured."""
        self._steps += 1
        return None if self._steps < self._next_look or self._is_reported else self._memory()

    def after(self, before: int | None) -> Growth | None:
        """Measures the memory after a step, given the result of `before`. Reports large and steady growth once."""
        if before is None:
            return None
        began, now = self._clock(), self._memory()
        self._look_seconds = 2 * (self._clock() - began)
        self._inside, self._looks = self._inside + now - before, self._looks + 1
        # random, so that measurements do not coincide with a period of the environment
        self._next_look += self._draws.randint(1, 2 * self._stride() - 1)
        if self._steps < self._next_mark:
            return None
        self._marks = [*self._marks[-INTERVALS:], _Mark(self._steps, now, self._inside, self._looks)]
        self._next_mark *= 2
        growth = self._steady_growth()
        self._is_reported = growth is not None
        return growth

    def _stride(self) -> int:
        """Returns the mean number of steps to the next sample, from the time of a sample and of the steps before
        it.
        """
        now = self._clock()
        since, self._last_look = now - self._last_look, now
        steps, self._last_steps = self._steps - self._last_steps, self._steps
        if since <= 0:
            return MIN_STRIDE
        return max(MIN_STRIDE, math.ceil(self._look_seconds * steps / since / MAX_SHARE))

    def _steady_growth(self) -> Growth | None:
        if len(self._marks) <= INTERVALS:
            return None
        first, *_, before, last = self._marks
        rates = [
            (new.resident - old.resident) / (new.steps - old.steps)
            for old, new in zip(self._marks, self._marks[1:], strict=False)
        ]
        if last.resident - before.resident < MIN_GROWTH or min(rates) < STEADY * max(rates):
            return None
        inside = (last.inside - first.inside) / (last.looks - first.looks) * (last.steps - first.steps)
        if inside < MIN_SHARE * (last.resident - first.resident):
            return None
        return Growth(rates[-1] / self._num_envs, last.resident)
