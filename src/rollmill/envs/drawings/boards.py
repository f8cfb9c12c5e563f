"""Draws game boards, given as planes of stones or colours.

Shape letters: `H` rows from the top, `W` columns, `C` channels.
"""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, Num

from rollmill.core.drawing import Circle, Drawing, Line, rectangle
from rollmill.envs.drawings import BLUE, CHANNELS, INK, ORANGE, PAPER, RED

BOARD = "#2f6db5"
HOLE = "#e9edf0"
YELLOW = "#f2c230"
PLAYERS = ((RED, "first"), (YELLOW, "second"))
MOVES_A_SECOND = 1.5


def draw_stones(first: Bool[np.ndarray, "H W"], second: Bool[np.ndarray, "H W"]) -> Drawing:
    """Draws a Connect Four board in blue, with red stones for the first player, and yellow for the second."""
    rows, columns = first.shape
    stones = [
        Circle(centre, 0.4, RED if first[place] else YELLOW if second[place] else HOLE)
        for place, centre in _squares(rows, columns)
    ]
    board = rectangle(0.0, 0.0, float(columns), float(rows), BOARD)
    return Drawing(-0.15, -0.15, columns + 0.15, rows + 0.15, (board, *stones), fps=MOVES_A_SECOND, legend=PLAYERS)


def draw_marks(first: Bool[np.ndarray, "H W"], second: Bool[np.ndarray, "H W"]) -> Drawing:
    """Draws a tic-tac-toe board, with crosses for the first player and rings for the second."""
    rows, columns = first.shape
    shapes = [Line(((at, 0.05), (at, rows - 0.05)), 0.05, INK) for at in range(1, columns)]
    shapes += [Line(((0.05, at), (columns - 0.05, at)), 0.05, INK) for at in range(1, rows)]
    for place, (x, y) in _squares(rows, columns):
        if first[place]:
            shapes += [Line(((x - 0.27, y - s * 0.27), (x + 0.27, y + s * 0.27)), 0.11, RED) for s in (-1, 1)]
        if second[place]:
            shapes += [Circle((x, y), 0.34, BLUE), Circle((x, y), 0.23, PAPER)]
    return Drawing(
        -0.1,
        -0.1,
        columns + 0.1,
        rows + 0.1,
        shapes,
        fps=MOVES_A_SECOND,
        legend=((RED, "first: crosses"), (BLUE, "second: rings")),
    )


def draw_channels(planes: Num[np.ndarray, "H W C"]) -> Drawing:
    """Draws a coloured square for each place of an image with channels.

    Each channel has its own colour. If several channels of a place are not 0, the last channel is on top.
    """
    rows, columns, channels = planes.shape
    squares = [
        rectangle(x + 0.03, y + 0.03, x + 0.97, y + 0.97, CHANNELS[c % len(CHANNELS)])
        for c in range(channels)
        for x, y in np.argwhere(planes[::-1, :, c].T != 0).astype(float).tolist()
    ]
    return Drawing(0, 0, columns, rows, squares, background=INK, fps=15.0)


def draw_point(position: tuple[float, float], goal: tuple[float, float], *, radius: float) -> Drawing:
    """Draws a point on the square from -1 to 1, and the circle that the point has to reach."""
    frame = Line(((-1, -1), (1, -1), (1, 1), (-1, 1), (-1, -1)), 0.012, INK)
    shapes = (frame, Circle(goal, radius, "#fbe7c1"), Circle(goal, 0.05, ORANGE), Circle(position, 0.07, BLUE))
    return Drawing(-1.1, -1.1, 1.1, 1.1, shapes, fps=8.0, legend=((BLUE, "point"), (ORANGE, "goal")))


def _squares(rows: int, columns: int) -> Iterator[tuple[tuple[int, int], tuple[float, float]]]:
    """Yields the row and the column of each square, and its centre."""
    for row in range(rows):
        for column in range(columns):
            yield (row, column), (column + 0.5, rows - row - 0.5)
