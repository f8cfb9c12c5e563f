"""Colours that carry a meaning stay apart for a deuteranope, as for everybody."""

import re
from itertools import combinations

import numpy as np
import pytest
from PIL import Image, ImageSequence

from manual.snippets import ROOT
from rollmill.envs import drawings
from rollmill.envs.drawings import boards
from rollmill.envs.robots.pictures import BACKGROUND, COLOURS as ROBOTS
from rollmill.pages.page import asset
from rollmill.plotting.png import COLOURS
from seen_colours import apart, ciede2000

AT_A_GLANCE = 10.0
THEMES = dict(
    zip(
        ("light", "dark"),
        re.findall(r":root \{(.*?)\}", asset("rollmill.pages.page", "page.css"), re.S),
        strict=True,
    )
)
FAMILIES = {
    "lines": (*(f"c{index}" for index in range(8)), "idle"),
    "times": ("device", "host", "both", "idle", "mark"),
    "host": ("python", "simulator", "dispatch", "cuda", "transfer", "compile", "channel", "storage", "waiting"),
}


@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [
        ((50.0, 2.6772, -79.7751), (50.0, 0.0, -82.7485), 2.0425),
        ((50.0, 2.5, 0.0), (73.0, 25.0, -18.0), 27.1492),
        ((22.7233, 20.0904, -46.6940), (23.0331, 14.9730, -42.5619), 2.0373),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
    ],
)
def test_differences_are_those_of_the_published_table(one, other, difference):
    assert ciede2000(np.array(one), np.array(other)) == pytest.approx(difference, abs=1e-4)


def test_red_and_green_of_one_lightness_are_alike_to_a_deuteranope():
    assert apart("#b5651d", "#6b8e23") < 14 < 35 < apart("#b5651d", "#6b8e23", deuteranope=False)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_colours_of_pages(theme, family):
    colours = dict(re.findall(r"--(\w+): (#\w+)", THEMES[theme]))
    assert too_near({name: colours[name] for name in (*FAMILIES[family], "card")}) == []


def test_colours_of_curves_as_pictures():
    assert too_near({**dict(enumerate(COLOURS)), "paper": "#ffffff"}) == []


@pytest.mark.parametrize(
    "colours",
    [
        {"tagger": drawings.RED, "runner": drawings.BLUE, "tagged": drawings.SOFT, "paper": drawings.PAPER},
        {"first": drawings.RED, "second": boards.YELLOW, "hole": boards.HOLE, "board": boards.BOARD},
        {"first": drawings.RED, "second": drawings.BLUE, "lines": drawings.INK, "paper": drawings.PAPER},
        {**dict(enumerate(drawings.CHANNELS)), "background": drawings.INK},
        {"link": drawings.BLUE, "second": drawings.ORANGE, "height": drawings.GREEN, "paper": drawings.PAPER},
        {"robot": ROBOTS[0], "object": ROBOTS[1], "background": BACKGROUND},
        {"pole": drawings.WOOD, "cart": drawings.BLUE, "paper": drawings.PAPER},
    ],
)
def test_colours_of_drawings(colours):
    assert too_near(colours) == []


PICTURES = sorted(path for path in (ROOT / "docs/figures").rglob("*") if path.suffix in (".png", ".gif"))


@pytest.mark.slow
@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_pictures_of_the_manual_need_no_red_and_green(path):
    """Two common colours that others tell apart differ for a deuteranope too; pale areas lie below lines."""
    with Image.open(path) as image:
        frames = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)]
    pixels = np.concatenate([frame.reshape(-1, 3) for frame in frames[:: max(1, len(frames) // 4)]])
    packed = (pixels // 8 * 8 + 4).astype(np.uint32) @ np.array([2**16, 2**8, 1], np.uint32)
    colours, counts = np.unique(packed, return_counts=True)
    often = [int(colours[index]) for index in np.argsort(-counts)[:14] if counts[index] > 0.002 * packed.size]
    names = [f"#{colour:06x}" for colour in often if min(colour.to_bytes(3, "big")) < 192]
    alike = [
        (*pair, difference)
        for pair in combinations(names, 2)
        if (difference := apart(*pair)) < AT_A_GLANCE and apart(*pair, deuteranope=False) > 20
    ]
    assert alike == []


def too_near(colours):
    """Returns the pairs that are hard to tell apart, with their differences."""
    pairs = combinations(colours.items(), 2)
    nearest = [
        (min(apart(one, two), apart(one, two, deuteranope=False)), first, second)
        for (first, one), (second, two) in pairs
    ]
    return [(round(difference, 1), *names) for difference, *names in nearest if difference < AT_A_GLANCE]
