"""Small variants of Tag, which two CPU cores learn in a minute or two."""

import dataclasses

from rollmill.core.types import Environment
from rollmill.envs.tag_continuous import tag_continuous
from rollmill.envs.tag_gridworld import tag_gridworld


def tag_gridworld_small() -> Environment:
    """Four taggers hunt a runner on 21 x 21 cells: TagGridWorld-v0 with `grid_length` 20.

    On the 101 x 101 cells of TagGridWorld-v0, a runner that stays in its corner cannot be reached in fewer than
    the 100 steps of an episode.
    """
    env = tag_gridworld()
    params = dataclasses.replace(env.params, grid_length=20)
    return env._replace(name="TagGridWorld-Small-v0", params=params)


def tag_continuous_small() -> Environment:
    """Three taggers hunt nine slower runners for 100 steps: TagContinuous-v0 on a square of side 10.

    Runners are half as fast, there are 5 choices of acceleration and of turn, and each agent sees its 4
    nearest neighbours.
    """
    env = tag_continuous(
        num_taggers=3,
        num_runners=9,
        max_steps=100,
        num_acceleration_levels=4,
        num_turn_levels=4,
        num_other_agents_observed=4,
    )
    params = dataclasses.replace(env.params, grid_length=10.0, skill_level_runner=0.5)
    return env._replace(name="TagContinuous-Small-v0", params=params)
