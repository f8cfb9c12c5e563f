"""IMPALA (Espeholt et al., ICML 2018) as a graph of four fragments.

The learner trains on whole sequences. V-trace corrects for the difference between the policy that acted and the
learner's policy. They differ if the acting weights were some updates old, or if the learner makes several epochs
over a batch. Synchronous and asynchronous runs use one graph. In a synchronous run with one epoch and one
minibatch, all ratios are 1.

Departures from the paper: losses are means over samples instead of sums, so they do not grow with the batch.
Truncated episodes are bootstrapped from the learner's value of their final observation. If observations are large,
such as images, the actor computes this value when it collects the step, because a trajectory would otherwise hold
every image twice.

Shape letters: `T` steps, `E` environments of this replica, `N` sequences of a minibatch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PyTree

from rollmill.algorithms.building import graph_of, loops_of, parts_of, validate_config
from rollmill.algorithms.hyperparameters import current_config, current_hyperparameters
from rollmill.algorithms.losses import approximate_kl, policy_gradient_loss, squared_value_loss
from rollmill.algorithms.network_policy import MakeNetwork, NetworkPolicy, PolicyWeights
from rollmill.algorithms.on_policy import (
    IMAGES_AT_ONCE,
    ActorCriticLearner,
    beginnings,
    is_missing,
    update_learner_statistics,
    update_value_statistics,
)
from rollmill.algorithms.reports import value_moments
from rollmill.algorithms.returns import bootstrap_values, vtrace
from rollmill.core.bounds import (
    Count,
    Range,
    Rate,
    Scheduled,
    ScheduledFraction,
    ScheduledNonNegative,
    ScheduledPositive,
)
from rollmill.core.errors import unknown_name
from rollmill.core.field_help import with_field_help
from rollmill.core.schema import check_fields
from rollmill.core.types import Environment, GymnasiumObject, HostEnvironment, Memory, Observation, Params
from rollmill.dataflow import Batch, Graph, Metrics, Reduce, SequenceGradients, Trajectory, UnrolledSteps
from rollmill.networks import NetworkConfig

OPTIMIZERS = ("rmsprop", "adam")


@with_field_help
@dataclass(frozen=True)
class IMPALAConfig:
    """Hyperparameters of IMPALA, named as in the literature."""

    total_timesteps: Count = 500_000
    """Number of environment steps of the whole run, over all environments."""
    num_envs: Count = 16
    """Number of parallel environments, over all actors together."""
    num_steps: Count = 16
    """Number of steps in a sequence (the unroll length in the paper)."""
    update_epochs: Count = 1
    """Number of epochs (passes over the batch) in one iteration. V-trace corrects for epochs after the first."""
    num_minibatches: Count = 1
    """Number of minibatches in one epoch. Each consists of whole sequences."""
    optimizer: Literal["rmsprop", "adam"] = "rmsprop"
    """Optimiser: RMSProp, as published, or Adam."""
    learning_rate: Rate = 3e-3
    """Learning rate of the optimiser. If it is annealed, this is the initial value."""
    anneal_lr: bool = True
    """Anneal the learning rate linearly to zero over all planned updates."""
    rms_decay: ScheduledFraction = 0.99
    """Decay of RMSProp's running mean of squared gradients. Not used with Adam."""
    rms_eps: ScheduledPositive = 1e-5
    """Epsilon of RMSProp, added to the mean of squared gradients before the square root. The paper's 0.1 is for
    sums over samples. Not used with Adam."""
    rms_bias_correction: bool = False
    """Correct RMSProp's running mean for its start at zero, as Adam does. Otherwise, the first updates are ten
    times as large, if `rms_decay` is 0.99. Not used with Adam."""
    gamma: ScheduledFraction = 0.99
    """Discount factor."""
    clip_rho: Annotated[Scheduled, Range(0, exclusive=True, finite=False)] = 1.0
    """Bound on the ratio that weighs a step's error and the policy gradient (rho-bar)."""
    clip_c: Annotated[Scheduled, Range(0, exclusive=True, finite=False)] = 1.0
    """Bound on the ratios that propagate errors back in time (c-bar)."""
    vtrace_lambda: ScheduledFraction = 1.0
    """Decay of the trace; 1 as published."""
    norm_adv: bool = True
    """Standardise the advantages of each batch before the first update. The subtracted baseline is weighted by the
    same importance ratios as the advantages."""
    ent_coef: ScheduledNonNegative = 0.01
    """Weight of the entropy bonus."""
    vf_coef: ScheduledNonNegative = 0.5
    """Weight of the value loss."""
    max_grad_norm: Annotated[Scheduled, Range(0, finite=False)] = 0.5
    """Maximum global norm of the gradients. Gradients with a larger norm are scaled down to it. The paper's 40 is
    for sums over samples."""
    normalize_observations: bool = False
    """Standardise observations with running statistics, which are part of the training state."""
    normalize_rewards: bool = False
    """Divide rewards by the running standard deviation of the discounted return."""
    normalize_values: bool = True
    """Standardise the critic's targets with running statistics, which are part of the training state."""
    num_shards: Count | None = None
    """Number of logical shards within which sequences are shuffled, a multiple of the device count. Default:
    automatic."""
    network: NetworkConfig = field(default_factory=NetworkConfig)
    """The actor-critic network."""

    def __post_init__(self) -> None:
        check_fields(self)


