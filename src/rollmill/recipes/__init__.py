"""Complete sets of hyperparameters, each a function; `--recipe NAME` starts from one."""

from rollmill.recipes import classic, mujoco, tag
from rollmill.recipes.classic import Recipe

RECIPES = {**classic.RECIPES, **mujoco.RECIPES, **tag.RECIPES}

__all__ = ["RECIPES", "Recipe"]
