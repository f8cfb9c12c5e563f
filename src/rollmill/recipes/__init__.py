"""Complete sets of hyperparameters, each returned by a function. `--recipe NAME` selects one."""

from rollmill.recipes import classic, games, host, others, robots
from rollmill.recipes.classic import Recipe as Recipe

RECIPES = {**host.RECIPES, **classic.RECIPES, **games.RECIPES, **robots.RECIPES, **others.RECIPES}
