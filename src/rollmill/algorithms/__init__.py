"""Graphs, one file each, and the returns and losses that they share."""

from rollmill.algorithms.fragments import clip_to_space, environment_functions
from rollmill.algorithms.ppo import PPOConfig, ppo
from rollmill.algorithms.returns import Advantages, bootstrap_values, generalised_advantages

__all__ = [
    "Advantages",
    "PPOConfig",
    "bootstrap_values",
    "clip_to_space",
    "environment_functions",
    "generalised_advantages",
    "ppo",
]
