"""Complete sets of hyperparameters, each a function; `--recipe NAME` starts from one."""

from rollmill.recipes import atari, classic, games, mujoco, tag
from rollmill.recipes.classic import Recipe

RECIPES = {**atari.RECIPES, **classic.RECIPES, **games.RECIPES, **mujoco.RECIPES, **tag.RECIPES}

__all__ = ["RECIPES", "Recipe"]
