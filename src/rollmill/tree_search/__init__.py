"""Tree searches that step an environment, the positions from which they begin, and fixed opponents for games."""
