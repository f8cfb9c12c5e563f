"""Captions below pictures, strips with strings at fixed positions and a legend of colours, drawn by Pillow."""

import importlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from rollmill.core.drawing import Colour
from rollmill.pictures.files import pillow
from rollmill.pictures.raster import Picture

MIN_WIDTH = 96
"""Minimum width in pixels of a picture that gets a caption."""
MIN_FONT, MAX_FONT, FONT_SHARE = 9, 28, 32
"""Pixels of the font, which is a `FONT_SHARE`th of the picture's width within these limits."""
CELL = 9.5
"""Width of each text's position, in font heights."""
LINE = 1.5
"""Height of a line, in font heights."""
PAPER, INK = "#ffffff", "#1d2327"

Legend = Sequence[tuple[Colour, str]]


class _Placed(NamedTuple):
    """A text, its upper left corner in pixels, and the colour of the mark before it."""

    x: float
    y: float
    text: str
    colour: Colour | None = None


def add_caption(picture: Picture, texts: Sequence[str], legend: Legend = ()) -> Picture:
    """Returns the picture above a strip with the strings `texts` and a legend.

    The height depends only on the number of strings and on the legend, so all frames of a film have the same size.
    A picture that is too narrow is returned unchanged. Raises a `UsageError` if Pillow is not installed.
    """
    width = picture.shape[1]
    if width < MIN_WIDTH:
        return picture
    strip = _strip(width, tuple(texts), tuple(legend))
    return np.concatenate([picture, strip])


@lru_cache(maxsize=64)
def _strip(width: int, texts: tuple[str, ...], legend: tuple[tuple[Colour, str], ...]) -> Picture:
    image, size = pillow(), min(MAX_FONT, max(MIN_FONT, width // FONT_SHARE))
    font, line = _font(size), round(LINE * size)
    cells = list(_cells(width, texts, size, line))
    rows = round(cells[-1].y / line) + 1 if cells else 0
    cells += _marks(width, legend, font, size, line, rows)
    height = round(cells[-1].y) + line + size // 3 if cells else 0
    strip: Any = image.new("RGB", (width, height + height % 2), PAPER)
    drawing = importlib.import_module("PIL.ImageDraw").Draw(strip)
    for placed in cells:
        x, y = placed.x, placed.y + size // 3
        if placed.colour is not None:
            drawing.rectangle((x, y + 0.2 * size, x + 0.7 * size, y + 0.9 * size), placed.colour, INK)
            x += size
        drawing.text((x, y), placed.text, INK, font=font)
    return np.asarray(strip)


def _cells(width: int, texts: Sequence[str], size: int, line: int) -> Iterator[_Placed]:
    columns = max(1, min(len(texts), int(width / (CELL * size))))
    for index, text in enumerate(texts):
        row, column = divmod(index, columns)
        yield _Placed(0.5 * size + column * width / columns, row * line, text)


def _marks(width: int, legend: Legend, font: Any, size: int, line: int, row: int) -> Iterator[_Placed]:
    x, y = 0.5 * size, row * line
    for colour, text in legend:
        needed = font.getlength(text) + 2.0 * size
        if x > 0.5 * size and x + needed > width:
            x, y = 0.5 * size, y + line
        yield _Placed(x, y, text, colour)
        x += needed


@lru_cache(maxsize=8)
def _font(size: int) -> Any:
    return importlib.import_module("PIL.ImageFont").load_default(size)
