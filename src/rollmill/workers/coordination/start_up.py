"""How long a training with workers takes to start up: what is built and compiled before it learns.

Workers build and compile side by side and after one another, so neither a sum nor a maximum over them says how
long nothing was learned. Each worker reports the times at which it compiled; their union is what counts.
"""

import time
from collections.abc import Iterable

from rollmill.programs.compile_clock import CompileTimes, Interval, union
from rollmill.workers.reports import Durations


class StartUp:
    """Combines the compile times of all workers.

    Args:
        began: when workers were asked for, by `time.monotonic`.
    """

    def __init__(self, began: float) -> None:
        self._began = began
        self._compiled: list[Interval] = []
        self._built = began

    def add(self, times: CompileTimes) -> Durations:
        """The durations, including a worker's times that have just arrived."""
        now = time.monotonic()
        self._compiled += [(now - begin, now - end) for begin, end in times.compiled]
        self._built = max(self._built, now - times.built)
        return Durations(_length(self._compiled), _length([*self._compiled, (self._began, self._built)]))


def _length(intervals: Iterable[Interval]) -> float:
    return sum((end - begin for begin, end in union(intervals)), start=0.0)
