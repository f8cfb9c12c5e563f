"""Synchronous advantage actor-critic (A2C), which is A3C with other default settings.

The graph is the same as for A3C (Mnih et al., ICML 2016). The settings come from OpenAI Baselines (Wu et al.,
"OpenAI Baselines: ACKTR and A2C", 2017) and Stable-Baselines3: rollouts of five steps, a smaller learning rate,
and no normalisation of advantages and values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollmill.algorithms.a3c import A3CConfig, advantage_actor_critic
from rollmill.algorithms.building import configured
from rollmill.algorithms.fragments import MakeNetwork
from rollmill.core.bounds import Count, Rate
from rollmill.core.field_help import with_field_help
from rollmill.core.types import Environment, GymnasiumObject, HostEnvironment, Params
from rollmill.dataflow import Graph
from rollmill.networks import NetworkConfig


@with_field_help
@dataclass(frozen=True)
class A2CConfig(A3CConfig):
    """Hyperparameters of A2C. The fields are the same as for A3C, with other defaults."""

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
    """Makes the graph of A2C on an environment.

    Args:
        env: what `rollmill.make` returns, an `Environment` of your own, an id, or what `gymnasium.make` returns.
        config: hyperparameters; single ones can be given as keywords instead: `a2c(env, num_envs=8)`.
        params: parameters that replace the environment's. A leaf with a leading axis `[num_envs, ...]` holds one
            value for each environment.
        network: a `NetworkConfig` instead of `config.network`, or the name of its torso; or a function that
            makes your own network, `(key, observation_space, action_space) -> ActorCritic`.
        **overrides: fields of `A2CConfig` to replace. `learning_rate` may be an Optax schedule, by the number
            of updates, which replaces annealing.

    Raises:
        UsageError: invalid names, types or sizes, spaces that A2C does not support, or a multi-agent environment.

    Examples:
        >>> algorithm = rollmill.a2c("CartPole-v1", total_timesteps=500_000)
    """
    _, choices = configured(A2CConfig, env, config, network, overrides)
    return advantage_actor_critic("a2c", env, choices, params=params)
