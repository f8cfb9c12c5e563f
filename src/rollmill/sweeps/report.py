"""`report.html` of a sweep: learning curves of its trials and a table, in one file that loads nothing else."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from rollmill.core.errors import StorageError
from rollmill.core.folder import Folder
from rollmill.pages.charts import ticks
from rollmill.record.metric_curves import MetricPoint, thinned_curve
from rollmill.sweeps.analysis import Configuration, Importance, configurations, importances, without_seed
from rollmill.sweeps.directory import TRIAL_RESULTS, SweepDirectory
from rollmill.sweeps.parallel import parallel_coordinates
from rollmill.sweeps.ranking import OVER_SEEDS, SEED, count_best
from rollmill.sweeps.spec import Trial, text_of

REPORT = "report.html"
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 900, 420, 70, 14, 14, 46
MAX_ROWS = 500
"""Rows of the table that are shown with their curves, the best ones."""
MAX_POINTS = 12_000
"""Points of all curves together."""
MAX_CONFIGURATIONS = 100
"""Configurations of the table over seeds, the best ones."""
MIN_OF_CURVE, MAX_OF_CURVE = 12, 120
"""Points of one curve."""

STYLE = """\
:root { color-scheme: light dark }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 940px; margin: 2em auto; padding: 0 1em }
svg { width: 100%; height: auto } svg text { font-size: 12px; fill: currentColor }
.axis { stroke: currentColor; stroke-opacity: .15 }
.curve { fill: none; stroke: #7a8fa6; stroke-opacity: .45; stroke-width: 1.2 }
.curve:hover { stroke: #c22; stroke-opacity: 1; stroke-width: 2 }
.best { stroke: #d9730d; stroke-opacity: 1; stroke-width: 2.6 }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: 2px 12px 2px 0; border-bottom: 1px solid #8883; white-space: nowrap }
td.number { text-align: right }
tr.best td { color: #d9730d; font-weight: 600 }
h2 { font-size: 1.1em; margin: 1.6em 0 .3em } p { max-width: 75ch }
svg.parallel { min-width: 560px } .way { fill: none; stroke: #7a8fa6; stroke-width: 1.3 }
.way:hover { stroke: #c22; stroke-width: 2.5 } .way.best { stroke: #d9730d; stroke-width: 2.6 }
.share { display: grid; grid-template-columns: minmax(6em, 11em) 1fr 3.5em; gap: .8em; align-items: center }
.share b { display: block; height: .8em; background: #8882; border-radius: 3px; overflow: hidden }
.share i { display: block; height: 100%; background: #3a7fb0 } .share span:last-child { text-align: right }"""


class LabelledCurve(NamedTuple):
    """A learning curve, and what it is of."""

    label: str
    points: Sequence[MetricPoint]


class _Scale(NamedTuple):
    """From numbers to positions in the figure."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return self.start + share * (self.end - self.start)


def write_report(sweep: SweepDirectory, rows: Sequence[Mapping[str, Any]], metric: str) -> None:
    """Writes the report of a sweep, whose rows are sorted by `metric`, the best trial first."""
    spec, trials = sweep.spec, {trial.name: trial for trial in sweep.trials()}
    shown = rows[:MAX_ROWS]
    each = min(MAX_OF_CURVE, max(MIN_OF_CURVE, MAX_POINTS // max(1, len(shown))))
    curves = [_curve_of_row(sweep, trials[row["trial"]], row, each) for row in shown]
    number = (
        f"{len(trials)} of {spec.num_trials} trials" if len(trials) < spec.num_trials else f"{len(trials)} trials"
    )
    title = f"{spec.request.algorithm} on {spec.request.environment}: {number}"
    page = report(title, curves, shown, options=spec.options_varied, metric=metric, all_rows=rows)
    try:
        with Folder(sweep.root).replacing(REPORT) as file:
            file.write(page.encode())
    except OSError as error:
        raise StorageError(f"{sweep.root / REPORT} cannot be written: {error}.") from error


def _curve_of_row(sweep: SweepDirectory, trial: Trial, row: Mapping[str, Any], most: int) -> LabelledCurve:
    if trial.seeds is None:
        return LabelledCurve(str(trial), thinned_curve(sweep.run(trial), most))
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
    """Returns the page of a sweep, with the learning curve of each row.

    Rows are sorted by the column `metric`, the best first, and only the first of `all_rows` may be shown.
    `options` are the columns with the settings of a trial.
    """
    total = len(all_rows)
    best = count_best(rows, options, metric)
    note = f"The best {len(rows)} of {total} are shown." if total > len(rows) else ""
    columns = ("trial", *options, "status", *TRIAL_RESULTS, *(OVER_SEEDS if SEED in options else ()))
    by = f"the mean {metric} over the seeds of a point" if SEED in options else metric
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{STYLE}\n</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            f"<p>Return over environment steps; the best by {escape(by)} in orange. {note}</p>",
            figure(curves, num_best=best),
            *_sections(all_rows, options, metric),
            "<h2>Trials</h2>",
            f'<div class="scroll">{_table(rows, columns, num_best=best)}</div>',
            "</body></html>\n",
        ]
    )


def _sections(rows: Sequence[Mapping[str, Any]], options: Sequence[str], metric: str) -> list[str]:
    """Returns what all trials together tell: configurations over their seeds, their picture, and importance."""
    found, names = configurations(rows, options, metric), without_seed(options)
    parts = []
    if SEED in options and found:
        lines = [[*each.point, each.mean, _interval(each), _seeds(each)] for each in found[:MAX_CONFIGURATIONS]]
        columns = (*names, f"mean {metric}", "95 % interval", "seeds")
        parts += [
            "<h2>Configurations over their seeds</h2>",
            "<p>The highest mean comes first, among those that have all seeds. Intervals are by bootstrap over "
            "the seeds: where those of two configurations overlap, more seeds may turn the order round.</p>",
            f'<div class="scroll">{_plain_table(columns, lines)}</div>',
        ]
    if len(names) > 1 and (picture := parallel_coordinates(found, names, metric)):
        how = "A line for each configuration, the stronger the better, and the best in orange."
        parts += ["<h2>Parallel coordinates</h2>", f"<p>{how}</p>", f'<div class="scroll">{picture}</div>']
    if len(options) > 1 and (shares := importances(rows, options, metric)):
        parts += [
            "<h2>Importance of options</h2>",
            f"<p>The share of the differences in {escape(metric)} between trials that each option explains by "
            "itself, less what chance would give. Options that matter only together have small shares. That of "
            "the seed is noise.</p>",
            *(_share(each) for each in shares),
        ]
    return parts


def _interval(each: Configuration) -> str:
    return f"{_short(each.low)} to {_short(each.high)}" if each.seeds > 1 else ""


def _seeds(each: Configuration) -> str:
    return f"{each.seeds} of {each.seeds + each.missing}" if each.missing else str(each.seeds)


def _plain_table(columns: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    cells = ("".join(map(_td, line)) for line in lines)
    body = "".join(f"<tr>{line}</tr>" for line in cells)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _share(each: Importance) -> str:
    width = f'<i style="width:{100 * each.share:.1f}%"></i>'
    return (
        f'<div class="share"><span>{escape(each.option)}</span><b>{width}</b><span>{each.share:.0%}</span></div>'
    )


def figure(curves: Sequence[LabelledCurve], *, num_best: int) -> str:
    """Learning curves as SVG; the first `num_best` lie over the others and are highlighted."""
    points = [point for curve in curves for point in curve.points if math.isfinite(point.value)]
    if not points:
        return "<p>No episode has ended yet.</p>"
    returns = [point.value for point in points]
    across = _Scale(0.0, float(max(point.env_steps for point in points)), LEFT, WIDTH - RIGHT)
    upwards = _Scale(min(returns), max(returns), HEIGHT - BOTTOM, TOP)
    kinds = ["curve best"] * num_best + ["curve"] * len(curves)
    lines = [_curve(curve, across, upwards, kind=kind) for curve, kind in zip(curves, kinds, strict=False)]
    axes = [*_ticks_across(across), *_ticks_upwards(upwards)]
    view = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="learning curves"'
    drawn = [line for line in reversed(lines) if line]
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {view}>', *axes, *drawn, "</svg>"])


def _curve(curve: LabelledCurve, across: _Scale, upwards: _Scale, *, kind: str) -> str:
    known = [point for point in curve.points if math.isfinite(point.value)]
    if not known:
        return ""
    path = " ".join(f"{across(point.env_steps):.0f},{upwards(point.value):.0f}" for point in known)
    return f'<polyline class="{kind}" points="{path}"><title>{escape(curve.label)}</title></polyline>'


def _ticks_across(scale: _Scale) -> list[str]:
    bottom, middle = HEIGHT - BOTTOM, (LEFT + WIDTH - RIGHT) / 2
    marks = [
        f'<line class="axis" x1="{scale(tick):.0f}" x2="{scale(tick):.0f}" y1="{TOP}" y2="{bottom}"/>'
        f'<text x="{scale(tick):.0f}" y="{bottom + 18}" text-anchor="middle">{_short(tick)}</text>'
        for tick in ticks(scale.low, scale.high)
    ]
    return [*marks, f'<text x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">environment steps</text>']


def _ticks_upwards(scale: _Scale) -> list[str]:
    name = f'<text x="{LEFT + 8}" y="{TOP + 12}">return</text>'
    marks = [
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{scale(tick):.0f}" y2="{scale(tick):.0f}"/>'
        f'<text x="{LEFT - 8}" y="{scale(tick) + 4:.0f}" text-anchor="end">{_short(tick)}</text>'
        for tick in ticks(scale.low, scale.high)
    ]
    return [*marks, name]


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], *, num_best: int) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    starts = ['<tr class="best">'] * num_best + ["<tr>"] * len(rows)
    lines = [
        start + "".join(_td(row[name]) for name in columns) + "</tr>"
        for start, row in zip(starts, rows, strict=False)
    ]
    return "\n".join([f"<table><thead><tr>{head}</tr></thead><tbody>", *lines, "</tbody></table>"])


def _td(value: Any) -> str:
    """Returns a cell of a table, with numbers at its right side."""
    kind = ' class="number"' if _is_number(value) else ""
    return f"<td{kind}>{escape(_cell(value))}</td>"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return _short(float(value)) if _is_number(value) else text_of(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: float) -> str:
    """Returns a number in few characters: 1.5M, 20k, 0.25."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:.4g}"
