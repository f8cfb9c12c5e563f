"""Ranks the configurations of a sweep by their mean over seeds, so that one lucky seed does not decide."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

SEED = "seed"
MEAN_OVER_SEEDS = "mean_over_seeds"
OVER_SEEDS = (MEAN_OVER_SEEDS, "num_seeds")
"""Columns that a sweep over seeds adds: the mean of the metric over the seeds of a configuration, and the number
of seeds with a result."""


class _Point(NamedTuple):
    """The results of a point's seeds."""

    mean: float | None
    """None without any result."""
    count: int
    is_complete: bool
    """True if every seed has a result."""
    place: int
    """Number of the point, in the order of the rows."""


def rank_rows(rows: Sequence[dict[str, Any]], options: Sequence[str], metric: str) -> list[dict[str, Any]]:
    """Returns rows, one for each trial or seed, sorted so that rows of the best configuration come first.

    Within a configuration, the largest `metric` comes first. Configurations with a result for every seed come
    first, then configurations that lack some results, and finally configurations without results. Columns in
    `options` contain the values that vary. If seeds vary, each row also has the columns `OVER_SEEDS`.
    """
    varies = SEED in options
    points = _points(rows, options, metric) if varies else {}

    def key(row: Mapping[str, Any]) -> tuple:
        own = (row[metric] is None, -(row[metric] or 0.0))
        if not varies:
            return own
        point = points[point_of(row, options)]
        return (point.mean is None, not point.is_complete, -(point.mean or 0.0), point.place, *own)

    if not varies:
        return sorted(rows, key=key)
    means = (points[point_of(row, options)] for row in rows)
    extended = [
        row | dict(zip(OVER_SEEDS, point[:2], strict=True)) for row, point in zip(rows, means, strict=True)
    ]
    return sorted(extended, key=key)


def count_best(rows: Sequence[Mapping[str, Any]], options: Sequence[str], metric: str) -> int:
    """Returns the number of leading rows that belong to the best configuration, or 0 without results."""
    if not rows or rows[0][metric] is None:
        return 0
    if SEED not in options:
        return 1
    best = point_of(rows[0], options)
    return sum(point_of(row, options) == best for row in rows)


def point_of(row: Mapping[str, Any], options: Sequence[str]) -> tuple:
    """Returns the values of a row that define its configuration, without the seed."""
    return tuple(row[option] for option in options if option != SEED)


def _points(rows: Iterable[Mapping[str, Any]], options: Sequence[str], metric: str) -> dict[tuple, _Point]:
    results: dict[tuple, list[Any]] = {}
    for row in rows:
        results.setdefault(point_of(row, options), []).append(row[metric])
    points = {}
    for place, (point, values) in enumerate(results.items()):
        known = [value for value in values if value is not None]
        mean = sum(known) / len(known) if known else None
        points[point] = _Point(mean, len(known), len(known) == len(values), place)
    return points
