"""Analyses the results of a sweep: its configurations over their seeds, and the importance of each option."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rollmill.sweeps.intervals import bootstrap_interval
from rollmill.sweeps.ranking import SEED, point_of
from rollmill.sweeps.spec import text_of

MIN_TRIALS = 6
"""Minimum number of trials with a result for an estimate of importance."""
MAX_BINS = 5
"""Maximum number of bins for a numeric option."""


class Configuration(NamedTuple):
    """A combination of option values in a sweep, with its results over seeds."""

    point: tuple
    """Values of the configuration, in the order of the options without the seed."""
    mean: float
    low: float
    """Ends `low` and `high` of the bootstrap interval for the mean over seeds, equal for a single seed."""
    high: float
    seeds: int
    """Number of seeds with a result."""
    missing: int
    """Number of seeds without a result."""


class Importance(NamedTuple):
    """The share of the differences between trials that one option explains."""

    option: str
    share: float
    """Share of the variance of the metric that the option explains, from 0 to 1."""


def configurations(rows: Sequence[Mapping[str, Any]], options: Sequence[str], metric: str) -> list[Configuration]:
    """Returns the configurations that have a result, sorted by their mean. Those with all seeds come first."""
    results: dict[tuple, list[Any]] = {}
    for row in rows:
        results.setdefault(point_of(row, options), []).append(row[metric])
    made = []
    for point, values in results.items():
        known = np.array([value for value in values if value is not None], np.float64)
        if len(known):
            low, high = bootstrap_interval(known[:, None])
            ends = float(low[0]), float(high[0])
            made.append(Configuration(point, float(known.mean()), *ends, len(known), len(values) - len(known)))
    return sorted(made, key=lambda each: (each.missing > 0, -each.mean))


def importances(rows: Sequence[Mapping[str, Any]], options: Sequence[str], metric: str) -> list[Importance]:
    """Returns the share of a metric's variance that each option explains, the most important option first.

    The share is corrected for chance, and at least 0. Numeric options with many values are divided into bins with
    equal numbers of trials. The result is empty if there are too few trials, or if all have the same result.
    """
    known = [row for row in rows if row[metric] is not None]
    values = np.array([row[metric] for row in known], np.float64)
    if len(known) < MIN_TRIALS or not values.var() > 0:
        return []
    found = []
    for option in options:
        groups = _groups([row[option] for row in known])
        if 1 < len(set(groups)) < len(known):
            found.append(Importance(option, _explained_share(values, np.array(groups))))
    return sorted(found, key=lambda each: -each.share)


def _groups(values: Sequence[Any]) -> list[int]:
    """Returns the group index of each value. Numeric values are grouped in bins if there are many."""
    texts = [text_of(value) for value in values]
    kinds = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    if not numeric or len(kinds) <= MAX_BINS:
        return [kinds[text] for text in texts]
    bins = min(MAX_BINS, len(values) // 3)
    edges = np.quantile(np.array(values, np.float64), np.linspace(0, 1, bins + 1)[1:-1])
    return np.searchsorted(edges, np.array(values, np.float64), side="right").tolist()


def _explained_share(values: np.ndarray, groups: np.ndarray) -> float:
    """Returns epsilon squared: the share of the variance between groups, less what chance would give."""
    total = float(((values - values.mean()) ** 2).sum())
    kinds = np.unique(groups)
    within = sum(float(((part - part.mean()) ** 2).sum()) for part in (values[groups == kind] for kind in kinds))
    spread = within / (len(values) - len(kinds))
    share = (total - within - (len(kinds) - 1) * spread) / total
    return min(max(share, 0.0), 1.0) if math.isfinite(share) else 0.0


def without_seed(options: Sequence[str]) -> list[str]:
    """Returns the options that make up a configuration, which are all but the seed."""
    return [option for option in options if option != SEED]
