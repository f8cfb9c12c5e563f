"""Draws parallel coordinates, with an axis per option, an axis for the metric, and a line per configuration."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from rollmill.core.text import compact, truncate
from rollmill.sweeps.analysis import Configuration
from rollmill.sweeps.spec import text_of

MAX_LINES = 300
WIDTH, HEIGHT, SIDE, TOP, BOTTOM = 900, 320, 70, 34, 24
LOGARITHMIC = 50.0
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""
MAX_NAME = 18
MAX_MARKS = 8


class _Axis(NamedTuple):
    """An axis: positions of values, from 0 at the bottom to 1 at the top, and their labels."""

    name: str
    places: list[float]
    marks: list[tuple[float, str]]


def parallel_coordinates(configurations: Sequence[Configuration], options: Sequence[str], metric: str) -> str:
    """Draws the configurations of a sweep as SVG, with the best configuration on top.

    `options` names the values of each configuration. Returns an empty string for fewer than two configurations.
    """
    shown = configurations[:MAX_LINES]
    if len(shown) < 2:
        return ""
    axes = [_axis(option, [each.point[index] for each in shown]) for index, option in enumerate(options)]
    axes.append(_axis(metric, [each.mean for each in shown]))
    across = [SIDE + (WIDTH - 2 * SIDE) * index / (len(axes) - 1) for index in range(len(axes))]
    lines = [_line(number, each, axes, across, options) for number, each in reversed(list(enumerate(shown)))]
    drawn = [part for axis, x in zip(axes, across, strict=True) for part in _draw(axis, x)]
    view = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="parallel coordinates of configurations"'
    return "\n".join(
        [f'<svg class="parallel" xmlns="http://www.w3.org/2000/svg" {view}>', *lines, *drawn, "</svg>"]
    )


def _line(
    number: int, each: Configuration, axes: Sequence[_Axis], across: Sequence[float], options: Sequence[str]
) -> str:
    points = [f"{x:.0f} {_height(axis.places[number]):.0f}" for axis, x in zip(axes, across, strict=True)]
    values = ", ".join(f"{name}={text_of(value)}" for name, value in zip(options, each.point, strict=True))
    title = escape(f"{values}: {each.mean:.4g}")
    level = axes[-1].places[number]
    kind = "way best" if number == 0 else "way"
    path = f'<path class="{kind}" opacity="{0.25 + 0.7 * level:.2f}" d="M{"L".join(points)}">'
    return f"{path}<title>{title}</title></path>"


def _draw(axis: _Axis, x: float) -> list[str]:
    bottom = HEIGHT - BOTTOM
    marks = [
        f'<text x="{x + 5:.0f}" y="{_height(place) + 4:.0f}">{escape(truncate(text, MAX_NAME))}</text>'
        for place, text in axis.marks
    ]
    name = escape(truncate(axis.name, MAX_NAME))
    return [
        f'<line class="axis" x1="{x:.0f}" x2="{x:.0f}" y1="{TOP}" y2="{bottom}"/>',
        f'<text x="{x:.0f}" y="{TOP - 16}" text-anchor="middle">{name}</text>',
        *marks,
    ]


def _height(place: float) -> float:
    return TOP + (HEIGHT - BOTTOM - TOP) * (1 - place)


def _axis(name: str, values: Sequence[Any]) -> _Axis:
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return _numbers(name, [float(value) for value in values])
    texts = list(dict.fromkeys(text_of(value) for value in values))
    place = {text: 0.5 if len(texts) == 1 else index / (len(texts) - 1) for index, text in enumerate(texts)}
    marks = [(place[text], text) for text in texts[:MAX_MARKS]]
    return _Axis(name, [place[text_of(value)] for value in values], marks)


def _numbers(name: str, values: Sequence[float]) -> _Axis:
    low, high = min(values), max(values)
    scale = math.log if low > 0 and high / low >= LOGARITHMIC else float
    start, end = scale(low), scale(high)
    place = lambda value: (scale(value) - start) / (end - start) if end > start else 0.5
    known = sorted(set(values))
    marked = known if len(known) <= MAX_MARKS else [low, high]
    return _Axis(name, [place(value) for value in values], [(place(value), compact(value)) for value in marked])
