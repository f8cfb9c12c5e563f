"""The page `report.html` of a sweep: learning curves of its trials and a table, in one self-contained file."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rollmill.core.errors import StorageError
from rollmill.core.folder import Folder
from rollmill.core.text import compact, format_count, number
from rollmill.pages import charts
from rollmill.pages.charts import COLOURED, GREY, ChartLine, chart
from rollmill.pages.page import BarPart, asset, bar_row, escape_html, legend, page, section, table
from rollmill.record.metric_curves import MetricPoint, thinned_curve
from rollmill.sweeps.analysis import Configuration, Importance, configurations, importances, without_seed
from rollmill.sweeps.directory import SweepDirectory
from rollmill.sweeps.metrics import TRIAL_RESULTS, curve_of, extra_columns, is_of_kind
from rollmill.sweeps.parallel_coordinates import parallel_coordinates
from rollmill.sweeps.ranking import MEAN_OVER_SEEDS, OVER_SEEDS, SEED, count_best
from rollmill.sweeps.spec import Trial, text_of

REPORT = "report.html"
MAX_ROWS = 500
"""Maximum number of rows shown with their curves, the best ones."""
MAX_POINTS = 12_000
"""Maximum number of points in all curves together."""
MAX_CONFIGURATIONS = 100
"""Maximum number of configurations shown in the table over seeds, the best ones."""
MIN_OF_CURVE, MAX_OF_CURVE = 12, 120
"""Minimum and maximum number of points of a curve."""

STYLE = """\
svg.parallel { min-width: 560px } .parallel .axis { stroke: var(--line) }
.way { fill: none; stroke: var(--dim); stroke-width: 1.3 } .way:hover { stroke-width: 2.5 }
.way.best { stroke: var(--mark); stroke-width: 2.6 }
"""
MAX_LABEL = 90
NUMBERS = (*TRIAL_RESULTS, MEAN_OVER_SEEDS)
"""Columns with numbers that are rounded to three digits."""


class LabelledCurve(NamedTuple):
    """A learning curve with its label."""

    label: str
    points: Sequence[MetricPoint]


def write_report(sweep: SweepDirectory, rows: Sequence[Mapping[str, Any]], metric: str) -> None:
    """Writes the report page of a sweep. The rows are sorted by `metric`, with the best trial first."""
    spec, trials = sweep.spec, {trial.name: trial for trial in sweep.trials()}
    shown = rows[:MAX_ROWS]
    each = min(MAX_OF_CURVE, max(MIN_OF_CURVE, MAX_POINTS // max(1, len(shown))))
    curves = [_curve_of_row(sweep, trials[row["trial"]], row, each) for row in shown]
    count = (
        f"{len(trials)} of {spec.num_trials} trials"
        if len(trials) < spec.num_trials
        else format_count(len(trials), "trial")
    )
    title = f"{spec.request.algorithm} on {spec.request.environment}: {count}"
    text = report(title, curves, shown, options=spec.options_varied, metric=metric, all_rows=rows)
    try:
        with Folder(sweep.root).replacing(REPORT) as file:
            file.write(text.encode())
    except OSError as error:
        raise StorageError(f"{sweep.root / REPORT} cannot be written: {error}.") from error


def _curve_of_row(sweep: SweepDirectory, trial: Trial, row: Mapping[str, Any], most: int) -> LabelledCurve:
    if trial.seeds is None:
        metric = curve_of(sweep.spec.metric)
        return LabelledCurve(str(trial), thinned_curve(sweep.run(trial), most, metric=metric))
    seed = int(row["seed"]) if len(trial.seeds) > 1 else None
    return LabelledCurve(f"{trial}, seed {row['seed']}", thinned_curve(sweep.run(trial), most, seed=seed))


def report(
    title: str,
    curves: Sequence[LabelledCurve],
    rows: Sequence[Mapping[str, Any]],
    *,
    options: Sequence[str],
    metric: str,
    all_rows: Sequence[Mapping[str, Any]],
) -> str:
    """Returns the report page of a sweep, with the learning curve of each row.

    Rows are sorted by the column `metric`, the best first. `all_rows` may contain further rows that are not shown.
    `options` are the columns with the settings of a trial.
    """
    best = count_best(rows, options, metric)
    by = f"the mean {metric} over the seeds of a configuration" if SEED in options else metric
    how = f"The best trials by {by} have colours; a grey line shows its trial under the pointer."
    body = [
        f"<h1>{escape_html(title)}</h1>",
        section("Return", how, learning_curves(curves, num_best=best)),
        *_sections(all_rows, options, metric),
        section("Trials", _trials_shown(len(rows), len(all_rows)), [_table(rows, options, num_best=best)]),
    ]
    return page(title, body, script=asset(charts.__name__, "charts.js"), style=STYLE)


def _trials_shown(shown: int, total: int) -> str:
    star = "Trials of the best point have a star."
    return f"{star} The best {shown} of {total} are shown." if total > shown else star


def learning_curves(curves: Sequence[LabelledCurve], *, num_best: int) -> list[str]:
    """Draws learning curves. The first `num_best`, up to eight, are coloured and on top, and the others
    are grey.
    """
    lines = [line for line in (_line(curve, index, num_best) for index, curve in enumerate(curves)) if line]
    if not lines:
        return ['<p class="how">No episode has ended yet.</p>']
    names = [(line.label, line.colour) for line in lines if not line.is_faint]
    names += [("other trials", GREY)] if len(names) < len(lines) else []
    figure = chart(lines, across="environment steps", upwards="return", is_smoothable=True)
    return [legend(names, most=MAX_LABEL), figure]


def _line(curve: LabelledCurve, index: int, num_best: int) -> ChartLine | None:
    """Returns the line of a curve, or None if no episode has ended."""
    ended = [point for point in curve.points if math.isfinite(point.value)]
    steps, values = [float(point.env_steps) for point in ended], [point.value for point in ended]
    is_faint = index >= min(num_best, COLOURED)
    colour = GREY if is_faint else f"c{index}"
    return ChartLine(curve.label, colour, steps, values, values, values, is_faint=is_faint) if ended else None


def _sections(rows: Sequence[Mapping[str, Any]], options: Sequence[str], metric: str) -> list[str]:
    """Returns the sections on all trials together: configurations over their seeds, their picture, importance."""
    ranking, names = configurations(rows, options, metric), without_seed(options)
    parts = []
    if SEED in options and ranking:
        lines = [
            [*map(text_of, each.point), number(each.mean), _interval(each), _seeds(each)]
            for each in ranking[:MAX_CONFIGURATIONS]
        ]
        columns = (*names, f"mean {metric}", "95 % interval", "seeds")
        how = (
            "Configurations with all seeds come first, in order of their mean. Intervals are bootstrapped over "
            "the seeds. If two of them overlap, more seeds may reverse their order."
        )
        left = [index for index, name in enumerate(names) if not _is_numeric(rows, name)]
        parts.append(section("Configurations over their seeds", how, [table(columns, lines, left=left)]))
    if len(names) > 1 and (picture := parallel_coordinates(ranking, names, metric)):
        how = "One line per configuration. Better ones are drawn stronger, and the best one is thick and orange."
        parts.append(section("Parallel coordinates", how, [f'<div class="scroll">{picture}</div>']))
    if len(options) > 1 and (shares := importances(rows, options, metric)):
        how = (
            f"The share of the variance in {metric} between trials that each option explains on its own, minus "
            "the share expected by chance. Options that matter only in combination have small shares. The share "
            "of the seed is noise."
        )
        parts.append(section("Importance of options", how, map(_share, shares)))
    return parts


def _interval(each: Configuration) -> str:
    return f"{number(each.low)} to {number(each.high)}" if each.seeds > 1 else ""


def _seeds(each: Configuration) -> str:
    return f"{each.seeds} of {each.seeds + each.missing}" if each.missing else str(each.seeds)


def _share(each: Importance) -> str:
    text = f"{each.share:.0%}"
    return bar_row(each.option, [BarPart(each.share, "device", f"{each.option}: {text}")], text)


def _table(rows: Sequence[Mapping[str, Any]], options: Sequence[str], *, num_best: int) -> str:
    over_seeds = OVER_SEEDS if SEED in options else ()
    columns = ("trial", *options, "status", *TRIAL_RESULTS, *extra_columns(rows), *over_seeds)
    cells = [tuple(_cell(name, row[name]) for name in columns) for row in rows]
    left = [index for index, name in enumerate(columns) if not _is_numeric(rows, name)]
    return table(columns, cells, left=left, num_marked=num_best)


def _is_numeric(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    values = [row[name] for row in rows if row[name] is not None]
    return bool(values) and all(isinstance(each, int | float) and not isinstance(each, bool) for each in values)


def _cell(name: str, value: Any) -> str:
    """Formats a cell: a setting as the user wrote it, or a result with few digits."""
    if value is None:
        return ""
    if name == "env_steps":
        return compact(value)
    return number(float(value)) if name in NUMBERS or is_of_kind(name) else text_of(value)
