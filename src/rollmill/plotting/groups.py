"""Groups the curves of several runs by configuration, with means and intervals over seeds.

Shape letters: `P` points along an axis, `S` seeds.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from rollmill.core.errors import DataError
from rollmill.core.json_data import short_json
from rollmill.core.text import format_count
from rollmill.record.metric_curves import MetricPoint
from rollmill.sweeps.intervals import bootstrap_interval

POINTS = 200
"""Number of points along an axis at which curves are compared."""
AXES = ("steps", "seconds")
ENDED_EARLY = 0.95
"""Share of the steps of a seed's longest run. Another run of the seed that has fewer counts only up to its end."""
PLACEMENT = (
    "distribution",
    "place",
    "workers",
    "actors",
    "learners",
    "asynchronous",
    "devices",
    "fusion",
    "numerics",
)
INITIAL_WEIGHTS = ("start_from", "clone", "clone_updates", "pool_from")
NAMED = (*PLACEMENT, *INITIAL_WEIGHTS)
"""Options of a run that its label may show. Other options, such as the seed, do not distinguish groups."""
NAMES_FIRST = ("algorithm", "environment")


class SeedCurve(NamedTuple):
    """The learning curve of one seed of a run."""

    run: str
    settings: Mapping[str, Any]
    """The settings that distinguish groups, from dotted names to JSON values."""
    points: Sequence[MetricPoint]
    seed: int | None = None
    """The seed, or None for the mean over the seeds of a run, and if the configuration does not name it."""


class Band(NamedTuple):
    """The mean of a group's curves along one axis, with its interval."""

    x: Float[np.ndarray, " P"]
    mean: Float[np.ndarray, " P"]
    low: Float[np.ndarray, " P"]
    high: Float[np.ndarray, " P"]


class CurveGroup(NamedTuple):
    """The learning curves of runs with the same configuration."""

    label: str
    """The settings in which the group differs from others, as a string."""
    runs: tuple[str, ...]
    """Name of each curve's run."""
    steps: Band
    seconds: Band
    last: Float[np.ndarray, " S"]
    """Last value of each seed. If several runs have the same seed, it is the mean of their last values, without
    runs that ended early."""
    last_steps: float
    """Environment steps at the end of the longest curve."""
    last_seconds: float

    @property
    def seeds_text(self) -> str:
        """Number of seeds, such as `3 seeds` or `4 runs of 3 seeds`, or an empty string for a single curve."""
        seeds, runs = len(self.last), len(self.runs)
        if runs == seeds:
            return f"{seeds} seeds" if seeds > 1 else ""
        return f"{runs} runs of {format_count(seeds, 'seed')}"


class Curves(NamedTuple):
    """Learning curves of one metric, in groups. The group with the highest mean of last values comes first."""

    metric: str
    smoothing: float
    groups: tuple[CurveGroup, ...]
    left_out: tuple[str, ...] = ()
    """Number of sweep trials that have no value of the metric yet."""
    baselines: Mapping[str, float] = MappingProxyType({})
    """Values of policies that are not trained, by name."""
    kinds: tuple[str, ...] = ()
    """Kinds of agents whose returns are drawn, if each kind has a curve."""


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that distinguish a run from runs of other groups, read from its recorded configuration.

    Raises a `DataError` if a part of the configuration is not an object.
    """
    graph, options = object_in(config, "graph"), object_in(config, "options")
    settings: dict[str, Any] = {name: graph.get(name) for name in NAMES_FIRST}
    settings |= _flat(object_in(graph, "environment_options"), "")
    settings |= _flat(object_in(graph, "config"), "")
    settings |= {name: options.get(name) for name in NAMED}
    return settings


def object_in(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns an object inside a recorded configuration, or an empty one if it is missing or null.

    Raises a `DataError` if the value is anything else.
    """
    value = values.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"config.json: {name}={short_json(value)} must be an object.")
    return value


