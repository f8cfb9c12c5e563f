"""Draws the curves of selected runs as part of the board's page."""

import math
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rollmill.board.contents import Item, Signature, run_signature
from rollmill.core.errors import RollmillError
from rollmill.core.text import compact
from rollmill.overview.table import steps_text
from rollmill.pages.charts import COLOURED, GREY, ChartLine, chart
from rollmill.pages.page import escape_html, folding_section, legend, table
from rollmill.plotting.curves import curves_of
from rollmill.plotting.groups import (
    CurveGroup,
    SeedCurve,
    group_curves,
    setting_text,
    smoothed_points,
    thin_points,
)
from rollmill.plotting.labels import AXIS_TITLES
from rollmill.record.metric_curves import RETURN, thinned_curve
from rollmill.record.run_directory import RunDirectory
from rollmill.record.status import RETURNS

MAX_POINTS = 300
"""Maximum number of points that are drawn of a curve."""
MAX_KEPT = 400
"""Maximum number of curves that are cached."""
SPARK_POINTS = 24
MAX_TITLE = 70


class CurveCache:
    """Cache of learning curves. A curve is read again if its run has changed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, str], tuple[Signature, list[SeedCurve]]] = {}

    def curves(self, item: Item, metric: str) -> list[SeedCurve]:
        """Returns the curves of a run's seeds, or none if the run has no value of the metric or cannot be read."""
        signature, key = run_signature(item.entry.path), (item.key, metric)
        with self._lock:
            kept = self._kept.pop(key, None)
        if kept is None or kept[0] != signature:
            kept = signature, _read(item, metric)
        with self._lock:
            self._kept[key] = kept
            while len(self._kept) > MAX_KEPT:
                del self._kept[next(iter(self._kept))]
        return kept[1]


def _read(item: Item, metric: str) -> list[SeedCurve]:
    try:
        curves = curves_of(RunDirectory(item.entry.path), metric)
    except (RollmillError, OSError):
        return []
    return [curve._replace(run=item.key, points=thin_points(curve.points, MAX_POINTS)) for curve in curves]


def spark(item: Item) -> list[float]:
    """Returns a few values of a run's learning curve, for the small figure in its row.

    With several kinds of agents, they are the returns of the first kind.
    """
    metric = f"{RETURNS}{next(iter(item.entry.returns))}" if item.entry.returns else RETURN
    try:
        points = thinned_curve(RunDirectory(item.entry.path), SPARK_POINTS, metric=metric)
    except (RollmillError, OSError):
        return []
    values = (float(f"{point.value:.4g}") for point in points)
    return [value for value in values if math.isfinite(value)]


def comparison(
    cache: CurveCache, items: Sequence[Item], *, metric: str, axis: str, smoothing: float, by_group: bool
) -> str:
    """Returns the figure of the selected runs, and a table of their settings, as HTML."""
    curves = [curve for item in items for curve in cache.curves(item, metric)]
    rows = settings_table(items)
    if not curves:
        return f'<p class="how">None of the chosen runs has a value of {escape_html(metric)} yet.</p>{rows}'
    lines = _group_lines(curves, axis, smoothing) if by_group else _lines(items, curves, axis, smoothing)
    names = [(line.label, line.colour) for line in lines if not line.is_faint]
    upwards = metric.replace("/", " ").replace("_", " ")
    figure = chart(lines, across=AXIS_TITLES[axis], upwards=upwards)
    return "\n".join([legend(names, most=MAX_TITLE), figure, rows])


def _lines(items: Sequence[Item], curves: Sequence[SeedCurve], axis: str, smoothing: float) -> list[ChartLine]:
    colours = {item.key: colour_of(index) for index, item in enumerate(items)}
    num_curves = Counter(curve.run for curve in curves)
    lines = []
    for curve in curves:
        points = smoothed_points(curve.points, smoothing)
        values = [point.value for point in points]
        place = [point.seconds if axis == "seconds" else point.env_steps for point in points]
        colour = colours[curve.run]
        name = curve.run if num_curves[curve.run] == 1 else f"{curve.run}, {_seed(curve)}"
        lines.append(ChartLine(name, colour, place, values, values, values, is_faint=colour == GREY))
    return lines


def _group_lines(curves: Sequence[SeedCurve], axis: str, smoothing: float) -> list[ChartLine]:
    return [
        _group_line(index, group, axis) for index, group in enumerate(group_curves(curves, smoothing=smoothing))
    ]


def _group_line(index: int, group: CurveGroup, axis: str) -> ChartLine:
    values = (part.tolist() for part in getattr(group, axis))
    seeds = f" ({group.seeds_text})" if group.seeds_text else ""
    return ChartLine(group.label + seeds, colour_of(index), *values, is_faint=index >= COLOURED)


def colour_of(index: int) -> str:
    """Returns the CSS colour class of the line with this index."""
    return f"c{index}" if index < COLOURED else GREY


def settings_table(items: Sequence[Item]) -> str:
    """Returns an HTML table of the settings of several runs, with equal settings folded away."""
    names = dict.fromkeys(name for item in items for name in item.entry.settings)
    texts = {name: [_setting(item, name) for item in items] for name in names}
    differing = [name for name in names if len(set(texts[name])) > 1]
    columns = ("", *(item.key for item in items))
    results = [
        ("return", *(item.entry.return_text for item in items)),
        ("steps", *(steps_text(item.entry) for item in items)),
        ("steps/s", *(_compact(item.entry.steps_per_second) for item in items)),
        ("seed", *("" if item.entry.seed is None else str(item.entry.seed) for item in items)),
    ]
    shown = [*results, *((name, *texts[name]) for name in differing)]
    alike = [(name, *texts[name][:1]) for name in names if name not in differing]
    rest = [folding_section(f"{len(alike)} settings that are equal in all of them", [table(("", "value"), alike)])]
    return "\n".join([table(columns, shown), *(rest if alike else [])])


def _setting(item: Item, name: str) -> str:
    return setting_text(item.entry.settings[name]) if name in item.entry.settings else ""


def _compact(value: float | None) -> str:
    return "" if value is None else compact(value)


def small_chart(curves: Sequence[SeedCurve], metric: str) -> str:
    """Returns a figure of one metric of a run over its steps, as HTML."""
    lines = [_plain_line(curve, index) for index, curve in enumerate(curves)]
    return chart(lines, across=AXIS_TITLES["steps"], upwards=metric)


def _plain_line(curve: SeedCurve, index: int) -> ChartLine:
    values: Any = [point.value for point in curve.points]
    steps = [point.env_steps for point in curve.points]
    return ChartLine(_seed(curve), colour_of(index), steps, values, values, values)


def _seed(curve: SeedCurve) -> str:
    return "all seeds" if curve.seed is None else f"seed {curve.seed}"
