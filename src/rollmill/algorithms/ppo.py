"""Proximal policy optimisation (Schulman et al., 2017) as a graph of four fragments.

Details follow Huang et al., "The 37 Implementation Details of Proximal Policy Optimization", ICLR
Blog Track 2022, but for two: truncated episodes are bootstrapped from their final observation, and
statistics of observations stay as they are within an iteration.

Shape letters: `T` steps, `E` environments held here, `N` samples, or sequences, of a minibatch.
"""

from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PyTree

from rollmill.algorithms.fragments import (
    MakeNetwork,
    NetworkPolicy,
    PolicyWeights,
    compilable,
    environment_functions,
    network_policy,
)
from rollmill.algorithms.losses import (
    approximate_kl,
    clipped_policy_loss,
    clipped_value_loss,
    squared_value_loss,
)
from rollmill.algorithms.returns import bootstrap_values, generalised_advantages
from rollmill.algorithms.sizes import check_fractions, check_positive, check_shards, iterations_for
from rollmill.core.types import Environment, HostEnvironment, Memory, Params
from rollmill.dataflow import (
    Batch,
    Fragment,
    Graph,
    Loops,
    Metrics,
    Reduce,
    Trajectory,
    choose_num_shards,
)
from rollmill.envs import Statistics, initial_statistics, scale, update_statistics
from rollmill.networks import NetworkConfig, Output, actor_critic


@dataclass(frozen=True)
class PPOConfig:
    """Hyperparameters of PPO, under the field's names."""

    total_timesteps: int = 500_000
    """Environment steps of the whole training, over all environments."""
    num_envs: int = 64
    """Environments that run side by side."""
    num_steps: int = 64
    """Steps of each environment in one iteration."""
    update_epochs: int = 4
    """Passes over the batch in one iteration."""
    num_minibatches: int = 4
    """Minibatches of one pass."""
    learning_rate: float = 2.5e-3
    """Step size of Adam, at the start where it is annealed."""
    anneal_lr: bool = True
    """Let the step size fall linearly, to zero after the last of all planned updates."""
    gamma: float = 0.99
    """Discount factor."""
    gae_lambda: float = 0.95
    """Decay of generalised advantage estimation: 0 is one-step, 1 is Monte Carlo."""
    clip_coef: float = 0.2
    """How far the policy's ratio, and the value where it is clipped, may move from the old one."""
    clip_vloss: bool = True
    """Clip the value loss as the policy's is clipped."""
    norm_adv: bool = True
    """Standardise the advantages of each minibatch."""
    ent_coef: float = 0.01
    """Weight of the entropy bonus."""
    vf_coef: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Gradients are scaled down to this global norm."""
    target_kl: float | None = None
    """End an iteration's learning after an epoch whose last minibatch exceeds this KL divergence."""
    normalize_observations: bool = False
    """Standardise observations by running statistics, which are part of the training state."""
    normalize_rewards: bool = False
    """Divide rewards by the running standard deviation of the discounted return."""
    num_shards: int | None = None
    """Logical shards that shuffling stays inside, a multiple of the device count; chosen if left out."""
    network: NetworkConfig = field(default_factory=NetworkConfig)
    """The actor-critic network."""


class PPOLearner(eqx.Module):
    """Weights, optimiser and running statistics."""

    weights: PolicyWeights
    optimiser: PyTree[Array]
    returns: Statistics | None
    """Of the discounted return, where rewards are normalised."""


class Samples(NamedTuple):
    """What PPO learns from: `[T, E, ...]` in a batch, `[N, ...]` or `[N, T, ...]` in a minibatch."""

    observation: PyTree[Array]
    action_mask: PyTree[Bool[Array, "..."]]
    action: PyTree[Array]
    log_prob: Float[Array, "..."]
    value: Float[Array, "..."]
    advantage: Float[Array, "..."]
    target: Float[Array, "..."]
    begins: PyTree[Bool[Array, "..."]]
    """Whether an episode begins with this sample, so that the memory is reset; recurrent policies only."""


