"""Defines each algorithm as a graph, one file each, and the returns and losses that algorithms share."""

# A run needs one algorithm, so each name is imported at its first use.
from typing import TYPE_CHECKING

from rollmill.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from rollmill.algorithms.a2c import A2CConfig as A2CConfig, a2c as a2c
    from rollmill.algorithms.a3c import A3CConfig as A3CConfig, a3c as a3c
    from rollmill.algorithms.alphazero import AlphaZeroConfig as AlphaZeroConfig, alphazero as alphazero
    from rollmill.algorithms.building import (
        graph_settings as graph_settings,
        numbers_to_hold as numbers_to_hold,
    )
    from rollmill.algorithms.ddpg import DDPGConfig as DDPGConfig, ddpg as ddpg
    from rollmill.algorithms.dqn import DQNConfig as DQNConfig, dqn as dqn
    from rollmill.algorithms.environment_fragments import (
        EnvironmentFunctions as EnvironmentFunctions,
        clip_to_space as clip_to_space,
        environment_functions as environment_functions,
    )
    from rollmill.algorithms.hyperparameters import (
        current_config as current_config,
        current_hyperparameters as current_hyperparameters,
        schedule_evaluator as schedule_evaluator,
        schedule_metrics as schedule_metrics,
    )
    from rollmill.algorithms.impala import IMPALAConfig as IMPALAConfig, impala as impala
    from rollmill.algorithms.mappo import MAPPOConfig as MAPPOConfig, ippo as ippo, mappo as mappo
    from rollmill.algorithms.off_policy import (
        FunctionalNetwork as FunctionalNetwork,
        StepCounts as StepCounts,
        adam as adam,
        count_update as count_update,
        functional_network as functional_network,
        initial_progress as initial_progress,
        learner_hyperparameters as learner_hyperparameters,
        learning_rate_metric as learning_rate_metric,
        off_policy_graph as off_policy_graph,
        prepare_off_policy as prepare_off_policy,
        uniform_replay as uniform_replay,
        update_target as update_target,
    )
    from rollmill.algorithms.optimisers import (
        Optimiser as Optimiser,
        clipped_descent as clipped_descent,
        count_planned_update as count_planned_update,
        descend as descend,
        no_updates as no_updates,
    )
    from rollmill.algorithms.ppo import PPOConfig as PPOConfig, ppo as ppo
    from rollmill.algorithms.pqn import PQNConfig as PQNConfig, pqn as pqn
    from rollmill.algorithms.qmix import QMIXConfig as QMIXConfig, qmix as qmix
    from rollmill.algorithms.r2d2 import R2D2Config as R2D2Config, r2d2 as r2d2
    from rollmill.algorithms.reports import (
        GAMES as GAMES,
        MOMENTS as MOMENTS,
        explained_variance as explained_variance,
    )
    from rollmill.algorithms.returns import (
        Advantages as Advantages,
        bootstrap_values as bootstrap_values,
        generalised_advantages as generalised_advantages,
        lambda_returns as lambda_returns,
        vtrace as vtrace,
    )
    from rollmill.algorithms.rsac import RSACConfig as RSACConfig, rsac as rsac
    from rollmill.algorithms.sac import SACConfig as SACConfig, sac as sac
    from rollmill.algorithms.td3 import TD3Config as TD3Config, td3 as td3
    from rollmill.algorithms.vdn import VDNConfig as VDNConfig, vdn as vdn
    from rollmill.core.bounds import (
        ScheduledFraction as ScheduledFraction,
        ScheduledNonNegative as ScheduledNonNegative,
        ScheduledPositive as ScheduledPositive,
    )
    from rollmill.tree_search.opponents import opponent as opponent
    from rollmill.tree_search.positions import discrete_action as discrete_action, position as position

__getattr__, __dir__, __all__ = lazy_names(__name__)
