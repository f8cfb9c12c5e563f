"""Draws learning curves as a PNG, using matplotlib."""

from collections.abc import Sequence
from typing import IO, Any

from rollmill.core.text import compact
from rollmill.pages.charts import COLOURED
from rollmill.pictures import GREY, new_figure, tidy_axes
from rollmill.plotting.groups import Curves
from rollmill.plotting.labels import AXIS_TITLES, baseline_label, labels, metric_title

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#b84f8f", "#56b4e9", "#d55e00", "#5c4a00", "#3b2270")
WIDTH, HEIGHT = 8.0, 4.2
"""Size of one panel in inches."""


def write_png(file: IO[bytes], curves: Curves, axes: Sequence[str]) -> None:
    """Writes learning curves as a PNG, one panel per axis. Raises a `UsageError` without matplotlib."""
    figure = new_figure(WIDTH, HEIGHT * len(axes))
    for number, axis in enumerate(axes, 1):
        _draw(figure.add_subplot(len(axes), 1, number), curves, axis)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if handles:
        columns = 2 if len(labels) > 3 else 1
        legend = figure.legend(handles, labels, loc="outside upper center", ncols=columns, frameon=False)
        for text in legend.get_texts():  # other people's names must not be parsed as formulas
            text.set_parse_math(False)
    figure.savefig(file, format="png")


def _draw(part: Any, curves: Curves, axis: str) -> None:
    for index in reversed(range(len(curves.groups))):  # the best groups are drawn last, on top
        group, band = curves.groups[index], getattr(curves.groups[index], axis)
        coloured = index < COLOURED
        colour = COLOURS[index] if coloured else GREY
        if len(group.last) > 1 and coloured:
            part.fill_between(band.x, band.low, band.high, color=colour, alpha=0.18, linewidth=0)
        part.plot(band.x, band.mean, color=colour, linewidth=1.8 if coloured else 0.8)
    for colour, name in zip(COLOURS, labels(curves.groups)[:COLOURED], strict=False):
        part.plot([], [], color=colour, linewidth=1.8, label=name)
    for name, value in curves.baselines.items():
        part.axhline(value, color=GREY, linestyle="--", linewidth=1.2, label=baseline_label(name, value))
    part.set_xlabel(AXIS_TITLES[axis])
    part.set_ylabel(metric_title(curves), parse_math=False)
    part.xaxis.set_major_formatter(lambda value, _: compact(value))
    part.yaxis.set_major_formatter(lambda value, _: compact(value))
    tidy_axes(part)
    part.margins(x=0.01)
