"""Defines each algorithm as a graph, one file each, and the returns and losses that algorithms share."""

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
    from rollmill.algorithms.hyperparameters import current, numbers_now
    from rollmill.algorithms.impala import IMPALAConfig, impala
    from rollmill.algorithms.mappo import MAPPOConfig, ippo, mappo
    from rollmill.algorithms.off_policy import (
        Module,
        StepCounts,
        adam,
        counted,
        follow,
        learner_numbers,
        module,
        off_policy_graph,
        off_policy_parts,
        rate_metric,
        start_progress,
        uniform_replay,
    )
    from rollmill.algorithms.opponents import opponent
    from rollmill.algorithms.optimisers import Optimiser, clipped_descent, descend
    from rollmill.algorithms.positions import action_of, position
    from rollmill.algorithms.ppo import PPOConfig, ppo
    from rollmill.algorithms.pqn import PQNConfig, pqn
    from rollmill.algorithms.reports import GAMES, MOMENTS, explained_variance
    from rollmill.algorithms.returns import (
        Advantages,
        bootstrap_values,
        generalised_advantages,
        lambda_returns,
        vtrace,
    )
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
    "Module",
    "Optimiser",
    "PPOConfig",
    "PQNConfig",
    "SACConfig",
    "StepCounts",
    "TD3Config",
    "a2c",
    "a3c",
    "action_of",
    "adam",
    "alphazero",
    "bootstrap_values",
    "clip_to_space",
    "clipped_descent",
    "counted",
    "current",
    "ddpg",
    "descend",
    "dqn",
    "environment_functions",
    "explained_variance",
    "follow",
    "generalised_advantages",
    "impala",
    "ippo",
    "lambda_returns",
    "learner_numbers",
    "mappo",
    "module",
    "numbers_now",
    "off_policy_graph",
    "off_policy_parts",
    "opponent",
    "position",
    "ppo",
    "pqn",
    "rate_metric",
    "sac",
    "settings_of",
    "start_progress",
    "td3",
    "uniform_replay",
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
    "rollmill.algorithms.hyperparameters": "current numbers_now",
    "rollmill.algorithms.impala": "IMPALAConfig impala",
    "rollmill.algorithms.mappo": "MAPPOConfig ippo mappo",
    "rollmill.algorithms.off_policy": (
        "Module StepCounts adam counted follow learner_numbers module off_policy_graph off_policy_parts "
        "rate_metric start_progress uniform_replay"
    ),
    "rollmill.algorithms.optimisers": "Optimiser clipped_descent descend",
    "rollmill.algorithms.opponents": "opponent",
    "rollmill.algorithms.positions": "action_of position",
    "rollmill.algorithms.ppo": "PPOConfig ppo",
    "rollmill.algorithms.pqn": "PQNConfig pqn",
    "rollmill.algorithms.reports": "GAMES MOMENTS explained_variance",
    "rollmill.algorithms.returns": "Advantages bootstrap_values generalised_advantages lambda_returns vtrace",
    "rollmill.algorithms.sac": "SACConfig sac",
    "rollmill.algorithms.td3": "TD3Config td3",
}
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
