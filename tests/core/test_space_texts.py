"""Spaces in messages: one line each, however large they are."""

import numpy as np
import pytest
from gymnasium import spaces

from rollmill.core.spaces import MAX_SPACE_TEXT, space_text
from rollmill.envs.host.actions import fit_to_space
from wordings import raises


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (spaces.Discrete(4), "Discrete(4)"),
        (spaces.MultiDiscrete([2, 3]), "MultiDiscrete([2 3])"),
        (spaces.MultiDiscrete([2] * 300), "MultiDiscrete([2 2 2 ... 2 2 2]) of shape (300,)"),
        (spaces.MultiDiscrete([[2, 3], [4, 5]]), "MultiDiscrete([[2 3] [4 5]])"),
        (spaces.Box(-1, 1, (3,)), "Box(-1.0, 1.0, (3,), float32)"),
    ],
)
def test_a_space_is_one_line(space, text):
    assert space_text(space) == text


def test_long_texts_are_cut_in_the_middle():
    box = spaces.Box(np.arange(90.0), np.arange(1.0, 91.0), dtype=np.float64)
    many = spaces.Dict({f"part_{number}": spaces.Discrete(number + 1) for number in range(50)})
    for space, end in ((box, ", (90,), float64)"), (many, "'part_9': Discrete(10))")):
        text = space_text(space)
        assert len(text) <= MAX_SPACE_TEXT and " ... " in text and "\n" not in text and text.endswith(end)


def test_one_action_is_one():
    with raises("actions-have-shape-actions-have", "(1, 1), expected (1,) for 1 action of Discrete(2)."):
        fit_to_space(spaces.Discrete(2), np.zeros((1, 1)), 1)
