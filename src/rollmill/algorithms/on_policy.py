"""What actor-critics that learn from their own rollouts share: a learner, its statistics, and its gradients.

Shape letters: `T` steps, `E` environments held here, `N` samples, or sequences, of a minibatch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PyTree

from rollmill.algorithms.fragments import NetworkPolicy, PolicyWeights
from rollmill.algorithms.optimisers import descend, rate_now
from rollmill.algorithms.reports import value_moments
from rollmill.algorithms.returns import bootstrap_values, generalised_advantages
from rollmill.core.types import Key, Memory
from rollmill.dataflow import Batch, MeanGradients, Metrics, Reduce, Step, Trajectory
from rollmill.envs import RunningStatistics, initial_statistics, scale, update_statistics
from rollmill.networks import Output


class ActorCriticLearner(eqx.Module):
    """Weights, optimiser and running statistics."""

    weights: PolicyWeights
    optimiser: PyTree[Array]
    returns: RunningStatistics | None
    """Statistics of the discounted return, where rewards are normalised."""


class TrainingSamples(NamedTuple):
    """What is learned from: `[T, E, ...]` in a batch, `[N, ...]` or `[N, T, ...]` in a minibatch."""

    observation: PyTree[Array]
    action_mask: PyTree[Bool[Array, "..."]]
    action: PyTree[Array]
    log_prob: Float[Array, "..."]
    value: Float[Array, "..."]
    advantage: Float[Array, "..."]
    target: Float[Array, "..."]
    begins: PyTree[Bool[Array, "..."]]
    """Whether an episode begins with this sample, so that the memory is reset; recurrent policies only."""


SampleLoss: TypeAlias = Callable[[Any, Output], tuple[Float[Array, ""], Metrics]]
"""`(sample, what the network says about it) -> loss, metrics`."""


def start_learner(
    policy: NetworkPolicy, optimiser: optax.GradientTransformation, key: Key, *, normalise_rewards: bool
) -> ActorCriticLearner:
    """The learner before training."""
    weights = policy.start_weights(key)
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    returns = initial_statistics(scalar) if normalise_rewards else None
    return ActorCriticLearner(weights, optimiser.init(weights.network), returns)


# --- a rollout, once an iteration ---------------------------------------------------------------------


def prepare(
    policy: NetworkPolicy,
    learner: ActorCriticLearner,
    trajectory: Trajectory,
    *,
    gamma: float,
    gae_lambda: float,
    reduce: Reduce,
    replicas: int,
) -> tuple[ActorCriticLearner, Batch]:
    """Advantages and targets of a rollout, and statistics for the next one."""
    steps, weights = trajectory.steps, learner.weights
    after, reward = take_in(learner, steps, reduce=reduce, replicas=replicas)
    value, last_value, final_value = _values(policy, weights, trajectory)
    next_value = jax.vmap(bootstrap_values, in_axes=(1, 0, 1, 1, 1), out_axes=1)(
        value, last_value, final_value, steps.terminated, steps.truncated
    )
    done = steps.terminated | steps.truncated
    estimate = partial(generalised_advantages, gamma=gamma, gae_lambda=gae_lambda)
    advantage, target = jax.vmap(estimate, in_axes=1, out_axes=1)(reward, value, next_value, done)
    samples = TrainingSamples(
        observation=policy.normalise(weights, steps.observation),
        action_mask=steps.action_mask,
        action=steps.action,
        log_prob=steps.extras.log_prob,
        value=value,
        advantage=advantage,
        target=target,
        begins=beginnings(done) if policy.recurrent else (),
    )
    return after, Batch(samples, trajectory.start_memory)


def take_in(
    learner: ActorCriticLearner, steps: Step, *, reduce: Reduce, replicas: int
) -> tuple[ActorCriticLearner, Float[Array, "T E"]]:
    """The learner with its statistics advanced by a rollout, and the rewards, scaled where they are normalised."""
    returns, reward = learner.returns, steps.reward
    if returns is not None:
        returns = update_statistics(returns, steps.info["discounted_return"], reduce=reduce, replicas=replicas)
        reward = scale(returns, reward)
    observations = learner.weights.observations
    if observations is not None:
        observations = update_statistics(observations, steps.observation, reduce=reduce, replicas=replicas)
    weights = PolicyWeights(learner.weights.network, observations)
    return ActorCriticLearner(weights, learner.optimiser, returns), reward


def beginnings(done: Bool[Array, "T ..."]) -> Bool[Array, "T ..."]:
    """Whether an episode begins with a step; the first step's memory is that of the rollout's start."""
    return jnp.roll(done, 1, axis=0).at[0].set(False)


def _values(policy: NetworkPolicy, weights: PolicyWeights, trajectory: Trajectory):
    """Values of observations `[T, E]`, of where the next rollout goes on `[E]`, of final observations `[T, E]`.

    What a rollout has appraised is there already; otherwise the last are computed only in iterations in which an
    episode was truncated.
    """
    steps, extras = trajectory.steps, trajectory.steps.extras
    of_each = jax.vmap(partial(policy.value, weights))
    of_all = jax.vmap(of_each)
    last_value = of_each(trajectory.memory, trajectory.observation)
    value = of_all(steps.final_memory, steps.observation) if _is_missing(extras.value) else extras.value
    if not _is_missing(extras.final_value):
        return value, last_value, extras.final_value
    final_value = jax.lax.cond(
        jnp.any(steps.truncated),
        lambda: of_all(steps.final_memory, steps.final_observation),
        lambda: jnp.zeros_like(steps.reward),
    )
    return value, last_value, final_value


def _is_missing(value: PyTree[Array]) -> bool:
    return isinstance(value, tuple)


def report(schedule: optax.Schedule, learner: ActorCriticLearner, batch: Batch) -> Metrics:
    """The learning rate that an iteration begins with, and moments of values where the batch has them."""
    rate = {"learning_rate": rate_now(schedule, learner.optimiser)}
    samples = batch.samples
    return (
        {**rate, **value_moments(samples.value, samples.target)} if isinstance(samples, TrainingSamples) else rate
    )


# --- a minibatch --------------------------------------------------------------------------------------


def standardise_advantages(minibatch: Batch, reduce: Reduce) -> Batch:
    """Advantages with mean zero and deviation one over the whole minibatch.

    One reduction is enough (Chan et al., 1979): the variance of the whole is the mean of the parts' variances and
    the variance of their means.
    """
    advantage = minibatch.samples.advantage
    own_mean = jnp.mean(advantage)
    own_variance = jnp.mean(jnp.square(advantage - own_mean))
    mean, square, variance = reduce((own_mean, jnp.square(own_mean), own_variance))
    deviation = jnp.sqrt(variance + jnp.maximum(square - jnp.square(mean), 0))
    standardised = (advantage - mean) / (deviation + 1e-8)
    return minibatch._replace(samples=minibatch.samples._replace(advantage=standardised))


def unconditioned(minibatch: Batch, reduce: Reduce) -> Batch:
    """The minibatch as it is: nothing needs statistics of the whole."""
    return minibatch


def mean_gradients(policy: NetworkPolicy, loss: SampleLoss) -> MeanGradients:
    """Gradients of the mean loss over a minibatch, with respect to the network's weights."""
    of_one = _sequence_loss if policy.recurrent else _sample_loss
    return MeanGradients(partial(of_one, policy, loss), lambda learner: learner.weights.network)


