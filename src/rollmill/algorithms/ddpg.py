"""Deep deterministic policy gradients (Lillicrap et al., ICLR 2016).

DDPG consists of the fragments of TD3 with one critic. The actions of the target are not smoothed, and the actor is
updated together with the critic.

Departures from the paper: noise is Gaussian and uncorrelated, relative to half the width of the action space.
Learning rates and `tau` follow later implementations. The critic has no weight decay, and reads the action in its
first layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from rollmill.algorithms.off_policy import adam, off_policy_parts
from rollmill.algorithms.td3 import deterministic_graph
from rollmill.core.bounds import (
    Count,
    Range,
    Rate,
    Scheduled,
    ScheduledFraction,
    ScheduledNonNegative,
    ScheduledPositive,
)
from rollmill.core.field_help import with_field_help
from rollmill.core.schema import check_fields
from rollmill.core.types import Environment, GymnasiumObject, HostEnvironment, Params
from rollmill.dataflow import Graph
from rollmill.networks import NetworkConfig


@with_field_help
@dataclass(frozen=True)
class DDPGConfig:
    """Hyperparameters of DDPG, under their usual names."""

    total_timesteps: Count = 1_000_000
    """Number of environment steps of the whole run, over all environments."""
    num_envs: Count = 8
    """Number of parallel environments."""
    num_steps: Count = 1
    """Number of steps of each environment in one iteration, before `gradient_steps` updates."""
    gradient_steps: Count | None = None
    """Number of updates in one iteration. Default: one for each collected environment step, `num_envs` x
    `num_steps`."""
    buffer_size: Count = 1_000_000
    """Number of steps that the replay memory holds, over all environments."""
    batch_size: Count = 256
    """Number of transitions in the minibatch of one update."""
    learning_starts: Count = 10_000
    """Number of environment steps with random actions that are stored before learning begins."""
    learning_rate: Rate = 3e-4
    """Learning rate of Adam for the actor. If it is annealed, this is the initial value."""
    critic_learning_rate: ScheduledPositive = 1e-3
    """Learning rate of Adam for the critic. If it is annealed, this is the initial value."""
    anneal_lr: bool = False
    """Anneal the learning rates linearly to zero over all planned updates."""
    adam_eps: ScheduledPositive = 1e-8
    """Epsilon of Adam."""
    max_grad_norm: Annotated[Scheduled, Range(0, finite=False)] = float("inf")
    """Maximum global norm of each network's gradients. Gradients with a larger norm are scaled down to it."""
    gamma: ScheduledFraction = 0.99
    """Discount factor."""
    tau: ScheduledFraction = 0.005
    """Fraction by which the target networks move towards the networks at each update."""
    exploration_noise: ScheduledNonNegative = 0.1
    """Standard deviation of the exploration noise added to actions, in multiples of half the width of the action
    space."""
    num_shards: Count | None = None
    """Number of logical shards within which transitions are drawn, a multiple of the device count. Default:
    automatic."""
    network: NetworkConfig = field(
        default_factory=partial(NetworkConfig, activation="relu", hidden_sizes=(256, 256))
    )
    """Network of the actor, and of the critic."""

    def __post_init__(self) -> None:
        check_fields(self)


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
    parts = off_policy_parts(DDPGConfig, env, config, overrides, params=params, network=network)
    return deterministic_graph("ddpg", parts, adam(parts, "critic_learning_rate"), num_critics=1, delay=1)