class StepValues(NamedTuple):
    """Training samples of IMPALA: `[T, E, ...]` in a batch, `[N, T, ...]` in a minibatch."""

    observation: Observation
    action_mask: PyTree[Bool[Array, "..."]]
    action: PyTree[Array]
    log_prob: Float[Array, "..."]
    """Log-probability of the action under the behaviour policy."""
    reward: Float[Array, "..."]
    terminated: Bool[Array, "..."]
    truncated: Bool[Array, "..."]
    final_observation: PyTree[Array]
    """Normalised observation after the step, before any auto-reset, or `()` if `final_value` replaces it."""
    final_value: PyTree[Float[Array, "..."]]
    """Value after a truncated step, by the behaviour policy's weights. `()` unless observations are large."""
    begins: PyTree[Bool[Array, "..."]]
    """Whether the step begins an episode. `()` for policies without memory."""


class Ends(NamedTuple):
    """Values needed at the end of each IMPALA sequence: `[E, ...]` in a batch, `[N, ...]` in a minibatch."""

    start_memory: Memory
    """Memory of the behaviour policy before the first step."""
    last_observation: Observation
    """Observation after the last step."""
    units: PyTree[Array] = ()
    """Statistics of targets before the batch, for each sequence. `()` unless values are normalised."""
    scale: PyTree[Array] = ()
    """`Scale` of the batch's advantages, for each sequence. `()` unless advantages are standardised."""


class Outputs(NamedTuple):
    """Outputs of the learner's network for each step of a sequence."""

    log_prob: Float[Array, "..."]
    entropy: Float[Array, "..."]
    value: Float[Array, "..."]


class Scale(NamedTuple):
    """Baseline and standard deviation of advantages, which standardise them."""

    baseline: Float[Array, ""]
    deviation: Float[Array, ""]

    def standardise(self, weighted: Float[Array, "..."], rho: Float[Array, "..."]) -> Float[Array, "..."]:
        """Scales advantages, which are weighted by their ratios, to mean 0 and standard deviation 1."""
        return (weighted - rho * self.baseline) / (self.deviation + 1e-8)


class Estimates(NamedTuple):
    """Results of V-trace, in the units of rewards."""

    advantage: Float[Array, "..."]
    """Advantage of each action, weighted by the ratio `rho`."""
    target: Float[Array, "..."]
    """Estimated return from each step, for the critic."""
    rho: Float[Array, "..."]
    """Ratio of the learner's policy to the behaviour policy, bounded by `clip_rho`."""


class Signals(NamedTuple):
    """Constants in the loss of each step, which V-trace computes."""

    advantage: Float[Array, "..."]
    target: Float[Array, "..."]
    """Target of the critic, in its units."""
    raw_value: Float[Array, "..."]
    raw_target: Float[Array, "..."]
    """Value and target in the units of rewards."""


def impala(
    env: Environment | HostEnvironment | GymnasiumObject | str,
    config: IMPALAConfig | Mapping[str, Any] | None = None,
    *,
    params: Params | None = None,
    network: MakeNetwork | NetworkConfig | str | None = None,
    **overrides: Any,
) -> Graph:
    """Builds IMPALA for an environment, as a graph that `rollmill.train` trains.

    Args:
        env: an id, the result of `rollmill.make` or `gymnasium.make`, or your own `Environment`.
        config: hyperparameters. Single hyperparameters can be given as keyword arguments instead:
            `impala(env, num_envs=8)`.
        params: parameters that replace the environment's own. A leaf with an additional leading axis
            `[num_envs, ...]` holds one value for each environment.
        network: a `NetworkConfig` that replaces `config.network`, the name of a torso, or a function that creates
            your own network: `(key, observation_space, action_space) -> ActorCritic`.
        **overrides: fields of `IMPALAConfig` to replace. `learning_rate` may be an Optax schedule, which is a
            function of the number of updates and replaces annealing.

    Raises:
        UsageError: a name, type or size is invalid, IMPALA does not support the spaces, or the environment is
            multi-agent.

    Examples:
        >>> algorithm = rollmill.impala("CartPole-v1", total_timesteps=500_000)
    """
    config, choices = validate_config(IMPALAConfig, env, config, network, overrides)
    parts = parts_of(env, choices, params=params)
    loops = loops_of(config, by_sequence=True, epochs=config.update_epochs, num_minibatches=config.num_minibatches)
    return graph_of(
        "impala",
        parts,
        choices,
        loops,
        scaling=_scaling,
        prepare=partial(prepare, parts.policy, config),
        compact_step=parts.policy.compaction,
        gradients=sequence_gradients(parts.policy, config),
    )


