"""Games whose rules walk boards by loops under `vmap`: fused steps are the unfused ones, over whole episodes."""

import numpy as np
import pytest
from drawn_compare import WAYS
from game_environments import GAMES
from game_runs import differing, differing_from, steps_by_xla, unfused_steps

COPIES = 4


@pytest.mark.parametrize(
    ("name", "steps"),
    [("gomoku", 64), *(pytest.param(name, 256, marks=pytest.mark.slow) for name in GAMES)],
)
def test_steps_are_those_of_the_program(name, steps):
    played = unfused_steps(name, steps=steps, copies=COPIES)
    # So many rewards that the game is not over before it begins, or always goes the same way.
    assert len(np.unique(np.asarray(played.expected.reward))) >= 2
    assert {way: differing(played, run) for way, run in WAYS.items()} == dict.fromkeys(WAYS, 0)
    assert differing_from(played, steps_by_xla(name, played)) == 0
