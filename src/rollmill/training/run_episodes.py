"""Follows the episodes of a run: the latest episodes of each seed, and how many have ended or failed."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollmill.hooks import training_return
from rollmill.record.aggregates import EpisodeWindow, StackedRows
from rollmill.training.recorded_progress import Episodes, RecorderState

ENDED, FAILED = "episodes/ended", "episodes/failed"
EPISODE_METRICS = (ENDED, "episodes/return_sum", "episodes/length_sum", FAILED)
"""Metrics of the episodes that ended in an iteration."""
KIND_RETURN_PREFIX = "episodes/return_sum/"
"""Prefix of the sums of the returns of each kind of agents in these episodes."""


class RunEpisodes:
    """The latest episodes of each seed of a run, and the numbers of all of its episodes."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self.counts = Episodes()
        self._seeds = seeds
        self._windows = [EpisodeWindow() for _ in seeds]
        self._kinds: Sequence[str] = ()
        """Names of the kinds of agents once an iteration was counted, or none if there is only one kind."""
        self.keep()

    @property
    def windows(self) -> list[dict[str, Any]]:
        """The latest episodes of each seed, in the form that `take_over` accepts."""
        return [window.to_json() for window in self._windows]

    def keep(self) -> None:
        """Keeps the episodes so far, to which `rewind` returns."""
        self._kept = self.windows, self.counts

    def rewind(self) -> None:
        """Returns to the episodes at the last call of `keep`."""
        windows, self.counts = self._kept
        self._windows = [EpisodeWindow.from_json(window) for window in windows]

    def restore(self, progress: RecorderState) -> None:
        """Continues with the episodes of a checkpoint."""
        self._windows = [EpisodeWindow.from_json(vars(window)) for window in progress.episodes]
        self.counts = Episodes(*progress.failures)
        self.keep()

    def take_over(self, windows: Sequence[dict[str, Any]]) -> None:
        """Continues with the latest episodes of another run. The best mean return so far remains this run's."""
        pairs = zip(windows, [window.best_return for window in self._windows], strict=True)
        self._windows = [EpisodeWindow.from_json({**window, "best_return": best}) for window, best in pairs]

    def of_rows(self, block: StackedRows) -> list[list[list[float]]]:
        """Returns the metrics `EPISODE_METRICS` of each row and seed, and the sum of the returns of each kind."""
        self._kinds = _kinds_of(block)
        names = [*EPISODE_METRICS, *(KIND_RETURN_PREFIX + kind for kind in self._kinds)]
        where = [block.names.index(name) if name in block.names else -1 for name in names]
        each = np.where(np.asarray(where)[:, None] < 0, 0.0, block.numbers[:, where])
        return each.transpose(0, 2, 1).tolist()

    def count(self, of_seeds: Sequence[Sequence[float]]) -> None:
        """Counts the episodes of one row, as returned by `of_rows`."""
        for window, (ended, returned, length, failed, *of_kinds) in zip(self._windows, of_seeds, strict=True):
            self.counts = Episodes(self.counts.ended + ended, self.counts.failed + failed)
            if ended:
                window.add(ended, returned, length, dict(zip(self._kinds, of_kinds, strict=True)))

    @property
    def every_one_failed(self) -> bool:
        """True if every episode so far ended because its environment failed."""
        return self.counts.failed > 0 and self.counts.failed >= self.counts.ended

    @property
    def fewest(self) -> float:
        """Fewest episodes of a seed that the means are over."""
        return min(window.episodes for window in self._windows)

    @property
    def are_full(self) -> bool:
        """True if the means are over many episodes of each seed."""
        return all(window.full for window in self._windows)

    @property
    def returns(self) -> list[float | None]:
        """Mean return of the latest episodes of each seed, or None if none has ended."""
        return [window.mean_return for window in self._windows]

    @property
    def mean_return(self) -> float | None:
        """Mean return of the latest episodes over all seeds, or None if none has ended."""
        return _mean(self.returns)

    @property
    def mean_length(self) -> float | None:
        """Mean length of the latest episodes over all seeds, or None if none has ended."""
        return _mean([window.mean_length for window in self._windows])

    @property
    def kind_returns(self) -> dict[str, float | None]:
        """Mean return of each kind of agents over the latest episodes, or None if none has ended."""
        of_seeds = [window.kind_returns for window in self._windows]
        kinds = self._kinds or next(filter(None, of_seeds), {})
        return {kind: _mean([returns.get(kind) for returns in of_seeds]) for kind in kinds}

    def metrics(self) -> dict[str, float | None]:
        """Returns the means over the latest episodes for a log line, overall and by seed."""
        each = {f"episode/return_seed{s}": r for s, r in zip(self._seeds, self.returns, strict=True)}
        return {
            "episode/return": self.mean_return,
            "episode/length": self.mean_length,
            **{training_return(kind): mean for kind, mean in self.kind_returns.items()},
            **(each if len(each) > 1 else {}),
        }

    def summary(self) -> dict[str, Any]:
        """Returns the entries of the run's summary that are about episodes."""
        best = [window.best for window in self._windows]
        of_kinds = {name: mean for name, mean in self.kind_returns.items() if mean is not None}
        return {
            "failures": int(self.counts.failed),
            "final_return": self.mean_return,
            "best_return": _mean(best),
            **({"final_returns": of_kinds} if of_kinds else {}),
            **(self._over_seeds(best) if len(best) > 1 else {}),
        }

    def _over_seeds(self, best: list[float | None]) -> dict[str, Any]:
        known = [value for value in self.returns if value is not None]
        return {
            "seeds": list(self._seeds),
            "final_return_per_seed": self.returns,
            "best_return_per_seed": best,
            "final_return_std": float(np.std(known)) if known else None,
            "final_return_min": min(known, default=None),
            "final_return_max": max(known, default=None),
        }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _kinds_of(block: StackedRows) -> list[str]:
    """Returns the names of the kinds of agents, or none if there is only one kind."""
    kinds = [name.removeprefix(KIND_RETURN_PREFIX) for name in block.names if name.startswith(KIND_RETURN_PREFIX)]
    return kinds if len(kinds) > 1 else []
