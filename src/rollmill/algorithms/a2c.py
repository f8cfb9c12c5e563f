"""Synchronous advantage actor-critic (A2C), which is A3C with other default settings.

A2C has the graph of A3C (Mnih et al., ICML 2016). The settings come from OpenAI Baselines (Wu et al., "OpenAI
Baselines: ACKTR and A2C", 2017) and Stable-Baselines3: rollouts of five steps, a smaller learning rate, and no
normalisation of advantages and values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollmill.algorithms.a3c import A3CConfig, advantage_actor_critic
from rollmill.algorithms.building import validate_config
from rollmill.algorithms.network_policy import MakeNetwork
from rollmill.core.bounds import Count, Rate
from rollmill.core.field_help import with_field_help
from rollmill.core.types import Environment, GymnasiumObject, HostEnvironment, Params
from rollmill.dataflow import Graph
from rollmill.networks import NetworkConfig


@with_field_help
@dataclass(frozen=True)
class A2CConfig(A3CConfig):
    """Hyperparameters of A2C. The fields are inherited from `A3CConfig`, with other defaults."""

    num_envs: Count = 8
    """Number of parallel environments, over all workers together."""
    num_steps: Count = 5
    """Number of steps of each environment between updates."""
    learning_rate: Rate = 7e-4
    """Learning rate of RMSProp. If it is annealed, this is the initial value."""
    norm_adv: bool = False
    """Standardise the advantages of each update."""
    normalize_values: bool = False
    """Standardise the critic's targets with running statistics, which are part of the training state."""


def a2c(
    env: Environment | HostEnvironment | GymnasiumObject | str,
    config: A2CConfig | Mapping[str, Any] | None = None,
    *,
    params: Params | None = None,
    network: MakeNetwork | NetworkConfig | str | None = None,
    **overrides: Any,
) -> Graph:
    """Builds A2C for an environment, as a graph that `rollmill.train` trains.

    Args:
        env: an id, the result of `rollmill.make` or `gymnasium.make`, or your own `Environment`.
        config: hyperparameters. Single hyperparameters can be given as keyword arguments instead:
            `a2c(env, num_envs=8)`.
        params: parameters that replace the environment's own. A leaf with an additional leading axis
            `[num_envs, ...]` holds one value for each environment.
        network: a `NetworkConfig` that replaces `config.network`, the name of a torso, or a function that creates
            your own network: `(key, observation_space, action_space) -> ActorCritic`.
        **overrides: fields of `A2CConfig` to replace. `learning_rate` may be an Optax schedule, which is a
            function of the number of updates and replaces annealing.

    Raises:
        UsageError: a name, type or size is invalid, A2C does not support the spaces, or the environment is
            multi-agent.

    Examples:
        >>> algorithm = rollmill.a2c("CartPole-v1", total_timesteps=500_000)
    """
    _, choices = validate_config(A2CConfig, env, config, network, overrides)
    return advantage_actor_critic("a2c", env, choices, params=params)