def ppo(
    env: Environment | HostEnvironment,
    config: PPOConfig | None = None,
    *,
    params: Params | None = None,
    network: MakeNetwork | NetworkConfig | None = None,
    **overrides: Any,
) -> Graph:
    """PPO on an environment, as a graph.

    Args:
        env: what `rollmill.make` returns, or an `Environment` of your own.
        config: hyperparameters; single ones can be given as keywords instead: `ppo(env, num_envs=8)`.
        params: parameters of the environment instead of its own; a leaf with one more axis,
            `[num_envs, ...]`, differs from environment to environment.
        network: a `NetworkConfig` instead of `config.network`; or your own, as the function that makes
            it, `(key, observation_space, action_space) -> ActorCritic`.
        **overrides: fields of `PPOConfig` to replace.

    Raises:
        UsageError: for sizes that do not fit together, spaces that PPO cannot handle, and environments
            that live on the host.
    """
    if isinstance(network, NetworkConfig):
        overrides, network = {**overrides, "network": network}, None
    env = compilable(env)
    config = replace(config or PPOConfig(), **overrides)
    make_network = network or partial(actor_critic, config=config.network)
    envs = environment_functions(
        env, params=params, num_envs=config.num_envs, gamma=config.gamma if config.normalize_rewards else None
    )
    policy = network_policy(env, make_network, normalise_observations=config.normalize_observations)
    loops = _loops(config, by_sequence=policy.recurrent)
    optimiser = _optimiser(config, loops)
    custom = [name for name, given in (("params", params), ("network", network)) if given is not None]
    return Graph(
        settings={"algorithm": "ppo", "environment": env.name, "config": asdict(config), "custom": custom},
        observation_space=env.observation_space,
        action_space=env.action_space,
        loops=loops,
        environment=Fragment("environment", envs.step),
        policy=Fragment("policy", policy.sample),
        gradients=Fragment("gradients", partial(gradients, policy, config)),
        update=Fragment("update", partial(update, optimiser)),
        start_environment=envs.start,
        start_memory=policy.start_memory,
        start_learner=partial(_start_learner, policy, optimiser, config),
        action_mask=envs.action_mask,
        weights=lambda learner: learner.weights,
        prepare=partial(prepare, policy, config),
        condition=standardise_advantages if config.norm_adv else _unchanged,
        greedy=policy.greedy,
        keep_learning=None if config.target_kl is None else partial(_below, config.target_kl),
    )


# --- the fragments and what lies between them ---------------------------------------------------------


def prepare(
    policy: NetworkPolicy,
    config: PPOConfig,
    learner: PPOLearner,
    trajectory: Trajectory,
    *,
    reduce: Reduce,
    replicas: int,
) -> tuple[PPOLearner, Batch]:
    """Advantages and targets of a rollout, and statistics for the next one."""
    steps, weights = trajectory.steps, learner.weights
    returns, reward = _normalised_rewards(learner.returns, steps, reduce=reduce, replicas=replicas)
    value, last_value, final_value = _values(policy, weights, trajectory)
    next_value = jax.vmap(bootstrap_values, in_axes=(1, 0, 1, 1, 1), out_axes=1)(
        value, last_value, final_value, steps.terminated, steps.truncated
    )
    done = steps.terminated | steps.truncated
    estimate = partial(generalised_advantages, gamma=config.gamma, gae_lambda=config.gae_lambda)
    advantage, target = jax.vmap(estimate, in_axes=1, out_axes=1)(reward, value, next_value, done)
    samples = Samples(
        observation=policy.normalise(weights, steps.observation),
        action_mask=steps.action_mask,
        action=steps.action,
        log_prob=steps.extras.log_prob,
        value=value,
        advantage=advantage,
        target=target,
        begins=jnp.roll(done, 1, axis=0).at[0].set(False) if policy.recurrent else (),
    )
    observations = weights.observations
    if observations is not None:
        observations = update_statistics(observations, steps.observation, reduce=reduce, replicas=replicas)
    after = PPOLearner(PolicyWeights(weights.network, observations), learner.optimiser, returns)
    return after, Batch(samples, trajectory.start_memory)


def _normalised_rewards(returns: Statistics | None, steps, *, reduce: Reduce, replicas: int):
    if returns is None:
        return None, steps.reward
    returns = update_statistics(returns, steps.info["discounted_return"], reduce=reduce, replicas=replicas)
    return returns, scale(returns, steps.reward)


def _values(policy: NetworkPolicy, weights: PolicyWeights, trajectory: Trajectory):
    """Values of observations `[T, E]`, of where the next rollout goes on `[E]`, of final observations `[T, E]`.

    The last are computed only in iterations in which an episode was truncated.
    """
    steps = trajectory.steps
    of_each = jax.vmap(partial(policy.value, weights))
    of_all = jax.vmap(of_each)
    value = steps.extras.value if policy.recurrent else of_all(steps.final_memory, steps.observation)
    final_value = jax.lax.cond(
        jnp.any(steps.truncated),
        lambda: of_all(steps.final_memory, steps.final_observation),
        lambda: jnp.zeros_like(steps.reward),
    )
    return value, of_each(trajectory.memory, trajectory.observation), final_value


def standardise_advantages(minibatch: Batch, reduce: Reduce) -> Batch:
    """Advantages with mean zero and deviation one over the whole minibatch."""
    advantage = minibatch.samples.advantage
    mean = reduce(jnp.mean(advantage))
    centred = advantage - mean
    deviation = jnp.sqrt(reduce(jnp.mean(jnp.square(centred))))
    return minibatch._replace(samples=minibatch.samples._replace(advantage=centred / (deviation + 1e-8)))


