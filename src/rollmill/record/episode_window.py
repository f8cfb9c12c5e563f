"""The recent episodes of one training: what "the return" means while a run goes on."""

from collections import deque
from typing import Any, NamedTuple

EPISODES = 100
"""The mean is over the latest iterations that together hold at least this many episodes."""


class _Ended(NamedTuple):
    count: float
    return_sum: float
    length_sum: float


class EpisodeWindow:
    """Mean return and length over recent episodes, and the best that the mean return ever was.

    `best_return` is that of full windows alone: the mean of a few early episodes is no record. `best` is defined
    wherever `mean_return` is, and never below it, so that means of the two over several trainings can be compared.
    """

    def __init__(self) -> None:
        self._recent: deque[_Ended] = deque()
        self.best_return: float | None = None

    def to_json(self) -> dict[str, Any]:
        """What `from_json` goes on from."""
        return {"recent": [list(ended) for ended in self._recent], "best_return": self.best_return}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "EpisodeWindow":
        """The window as it was when `to_json` was called."""
        window = cls()
        window._recent.extend(_Ended(*ended) for ended in saved["recent"])
        window.best_return = saved["best_return"]
        return window

    def add(self, count: float, return_sum: float, length_sum: float) -> None:
        """Adds the episodes that ended in one iteration: how many, their returns and lengths in sum."""
        if count:
            self._recent.append(_Ended(count, return_sum, length_sum))
        while len(self._recent) > 1 and sum(e.count for e in self._recent) - self._recent[0].count >= EPISODES:
            self._recent.popleft()
        mean = self.mean_return
        if self.full and mean is not None:
            self.best_return = mean if self.best_return is None else max(mean, self.best_return)

    @property
    def full(self) -> bool:
        """Whether the means are over as many episodes as they should be."""
        return sum(e.count for e in self._recent) >= EPISODES

    @property
    def best(self) -> float | None:
        """The best mean return; that of the present where there were never enough episodes for a full window."""
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
        count = sum(e.count for e in self._recent)
        return sum(getattr(e, name) for e in self._recent) / count if count else None
