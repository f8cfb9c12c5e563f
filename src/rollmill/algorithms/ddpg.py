"""Deep deterministic policy gradients (Lillicrap et al., ICLR 2016).

DDPG consists of the fragments of TD3 with one critic. The actions of the target are not smoothed, and the actor is
updated together with the critic.

Departures from the paper: noise is Gaussian and uncorrelated, relative to half the width of the action space.
Learning rates and `tau` follow later implementations. The critic has no weight decay, and reads the action in its
first layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollmill.algorithms.off_policy import OffPolicyConfig, adam, prepare_off_policy
from rollmill.algorithms.td3 import deterministic_graph
from rollmill.core.bounds import ScheduledNonNegative, ScheduledPositive
from rollmill.core.field_help import with_field_help
from rollmill.core.types import Environment, GymnasiumObject, HostEnvironment, Params
from rollmill.dataflow import Graph
from rollmill.networks import NetworkConfig


@with_field_help
@dataclass(frozen=True)
class DDPGConfig(OffPolicyConfig):
    """Hyperparameters of DDPG, named as in the literature."""

    critic_learning_rate: ScheduledPositive = 1e-3
    """Learning rate of Adam for the critic. If it is annealed, this is the initial value."""
    exploration_noise: ScheduledNonNegative = 0.1
    """Standard deviation of the exploration noise added to actions, in multiples of half the width of the action
    space."""


def ddpg(
    env: Environment | HostEnvironment | GymnasiumObject | str,
    config: DDPGConfig | Mapping[str, Any] | None = None,
    *,
    params: Params | None = None,
    network: NetworkConfig | str | None = None,
    **overrides: Any,
) -> Graph:
    """Builds DDPG for an environment with bounded continuous actions, as a graph that `rollmill.train` trains.

    Args:
        env: an id, the result of `rollmill.make` or `gymnasium.make`, or your own `Environment`.
        config: hyperparameters. Single hyperparameters can be given as keyword arguments instead:
            `ddpg(env, num_envs=8)`.
        params: parameters that replace the environment's own. A leaf with an additional leading axis
            `[num_envs, ...]` holds one value for each environment.
        network: a `NetworkConfig` that replaces `config.network`, or the name of a torso.
        **overrides: fields of `DDPGConfig` to replace. `learning_rate` may be an Optax schedule, which is a
            function of the number of updates and replaces annealing.

    Raises:
        UsageError: a name, type or size is invalid, or the action space is not a bounded `Box`.

    Examples:
        >>> algorithm = rollmill.ddpg("Pendulum-v1", total_timesteps=100_000)
    """
    parts = prepare_off_policy(DDPGConfig, env, config, overrides, params=params, network=network)
    return deterministic_graph("ddpg", parts, adam(parts, "critic_learning_rate"), num_critics=1, delay=1)