def _unchanged(minibatch: Batch, reduce: Reduce) -> Batch:
    return minibatch


def gradients(
    policy: NetworkPolicy, config: PPOConfig, learner: PPOLearner, minibatch: Batch
) -> tuple[PyTree[Array], Metrics]:
    """Of the mean loss over a minibatch, with respect to the network's weights."""

    def mean_loss(network):
        weights = PolicyWeights(network, learner.weights.observations)
        each = partial(sequence_loss if policy.recurrent else sample_loss, policy, config, weights)
        loss, metrics = jax.vmap(each)(minibatch.samples, minibatch.sequences)
        return jnp.mean(loss), jax.tree.map(jnp.mean, metrics)

    (loss, metrics), slopes = jax.value_and_grad(mean_loss, has_aux=True)(learner.weights.network)
    return slopes, {"losses/total": loss, **metrics}


def sample_loss(
    policy: NetworkPolicy, config: PPOConfig, weights: PolicyWeights, sample: Samples, memory: Memory
) -> tuple[Float[Array, ""], Metrics]:
    """Loss of one sample (Schulman et al., 2017, equation 9, negated)."""
    output = policy.forward(weights, memory, sample.observation, sample.action_mask)
    return _loss(config, sample, output)


def sequence_loss(
    policy: NetworkPolicy, config: PPOConfig, weights: PolicyWeights, samples: Samples, start_memory: Memory
) -> tuple[Float[Array, ""], Metrics]:
    """Mean loss of one environment's sequence `[T, ...]`, the memory carried along it."""
    fresh = policy.start_memory()

    def step(memory, sample):
        memory = jax.tree.map(partial(jnp.where, sample.begins), fresh, memory)
        output = policy.forward(weights, memory, sample.observation, sample.action_mask)
        return output.memory, _loss(config, sample, output)

    _, losses = jax.lax.scan(step, start_memory, samples)
    return jax.tree.map(jnp.mean, losses)


def _loss(config: PPOConfig, sample: Samples, output: Output) -> tuple[Float[Array, ""], Metrics]:
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


def update(optimiser: optax.GradientTransformation, learner: PPOLearner, slopes: PyTree[Array]) -> PPOLearner:
    """One step of the optimiser."""
    network = learner.weights.network
    with jax.numpy_dtype_promotion("standard"):  # Optax counts steps in integers and relies on promotion
        steps, state = optimiser.update(slopes, learner.optimiser, network)
    weights = PolicyWeights(optax.apply_updates(network, steps), learner.weights.observations)
    return PPOLearner(weights, state, learner.returns)


# --- building -----------------------------------------------------------------------------------------


def _loops(config: PPOConfig, *, by_sequence: bool) -> Loops:
    sizes = ("total_timesteps", "num_envs", "num_steps", "update_epochs", "num_minibatches")
    check_positive({name: getattr(config, name) for name in sizes})
    check_fractions({"gamma": config.gamma, "gae_lambda": config.gae_lambda})
    shards = config.num_shards
    if shards is None:
        shards = choose_num_shards(
            config.num_envs, config.num_steps, config.num_minibatches, by_sequence=by_sequence
        )
    rows_each = 1 if by_sequence else config.num_steps
    check_shards(shards, config.num_envs, rows_each, config.num_minibatches)
    return Loops(
        iterations=iterations_for(config.total_timesteps, config.num_envs, config.num_steps),
        num_envs=config.num_envs,
        num_steps=config.num_steps,
        epochs=config.update_epochs,
        num_minibatches=config.num_minibatches,
        num_shards=shards,
        cut="sequences" if by_sequence else "samples",
    )


def _optimiser(config: PPOConfig, loops: Loops) -> optax.GradientTransformation:
    """Adam on clipped gradients; weights are one flat vector to it, so that a step is a few operations."""
    updates = loops.iterations * loops.epochs * loops.num_minibatches
    rate = optax.linear_schedule(config.learning_rate, 0.0, updates) if config.anneal_lr else config.learning_rate
    return optax.flatten(optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.adam(rate, eps=1e-5)))


def _start_learner(policy: NetworkPolicy, optimiser, config: PPOConfig, key) -> PPOLearner:
    weights = policy.start_weights(key)
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    returns = initial_statistics(scalar) if config.normalize_rewards else None
    return PPOLearner(weights, optimiser.init(weights.network), returns)


def _below(target_kl: float, metrics: Metrics) -> Bool[Array, ""]:
    return metrics["losses/approx_kl"] <= target_kl
