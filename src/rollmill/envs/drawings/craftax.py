"""Draws the part of a Craftax-Classic world around the player, with health, food, drink and energy below.

Shape letters: `H` rows from the top, `W` columns, `N` creatures.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from rollmill.core.drawing import Circle, Drawing, Line, Shape, rectangle
from rollmill.envs.drawings import BLUE, INK, ORANGE, PAPER, RED

ROWS, COLUMNS = 11, 15
"""Size of the part that is drawn, in cells."""

BLOCKS = {
    **{"grass": "#7fb069", "water": "#4f86c6", "stone": "#8d99a6", "tree": "#3c6e47", "path": "#c9b99b"},
    **{"coal": "#3a3f44", "iron": "#c98b5e", "diamond": "#a9e4ef", "crafting_table": "#8a5a2b"},
    **{"furnace": "#5b5048", "sand": "#ecd9a0", "lava": "#e2572b", "plant": "#a7d46f", "ripe_plant": "#e75a7c"},
}
UNKNOWN = "#e9edf0"
CREATURES = {"zombies": "#27562f", "cows": "#f4f1ea", "skeletons": "#d8d8d8", "arrows": "#5b3a1e"}
NEEDS = {"health": RED, "food": ORANGE, "drink": BLUE, "energy": "#d9b310"}
STEPS_A_SECOND = 6.0


class DrawnPlayer(NamedTuple):
    """What is drawn of the player."""

    position: tuple[int, int]
    """Row and column."""
    offset: tuple[int, int]
    """Row and column of the direction."""
    is_asleep: bool
    needs: Mapping[str, int]
    """Health, food, drink and energy, from 0 to 9."""


def draw_world(
    blocks: Int[np.ndarray, "H W"],
    names: Mapping[int, str],
    player: DrawnPlayer,
    creatures: Mapping[str, Iterable[Int[np.ndarray, "2"]]],
) -> Drawing:
    """Draws the cells around the player.

    Args:
        blocks: numbers of the blocks of the whole map.
        names: name of each number, in lower case.
        player: the player.
        creatures: row and column of the living creatures of each kind.
    """
    top, left = player.position[0] - ROWS // 2, player.position[1] - COLUMNS // 2
    shapes: list[Shape] = []
    for row in range(ROWS):
        for column in range(COLUMNS):
            y, x = top + row, left + column
            is_inside = 0 <= y < blocks.shape[0] and 0 <= x < blocks.shape[1]
            colour = BLOCKS.get(names[int(blocks[y, x])], UNKNOWN) if is_inside else UNKNOWN
            shapes.append(rectangle(column, ROWS - row - 1, column + 1, ROWS - row, colour))
    for kind, positions in creatures.items():
        for y, x in positions:
            row, column = int(y) - top, int(x) - left
            if 0 <= row < ROWS and 0 <= column < COLUMNS:
                radius = 0.15 if kind == "arrows" else 0.36
                shapes.append(Circle(_centre(row, column), radius, CREATURES[kind]))
    shapes += [*_player(player), *_bars(player.needs)]
    height = 0.6 * len(NEEDS)
    return Drawing(
        -0.2,
        -0.4 - height,
        COLUMNS + 0.2,
        ROWS + 0.2,
        shapes,
        fps=STEPS_A_SECOND,
        legend=[
            *((colour, kind) for kind, colour in CREATURES.items()),
            *((c, name) for name, c in NEEDS.items()),
        ],
    )


def _centre(row: int, column: int) -> tuple[float, float]:
    return column + 0.5, ROWS - row - 0.5


def _player(player: DrawnPlayer) -> Iterable[Shape]:
    x, y = _centre(ROWS // 2, COLUMNS // 2)
    yield Circle((x, y), 0.42, PAPER)
    yield Circle((x, y), 0.36, "#6c7a89" if player.is_asleep else INK)
    yield Line(((x, y), (x + 0.3 * player.offset[1], y - 0.3 * player.offset[0])), 0.12, PAPER)


def _bars(needs: Mapping[str, int]) -> Iterable[Shape]:
    for line, (name, colour) in enumerate(NEEDS.items()):
        bottom = -0.8 - 0.6 * line
        for count in range(needs[name]):
            yield rectangle(0.6 * count, bottom, 0.6 * count + 0.5, bottom + 0.45, colour)
