"""Shared parts of on-policy actor-critics: the learner, its statistics, and its gradients.

Shape letters: `T` steps, `E` environments of this replica, `N` samples, or sequences, of a minibatch.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PyTree

from rollmill.algorithms.hyperparameters import as_data, current_config, current_hyperparameters, follows_schedules
from rollmill.algorithms.network_policy import NetworkPolicy, PolicyWeights
from rollmill.algorithms.optimisers import (
    Annealing,
    Optimiser,
    count_planned_update,
    descend,
    no_updates,
    rate_now,
)
from rollmill.algorithms.reports import MOMENTS, value_moments
from rollmill.algorithms.returns import bootstrap_values, generalised_advantages
from rollmill.core.types import Key, Memory
from rollmill.dataflow import (
    Batch,
    Hyperparameters,
    MeanGradients,
    Metrics,
    Reduce,
    SequenceGradients,
    Step,
    Trajectory,
)
from rollmill.envs import RunningStatistics, initial_statistics, merge_moments, scale, update_statistics
from rollmill.networks import Output

IMAGES_AT_ONCE = 256
"""Number of large observations whose values are computed at a time. As floats, and with the outputs of
convolutions, each takes some hundred kilobytes."""


class ActorCriticLearner(eqx.Module):
    """Learner state of an actor-critic: weights, optimiser state and running statistics."""

    weights: PolicyWeights
    optimiser: PyTree[Array]
    """Optimiser state of all parameters."""
    returns: RunningStatistics | None
    """Statistics of the discounted return, or None if rewards are not normalised."""
    hyperparameters: Hyperparameters = eqx.field(default_factory=dict)
    """Hyperparameters that the fragments read."""
    progress: Annealing | None = None
    """Number of updates so far, or None if no hyperparameter other than a learning rate follows a schedule."""
    rate_scale: Float[Array, ""] | None = None
    """Factor by which the configured learning rate is multiplied, or None if it is not adapted."""
    novelty: Any = None
    """`novelty.Novelty`, or None without a bonus for rare observations."""

    @property
    def updates_done(self) -> Float[Array, ""]:
        """Number of updates that the learner has made so far."""
        assert self.progress is not None
        return self.progress.updates


class TrainingSamples(NamedTuple):
    """Training samples: `[T, E, ...]` in a batch, `[N, ...]` or `[N, T, ...]` in a minibatch."""

    observation: PyTree[Array]
    action_mask: PyTree[Bool[Array, "..."]]
    action: PyTree[Array]
    log_prob: Float[Array, "..."]
    value: Float[Array, "..."]
    """The network's value, which may be normalised."""
    advantage: Float[Array, "..."]
    """Advantage of the action, in the units of rewards until it is standardised."""
    target: Float[Array, "..."]
    """Target of the network's value, normalised in the same way."""
    begins: PyTree[Bool[Array, "..."]]
    """Whether an episode begins with this sample, which resets the memory. `()` for policies without memory."""


SampleLoss: TypeAlias = Callable[[Any, Any, Output], tuple[Float[Array, ""], Metrics]]
"""`(configuration, sample, network output) -> loss, metrics`."""


def start_learner(
    policy: NetworkPolicy, optimiser: Optimiser, numbers: Mapping[str, float], key: Key, *, normalise_rewards: bool
) -> ActorCriticLearner:
    """Returns the initial learner state of an on-policy actor-critic."""
    weights, held = policy.start_weights(key), as_data(numbers)
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    returns = initial_statistics(scalar) if normalise_rewards else None
    progress = no_updates() if follows_schedules(numbers) else None
    rate_scale = jnp.float32(1) if "desired_kl" in numbers else None
    return ActorCriticLearner(weights, optimiser.init(weights.network), returns, held, progress, rate_scale)


# --- a rollout, once an iteration ---------------------------------------------------------------------