def _scaling(config: Any) -> optax.GradientTransformation:
    if config.optimizer not in OPTIMIZERS:
        raise unknown_name("optimizer", config.optimizer, OPTIMIZERS)
    if config.optimizer == "adam":
        return optax.scale_by_adam(eps=1e-5)
    return optax.scale_by_rms(
        decay=config.rms_decay, eps=config.rms_eps, bias_correction=config.rms_bias_correction
    )


# --- the fragments, and the functions between them ----------------------------------------------------


def prepare(
    policy: NetworkPolicy,
    config: Any,
    learner: ActorCriticLearner,
    trajectory: Trajectory,
    *,
    reduce: Reduce,
    replicas: int,
) -> tuple[ActorCriticLearner, Batch]:
    """Converts a rollout to a batch of IMPALA sequences, and updates running statistics for the next rollout.

    Values are computed later, by `gradients`. They are also computed here if statistics of targets or advantages
    need them.
    """
    config = current_config(config, current_hyperparameters(learner))
    steps, weights = trajectory.steps, learner.weights
    learner, reward = update_learner_statistics(learner, steps, reduce=reduce, replicas=replicas)
    final_value = steps.extras.final_value
    samples = StepValues(
        observation=policy.normalise(weights, steps.observation),
        action_mask=steps.action_mask,
        action=steps.action,
        log_prob=steps.extras.log_prob,
        reward=reward,
        terminated=steps.terminated,
        truncated=steps.truncated,
        final_observation=policy.normalise(weights, steps.final_observation) if is_missing(final_value) else (),
        final_value=final_value,
        begins=beginnings(steps.terminated | steps.truncated) if policy.recurrent else (),
    )
    batch = Batch(samples, Ends(trajectory.start_memory, policy.normalise(weights, trajectory.observation)))
    if weights.values is None and not config.norm_adv:
        return learner, batch
    found, units, scale = _estimates(policy, config, learner, weights, batch), (), ()
    if weights.values is not None:
        units, learner = (
            weights.values,
            update_value_statistics(learner, found.target, reduce=reduce, replicas=replicas),
        )
    if config.norm_adv:
        scale = _scale_of(found, reduce)
    each = lambda leaf: jnp.broadcast_to(leaf, (len(found.target),))
    units, scale = jax.tree.map(each, (units, scale))
    return learner, batch._replace(sequences=batch.sequences._replace(units=units, scale=scale))


def _scale_of(found: Estimates, reduce: Reduce) -> Scale:
    """Returns the scale of the advantages of all replicas.

    The ratio weighs the baseline, too. A constant that is subtracted from weighted advantages would not have an
    expected gradient of 0: it would push the policy away from the behaviour policy if it is positive.
    """
    advantage, rho = reduce((jnp.mean(found.advantage), jnp.mean(found.rho)))
    baseline = advantage / jnp.maximum(rho, 1e-8)
    square = reduce(jnp.mean(jnp.square(found.advantage - baseline * found.rho)))
    return Scale(baseline, jnp.sqrt(square))


def _estimates(
    policy: NetworkPolicy, config: Any, learner: ActorCriticLearner, weights: PolicyWeights, batch: Batch
) -> Estimates:
    """Computes V-trace advantages and targets, `[E, T]`, for a few sequences at a time if they are large."""
    unroll = partial(sequence_gradients(policy, config).unroll, weights.network, replace(learner, weights=weights))

    def estimate(minibatch: Batch) -> Estimates:
        return _vtrace(policy, config, weights, minibatch, unroll(minibatch))

    def estimate_of(env: Array) -> Estimates:
        sequence = jax.tree.map(lambda leaf: leaf[None, :, env], batch.samples)
        ends = jax.tree.map(lambda leaf: leaf[None, env], batch.sequences)
        return jax.tree.map(lambda leaf: leaf[0], estimate(Batch(sequence, ends)))

    num_steps, num_envs = batch.samples.reward.shape
    if policy.is_large:  # a second copy of all images would double the memory of the trajectory
        at_once = max(1, IMAGES_AT_ONCE // num_steps)
        return jax.lax.map(estimate_of, jnp.arange(num_envs), batch_size=at_once)
    by_sequence = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), batch.samples)
    return estimate(Batch(by_sequence, batch.sequences))


