"""Draws classic control problems. The functions take plain Python scalars, so adapters can use them too."""

import math
from typing import Any

import numpy as np

from rollmill.core.drawing import Circle, Drawing, Line, Point, Polygon, rectangle
from rollmill.envs.drawings import BLUE, FAINT, GREEN, INK, ORANGE, RED, SOFT, WOOD

VALLEY_POINTS = 60
WHEEL = 0.03


def draw_cartpole(position: float, angle: float, params: Any) -> Drawing:
    """Draws a cart on its track and a pole at an angle from upright (rad).

    Marks show the limits of the track. Lengths are in metres, and `params` are `CartPoleParams`.
    """
    limit, length = float(params.position_limit), 2 * float(params.pole_half_length)
    axle = (position, 0.3)
    return Drawing(
        left=-limit - 0.5,
        bottom=-0.4,
        right=limit + 0.5,
        top=length + 0.8,
        shapes=(
            Line(((-limit - 0.5, 0.0), (limit + 0.5, 0.0)), 0.02, INK),
            *(Line(((end, -0.1), (end, 0.1)), 0.03, RED) for end in (-limit, limit)),
            rectangle(position - 0.25, 0.06, position + 0.25, 0.3, BLUE),
            *(Circle((position + side, 0.06), 0.06, INK) for side in (-0.15, 0.15)),
            Line((axle, _turn(axle, length, angle)), 0.1, WOOD),
            Circle(axle, 0.045, INK),
        ),
        fps=50.0,
        legend=((RED, "limits"),),
    )


def draw_acrobot(angle_1: float, angle_2: float, *, length_1: float = 1.0, length_2: float = 1.0) -> Drawing:
    """Draws the two links of an acrobot, and the height that the tip has to reach. Lengths are in metres.

    The first angle is measured from the hanging position, and the second from the first link (rad).
    """
    side = length_1 + length_2 + 0.3
    elbow = _turn((0.0, 0.0), length_1, math.pi - angle_1)
    tip = _turn(elbow, length_2, math.pi - angle_1 - angle_2)
    return Drawing(
        left=-side,
        bottom=-side,
        right=side,
        top=side,
        shapes=(
            Line(((-side, length_1), (side, length_1)), 0.02, GREEN),
            Line(((0.0, 0.0), elbow), 0.18, BLUE),
            Line((elbow, tip), 0.18, ORANGE),
            Circle((0.0, 0.0), 0.1, INK),
            Circle(elbow, 0.1, INK),
        ),
        fps=15.0,
        legend=((GREEN, "height to reach"),),
    )


def draw_pendulum(angle: float, *, length: float = 1.0) -> Drawing:
    """Draws a pendulum at an angle from upright (rad), and the circle of its tip. Lengths are in metres."""
    side, end = 1.3 * length, _turn((0.0, 0.0), length, angle)
    return Drawing(
        left=-side,
        bottom=-side,
        right=side,
        top=side,
        shapes=(
            Circle((0.0, 0.0), 1.01 * length, FAINT),
            Circle((0.0, 0.0), 0.99 * length, "#ffffff"),
            Line(((0.0, 0.0), end), 0.14 * length, RED),
            Circle((0.0, 0.0), 0.06 * length, INK),
        ),
        fps=20.0,
    )


def draw_mountain_car(position: float, params: Any) -> Drawing:
    """Draws a car at a position along its valley, and the flag at the goal. `params` are `MountainCarParams`."""
    low, high, goal = (float(getattr(params, f"{name}_position")) for name in ("min", "max", "goal"))
    ground = tuple((float(x), _height(x)) for x in np.linspace(low, high, VALLEY_POINTS))
    slope = math.atan(1.35 * math.cos(3 * position))
    car = lambda x, y: _place((position, _height(position)), x, y, slope)
    wheels = [car(side, WHEEL) for side in (-0.05, 0.05)]
    body = [car(x, y) for x, y in ((-0.09, 0.04), (0.09, 0.04), (0.09, 0.09), (0.04, 0.13), (-0.09, 0.13))]
    pole = (goal, _height(goal))
    return Drawing(
        left=low,
        bottom=-0.05,
        right=high,
        top=1.3,
        shapes=(
            Polygon((*ground, (high, -0.1), (low, -0.1)), FAINT),
            Line(ground, 0.012, SOFT),
            Line((pole, (goal, pole[1] + 0.2)), 0.012, INK),
            Polygon(
                ((goal, pole[1] + 0.2), (goal, pole[1] + 0.11), (goal - 0.1, pole[1] + 0.155)),
                ORANGE,
            ),
            Polygon(body, BLUE),
            *(Circle(wheel, WHEEL, INK) for wheel in wheels),
        ),
    )


def _height(position: float | np.floating) -> float:
    """Returns the height of the valley, as drawn by Gymnasium."""
    return 0.45 * math.sin(3 * float(position)) + 0.55


def _turn(start: Point, length: float, angle: float) -> Point:
    """Returns the end of a rod that leaves a point at an angle from upright, to the right (rad)."""
    return start[0] + length * math.sin(angle), start[1] + length * math.cos(angle)


def _place(origin: Point, x: float, y: float, slope: float) -> Point:
    cos, sin = math.cos(slope), math.sin(slope)
    return origin[0] + cos * x - sin * y, origin[1] + sin * x + cos * y
