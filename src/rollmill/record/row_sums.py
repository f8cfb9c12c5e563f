"""Metrics of several iterations, aggregated for one line of the log."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

NO_WEIGHTS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class SavedSums:
    """Sums over the iterations since the last line, as stored in a checkpoint."""

    iterations: int = 0
    sums: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """For each metric, one number for each seed."""


class RowSums:
    """Sums of metrics over iterations. Metrics are scalars or `[seed]`, and finite."""

    def __init__(self, saved: SavedSums | None = None) -> None:
        saved = saved or SavedSums()
        self.iterations = saved.iterations
        self._sums = {name: np.asarray(numbers) for name, numbers in saved.sums.items()}

    def add(self, row: Mapping[str, Any], *, iterations: int = 1) -> None:
        """Adds the metrics of one iteration, or their sums over several."""
        self.iterations += iterations
        for name, value in row.items():
            numbers = np.atleast_1d(np.asarray(value, np.float64))
            self._sums[name] = self._sums[name] + numbers if name in self._sums else numbers

    def totals(self) -> dict[str, float]:
        """Sums over iterations and seeds."""
        return {name: float(np.sum(numbers)) for name, numbers in self._sums.items()}

    @property
    def names(self) -> list[str]:
        """Names of the metrics."""
        return list(self._sums)

    def means(self, weights: Mapping[str, str] = NO_WEIGHTS) -> dict[str, np.ndarray]:
        """Means over iterations, one number for each seed.

        Args:
            weights: for some metrics the name of another one, the share of each iteration in which they were
                computed; they are 0 in the rest. Their means are over what was computed, NaN if nothing was.
        """
        each = {name: self._sums[weights[name]] if name in weights else self.iterations for name in self._sums}
        with np.errstate(invalid="ignore"):
            return {name: numbers / each[name] for name, numbers in self._sums.items()}

    def to_json(self) -> dict[str, Any]:
        """The sums as JSON in the form of `SavedSums`."""
        return {"iterations": self.iterations, "sums": {name: x.tolist() for name, x in self._sums.items()}}
