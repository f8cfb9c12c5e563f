"""Renders drawings as pixels with smooth edges. The covered share of a pixel is computed from the pixel's
distance to the shape.

Shape letters: `H` rows from the top and `W` columns of pixels, `h` and `w` rows and columns of the part that a
shape touches, `P` points.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, UInt8

from rollmill.core.drawing import Circle, Drawing, Line, Polygon, Shape
from rollmill.core.errors import UsageError

Picture = UInt8[np.ndarray, "_ _ 3"]
"""Pixels of a picture, beginning with the top row, as red, green and blue."""

KEPT_SHAPES = 512
"""Number of shapes whose pixels are cached, because most of a drawing stays the same from frame to frame."""


class _Cover(NamedTuple):
    """The part of the picture that a shape touches, and how much of each pixel it covers, from 0 to 1."""

    top: int
    left: int
    share: Float[np.ndarray, "h w"]


def size_of(drawing: Drawing, longer_side: int) -> tuple[int, int]:
    """Returns the pixel rows and columns of a drawing, given its longer side. Both are even, as videos require.

    Raises a `UsageError` if the drawing has no area.
    """
    width, height = drawing.right - drawing.left, drawing.top - drawing.bottom
    if not (0 < width < np.inf and 0 < height < np.inf):
        raise UsageError(
            f"a drawing from ({drawing.left}, {drawing.bottom}) to ({drawing.right}, {drawing.top}) has no area. "
            "hint: right must be greater than left, and top greater than bottom."
        )
    scale = longer_side / max(width, height)
    return tuple(max(2, 2 * round(side * scale / 2)) for side in (height, width))  # pyright: ignore[reportReturnType]


def rasterise(drawing: Drawing, longer_side: int) -> Picture:
    """Renders a drawing with `longer_side` pixels on its longer side.

    Raises a `UsageError` if the drawing has no area, or if a colour is invalid.
    """
    height, width = size_of(drawing, longer_side)
    scale = (width / float(drawing.right - drawing.left), height / float(drawing.top - drawing.bottom))
    pixels = np.empty((height, width, 3), np.float32)
    pixels[:] = _rgb(drawing.background)
    for shape in drawing.shapes:
        cover = _compute_cover(_in_pixels(shape, drawing, scale)._replace(colour=""), height, width)
        rows = slice(cover.top, cover.top + cover.share.shape[0])
        columns = slice(cover.left, cover.left + cover.share.shape[1])
        part = pixels[rows, columns]
        part += cover.share[..., None] * (_rgb(shape.colour) - part)
    return np.round(pixels).astype(np.uint8)


@lru_cache(maxsize=256)
def _rgb(colour: str) -> Float[np.ndarray, "3"]:
    digits = colour.removeprefix("#")
    try:
        if len(digits) != 6:
            raise ValueError
        return np.array([int(digits[at : at + 2], 16) for at in (0, 2, 4)], np.float32)
    except ValueError:
        raise UsageError(
            f"{colour!r} is not a colour. hint: use six hexadecimal digits, such as #1d2327."
        ) from None


def _in_pixels(shape: Shape, drawing: Drawing, scale: tuple[float, float]) -> Shape:
    """Returns the shape in pixels from the upper left corner, as Python scalars that can be keys of a cache."""
    points = [shape.centre] if isinstance(shape, Circle) else shape.points
    placed = tuple(((float(x) - drawing.left) * scale[0], (drawing.top - float(y)) * scale[1]) for x, y in points)
    match shape:
        case Circle():
            return shape._replace(centre=placed[0], radius=float(shape.radius) * scale[0])
        case Line():
            return shape._replace(points=placed, width=float(shape.width) * scale[0])
    return shape._replace(points=placed)


@lru_cache(maxsize=KEPT_SHAPES)
def _compute_cover(shape: Shape, height: int, width: int) -> _Cover:
    points = np.array([shape.centre] if isinstance(shape, Circle) else shape.points, np.float64).reshape(-1, 2)
    if points.size == 0 or not np.isfinite(points).all():
        return _Cover(0, 0, np.zeros((0, 0), np.float32))
    margin = 1.0 + (shape.radius if isinstance(shape, Circle) else shape.width if isinstance(shape, Line) else 0.0)
    limits = np.array([width, height])
    low = np.clip(np.floor(points.min(0) - margin), 0, limits).astype(int)
    high = np.clip(np.ceil(points.max(0) + margin), 0, limits).astype(int)
    x = np.arange(low[0], high[0])[None] + 0.5
    y = np.arange(low[1], high[1])[:, None] + 0.5
    match shape:
        case Circle(_, radius, _):
            distance = np.hypot(x - points[0, 0], y - points[0, 1]) - radius
        case Line(_, line_width, _):
            distance = _distance_to_lines(x, y, points) - line_width / 2
        case Polygon():
            edge = _distance_to_lines(x, y, np.concatenate([points, points[:1]]))
            distance = np.where(_inside(x, y, points), -edge, edge)
    return _Cover(int(low[1]), int(low[0]), np.clip(0.5 - distance, 0, 1).astype(np.float32))


def _distance_to_lines(
    x: Float[np.ndarray, "1 w"], y: Float[np.ndarray, "h 1"], points: Float[np.ndarray, "P 2"]
) -> Float[np.ndarray, "h w"]:
    nearest = np.full((y.size, x.size), np.inf)
    for (from_x, from_y), (to_x, to_y) in zip(points[:-1], points[1:], strict=True):
        along_x, along_y = to_x - from_x, to_y - from_y
        length = max(along_x**2 + along_y**2, 1e-12)
        part = np.clip(((x - from_x) * along_x + (y - from_y) * along_y) / length, 0, 1)
        np.minimum(nearest, np.hypot(x - from_x - part * along_x, y - from_y - part * along_y), out=nearest)
    return nearest


def _inside(
    x: Float[np.ndarray, "1 w"], y: Float[np.ndarray, "h 1"], points: Float[np.ndarray, "P 2"]
) -> Bool[np.ndarray, "h w"]:
    """Returns True where a ray to the right crosses the outline an odd number of times."""
    inside = np.zeros((y.size, x.size), bool)
    for (from_x, from_y), (to_x, to_y) in zip(points, np.roll(points, -1, axis=0), strict=True):
        if from_y != to_y:
            crossing = from_x + (y - from_y) * (to_x - from_x) / (to_y - from_y)
            inside ^= ((from_y > y) != (to_y > y)) & (x < crossing)
    return inside


def resize(picture: Picture, height: int, width: int) -> Picture:
    """Resizes a picture. Each new pixel is the mean of the old pixels that it covers."""
    down, across = (_overlaps(new, old) for new, old in zip((height, width), picture.shape[:2], strict=True))
    made = np.einsum("hH,HWc,wW->hwc", down, picture.astype(np.float32), across, optimize=True)
    return np.round(made).astype(np.uint8)


@lru_cache(maxsize=8)
def _overlaps(new: int, old: int) -> Float[np.ndarray, "new old"]:
    """Returns, for each of `new` equal parts of a line, the fraction of it in each of `old` equal parts."""
    edges = np.arange(new + 1) * old / new
    cells = np.arange(old)
    covered = np.minimum(edges[1:, None], cells + 1) - np.maximum(edges[:-1, None], cells)
    return (np.clip(covered, 0, None) * new / old).astype(np.float32)
