"""Proximal policy optimisation (Schulman et al., 2017) as a graph of four fragments.

Details follow Huang et al., "The 37 Implementation Details of Proximal Policy Optimization", ICLR
Blog Track 2022, with two exceptions: truncated episodes are bootstrapped from their final observation, and
statistics of observations are frozen within an iteration.

Shape letters: `T` steps, `E` environments of this replica, `N` samples, or sequences, of a minibatch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
import optax
from gymnasium import spaces
from jaxtyping import Array, Bool, Float

from rollmill.algorithms.building import (
    Choices,
    Parts,
    graph_of,
    loops_of,
    optimiser_of,
    parts_of,
    validate_config,
)
from rollmill.algorithms.losses import (
    approximate_kl,
    bound_loss,
    clipped_policy_loss,
    clipped_value_loss,
    squared_value_loss,
)
from rollmill.algorithms.network_policy import MakeNetwork
from rollmill.algorithms.on_policy import (
    SampleLoss,
    TrainingSamples,
    adapt_rate,
    mean_gradients,
    no_condition,
    prepare,
    standardise_advantages,
)
from rollmill.core.bounds import (
    Count,
    NonNegative,
    Positive,
    Range,
    Rate,
    Scheduled,
    ScheduledFraction,
    ScheduledNonNegative,
    ScheduledPositive,
)
from rollmill.core.errors import UsageError
from rollmill.core.field_help import with_field_help
from rollmill.core.schema import check_fields
from rollmill.core.spaces import is_unbounded, space_text
from rollmill.core.types import Environment, GymnasiumObject, HostEnvironment, Params
from rollmill.dataflow import Graph, Metrics
from rollmill.envs.registry import single_agent
from rollmill.networks import NetworkConfig, Output
from rollmill.networks.distributions import DiagonalGaussian

ADAPTIVE = {"kl_factor": 1.5, "min_learning_rate": 1e-5, "max_learning_rate": 1e-2}
"""Default settings of RSL-RL for an adaptive learning rate."""

BEYOND = 1.1
"""Multiple of half the action range up to which action means are not penalised, as in rl_games."""


@with_field_help
@dataclass(frozen=True)
class PPOConfig:
    """Hyperparameters of PPO, named as in the literature."""

    total_timesteps: Count = 500_000
    """Number of environment steps of the whole run, over all environments."""
    num_envs: Count = 64
    """Number of parallel environments."""
    num_steps: Count = 64
    """Number of steps of each environment in one iteration."""
    update_epochs: Count = 4
    """Number of epochs (passes over the batch) in one iteration."""
    num_minibatches: Count = 4
    """Number of minibatches in one epoch."""
    learning_rate: Rate = 2.5e-3
    """Learning rate of Adam. If it is annealed, this is the initial value."""
    anneal_lr: bool = True
    """Anneal the learning rate linearly to zero over all planned updates."""
    gamma: ScheduledFraction = 0.99
    """Discount factor."""
    gae_lambda: ScheduledFraction = 0.95
    """Decay of generalised advantage estimation, from 0 (one-step) to 1 (Monte Carlo)."""
    clip_coef: ScheduledPositive = 0.2
    """Clipping range of the policy's ratio around 1, and of a clipped value around the old value."""
    clip_vloss: bool = True
    """Clip the value loss like the policy loss."""
    norm_adv: bool = True
    """Standardise the advantages of each minibatch."""
    ent_coef: ScheduledNonNegative = 0.01
    """Weight of the entropy bonus."""
    vf_coef: ScheduledNonNegative = 0.5
    """Weight of the value loss."""
    max_grad_norm: Annotated[Scheduled, Range(0, finite=False)] = 0.5
    """Maximum global norm of the gradients. Gradients with a larger norm are scaled down to it."""
    bound_coef: NonNegative | None = None
    """Weight of a loss on the means of continuous actions that exceed their bounds by more than a tenth of half
    their range."""
    desired_kl: Positive | None = None
    """Adapt the learning rate at each minibatch to keep the KL divergence near this value. The rate is divided by
    `kl_factor` if the divergence is more than twice this value, and multiplied if it is less than half."""
    kl_factor: Annotated[float, Range(1)] | None = None
    """Factor by which `desired_kl` changes the learning rate. Default: 1.5."""
    min_learning_rate: Positive | None = None
    """Lowest learning rate with `desired_kl`. Default: 1e-5."""
    max_learning_rate: Positive | None = None
    """Highest learning rate with `desired_kl`. Default: 1e-2."""
    target_kl: NonNegative | None = None
    """Skip the remaining epochs of an iteration once the last minibatch of an epoch exceeds this KL divergence."""
    rnd_coef: NonNegative | None = None
    """Weight of a bonus for steps to rare observations, computed by random network distillation. Use it if random
    actions hardly ever earn a reward. Try 1."""
    normalize_observations: bool | None = None
    """Standardise observations with running statistics, which are part of the training state. By default, this is
    on if no element of the observation has a bound, and with `rnd_coef`."""
    normalize_rewards: bool = False
    """Divide rewards by the running standard deviation of the discounted return."""
    normalize_values: bool = True
    """Standardise the critic's targets with running statistics, which are part of the training state."""
    num_shards: Count | None = None
    """Number of logical shards within which samples are shuffled, a multiple of the device count. Default:
    automatic."""
    network: NetworkConfig = field(default_factory=NetworkConfig)
    """The actor-critic network."""

    def __post_init__(self) -> None:
        check_fields(self)