def _flat(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def group_curves(curves: Sequence[SeedCurve], *, smoothing: float = 0.0) -> tuple[CurveGroup, ...]:
    """Groups curves by their settings. The group with the highest mean of last values comes first.

    Args:
        curves: curves with at least one point each.
        smoothing: weight of the past in an exponential moving mean of each curve, from 0 to below 1.
    """
    members: dict[tuple, list[SeedCurve]] = {}
    for curve in curves:
        members.setdefault(group_key(curve.settings), []).append(curve)
    labels = labels_of([group[0].settings for group in members.values()])
    made = [_group(label, group, smoothing) for label, group in zip(labels, members.values(), strict=True)]
    return tuple(sorted(made, key=lambda group: -float(group.last.mean())))


def group_key(settings: Mapping[str, Any]) -> tuple:
    """Returns a value that is equal for curves of the same group."""
    return tuple(sorted((name, setting_text(value)) for name, value in settings.items()))


def labels_of(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a label for each group, made of the settings that differ, algorithm and environment first."""
    named = [tuple(setting_text(group.get(name)) for name in NAMES_FIRST) for group in groups]
    alike = [name for i, name in enumerate(NAMES_FIRST) if len({pair[i] for pair in named}) == 1]
    heads = [
        " on ".join(text for name, text in zip(NAMES_FIRST, pair, strict=True) if name not in alike)
        for pair in named
    ]
    labels = []
    for group, pair, head in zip(groups, named, heads, strict=True):
        twins = [other for other, theirs in zip(groups, named, strict=True) if theirs == pair]
        rest = ", ".join(f"{name}={setting_text(group.get(name))}" for name in _differing(twins))
        labels.append(", ".join(part for part in (head, rest) if part) or " on ".join(pair))
    return labels


def _differing(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Settings that differ between groups, in recorded order."""
    names = dict.fromkeys(name for group in groups for name in group)
    return [name for name in names if len({setting_text(group.get(name)) for group in groups}) > 1]


def setting_text(value: Any) -> str:
    """Returns the value of a setting as labels and tables show it, such as `64 64` for layer sizes."""
    match value:
        case bool() | None:
            return str(value).lower()
        case float():
            short = f"{value:g}"
            return short if float(short) == value else repr(value)
        case list() | tuple():
            return " ".join(map(setting_text, value)) or "none"
    return str(value)


def _group(label: str, members: Sequence[SeedCurve], smoothing: float) -> CurveGroup:
    smooth = [smooth_values(np.array([point.value for point in member.points]), smoothing) for member in members]
    early = _ended_early(members)
    bands = {axis: _band(members, _positions(members, axis), smooth, early) for axis in AXES}
    return CurveGroup(
        label=label,
        runs=tuple(member.run for member in members),
        **bands,
        last=_seed_means(members, np.where(early, np.nan, [values[-1] for values in smooth])),
        last_steps=max(member.points[-1].env_steps for member in members),
        last_seconds=max(point.seconds for member in members for point in member.points),
    )


def _seed_of(members: Sequence[SeedCurve], index: int) -> object:
    """Returns a value that is equal for the curves of one seed."""
    seed = members[index].seed
    return ("curve", index) if seed is None else seed


def _ended_early(members: Sequence[SeedCurve]) -> Bool[np.ndarray, " curves"]:
    """Returns for each curve whether it ended long before another one of its seed, as a killed run does."""
    longest: dict[object, float] = {}
    for index, member in enumerate(members):
        seed = _seed_of(members, index)
        longest[seed] = max(longest.get(seed, 0.0), member.points[-1].env_steps)
    shares = [
        member.points[-1].env_steps / longest[_seed_of(members, index)] for index, member in enumerate(members)
    ]
    return np.array(shares) < ENDED_EARLY


def _positions(members: Sequence[SeedCurve], axis: str) -> list[Float[np.ndarray, " _"]]:
    field = {"steps": "env_steps", "seconds": "seconds"}[axis]
    found = [np.array([getattr(point, field) for point in member.points], np.float64) for member in members]
    return [np.maximum.accumulate(at) for at in found]


def smooth_values(values: Float[np.ndarray, " P"], weight: float) -> Float[np.ndarray, " P"]:
    """Returns the exponential moving mean of values, corrected so that it begins with the first value."""
    if weight == 0:
        return values
    total, share, made = 0.0, 0.0, np.empty(len(values))
    for index, value in enumerate(values):
        total, share = weight * total + (1 - weight) * value, weight * share + (1 - weight)
        made[index] = total / share
    return made


def smoothed_points(points: Sequence[MetricPoint], weight: float) -> list[MetricPoint]:
    """Returns the points of a curve with smoothed values."""
    values = smooth_values(np.array([point.value for point in points]), weight).tolist()
    return [point._replace(value=value) for point, value in zip(points, values, strict=True)]


def thin_points(points: Sequence[MetricPoint], max_points: int) -> list[MetricPoint]:
    """Returns at most `max_points` points, means of adjacent ones. The last point is unchanged."""
    if len(points) <= max_points:
        return list(points)
    parts = np.array_split(np.array(points[:-1]), max_points - 1)
    return [*(MetricPoint(*part.mean(0).tolist()) for part in parts), points[-1]]


def _seed_means(members: Sequence[SeedCurve], rows: Float[np.ndarray, "curves ..."]) -> Float[np.ndarray, "S ..."]:
    """Returns the mean over the curves of each seed, ignoring NaN. A repeated seed says nothing about the spread
    over seeds.
    """
    of_seed: dict[object, list[int]] = {}
    for index in range(len(members)):
        of_seed.setdefault(_seed_of(members, index), []).append(index)
    return np.stack([np.nanmean(rows[indices], axis=0) for indices in of_seed.values()])


def _band(
    members: Sequence[SeedCurve],
    positions: Sequence[Float[np.ndarray, " _"]],
    values: Sequence[Float[np.ndarray, " _"]],
    early: Bool[np.ndarray, " curves"],
) -> Band:
    """Returns the mean over seeds and its interval, from the first common step of the curves. Ended curves stay
    constant, except for those that ended `early`.
    """
    x = np.linspace(max(at[0] for at in positions), max(at[-1] for at in positions), POINTS)
    curves = np.stack([np.interp(x, at, value) for at, value in zip(positions, values, strict=True)])
    ends = np.array([at[-1] for at in positions])
    rows = _seed_means(members, np.where(early[:, None] & (x > ends[:, None]), np.nan, curves))
    return Band(x, rows.mean(0), *bootstrap_interval(rows))
