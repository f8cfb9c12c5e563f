"""Captions below pictures: texts in places that do not move, and a legend."""

import numpy as np
import pytest

from rollmill.pictures import add_caption

pytest.importorskip("PIL", reason="Pillow draws captions")
LEGEND = (("#d55e00", "tagger"), ("#0072b2", "runner"))


def picture(width):
    return np.full((40, width, 3), 100, np.uint8)


def strip(*texts, width=480, legend=()):
    return add_caption(picture(width), texts, legend)[40:]


def test_the_picture_stays_and_the_strip_below_has_ink_on_paper():
    made = add_caption(picture(480), ("episode 1", "step 3"))
    assert (made[:40] == 100).all() and made.shape[1:] == (480, 3) and made.shape[0] % 2 == 0
    assert made[40:].max() == 255 and 0.01 < (made[40:] < 128).mean() < 0.2


def test_a_text_that_changes_changes_its_own_place_only():
    one, other = (strip("episode 1", f"step {step}", "return 1.5") for step in (9, 10))
    columns = np.flatnonzero((one != other).any((0, 2)))
    assert one.shape == other.shape and columns.min() >= 160 and columns.max() < 320


def test_a_legend_has_its_colours_in_a_line_of_its_own():
    plain, made = strip("step 3"), strip("step 3", legend=LEGEND)
    assert made.shape[0] > plain.shape[0] and (made[: plain.shape[0] - 8] == plain[:-8]).all()
    colours = {tuple(colour) for colour in made.reshape(-1, 3).tolist()}
    assert {(0xD5, 0x5E, 0), (0, 0x72, 0xB2)} <= colours


def test_narrow_pictures_have_more_lines_and_the_narrowest_none():
    texts = ("episode 1", "step 3", "return 1.5", "action 1")
    assert strip(*texts, width=160).shape[0] > strip(*texts, width=400).shape[0] - 8
    assert add_caption(picture(60), texts).shape == (40, 60, 3)
    empty = strip("episode 1", "step 0", "return 0", "")
    assert empty.shape == strip(*texts).shape
