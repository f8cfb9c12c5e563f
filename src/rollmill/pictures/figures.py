"""Figures drawn by matplotlib, an optional package."""

import importlib
from typing import Any

from rollmill.core.errors import UsageError
from rollmill.core.installation import install_command

DPI = 160
"""Pixels per inch."""
GREY, GRID = "#a9b2b8", "#d9dee1"


def require_matplotlib() -> None:
    """Raises a `UsageError` if matplotlib is not installed."""
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError:
        raise UsageError(
            f".png files need matplotlib, which is not installed. hint: {install_command('plot')}, or write an "
            ".html file, which needs no package."
        ) from None


def new_figure(width: float, height: float) -> Any:
    """Returns an empty `matplotlib.figure.Figure` of a size in inches."""
    require_matplotlib()
    figure = importlib.import_module("matplotlib.figure").Figure
    return figure(figsize=(width, height), dpi=DPI, layout="constrained")


def tidy_axes(axes: Any, *, grid: str = "both") -> None:
    """Removes the upper and right side of matplotlib axes, and draws a faint grid behind the data.

    `grid` is `x`, `y` or `both`: the axes whose ticks get grid lines.
    """
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
