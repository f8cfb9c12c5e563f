"""Drawings become the pixels that their shapes cover."""

import numpy as np
import pytest

from rollmill.core.drawing import Circle, Drawing, Line, Polygon, rectangle
from rollmill.pictures import coloured_lines, plain_lines, rasterise, resize
from wordings import raises

BLACK = "#000000"


def drawn(*shapes, side=100):
    return rasterise(Drawing(0, 0, 1, 1, shapes), side)


def ink(picture):
    """The area that is black, as a part of the picture."""
    return float(1 - picture[..., 0].mean() / 255)


@pytest.mark.parametrize(
    ("shape", "area"),
    [
        (Circle((0.5, 0.5), 0.3, BLACK), np.pi * 0.09),
        (Line(((0.2, 0.3), (0.8, 0.7)), 0.1, BLACK), 0.1 * np.hypot(0.6, 0.4) + np.pi * 0.0025),
        (rectangle(0.1, 0.2, 0.6, 0.9, BLACK), 0.35),
        (Polygon(((0.1, 0.1), (0.9, 0.1), (0.5, 0.8)), BLACK), 0.28),
    ],
)
def test_a_shape_covers_its_area(shape, area):
    assert ink(drawn(shape)) == pytest.approx(area, rel=0.01)


def test_up_is_up_and_right_is_right():
    picture = drawn(rectangle(0.5, 0.75, 1.0, 1.0, "#ff0000"), side=8)
    assert (picture[:2, 4:] == (255, 0, 0)).all()
    assert (picture[2:] == 255).all() and (picture[:, :4] == 255).all()


def test_what_lies_outside_or_is_not_finite_leaves_no_trace():
    assert ink(drawn(Circle((5.0, 0.5), 0.3, BLACK), Circle((np.nan, 0.5), 0.3, BLACK))) == 0


def test_a_drawing_keeps_its_proportions_in_even_pixels():
    assert rasterise(Drawing(-2, 0, 2, 1, ()), 99).shape == (24, 100, 3)


def test_bad_colours_and_areas_are_refused():
    with raises("is-no-colour-hint-six", "'red'"):
        drawn(Circle((0.5, 0.5), 0.3, "red"))
    with raises("drawing-from-to-has-no"):
        rasterise(Drawing(0, 0, 0, 1, ()), 100)


def test_a_resized_picture_has_the_means_of_the_old_pixels():
    picture = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    halved = picture.reshape(1, 2, 2, 2, 3).mean((1, 3)).round().astype(np.uint8)
    assert (resize(picture, 1, 2) == halved).all()
    assert (resize(resize(picture, 6, 12), 2, 4) == picture).all()


def test_a_terminal_shows_two_pixels_a_character():
    picture = np.zeros((4, 2, 3), np.uint8)
    picture[0] = (255, 0, 0)
    lines = coloured_lines(picture, columns=2, rows=2)
    assert lines[0] == "\x1b[38;2;255;0;0;48;2;0;0;0m▀▀\x1b[0m" and len(lines) == 2


def test_plain_characters_are_dark_where_a_picture_differs_from_its_paper():
    picture = np.full((8, 8, 3), 255, np.uint8)
    picture[4:] = 0
    assert plain_lines(picture, columns=8, rows=4) == ["", "", "@" * 8, "@" * 8]
