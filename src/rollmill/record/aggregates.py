"""Aggregates metrics over the iterations of a log line: means, throughput, and the latest episodes."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

NO_WEIGHTS: Mapping[str, str] = MappingProxyType({})
NO_KINDS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class SavedSums:
    """Sums of metrics over the iterations since the last log line, as stored in a checkpoint."""

    iterations: int = 0
    sums: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Sum of each metric, with one value per seed."""
    absent: dict[str, int] = field(default_factory=dict)
    """For metrics that some iterations lack, the number of iterations without them."""


class StackedRows(NamedTuple):
    """Metrics of consecutive iterations, stacked into one array."""

    names: list[str]
    numbers: Float64[np.ndarray, "rows metrics seeds"]
    counts: list[int]
    """Number of iterations of each row."""

    def of_seed(self, number: int) -> "StackedRows":
        """Returns the metrics of one seed, selected by its position."""
        return self._replace(numbers=self.numbers[:, :, number, None])

    def of(self, prefix: str) -> Float64[np.ndarray, "rows some seeds"]:
        """Returns the metrics whose names begin with `prefix`."""
        return self.numbers[:, [index for index, name in enumerate(self.names) if name.startswith(prefix)]]

    def with_others(self, others: Mapping[str, Float64[np.ndarray, " rows"]]) -> "StackedRows":
        """Returns the rows with additional metrics that all seeds share."""
        if not others:
            return self
        rows, _, seeds = self.numbers.shape
        added = np.broadcast_to(np.stack(list(others.values()), axis=1)[..., None], (rows, len(others), seeds))
        return self._replace(names=[*self.names, *others], numbers=np.concatenate([self.numbers, added], axis=1))


def stack_rows(rows: Sequence[Mapping[str, Any]], counts: Sequence[int]) -> list[StackedRows]:
    """Stacks rows of metrics into arrays, one for each group of consecutive rows with the same metrics."""
    blocks: list[StackedRows] = []
    for names, group in groupby(zip(rows, counts, strict=True), key=lambda each: list(each[0])):
        alike = list(group)
        numbers = np.asarray([list(row.values()) for row, _ in alike], np.float64)
        blocks.append(
            StackedRows(names, numbers.reshape(len(alike), len(names), -1), [count for _, count in alike])
        )
    return blocks


class RowSums:
    """Sums of finite metrics over iterations. Each metric is a scalar, or an array with one value per seed."""

    def __init__(self, saved: SavedSums | None = None) -> None:
        saved = saved or SavedSums()
        self.iterations = saved.iterations
        self.names = list(saved.sums)
        self._absent = dict(saved.absent)
        self._sums = np.asarray(list(saved.sums.values()), np.float64)  # [metric, seed]

    def add(self, row: Mapping[str, Any], *, iterations: int = 1) -> None:
        """Adds the metrics of one iteration, or the sums of metrics over several iterations."""
        self.add_numbers(
            list(row), np.asarray(list(row.values()), np.float64).reshape(len(row), -1), iterations=iterations
        )

    def add_numbers(
        self, names: list[str], numbers: Float64[np.ndarray, "metrics seeds"], *, iterations: int = 1
    ) -> None:
        """Adds the metrics of one iteration, or their sums over several iterations, given as an array."""
        if self.names and self.names != names:  # the line was begun by another version, or with other options
            sums = dict(zip(names, numbers, strict=True))
            self._absent |= {name: self.iterations for name in names if name not in self.names}
            for name, before in zip(self.names, self._sums, strict=True):
                if name not in sums:
                    self._absent[name] = self._absent.get(name, 0) + iterations
                sums[name] = sums[name] + before if name in sums else before
            names, numbers = list(sums), np.asarray(list(sums.values()))
        elif self.names:
            numbers = self._sums + numbers
        self.names, self._sums = names, numbers
        self.iterations += iterations

    def totals(self) -> dict[str, float]:
        """Returns the sum of each metric over iterations and seeds."""
        return dict(zip(self.names, self._sums.sum(axis=-1).tolist(), strict=True))

    def means(self, weights: Mapping[str, str] = NO_WEIGHTS) -> dict[str, np.ndarray]:
        """Returns the mean of each metric over iterations, one value per seed.

        Some metrics are not computed in every iteration, and are 0 otherwise. `weights` maps each of them to the
        metric that holds the computed fraction of an iteration. Their means are taken over the computed part only,
        and are NaN if there is none.
        """
        counts: Any = self.iterations or 1
        if self._absent:
            counts = [[counts - self._absent.get(name, 0)] for name in self.names]
        means = dict(zip(self.names, self._sums / counts, strict=True))
        sums = dict(zip(self.names, self._sums, strict=True))
        with np.errstate(invalid="ignore"):
            return means | {name: sums[name] / sums[weight] for name, weight in weights.items() if name in sums}

    def to_json(self) -> dict[str, Any]:
        """Returns the sums in the JSON form of `SavedSums`."""
        sums = dict(zip(self.names, self._sums.tolist(), strict=True))
        return {"iterations": self.iterations, "sums": sums, **({"absent": self._absent} if self._absent else {})}