def sequence_gradients(policy: NetworkPolicy, config: Any) -> SequenceGradients:
    """Returns the fragment that computes gradients of the mean IMPALA loss over a minibatch of sequences."""
    return SequenceGradients(
        partial(_step, policy),
        loss=partial(_loss, config),
        network=lambda learner: learner.weights.network,
        start_memory=lambda ends: ends.start_memory,
        constants=partial(_signals, policy, config),
        recurrent=policy.recurrent,
    )


def _step(
    policy: NetworkPolicy, network: PyTree[Array], learner: ActorCriticLearner, memory: Memory, sample: StepValues
) -> tuple[Memory, Outputs]:
    """Returns the memory after ONE step, before any reset, and the outputs of the step."""
    if policy.recurrent:
        memory = jax.tree.map(partial(jnp.where, sample.begins), policy.start_memory(), memory)
    weights = replace(learner.weights, network=network)
    output = policy.forward(weights, memory, sample.observation, sample.action_mask)
    distribution = output.distribution
    return output.memory, Outputs(distribution.log_prob(sample.action), distribution.entropy(), output.value)


def _signals(
    policy: NetworkPolicy, config: Any, learner: ActorCriticLearner, minibatch: Batch, unrolled: UnrolledSteps
) -> Signals:
    """Returns the standardised advantages and normalised targets of each sequence `[N, T]`."""
    config, (_, _, units, scale) = current_config(config, current_hyperparameters(learner)), minibatch.sequences
    in_units = replace(learner.weights, values=_of_all(units))
    found = _vtrace(policy, config, in_units, minibatch, unrolled)
    advantage = _of_all(scale).standardise(found.advantage, found.rho) if scale else found.advantage
    target = learner.weights.normalised_value(found.target)
    return Signals(advantage, target, in_units.raw_value(unrolled.outputs.value), found.target)


def _of_all(same: PyTree[Array]) -> Any:
    """Returns the first of equal leaves `[N, ...]`, or None if there are no leaves."""
    return jax.tree.map(lambda leaf: leaf[0], same) if jax.tree.leaves(same) else None


def _vtrace(
    policy: NetworkPolicy, config: Any, weights: PolicyWeights, minibatch: Batch, unrolled: UnrolledSteps
) -> Estimates:
    """Computes V-trace advantages and targets of each sequence `[N, T]`, in the units of rewards.

    Final observations are evaluated only if an episode of the minibatch was truncated.
    """
    steps: StepValues = minibatch.samples
    outputs, after = unrolled.outputs, unrolled.memory_after
    raw_value = lambda memory, observation: weights.raw_value(
        policy.forward(weights, memory, observation, ()).value
    )
    value_n, value = jax.vmap(raw_value), weights.raw_value(outputs.value)
    final_value = steps.final_value
    if is_missing(final_value):
        final_value = jax.lax.cond(
            jnp.any(steps.truncated),
            lambda: jax.vmap(value_n)(after, steps.final_observation),
            lambda: jnp.zeros_like(steps.reward),
        )
    last_memory = jax.tree.map(lambda leaf: leaf[:, -1], after)
    last_value = value_n(last_memory, minibatch.sequences.last_observation)
    bootstrap = jax.vmap(bootstrap_values)
    next_value = bootstrap(value, last_value, final_value, steps.terminated, steps.truncated)
    estimate = partial(
        vtrace,
        gamma=config.gamma,
        clip_rho=config.clip_rho,
        clip_c=config.clip_c,
        trace_decay=config.vtrace_lambda,
    )
    done = steps.terminated | steps.truncated
    log_ratio = outputs.log_prob - steps.log_prob
    found = jax.vmap(estimate)(log_ratio, steps.reward, value, next_value, done)
    return Estimates(*found, _rho(config, log_ratio))


def _rho(config: Any, log_ratio: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.minimum(config.clip_rho, jnp.exp(log_ratio))


def _loss(
    config: Any, learner: ActorCriticLearner, sample: StepValues, signals: Signals, outputs: Outputs
) -> tuple[Float[Array, ""], Metrics]:
    """Computes the loss of ONE step (Espeholt et al., 2018, section 4.2)."""
    config = current_config(config, current_hyperparameters(learner))
    log_ratio = outputs.log_prob - sample.log_prob
    policy_loss = policy_gradient_loss(outputs.log_prob, signals.advantage)
    value_loss = squared_value_loss(outputs.value, signals.target)
    loss = policy_loss + config.vf_coef * value_loss - config.ent_coef * outputs.entropy
    return loss, {
        "losses/policy": policy_loss,
        "losses/value": value_loss,
        "losses/entropy": outputs.entropy,
        "losses/approx_kl": approximate_kl(log_ratio),
        "losses/rho": _rho(config, log_ratio),
        **value_moments(signals.raw_value, signals.raw_target),
    }
