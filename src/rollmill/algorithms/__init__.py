"""Algorithms as graphs, one file each, and the returns and losses that they share."""

# Names are imported at their first use: a training needs one algorithm.
from typing import TYPE_CHECKING

from rollmill.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from rollmill.algorithms.a2c import A2CConfig, a2c
    from rollmill.algorithms.a3c import A3CConfig, a3c
    from rollmill.algorithms.alphazero import AlphaZeroConfig, alphazero
    from rollmill.algorithms.building import settings_of
    from rollmill.algorithms.ddpg import DDPGConfig, ddpg
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
    "A2CConfig",
    "A3CConfig",
    "Advantages",
    "AlphaZeroConfig",
    "DDPGConfig",
    "DQNConfig",
    "EnvironmentFunctions",
    "IMPALAConfig",
    "MAPPOConfig",
    "PPOConfig",
    "SACConfig",
    "TD3Config",
    "a2c",
    "a3c",
    "action_of",
    "alphazero",
    "bootstrap_values",
    "clip_to_space",
    "ddpg",
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

_MODULES = {
    "rollmill.algorithms.a2c": "A2CConfig a2c",
    "rollmill.algorithms.a3c": "A3CConfig a3c",
    "rollmill.algorithms.alphazero": "AlphaZeroConfig alphazero",
    "rollmill.algorithms.building": "settings_of",
    "rollmill.algorithms.ddpg": "DDPGConfig ddpg",
    "rollmill.algorithms.dqn": "DQNConfig dqn",
    "rollmill.algorithms.fragments": "EnvironmentFunctions clip_to_space environment_functions",
    "rollmill.algorithms.impala": "IMPALAConfig impala",
    "rollmill.algorithms.mappo": "MAPPOConfig ippo mappo",
    "rollmill.algorithms.opponents": "opponent",
    "rollmill.algorithms.positions": "action_of position",
    "rollmill.algorithms.ppo": "PPOConfig ppo",
    "rollmill.algorithms.reports": "GAMES MOMENTS explained_variance",
    "rollmill.algorithms.returns": "Advantages bootstrap_values generalised_advantages vtrace",
    "rollmill.algorithms.sac": "SACConfig sac",
    "rollmill.algorithms.td3": "TD3Config td3",
}
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
