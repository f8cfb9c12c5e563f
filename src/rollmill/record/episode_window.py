"""The window of recent episodes of one training, over which the reported return is the mean."""

from collections import deque
from typing import Any, NamedTuple

EPISODES = 100
"""Size of a full window: means are over the latest iterations with at least this many episodes together."""


class _EndedEpisodes(NamedTuple):
    count: float
    return_sum: float
    length_sum: float


class EpisodeWindow:
    """Mean return and length over recent episodes, and the best mean return so far.

    `best_return` is the maximum over full windows only: the mean of a few early episodes does not count. `best`
    is defined wherever `mean_return` is, and never below it, so that means of both over several trainings compare.
    """

    def __init__(self) -> None:
        self._recent: deque[_EndedEpisodes] = deque()
        self.best_return: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The state of the window as JSON, for `from_json`."""
        return {"recent": [list(ended) for ended in self._recent], "best_return": self.best_return}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "EpisodeWindow":
        """The window as it was when `to_json` was called."""
        window = cls()
        window._recent.extend(_EndedEpisodes(*ended) for ended in saved["recent"])
        window.best_return = saved["best_return"]
        return window

    def add(self, count: float, return_sum: float, length_sum: float) -> None:
        """Adds the episodes that ended in one iteration: their number, and the sums of returns and lengths."""
        if count:
            self._recent.append(_EndedEpisodes(count, return_sum, length_sum))
        while len(self._recent) > 1 and self.episodes - self._recent[0].count >= EPISODES:
            self._recent.popleft()
        mean = self.mean_return
        if self.full and mean is not None:
            self.best_return = mean if self.best_return is None else max(mean, self.best_return)

    @property
    def full(self) -> bool:
        """True if the window holds at least `EPISODES` episodes."""
        return self.episodes >= EPISODES

    @property
    def episodes(self) -> float:
        """Number of episodes that the means are over."""
        return sum((e.count for e in self._recent), start=0.0)

    @property
    def best(self) -> float | None:
        """The best mean return; the current one if the window was never full."""
        return self.mean_return if self.best_return is None else self.best_return

    @property
    def mean_return(self) -> float | None:
        """Mean return of recent episodes; None before the first has ended."""
        return self._mean("return_sum")

    @property
    def mean_length(self) -> float | None:
        """Mean length of recent episodes, in steps; None before the first has ended."""
        return self._mean("length_sum")

    def _mean(self, name: str) -> float | None:
        count = self.episodes
        return sum(getattr(e, name) for e in self._recent) / count if count else None
