"""Complete sets of hyperparameters, each a function; `--recipe NAME` starts from one."""

from rollmill.recipes.classic import RECIPES, Recipe

__all__ = ["RECIPES", "Recipe"]
