"""MAPPO on Tag: taggers and runners learn at the same time, each kind with parameters of its own.

The environments are WarpDrive's, at sizes that two CPU cores can train.
"""

from rollmill.algorithms import MAPPOConfig
from rollmill.recipes.classic import Recipe


def tag_gridworld() -> Recipe:
    """MAPPO on TagGridWorld: four taggers and a runner on 21 x 21 cells."""
    config = MAPPOConfig(
        total_timesteps=1_000_000,
        num_envs=64,
        num_steps=32,
        update_epochs=4,
        num_minibatches=4,
        learning_rate=1e-3,
        ent_coef=0.01,
    )
    return Recipe("mappo", "TagGridWorld-Small-v0", config, "Tag on a grid in a minute on two cores")


def tag_continuous() -> Recipe:
    """MAPPO on TagContinuous: three taggers and nine slower runners on a square."""
    config = MAPPOConfig(
        total_timesteps=640_000,
        num_envs=64,
        num_steps=50,
        update_epochs=4,
        num_minibatches=4,
        learning_rate=3e-3,
        gamma=0.97,
        ent_coef=0.003,
    )
    return Recipe("mappo", "TagContinuous-Small-v0", config, "Tag on a square in two minutes on two cores")


RECIPES = {"tag-continuous": tag_continuous, "tag-gridworld": tag_gridworld}
