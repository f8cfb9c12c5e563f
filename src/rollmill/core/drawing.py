"""Drawings of environments, which are lists of shapes. `x` grows to the right, and `y` grows upwards."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

Point: TypeAlias = tuple[float, float]
Colour: TypeAlias = str
"""Colour such as `#1d2327`, with two hexadecimal digits each for red, green and blue."""


class Line(NamedTuple):
    """Straight lines from each point to the next, with round ends and corners."""

    points: Sequence[Point]
    width: float
    colour: Colour


class Circle(NamedTuple):
    """A filled circle."""

    centre: Point
    radius: float
    colour: Colour


class Polygon(NamedTuple):
    """A filled polygon. Areas that the outline encloses twice are not filled."""

    points: Sequence[Point]
    colour: Colour


Shape: TypeAlias = Line | Circle | Polygon


class Drawing(NamedTuple):
    """A picture of an environment's state, to be drawn in any resolution.

    `left`, `bottom`, `right` and `top` are the visible range of coordinates. Shapes are painted in order.
    """

    left: float
    bottom: float
    right: float
    top: float
    shapes: Sequence[Shape]
    background: Colour = "#ffffff"
    fps: float = 30.0
    """Number of states per second at which an animation looks natural."""
    legend: Sequence[tuple[Colour, str]] = ()
    """Colours and their meaning in a word or two, for a caption below the picture."""


def rectangle(left: float, bottom: float, right: float, top: float, colour: Colour) -> Polygon:
    """Returns a filled rectangle whose sides are horizontal and vertical."""
    return Polygon(((left, bottom), (right, bottom), (right, top), (left, top)), colour)