def prepare(
    policy: NetworkPolicy,
    config: Any,
    learner: ActorCriticLearner,
    trajectory: Trajectory,
    *,
    reduce: Reduce,
    replicas: int,
) -> tuple[ActorCriticLearner, Batch]:
    """Computes advantages and targets of a rollout, and updates running statistics for the next rollout.

    It uses `gamma` and `gae_lambda` of `config`.
    """
    config = current_config(config, current_hyperparameters(learner))
    steps, weights = trajectory.steps, learner.weights
    learner, reward = update_learner_statistics(learner, steps, reduce=reduce, replicas=replicas)
    value, last_value, final_value = _values(policy, weights, trajectory)
    next_value = jax.vmap(bootstrap_values, in_axes=(1, 0, 1, 1, 1), out_axes=1)(
        value, last_value, final_value, steps.terminated, steps.truncated
    )
    done = steps.terminated | steps.truncated
    estimate = partial(generalised_advantages, gamma=config.gamma, gae_lambda=config.gae_lambda)
    advantage, target = jax.vmap(estimate, in_axes=1, out_axes=1)(reward, value, next_value, done)
    learner = update_value_statistics(learner, target, reduce=reduce, replicas=replicas)
    samples = TrainingSamples(
        observation=policy.normalise(weights, steps.observation),
        action_mask=steps.action_mask,
        action=steps.action,
        log_prob=steps.extras.log_prob,
        value=weights.normalised_value(value),
        advantage=advantage,
        target=learner.weights.normalised_value(target),
        begins=beginnings(done) if policy.recurrent else (),
    )
    return learner, Batch(samples, trajectory.start_memory)


def update_learner_statistics(
    learner: ActorCriticLearner, steps: Step, *, reduce: Reduce, replicas: int
) -> tuple[ActorCriticLearner, Float[Array, "T E"]]:
    """Updates the learner's running statistics with a rollout.

    It returns the new learner, and the rewards, which are scaled if rewards are normalised.
    """
    returns, reward = learner.returns, steps.reward
    if returns is not None:
        returns = update_statistics(returns, steps.info["discounted_return"], reduce=reduce, replicas=replicas)
        reward = scale(returns, reward)
    observations = learner.weights.observations
    if observations is not None:
        observations = update_statistics(observations, steps.observation, reduce=reduce, replicas=replicas)
    weights = replace(learner.weights, observations=observations)
    return replace(learner, weights=weights, returns=returns), reward


def update_value_statistics(
    learner: ActorCriticLearner, target: Float[Array, "..."], *, reduce: Reduce, replicas: int
) -> ActorCriticLearner:
    """Updates the statistics of the critic's targets, if there are any, with targets in the units of rewards."""
    values = learner.weights.values
    if values is None:
        return learner
    values = update_statistics(values, target, reduce=reduce, replicas=replicas)
    return replace(learner, weights=replace(learner.weights, values=values))


def merge_metrics(
    batch_size: int, learner: ActorCriticLearner, metrics: Metrics, *, share: float = 1.0
) -> ActorCriticLearner:
    """Updates the statistics of the critic's targets with the moments in the metrics (`Graph.merge_metrics`)."""
    mean, square = metrics[f"{MOMENTS}target"], metrics[f"{MOMENTS}target_square"]
    values = learner.weights.values
    assert values is not None
    values = merge_moments(values, mean, jnp.maximum(square - jnp.square(mean), 0), share * batch_size)
    return replace(learner, weights=replace(learner.weights, values=values))


def beginnings(done: Bool[Array, "T ..."]) -> Bool[Array, "T ..."]:
    """Returns True for each step that begins an episode, except for the first step of a rollout.

    The first step uses the memory with which the rollout started.
    """
    return jnp.roll(done, 1, axis=0).at[0].set(False)


