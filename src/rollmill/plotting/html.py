"""Draws learning curves as a self-contained HTML page."""

from collections.abc import Sequence

from rollmill.core.text import compact, number, one_line, truncate
from rollmill.pages import charts
from rollmill.pages.charts import COLOURED, GREY, ChartLine, chart
from rollmill.pages.page import asset, escape_html, folding_section, legend, page, section, table
from rollmill.plotting.groups import CurveGroup, Curves
from rollmill.plotting.labels import AXIS_TITLES, MAX_LABEL, baseline_label, explanation, labels, metric_title

MAX_FAINT = 200
MAX_ROWS = 500
"""Maximum number of groups in the table, those with the highest last values."""
LONGEST = MAX_LABEL + 24
"""Maximum number of characters of a label, including the number of seeds."""
COLUMNS = ("group", "seeds", "last mean", "lowest", "highest", "steps", "seconds")


def curves_page(curves: Curves, axes: Sequence[str]) -> str:
    """Returns a page of learning curves as HTML, with a figure for each axis: `steps`, `seconds` or both."""
    title = f"{metric_title(curves).capitalize()} of {_subject(curves)}"
    names = labels(curves.groups)
    colours = [(name, f"c{index}") for index, name in enumerate(names[:COLOURED])]
    colours += [(baseline_label(name, value), GREY) for name, value in curves.baselines.items()]
    left_out = f"No values yet: {', '.join(curves.left_out[:20])}." if curves.left_out else ""
    body = [
        f"<h1>{escape_html(title)}</h1>",
        *(f'<p class="dim">{escape_html(text)}</p>' for text in (explanation(curves), left_out) if text),
    ]
    for axis in axes:
        figure = chart(_lines(curves, names, axis), across=AXIS_TITLES[axis], upwards=metric_title(curves))
        body.append(section(f"Over {AXIS_TITLES[axis]}", "", [legend(colours, most=LONGEST), figure]))
    shown = curves.groups[:MAX_ROWS]
    how = "The last value of each seed, smoothed like the curves."
    body.append(section("Last values", how, [table(COLUMNS, map(_row, names, shown), most=LONGEST)]))
    body.append(folding_section("runs of each group", ["<ul>", *map(_runs, names, shown), "</ul>"]))
    return page(title, body, script=asset(charts.__name__, "charts.js"))


def _subject(curves: Curves) -> str:
    if curves.kinds:
        runs = {run for group in curves.groups for run in group.runs}
        num_runs = f", {len(runs)} runs" if len(runs) > 1 else ""
        return one_line(truncate(", ".join(curves.kinds), MAX_LABEL)) + num_runs
    groups, seeds = len(curves.groups), sum(len(group.last) for group in curves.groups)
    if groups == 1:
        return labels(curves.groups)[0]
    return f"{groups} configurations" + (f", {seeds} seeds" if seeds > groups else "")


def _lines(curves: Curves, names: Sequence[str], axis: str) -> list[ChartLine]:
    groups = curves.groups[: COLOURED + MAX_FAINT]
    lines = [_line(index, names[index], group, axis) for index, group in enumerate(groups)]
    ends = [end for line in lines for end in line.x]
    return lines + [_level(name, value, min(ends), max(ends)) for name, value in curves.baselines.items()]


def _level(name: str, value: float, first: float, last: float) -> ChartLine:
    y = (value, value)
    return ChartLine(baseline_label(name, value), GREY, (first, last), y, y, y)


def _line(index: int, name: str, group: CurveGroup, axis: str) -> ChartLine:
    band, faint = getattr(group, axis), index >= COLOURED
    values = (part.tolist() for part in (band.x, band.mean, band.low, band.high))
    return ChartLine(name, GREY if faint else f"c{index}", *values, is_faint=faint)


def _runs(name: str, group: CurveGroup) -> str:
    return f"<li>{escape_html(name)}: {escape_html(', '.join(group.runs))}</li>"


def _row(name: str, group: CurveGroup) -> tuple[str, ...]:
    last = (group.last.mean(), group.last.min(), group.last.max())
    return (
        name,
        str(len(group.last)),
        *(number(float(value)) for value in last),
        compact(group.last_steps),
        number(group.last_seconds),
    )
