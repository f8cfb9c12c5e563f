"""Algorithms as graphs, one file each, and the returns and losses that they share."""

from rollmill.algorithms.a3c import A3CConfig, a3c
from rollmill.algorithms.alphazero import AlphaZeroConfig, alphazero
from rollmill.algorithms.building import settings_of
from rollmill.algorithms.dqn import DQNConfig, dqn
from rollmill.algorithms.fragments import EnvironmentFunctions, clip_to_space, environment_functions
from rollmill.algorithms.impala import IMPALAConfig, impala
from rollmill.algorithms.mappo import MAPPOConfig, ippo, mappo
from rollmill.algorithms.opponents import opponent
from rollmill.algorithms.positions import action_of, position
from rollmill.algorithms.ppo import PPOConfig, ppo
from rollmill.algorithms.reports import GAMES, MOMENTS, explained_variance
from rollmill.algorithms.returns import Advantages, bootstrap_values, generalised_advantages, vtrace
from rollmill.algorithms.sac import SACConfig, sac
from rollmill.algorithms.td3 import TD3Config, td3

__all__ = [
    "GAMES",
    "MOMENTS",
    "A3CConfig",
    "Advantages",
    "AlphaZeroConfig",
    "DQNConfig",
    "EnvironmentFunctions",
    "IMPALAConfig",
    "MAPPOConfig",
    "PPOConfig",
    "SACConfig",
    "TD3Config",
    "a3c",
    "action_of",
    "alphazero",
    "bootstrap_values",
    "clip_to_space",
    "dqn",
    "environment_functions",
    "explained_variance",
    "generalised_advantages",
    "impala",
    "ippo",
    "mappo",
    "opponent",
    "position",
    "ppo",
    "sac",
    "settings_of",
    "td3",
    "vtrace",
]