def ppo(
    env: Environment | HostEnvironment | GymnasiumObject | str,
    config: PPOConfig | Mapping[str, Any] | None = None,
    *,
    params: Params | None = None,
    network: MakeNetwork | NetworkConfig | str | None = None,
    **overrides: Any,
) -> Graph:
    """Builds PPO for an environment, as a graph that `rollmill.train` trains.

    Args:
        env: an id, the result of `rollmill.make` or `gymnasium.make`, or your own `Environment`.
        config: hyperparameters. Single hyperparameters can be given as keyword arguments instead:
            `ppo(env, num_envs=8)`.
        params: parameters that replace the environment's own. A leaf with an additional leading axis
            `[num_envs, ...]` holds one value for each environment.
        network: a `NetworkConfig` that replaces `config.network`, the name of a torso, or a function that creates
            your own network: `(key, observation_space, action_space) -> ActorCritic`.
        **overrides: fields of `PPOConfig` to replace. `learning_rate` may be an Optax schedule, which is a
            function of the number of updates and replaces annealing.

    Raises:
        UsageError: a name, type or size is invalid, PPO does not support the spaces, or the environment is
            multi-agent.

    Examples:
        >>> algorithm = rollmill.ppo("CartPole-v1", total_timesteps=500_000, learning_rate=1e-3)
    """
    config, choices = validate_config(PPOConfig, env, config, network, overrides)
    env = single_agent(env)
    if config.normalize_observations is None:
        unscaled = is_unbounded(env.observation_space) or config.rnd_coef is not None
        config = replace(config, normalize_observations=unscaled)
    choices = _adaptive(choices._replace(config=config))
    parts = parts_of(env, choices, params=params)
    loops = loops_of(
        config,
        by_sequence=parts.policy.recurrent,
        epochs=config.update_epochs,
        num_minibatches=config.num_minibatches,
    )
    _check_standardised(config)
    explores = config.rnd_coef is not None
    if explores:
        _check_novelty(config, parts)
    graph = graph_of(
        "ppo",
        parts,
        choices,
        loops,
        scaling=_adam,
        prepare=partial(prepare, parts.policy, config),
        # `compute_values` would drop the observations for which the bonus is paid
        compute_values=None if explores else parts.policy.fused_values,
        compact_step=parts.policy.compaction,
        gradients=mean_gradients(parts.policy, _loss_within(config, choices, parts.env.action_space), config),
        condition=standardise_advantages if config.norm_adv else no_condition,
        keep_learning=None if config.target_kl is None else partial(_below, config.target_kl),
        adapt=None if config.desired_kl is None else adapt_rate,
    )
    if not explores:
        return graph
    from rollmill.algorithms.novelty import with_novelty  # few runs have an exploration bonus

    return with_novelty(graph, parts.policy, parts.config, optimiser_of(choices, _adam, loops))


def _adam(config: PPOConfig) -> optax.GradientTransformation:
    return optax.scale_by_adam(eps=1e-5)


def _check_novelty(config: PPOConfig, parts: Parts) -> None:
    """Raises a `UsageError` for a policy or an option that does not support the exploration bonus."""
    hint = f"hint: leave rnd_coef={config.rnd_coef} out, or"
    if parts.policy.recurrent:
        raise UsageError(f"rnd_coef needs a policy without memory. {hint} choose another torso.")
    if parts.policy.is_large:
        raise UsageError(f"rnd_coef needs observations smaller than images. {hint} use smaller observations.")
    if config.normalize_rewards:
        raise UsageError(
            f"rnd_coef cannot be combined with normalize_rewards, because it scales its bonus itself. {hint} "
            "leave normalize_rewards out."
        )