def _values(policy: NetworkPolicy, weights: PolicyWeights, trajectory: Trajectory):
    """Returns values of observations `[T, E]`, of the one after the last step `[E]`, and of final ones `[T, E]`.

    They are in the units of rewards. Values added by `compute_values` or `compact_step` are reused. Otherwise
    final observations are evaluated only in iterations with a truncated episode.
    """
    steps, extras = trajectory.steps, trajectory.steps.extras
    # A lambda, because JAX would format the whole policy to name a bound method.
    value_e = jax.vmap(lambda memory, observation: policy.value(weights, memory, observation))
    value_te = partial(over_steps, value_e, at_once=IMAGES_AT_ONCE if policy.is_large else None)
    last_value = value_e(trajectory.memory, trajectory.observation)
    value = value_te(steps.final_memory, steps.observation) if is_missing(extras.value) else extras.value
    if not is_missing(extras.final_value):
        return value, last_value, extras.final_value
    final_value = jax.lax.cond(
        jnp.any(steps.truncated),
        lambda: value_te(steps.final_memory, steps.final_observation),
        lambda: jnp.zeros_like(steps.reward),
    )
    return value, last_value, final_value


def over_steps(
    value_e: Callable[..., PyTree[Array]], memory: Memory, observation: PyTree[Array], *, at_once: int | None
) -> PyTree[Array]:
    """Computes the values of all steps of a rollout.

    With `at_once`, at most this many observations are evaluated at a time to limit memory, but never less than one
    step of all environments.
    """
    if at_once is None:
        return jax.vmap(value_e)(memory, observation)
    num_steps, num_envs = jax.tree.leaves(observation)[0].shape[:2]
    steps = min(num_steps, max(1, at_once // num_envs))
    return jax.lax.map(lambda now: value_e(*now), (memory, observation), batch_size=steps)


def is_missing(value: PyTree[Array]) -> bool:
    """Returns whether all steps lack a value, so that the leaf is `()` instead of an array."""
    return isinstance(value, tuple)


def report(
    schedule: Callable[[Hyperparameters], optax.Schedule], learner: ActorCriticLearner, batch: Batch
) -> Metrics:
    """Returns metrics of an iteration: its first learning rate, and moments of values if the batch has values."""
    rate = {"learning_rate": rate_now(schedule(with_rate(learner, learner.hyperparameters)), learner.optimiser)}
    samples = batch.samples
    if not isinstance(samples, TrainingSamples):
        return rate
    value, target = map(learner.weights.raw_value, (samples.value, samples.target))
    return {**rate, **value_moments(value, target)}


# --- a minibatch --------------------------------------------------------------------------------------


class Moments(NamedTuple):
    """Mean and standard deviation of advantages."""

    mean: Float[Array, ""]
    deviation: Float[Array, ""]

    def standardise(self, advantage: Float[Array, "..."]) -> Float[Array, "..."]:
        """Scales advantages to mean 0 and standard deviation 1. If all are equal, the result is 0."""
        return (advantage - self.mean) / (self.deviation + 1e-8)


def moments_of(advantage: Float[Array, "..."], reduce: Reduce) -> Moments:
    """Returns the moments of the advantages over all replicas.

    One reduction is enough (Chan et al., 1979): the total variance is the mean of the parts' variances plus the
    variance of their means.
    """
    local_mean = jnp.mean(advantage)
    local_variance = jnp.mean(jnp.square(advantage - local_mean))
    mean, square, variance = reduce((local_mean, jnp.square(local_mean), local_variance))
    return Moments(mean, jnp.sqrt(variance + jnp.maximum(square - jnp.square(mean), 0)))


def standardise_advantages(minibatch: Batch, reduce: Reduce) -> Batch:
    """Scales advantages to mean 0 and standard deviation 1 over the minibatch of all replicas."""
    advantage = minibatch.samples.advantage
    standardised = moments_of(advantage, reduce).standardise(advantage)
    return minibatch._replace(samples=minibatch.samples._replace(advantage=standardised))


def no_condition(minibatch: Batch, reduce: Reduce) -> Batch:
    """Returns the minibatch unchanged: the identity for `Graph.condition`."""
    return minibatch


def mean_gradients(policy: NetworkPolicy, loss: SampleLoss, config: Any) -> MeanGradients | SequenceGradients:
    """Returns the fragment that computes the gradients of the mean loss over a minibatch."""
    network = lambda learner: learner.weights.network
    if not policy.recurrent:
        return MeanGradients(partial(_sample_loss, policy, loss, config), network)
    return SequenceGradients(
        partial(_recurrent_step, policy, loss, config),
        loss=lambda learner, sample, constants, loss_and_metrics: loss_and_metrics,
        network=network,
        start_memory=lambda memory: memory,
    )


def _sample_loss(
    policy: NetworkPolicy,
    loss: SampleLoss,
    config: Any,
    network: PyTree[Array],
    learner: ActorCriticLearner,
    sample: TrainingSamples,
    memory: Memory,
) -> tuple[Float[Array, ""], Metrics]:
    weights = replace(learner.weights, network=network)
    config = current_config(config, current_hyperparameters(learner))
    return loss(config, sample, policy.forward(weights, memory, sample.observation, sample.action_mask))


def _recurrent_step(
    policy: NetworkPolicy,
    loss: SampleLoss,
    config: Any,
    network: PyTree[Array],
    learner: ActorCriticLearner,
    memory: Memory,
    sample: TrainingSamples,
) -> tuple[Memory, tuple[Float[Array, ""], Metrics]]:
    """Returns the memory after a step of one environment, and the loss of the step."""
    weights = replace(learner.weights, network=network)
    config = current_config(config, current_hyperparameters(learner))
    memory = jax.tree.map(partial(jnp.where, sample.begins), policy.start_memory(), memory)
    output = policy.forward(weights, memory, sample.observation, sample.action_mask)
    return output.memory, loss(config, sample, output)


def update(
    optimiser: Optimiser, learner: ActorCriticLearner, gradients: PyTree[Array], *, share: float = 1.0
) -> ActorCriticLearner:
    """Makes one optimiser step. `share` is the fraction of a minibatch that the gradients come from."""
    held, progress = with_rate(learner, current_hyperparameters(learner)), learner.progress
    network, state = descend(optimiser, learner.weights.network, learner.optimiser, gradients, held, share=share)
    progress = None if progress is None else count_planned_update(progress, share)
    weights = replace(learner.weights, network=network)
    return replace(learner, weights=weights, optimiser=state, progress=progress)


MEASURABLE_KL = 1e-6
"""Maximum KL divergence that may be a rounding error. In the first minibatch, the exact divergence is 0."""


def adapt_rate(learner: ActorCriticLearner, metrics: Metrics) -> ActorCriticLearner:
    """Lowers the learning rate if the policy has changed too much since the rollout, and raises it if too little.

    The rule follows RSL-RL (Rudin et al., "Learning to Walk in Minutes Using Massively Parallel Deep Reinforcement
    Learning", 2021), with a one-sample estimate of the KL divergence. It uses `desired_kl`, `kl_factor` and the
    bounds of the learning rate.
    """
    numbers, kl = learner.hyperparameters, metrics["losses/approx_kl"]
    assert learner.rate_scale is not None
    first, desired, factor = numbers["learning_rate"], numbers["desired_kl"], numbers["kl_factor"]
    rises = (kl < desired / 2) & (kl > MEASURABLE_KL)
    change = jnp.where(kl > 2 * desired, 1 / factor, jnp.where(rises, factor, 1.0))
    rate = jnp.clip(
        first * learner.rate_scale * change, numbers["min_learning_rate"], numbers["max_learning_rate"]
    )
    return replace(learner, rate_scale=jnp.where(change == 1.0, learner.rate_scale, rate / first))


def with_rate(learner: ActorCriticLearner, numbers: Hyperparameters) -> Hyperparameters:
    """Returns the hyperparameters with the adapted learning rate, clipped to its current bounds."""
    if learner.rate_scale is None:
        return numbers
    rate, low, high = (numbers[name] for name in ("learning_rate", "min_learning_rate", "max_learning_rate"))
    return {**numbers, "learning_rate": jnp.clip(rate * learner.rate_scale, low, high)}
