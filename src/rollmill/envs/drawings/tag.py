"""Drawings of taggers and runners, on a square or on a grid.

Shape letters: `A` agents, `G` taggers before the runners.
"""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Num

from rollmill.core.drawing import Circle, Drawing, Line, Shape, rectangle
from rollmill.envs.drawings import BLUE, FAINT, INK, PAPER, RED, SOFT

REACH = "#f9dcc9"
RIM = 1.25
"""Radius of the white rim around an agent, in multiples of its radius, which separates overlapping agents."""
MAX_CELLS = 30
"""Cells in a row up to which a grid is drawn."""


def draw_square(
    x: Num[np.ndarray, " A"],
    y: Num[np.ndarray, " A"],
    in_game: Bool[np.ndarray, " A"],
    *,
    num_taggers: int,
    length: float,
    directions: Num[np.ndarray, " A"] | None = None,
    reach: float = 0.0,
) -> Drawing:
    """Draws the taggers and runners of TagContinuous on a square with sides of `length`.

    Taggers are red, runners blue, and runners that have left the game grey. A short line shows the direction of
    each agent (rad). A circle around each tagger shows its `reach`, the distance at which it tags.
    """
    size = length * max(0.008, min(0.02, 0.14 / np.sqrt(len(x))))
    radius = {False: size, True: 1.35 * size}
    colours = np.where(in_game, np.where(np.arange(len(x)) < num_taggers, RED, BLUE), SOFT)
    order = np.argsort(in_game, kind="stable")  # agents that have left are drawn first, below the others
    reaches = range(num_taggers) if reach > size else ()
    shapes: list[Shape] = [Circle((float(x[i]), float(y[i])), reach, REACH) for i in reaches]
    for i in order:
        centre, own = (float(x[i]), float(y[i])), radius[bool(i < num_taggers)]
        shapes.append(Circle(centre, own * RIM, PAPER))
        if directions is not None and in_game[i]:
            ahead = 2.2 * own * np.array([np.cos(directions[i]), np.sin(directions[i])])
            shapes.append(Line((centre, (centre[0] + ahead[0], centre[1] + ahead[1])), 0.5 * own, str(colours[i])))
        shapes.append(Circle(centre, own, str(colours[i])))
    edge, margin = 0.006 * length, 0.05 * length
    frame = Line(((0, 0), (length, 0), (length, length), (0, length), (0, 0)), edge, INK)
    return Drawing(
        -margin, -margin, length + margin, length + margin, (frame, *shapes), fps=15.0, legend=_legend(reaches)
    )


def _legend(reaches: Sequence[int] = ()) -> tuple[tuple[str, str], ...]:
    return ((RED, "tagger"), (BLUE, "runner"), (SOFT, "tagged"), *(((REACH, "reach"),) if reaches else ()))


def draw_grid(
    x: Num[np.ndarray, " A"],
    y: Num[np.ndarray, " A"],
    in_game: Bool[np.ndarray, " A"],
    *,
    num_taggers: int,
    cells: int,
) -> Drawing:
    """Draws the taggers and runners of TagGridWorld in their cells.

    Taggers are red circles, runners blue squares, and tagged runners grey squares. Agents in the same cell are
    drawn smaller, side by side. `x` are columns and `y` are rows, counted upwards, from 0 to `cells` - 1.
    """
    width = 0.02 if cells <= MAX_CELLS else 0.05
    lines = [Line(((at, 0), (at, cells)), width, FAINT) for at in range(cells + 1)]
    lines += [Line(((0, at), (cells, at)), width, FAINT) for at in range(cells + 1)]
    frame = Line(((0, 0), (cells, 0), (cells, cells), (0, cells), (0, 0)), 0.006 * cells, INK)
    # on large grids, agents are drawn larger than their cells, so that they can be seen
    grow = max(1.0, cells / 25)
    shapes: list[Shape] = []
    for i in (*range(num_taggers, len(x)), *range(num_taggers)):
        (across, up), share = _place_in_cell(x, y, i)
        centre = float(x[i]) + 0.5 + grow * across, float(y[i]) + 0.5 + grow * up
        if i < num_taggers:
            shapes.append(Circle(centre, 0.4 * grow * share, RED))
        else:
            half = 0.36 * grow * share
            colour = BLUE if in_game[i] else SOFT
            shapes.append(
                rectangle(centre[0] - half, centre[1] - half, centre[0] + half, centre[1] + half, colour)
            )
    margin = 0.03 * cells
    shapes = [*(lines if cells <= MAX_CELLS else []), frame, *shapes]
    return Drawing(-margin, -margin, cells + margin, cells + margin, shapes, fps=8.0, legend=_legend())


def _place_in_cell(
    x: Num[np.ndarray, " A"], y: Num[np.ndarray, " A"], agent: int
) -> tuple[tuple[float, float], float]:
    """Returns an agent's offset from the middle of its cell, and its size as a share of the cell's side.

    Agents in the same cell are arranged in rows, so that all are visible.
    """
    together = np.flatnonzero((x == x[agent]) & (y == y[agent])).tolist()
    side = math.ceil(math.sqrt(len(together)))
    row, column = divmod(together.index(agent), side)
    rows = math.ceil(len(together) / side)
    return ((column + 0.5) / side - 0.5, 0.5 * (rows - 1) / side - row / side), 1.0 / side