def _check_standardised(config: PPOConfig) -> None:
    """Raises a `UsageError` for minibatches of one sample, because its standardised advantage is always zero."""
    samples = config.num_envs * config.num_steps // config.num_minibatches
    if config.norm_adv and samples == 1:
        raise UsageError(
            f"num_minibatches={config.num_minibatches} leaves one sample of num_envs x num_steps = "
            f"{config.num_envs} x {config.num_steps} in each minibatch. norm_adv sets the advantage of a single "
            "sample to zero, so nothing would be learned. hint: use fewer minibatches, or norm_adv=False."
        )


def _adaptive(choices: Choices) -> Choices:
    """Adds the settings of an adaptive learning rate if `desired_kl` is set."""
    config = choices.config
    given = {name: value for name in ADAPTIVE if (value := getattr(config, name)) is not None}
    if config.desired_kl is None:
        if given:
            raise UsageError(
                f"{', '.join(given)} has no effect without desired_kl. hint: give desired_kl as well."
            )
        return choices
    if config.anneal_lr or isinstance(config.learning_rate, str) or choices.schedule is not None:
        raise UsageError(
            f"desired_kl={config.desired_kl} adapts the learning rate, so it cannot be combined with anneal_lr "
            "or a schedule. hint: use anneal_lr=False with a number as learning_rate, or leave desired_kl out."
        )
    config = replace(config, **{**ADAPTIVE, **given})
    low, rate, high = config.min_learning_rate, config.learning_rate, config.max_learning_rate
    if not low <= rate <= high:
        raise UsageError(
            f"learning_rate={rate:g} must lie between min_learning_rate={low:g} and max_learning_rate={high:g}, "
            "because desired_kl adapts it. hint: change the bounds or the initial rate."
        )
    return choices._replace(config=config)


def _loss_within(config: PPOConfig, choices: Choices, space: spaces.Space) -> SampleLoss:
    """Returns the loss of a sample, with a penalty on out-of-bounds action means if `bound_coef` is set."""
    if config.bound_coef is None:
        return sample_loss
    has_means = choices.network is None and not config.network.squash_actions and config.network.name is None
    if not has_means or not isinstance(space, spaces.Box) or not space.is_bounded():
        raise UsageError(
            f"bound_coef={config.bound_coef} needs a bounded Box as the action space, and a NetworkConfig that "
            f"does not squash actions. The action space is {space_text(space)}. hint: leave bound_coef out."
        )
    center, half = 0.5 * (space.high + space.low), 0.5 * (space.high - space.low)
    return partial(_bounded_loss, center - BEYOND * half, center + BEYOND * half)


def _bounded_loss(
    low: np.ndarray, high: np.ndarray, config: Any, sample: TrainingSamples, output: Output
) -> tuple[Float[Array, ""], Metrics]:
    """Returns the PPO loss of one sample plus the penalty on action means beyond their bounds, and metrics."""
    loss, metrics = sample_loss(config, sample, output)
    distribution = output.distribution
    assert isinstance(distribution, DiagonalGaussian)
    beyond = bound_loss(distribution.mean, low, high)
    return loss + config.bound_coef * beyond, {**metrics, "losses/bounds": beyond}


def sample_loss(config: Any, sample: TrainingSamples, output: Output) -> tuple[Float[Array, ""], Metrics]:
    """Computes the PPO loss of one sample (Schulman et al., 2017, equation 9, negated).

    It uses `clip_coef`, `clip_vloss`, `vf_coef` and `ent_coef` of `config`.
    """
    log_ratio = output.distribution.log_prob(sample.action) - sample.log_prob
    entropy = output.distribution.entropy()
    policy_loss = clipped_policy_loss(log_ratio, sample.advantage, config.clip_coef)
    if config.clip_vloss:
        value_loss = clipped_value_loss(output.value, sample.value, sample.target, config.clip_coef)
    else:
        value_loss = squared_value_loss(output.value, sample.target)
    loss = policy_loss + config.vf_coef * value_loss - config.ent_coef * entropy
    return loss, {
        "losses/policy": policy_loss,
        "losses/value": value_loss,
        "losses/entropy": entropy,
        "losses/approx_kl": approximate_kl(log_ratio),
        "losses/clip_fraction": (jnp.abs(jnp.expm1(log_ratio)) > config.clip_coef).astype(jnp.float32),
    }


def _below(target_kl: float, metrics: Metrics) -> Bool[Array, ""]:
    return metrics["losses/approx_kl"] <= target_kl