SECONDS = 1.0
"""Shortest seconds over which throughput is measured, since metrics of several iterations come at once."""


class Throughput:
    """Measures the recent throughput of a run in environment steps per second."""

    def __init__(self) -> None:
        self._marks = deque([(time.perf_counter(), 0)])

    def skip(self, seconds: float) -> None:
        """Excludes the last `seconds` from the measured time."""
        now = time.perf_counter()
        self._marks = deque((min(time_of_mark + seconds, now), done) for time_of_mark, done in self._marks)

    def after(self, steps: int) -> float:
        """Adds `steps` completed environment steps, and returns the recent throughput in steps per second."""
        now, done = time.perf_counter(), self._marks[-1][1] + steps
        self._marks.append((now, done))
        while now - self._marks[1][0] >= SECONDS:
            self._marks.popleft()
        start, done_at_start = self._marks[0]
        return (done - done_at_start) / max(now - start, 1e-9)


EPISODES = 100
"""Number of episodes in a full window: means are over the latest iterations with at least that many."""


class _EndedEpisodes(NamedTuple):
    count: float
    return_sum: float
    length_sum: float
    of_kinds: tuple[float, ...] = ()
    """Sum of the returns of each kind of agents."""


class EpisodeWindow:
    """Mean return and length of recent episodes, and the best mean return so far.

    `best_return` only considers full windows, since the mean of a few early episodes says little. `best` is
    defined whenever `mean_return` is, and is never below it, so that runs can be compared by the mean of `best`.
    """

    def __init__(self) -> None:
        self._recent: deque[_EndedEpisodes] = deque()
        self._sums = _EndedEpisodes(0.0, 0.0, 0.0)
        self._kinds: tuple[str, ...] = ()
        self.best_return: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the window in a form that JSON can hold, and that `from_json` restores."""
        recent = [[*ended[:3], *ended.of_kinds] for ended in self._recent]
        kinds = {"kinds": list(self._kinds)} if self._kinds else {}
        return {"recent": recent, "best_return": self.best_return, **kinds}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "EpisodeWindow":
        """Restores a window from the result of `to_json`."""
        window = cls()
        window._kinds = tuple(saved.get("kinds", ()))
        for count, returns, lengths, *of_kinds in saved["recent"]:
            window._recent.append(_EndedEpisodes(count, returns, lengths, tuple(of_kinds)))
        window._sums = window._sum_window()
        window.best_return = saved["best_return"]
        return window

    def add(
        self, count: float, return_sum: float, length_sum: float, of_kinds: Mapping[str, float] = NO_KINDS
    ) -> None:
        """Adds the episodes that ended in one iteration: their number, and the sums of their returns and lengths.

        In an environment with several kinds of agents, `of_kinds` has the sum of the returns of each kind.
        """
        if count:
            self._kinds = tuple(of_kinds)
            self._recent.append(_EndedEpisodes(count, return_sum, length_sum, tuple(of_kinds.values())))
            left = self._sums.count + count  # exact, because episodes are counted in whole numbers
            while len(self._recent) > 1 and left - self._recent[0].count >= EPISODES:
                left -= self._recent.popleft().count
            self._sums = self._sum_window()
        mean = self.mean_return
        if self.full and mean is not None:
            self.best_return = mean if self.best_return is None else max(mean, self.best_return)

    def _sum_window(self) -> _EndedEpisodes:
        """Returns the sums over the window, from its beginning. A resumed run returns equal sums."""
        if not self._recent:
            return self._sums
        counts, returns, lengths, of_kinds = zip(*self._recent, strict=True)
        sums = zip(*of_kinds, strict=False)  # none, as long as older iterations lack the sums of kinds
        return _EndedEpisodes(sum(counts), sum(returns), sum(lengths), tuple(map(sum, sums)))

    @property
    def full(self) -> bool:
        """True if the window contains at least `EPISODES` episodes."""
        return self.episodes >= EPISODES

    @property
    def episodes(self) -> float:
        """Number of recent episodes that the means are taken over."""
        return self._sums.count

    @property
    def best(self) -> float | None:
        """The best mean return of a full window, or the current mean return if no window was full."""
        return self.mean_return if self.best_return is None else self.best_return

    @property
    def mean_return(self) -> float | None:
        """Mean return of recent episodes, or None if no episode has ended yet."""
        return self._sums.return_sum / self._sums.count if self._sums.count else None

    @property
    def kind_returns(self) -> dict[str, float]:
        """Mean return of each kind of agents in recent episodes. Empty without several kinds or episodes."""
        means = [total / self._sums.count for total in self._sums.of_kinds]
        return dict(zip(self._kinds, means, strict=False))

    @property
    def mean_length(self) -> float | None:
        """Mean length of recent episodes in steps, or None if no episode has ended yet."""
        return self._sums.length_sum / self._sums.count if self._sums.count else None
