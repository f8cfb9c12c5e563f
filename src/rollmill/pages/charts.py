"""Line charts as parts of an HTML page. They are readable at any width, and need no script."""

import json
import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from rollmill.core.text import compact
from rollmill.pages.page import escape_html, escaped_name

MIN_RANGE = 1e-300


def ticks(low: float, high: float) -> list[float]:
    """Returns about five round values in a range, multiples of 1, 2 or 5 times a power of ten."""
    if not MIN_RANGE < high - low < math.inf:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= (high - low) / 5)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


COLOURED = 8
"""Number of lines with a colour of their own, `c0` to `c7`."""
GREY = "idle"
"""Name of the colour of all other lines."""
UNITS = 1000.0
"""Width and height of the drawing in its own units. The browser scales it."""
DIGITS = 1
MAX_TITLE = 90


class ChartLine(NamedTuple):
    """A line of a chart, with an optional area around it. NaN marks missing points."""

    label: str
    colour: str
    """Name of one of the page's colours."""
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    is_faint: bool = False
    """Whether the line is in the background, without an area."""


class _Side(NamedTuple):
    """The ends of an axis, and the values of its labels."""

    low: float
    high: float
    marks: list[float]

    def share(self, value: float) -> float:
        """Returns the position of a number, from 0 to 1."""
        return (value - self.low) / (self.high - self.low)


def chart(lines: Sequence[ChartLine], *, across: str, upwards: str, is_smoothable: bool = False) -> str:
    """Draws a line chart as HTML, with the first line on top. At least one line must have a point.

    Args:
        lines: lines and the areas around them.
        across: title of the horizontal axis, in plain text.
        upwards: title of the vertical axis, in plain text.
        is_smoothable: add a slider for an exponential moving mean of each line. The lines must have no areas.
    """
    x = _side([value for line in lines for value in line.x], margin=0.0)
    y = _side([value for line in lines for values in (line.low, line.high) for value in values], margin=0.04)
    grid = [_grid_line(x.share(mark) * UNITS, None) for mark in x.marks]
    grid += [_grid_line(None, (1 - y.share(mark)) * UNITS) for mark in y.marks]
    shapes = [shape for line in reversed(lines) for shape in _shapes(line, x, y)]
    spread = f"{UNITS:g}"
    svg = (
        f'<svg viewBox="0 0 {spread} {spread}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escaped_name(upwards)} over {escaped_name(across)}">{"".join(grid + shapes)}</svg>'
    )
    down = "".join(_mark("top", 1 - y.share(mark), mark) for mark in y.marks)
    smoothing = " data-smoothing" if is_smoothable else ""
    level = "".join(_mark("left", x.share(mark), mark) for mark in x.marks)
    return "\n".join(
        [
            f'<div class="chart"{smoothing} data-lines="{_data(lines, x, y, across)}">',
            f'<div class="upwards">{escaped_name(upwards)}</div>',
            f'<div class="marks down">{down}</div><div class="plot" tabindex="0">{svg}</div>',
            f'<div class="marks level">{level}</div><div class="across">{escaped_name(across)}</div></div>',
        ]
    )


def _mark(side: str, share: float, value: float) -> str:
    return f'<span style="{side}:{100 * share:.2f}%">{compact(value)}</span>'


def _side(values: Sequence[float], *, margin: float) -> _Side:
    known = [value for value in values if math.isfinite(value)]
    low, high = min(known), max(known)
    room = margin * (high - low) if high > low else max(abs(low), 1.0) * 0.5
    low, high = low - room, high + room
    return _Side(low, high, ticks(low, high))


def _grid_line(x: float | None, y: float | None) -> str:
    x_1, x_2 = (0.0, UNITS) if x is None else (x, x)
    y_1, y_2 = (0.0, UNITS) if y is None else (y, y)
    return f'<line class="grid" x1="{x_1:.1f}" x2="{x_2:.1f}" y1="{y_1:.1f}" y2="{y_2:.1f}"/>'


def _shapes(line: ChartLine, x: _Side, y: _Side) -> list[str]:
    place = lambda at, value: f"{x.share(at) * UNITS:.{DIGITS}f} {(1 - y.share(value)) * UNITS:.{DIGITS}f}"
    shapes = []
    for part in _whole_parts(line):
        at = [line.x[i] for i in part]
        if not line.is_faint and any(line.low[i] < line.high[i] for i in part):
            upper = [place(line.x[i], line.high[i]) for i in part]
            lower = [place(line.x[i], line.low[i]) for i in reversed(part)]
            shapes.append(f'<path class="area" fill="var(--{line.colour})" d="M{"L".join(upper + lower)}Z"/>')
        mean = "L".join(place(one, line.y[i]) for one, i in zip(at, part, strict=True))
        kind = "line faint" if line.is_faint else "line"
        title = f"<title>{escape_html(line.label, most=MAX_TITLE)}</title>" if line.is_faint else ""
        shapes.append(f'<path class="{kind}" stroke="var(--{line.colour})" d="M{mean}">{title}</path>')
    return shapes


def _whole_parts(line: ChartLine) -> list[list[int]]:
    """Runs of neighbouring points that are all known."""
    parts: list[list[int]] = [[]]
    for index, value in enumerate(line.y):
        if math.isfinite(value):
            parts[-1].append(index)
        elif parts[-1]:
            parts.append([])
    return [part for part in parts if part]


def _data(lines: Sequence[ChartLine], x: _Side, y: _Side, across: str) -> str:
    """Returns the points for the script, as JSON in an attribute."""
    shown = [line for line in lines if not line.is_faint]
    data = {
        "x": [x.low, x.high],
        "y": [y.low, y.high],
        "across": across,
        "lines": [
            {"label": line.label, "colour": line.colour}
            | {name: _numbers(getattr(line, name)) for name in ("x", "y", "low", "high")}
            for line in shown
        ],
    }
    return escape(json.dumps(data, separators=(",", ":"), allow_nan=False))


def _numbers(values: Sequence[float]) -> list[float | None]:
    """Rounds values to five digits, with NaN as None."""
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]
