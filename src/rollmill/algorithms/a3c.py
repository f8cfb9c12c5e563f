"""Advantage actor-critic (Mnih et al., ICML 2016) as a graph of four fragments.

Synchronous and asynchronous runs use one graph. A synchronous run is A2C. In A3C, every worker holds environments,
policy and gradients, and its gradients are applied as they arrive. The workers share the statistics of RMSProp,
which are part of the learner.

There are two departures from the paper. The loss is a mean over samples instead of a sum, so it does not grow with
the rollout. Truncated episodes are bootstrapped from the value of their final observation.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import optax
from jaxtyping import Array, Float

from rollmill.algorithms.building import Choices, graph_of, loops_of, parts_of, validate_config
from rollmill.algorithms.losses import policy_gradient_loss, squared_value_loss
from rollmill.algorithms.network_policy import MakeNetwork
from rollmill.algorithms.on_policy import (
    TrainingSamples,
    mean_gradients,
    no_condition,
    prepare,
    standardise_advantages,
)
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
from rollmill.dataflow import Graph, Metrics
from rollmill.networks import NetworkConfig, Output


@with_field_help
@dataclass(frozen=True)
class A3CConfig:
    """Hyperparameters of A3C, named as in the literature."""

    total_timesteps: Count = 500_000
    """Number of environment steps of the whole run, over all environments."""
    num_envs: Count = 16
    """Number of parallel environments, over all workers together."""
    num_steps: Count = 16
    """Number of steps of each environment between updates (t_max in the paper)."""
    learning_rate: Rate = 3e-3
    """Learning rate of RMSProp. If it is annealed, this is the initial value."""
    anneal_lr: bool = True
    """Anneal the learning rate linearly to zero over all planned updates."""
    rms_decay: ScheduledFraction = 0.99
    """Decay of RMSProp's running mean of squared gradients."""
    rms_eps: ScheduledPositive = 1e-5
    """Epsilon of RMSProp, added to the mean of squared gradients before the square root. The paper's 0.1 is for
    sums over samples."""
    gamma: ScheduledFraction = 0.99
    """Discount factor."""
    gae_lambda: ScheduledFraction = 1.0
    """Decay of generalised advantage estimation. The published value of 1 sums rewards to the end of the
    rollout."""
    norm_adv: bool = True
    """Standardise the advantages of each update."""
    ent_coef: ScheduledNonNegative = 0.01
    """Weight of the entropy bonus."""
    vf_coef: ScheduledNonNegative = 0.5
    """Weight of the value loss."""
    max_grad_norm: Annotated[Scheduled, Range(0, finite=False)] = 0.5
    """Maximum global norm of the gradients. Gradients with a larger norm are scaled down to it."""
    normalize_observations: bool = False
    """Standardise observations with running statistics, which are part of the training state."""
    normalize_rewards: bool = False
    """Divide rewards by the running standard deviation of the discounted return."""
    normalize_values: bool = True
    """Standardise the critic's targets with running statistics, which are part of the training state."""
    num_shards: Count | None = None
    """Number of logical shards of the environments, a multiple of the device count. Default: automatic."""
    network: NetworkConfig = field(default_factory=NetworkConfig)
    """The actor-critic network."""

    def __post_init__(self) -> None:
        check_fields(self)


def a3c(
    env: Environment | HostEnvironment | GymnasiumObject | str,
    config: A3CConfig | Mapping[str, Any] | None = None,
    *,
    params: Params | None = None,
    network: MakeNetwork | NetworkConfig | str | None = None,
    **overrides: Any,
) -> Graph:
    """Builds A3C for an environment, as a graph that `rollmill.train` trains.

    Args:
        env: an id, the result of `rollmill.make` or `gymnasium.make`, or your own `Environment`.
        config: hyperparameters. Single hyperparameters can be given as keyword arguments instead:
            `a3c(env, num_envs=8)`.
        params: parameters that replace the environment's own. A leaf with an additional leading axis
            `[num_envs, ...]` holds one value for each environment.
        network: a `NetworkConfig` that replaces `config.network`, the name of a torso, or a function that creates
            your own network: `(key, observation_space, action_space) -> ActorCritic`.
        **overrides: fields of `A3CConfig` to replace. `learning_rate` may be an Optax schedule, which is a
            function of the number of updates and replaces annealing.

    Raises:
        UsageError: a name, type or size is invalid, A3C does not support the spaces, or the environment is
            multi-agent.

    Examples:
        >>> algorithm = rollmill.a3c("CartPole-v1", total_timesteps=500_000)
        >>> rollmill.train(algorithm, distribution="single-learner-coarse", actors=2, asynchronous=True)
    """
    _, choices = validate_config(A3CConfig, env, config, network, overrides)
    return advantage_actor_critic("a3c", env, choices, params=params)


def advantage_actor_critic(
    name: str,
    env: Environment | HostEnvironment | GymnasiumObject | str,
    choices: Choices,
    *,
    params: Params | None,
) -> Graph:
    """Returns the graph of advantage actor-critic (A2C and A3C), under the given algorithm's name."""
    config, parts = choices.config, parts_of(env, choices, params=params)
    return graph_of(
        name,
        parts,
        choices,
        loops_of(config, by_sequence=parts.policy.recurrent),
        scaling=lambda config: optax.scale_by_rms(decay=config.rms_decay, eps=config.rms_eps),
        prepare=partial(prepare, parts.policy, config),
        compute_values=parts.policy.fused_values,
        compact_step=parts.policy.compaction,
        gradients=mean_gradients(parts.policy, sample_loss, config),
        condition=standardise_advantages if config.norm_adv else no_condition,
    )


def sample_loss(config: Any, sample: TrainingSamples, output: Output) -> tuple[Float[Array, ""], Metrics]:
    """Computes the advantage actor-critic loss of one sample.

    See Mnih et al., 2016, algorithm S3, with the entropy bonus of section 4.
    """
    entropy = output.distribution.entropy()
    policy_loss = policy_gradient_loss(output.distribution.log_prob(sample.action), sample.advantage)
    value_loss = squared_value_loss(output.value, sample.target)
    loss = policy_loss + config.vf_coef * value_loss - config.ent_coef * entropy
    return loss, {"losses/policy": policy_loss, "losses/value": value_loss, "losses/entropy": entropy}
