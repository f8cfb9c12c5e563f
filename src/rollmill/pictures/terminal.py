"""Pictures as terminal text: two coloured pixels per character, or ASCII shades without colours."""

import numpy as np
from jaxtyping import UInt8

from rollmill.pictures.raster import resize

UPPER_HALF = "\N{UPPER HALF BLOCK}"
SHADES = " .:-=+*#%@"
"""Characters from light to dark."""
RESET = "\x1b[0m"


def coloured_lines(picture: UInt8[np.ndarray, "H W 3"], columns: int, rows: int) -> list[str]:
    """Returns a picture as lines of half-block characters in 24-bit colours, within `columns` and `rows`."""
    height, width = _fit(picture, columns, 2 * rows)
    pixels = resize(picture, max(2, height - height % 2), width)
    return ["".join(_pairs(upper, lower)) + RESET for upper, lower in zip(pixels[::2], pixels[1::2], strict=True)]


def plain_lines(picture: UInt8[np.ndarray, "H W 3"], columns: int, rows: int) -> list[str]:
    """Returns a picture as lines of ASCII characters. Pixels that differ from the upper left corner are dark."""
    height, width = _fit(picture, columns, 2 * rows)
    pixels = resize(picture, max(1, height // 2), width).astype(np.float32)
    paper = pixels[0, 0]
    ink = np.abs(pixels - paper).max(axis=2)
    shades = np.round(ink / max(float(ink.max()), 1.0) * (len(SHADES) - 1)).astype(int)
    return ["".join(SHADES[shade] for shade in row).rstrip() for row in shades]


def _fit(picture: UInt8[np.ndarray, "H W 3"], columns: int, pixel_rows: int) -> tuple[int, int]:
    height, width = picture.shape[:2]
    scale = min(columns / width, pixel_rows / height)
    return max(2, int(height * scale)), max(1, int(width * scale))


def _pairs(upper: UInt8[np.ndarray, "W 3"], lower: UInt8[np.ndarray, "W 3"]) -> list[str]:
    """Returns a character for the pixels of two rows. Colour codes are written only when the colour changes."""
    cells, before = [], None
    for top, bottom in zip(upper.tolist(), lower.tolist(), strict=True):
        colours = (*top, *bottom)
        if colours != before:
            cells.append("\x1b[38;2;{};{};{};48;2;{};{};{}m".format(*colours))
        cells.append(UPPER_HALF)
        before = colours
    return cells