def _sample_loss(
    policy: NetworkPolicy,
    loss: SampleLoss,
    network: PyTree[Array],
    learner: ActorCriticLearner,
    sample: TrainingSamples,
    memory: Memory,
) -> tuple[Float[Array, ""], Metrics]:
    weights = PolicyWeights(network, learner.weights.observations)
    return loss(sample, policy.forward(weights, memory, sample.observation, sample.action_mask))


def _sequence_loss(
    policy: NetworkPolicy,
    loss: SampleLoss,
    network: PyTree[Array],
    learner: ActorCriticLearner,
    samples: TrainingSamples,
    start_memory: Memory,
) -> tuple[Float[Array, ""], Metrics]:
    """Mean loss of one environment's sequence `[T, ...]`, the memory carried along it."""
    weights, fresh = PolicyWeights(network, learner.weights.observations), policy.start_memory()

    def step(memory, sample):
        memory = jax.tree.map(partial(jnp.where, sample.begins), fresh, memory)
        output = policy.forward(weights, memory, sample.observation, sample.action_mask)
        return output.memory, loss(sample, output)

    _, losses = jax.lax.scan(step, start_memory, samples)
    return jax.tree.map(jnp.mean, losses)


def update(
    optimiser: optax.GradientTransformation,
    learner: ActorCriticLearner,
    slopes: PyTree[Array],
    *,
    share: float = 1.0,
) -> ActorCriticLearner:
    """One step of the optimiser; `share` is the part of a minibatch that the gradients are of."""
    network, state = descend(optimiser, learner.weights.network, learner.optimiser, slopes, share=share)
    return ActorCriticLearner(PolicyWeights(network, learner.weights.observations), state, learner.returns)
