"""IMPALA (Espeholt et al., ICML 2018) as a graph of four fragments.

The learner trains on whole sequences, and corrects by V-trace for the difference between the behaviour
policy and its own: because the behaviour policy's weights were some updates old, or because the
learner makes several epochs over a batch. The graph does not depend on asynchrony. Executed
synchronously, with one epoch and one minibatch, all ratios are 1.

Departures from the paper: losses are means over samples, not sums, so that they do not grow with the
batch; and truncated episodes are bootstrapped from the value of their final observation. That value is the
learner's. If observations are large, such as images, it is the behaviour policy's, computed when the step is
collected, because a trajectory would hold every image twice otherwise.

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

from rollmill.algorithms.building import configured, graph_of, loops_of, parts_of
from rollmill.algorithms.fragments import MakeNetwork, NetworkPolicy, PolicyWeights
from rollmill.algorithms.hyperparameters import current, numbers_now
from rollmill.algorithms.losses import approximate_kl, policy_gradient_loss, squared_value_loss
from rollmill.algorithms.on_policy import (
    IMAGES_AT_ONCE,
    ActorCriticLearner,
    beginnings,
    is_missing,
    moments_of,
    update_learner_statistics,
    update_value_statistics,
)
from rollmill.algorithms.reports import value_moments
from rollmill.algorithms.returns import Advantages, bootstrap_values, vtrace
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
from rollmill.core.schema import check_fields
from rollmill.core.types import Environment, GymnasiumObject, HostEnvironment, Memory, Observation, Params
from rollmill.dataflow import Batch, Graph, Metrics, Reduce, Trajectory
from rollmill.networks import NetworkConfig

OPTIMIZERS = ("rmsprop", "adam")


@dataclass(frozen=True)
class IMPALAConfig:
    """Hyperparameters of IMPALA, under their usual names."""

    total_timesteps: Count = 500_000
    """Environment steps of the whole training, over all environments."""
    num_envs: Count = 16
    """Number of parallel environments, over all actors."""
    num_steps: Count = 16
    """Steps of a sequence (the paper's unroll length)."""
    update_epochs: Count = 1
    """Epochs (passes over the batch) in one iteration; V-trace corrects for those after the first."""
    num_minibatches: Count = 1
    """Minibatches of one epoch, each of whole sequences."""
    optimizer: Literal["rmsprop", "adam"] = "rmsprop"
    """RMSProp, as published, or Adam."""
    learning_rate: Rate = 3e-3
    """Learning rate; the initial one if it is annealed."""
    anneal_lr: bool = True
    """Anneal the learning rate linearly to zero over all planned updates."""
    rms_decay: ScheduledFraction = 0.99
    """Decay of RMSProp's running mean of squared gradients; not used with Adam."""
    rms_eps: ScheduledPositive = 1e-5
    """Added to that mean before the square root; the paper's 0.1 is for sums over samples. Not used with Adam."""
    gamma: ScheduledFraction = 0.99
    """Discount factor."""
    clip_rho: Annotated[Scheduled, Range(0, exclusive=True, finite=False)] = 1.0
    """Bound on the ratio that weighs a step's error and the policy gradient (rho-bar)."""
    clip_c: Annotated[Scheduled, Range(0, exclusive=True, finite=False)] = 1.0
    """Bound on the ratios that propagate errors back in time (c-bar)."""
    vtrace_lambda: ScheduledFraction = 1.0
    """Decay of the trace; 1 as published."""
    norm_adv: bool = True
    """Standardise the advantages of each batch, as they are before it is learned from."""
    ent_coef: ScheduledNonNegative = 0.01
    """Weight of the entropy bonus."""
    vf_coef: ScheduledNonNegative = 0.5
    """Weight of the value loss."""
    max_grad_norm: Annotated[Scheduled, Range(0, finite=False)] = 0.5
    """Largest global norm of gradients; longer ones are scaled down to it. The paper's 40 is for sums."""
    normalize_observations: bool = False
    """Standardise observations by running statistics, which are part of the training state."""
    normalize_rewards: bool = False
    """Divide rewards by the running standard deviation of the discounted return."""
    normalize_values: bool = True
    """Standardise the critic's targets by running statistics, which are part of the training state."""
    num_shards: Count | None = None
    """Logical shards within which sequences are shuffled, a multiple of the device count. Default: automatic."""
    network: NetworkConfig = field(default_factory=NetworkConfig)
    """The actor-critic network."""

    def __post_init__(self) -> None:
        check_fields(self)


class StepValues(NamedTuple):
    """IMPALA's training samples: `[T, E, ...]` in a batch, `[N, T, ...]` in a minibatch."""

    observation: Observation
    action_mask: PyTree[Bool[Array, "..."]]
    action: PyTree[Array]
    log_prob: Float[Array, "..."]
    """Log-probability of the action under the behaviour policy."""
    reward: Float[Array, "..."]
    terminated: Bool[Array, "..."]
    truncated: Bool[Array, "..."]
    final_observation: PyTree[Array]
    """`()` if there are final values."""
    final_value: PyTree[Float[Array, "..."]]
    """Value after a truncated step by the behaviour policy's weights; `()` unless observations are large."""


class Ends(NamedTuple):
    """The ends of each sequence: `[E, ...]` in a batch, `[N, ...]` in a minibatch."""

    start_memory: Memory
    """Memory of the behaviour policy before the first step."""
    last_observation: Observation
    """Observation after the last step."""
    units: PyTree[Array] = ()
    """Statistics of targets from before the batch, for each sequence; `()` unless values are normalised."""
    moments: PyTree[Array] = ()
    """`Moments` of the batch's advantages, for each sequence; `()` unless they are standardised."""


class Outputs(NamedTuple):
    """Outputs of the learner's network for each step `[T]`."""

    log_prob: Float[Array, "..."]
    entropy: Float[Array, "..."]
    value: Float[Array, "..."]
    memory: Memory
    """Memory after the step, before any reset."""


def impala(
    env: Environment | HostEnvironment | GymnasiumObject | str,
    config: IMPALAConfig | Mapping[str, Any] | None = None,
    *,
    params: Params | None = None,
    network: MakeNetwork | NetworkConfig | str | None = None,
    **overrides: Any,
) -> Graph:
    """IMPALA on an environment, as a graph.

    Args:
        env: what `rollmill.make` returns, an `Environment` of your own, an id, or what `gymnasium.make` returns.
        config: hyperparameters; single ones can be given as keywords instead: `impala(env, num_envs=8)`.
        params: parameters of the environment instead of its own; a leaf with one more axis,
            `[num_envs, ...]`, holds one value for each environment.
        network: a `NetworkConfig` instead of `config.network`, or the name of its torso; or a function that
            makes your own network, `(key, observation_space, action_space) -> ActorCritic`.
        **overrides: fields of `IMPALAConfig` to replace. `learning_rate` may be an Optax schedule, by the number
            of updates, which replaces annealing.

    Raises:
        UsageError: invalid names, types or sizes, spaces that IMPALA does not support, or an environment of
            several agents.
    """
    config, choices = configured(IMPALAConfig, env, config, network, overrides)
    parts = parts_of(env, choices, params=params)
    loops = loops_of(config, by_sequence=True, epochs=config.update_epochs, num_minibatches=config.num_minibatches)
    return graph_of(
        "impala",
        parts,
        choices,
        loops,
        scaling=_scaling,
        prepare=partial(prepare, parts.policy, config),
        condense=parts.policy.condensation,
        gradients=partial(gradients, parts.policy, config),
    )


def _scaling(config: Any) -> optax.GradientTransformation:
    if config.optimizer not in OPTIMIZERS:
        raise unknown_name("optimizer", config.optimizer, OPTIMIZERS)
    if config.optimizer == "adam":
        return optax.scale_by_adam(eps=1e-5)
    return optax.scale_by_rms(decay=config.rms_decay, eps=config.rms_eps)


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
    """Makes a batch of sequences, and updates the statistics for the next rollout.

    `gradients` computes values. They are computed here as well for statistics of targets and advantages.
    """
    config = current(config, numbers_now(learner))
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
    )
    batch = Batch(samples, Ends(trajectory.start_memory, policy.normalise(weights, trajectory.observation)))
    if weights.values is None and not config.norm_adv:
        return learner, batch
    found, units, moments = _estimates(policy, config, weights, batch), (), ()
    if weights.values is not None:
        units, learner = (
            weights.values,
            update_value_statistics(learner, found.target, reduce=reduce, replicas=replicas),
        )
    if config.norm_adv:
        moments = moments_of(found.advantage, reduce)
    each = lambda leaf: jnp.broadcast_to(leaf, (len(found.target),))
    units, moments = jax.tree.map(each, (units, moments))
    return learner, batch._replace(sequences=batch.sequences._replace(units=units, moments=moments))


def _estimates(policy: NetworkPolicy, config: Any, weights: PolicyWeights, batch: Batch) -> Advantages:
    """V-trace advantages and targets of a rollout, `[E, T]`, of few sequences at a time if they are large."""

    def estimate(minibatch: Batch) -> Advantages:
        return _vtrace(policy, config, weights, minibatch, _outputs(policy, weights, minibatch))

    def estimate_of(env: Array) -> Advantages:
        sequence = jax.tree.map(lambda leaf: leaf[None, :, env], batch.samples)
        ends = jax.tree.map(lambda leaf: leaf[None, env], batch.sequences)
        return jax.tree.map(lambda leaf: leaf[0], estimate(Batch(sequence, ends)))

    num_steps, num_envs = batch.samples.reward.shape
    if policy.is_large:  # another copy of all images would take as much memory as the trajectory
        at_once = max(1, IMAGES_AT_ONCE // num_steps)
        return jax.lax.map(estimate_of, jnp.arange(num_envs), batch_size=at_once)
    by_sequence = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), batch.samples)
    return estimate(Batch(by_sequence, batch.sequences))


def gradients(
    policy: NetworkPolicy, config: Any, learner: ActorCriticLearner, minibatch: Batch
) -> tuple[PyTree[Array], Metrics]:
    """Gradients of the mean loss over a minibatch of sequences, with respect to the network's weights."""
    config, (_, _, units, moments) = current(config, numbers_now(learner)), minibatch.sequences

    def mean_loss(network):
        weights = replace(learner.weights, network=network)
        outputs = _outputs(policy, weights, minibatch)
        in_units = replace(jax.lax.stop_gradient(weights), values=_of_all(units))
        advantages = jax.lax.stop_gradient(_vtrace(policy, config, in_units, minibatch, outputs))
        normalised = Advantages(
            _of_all(moments).standardise(advantages.advantage) if moments else advantages.advantage,
            learner.weights.normalised_value(advantages.target),
        )
        losses = jax.vmap(jax.vmap(partial(_loss, config)))(
            outputs.log_prob, outputs.entropy, outputs.value, minibatch.samples.log_prob, normalised
        )
        loss, metrics = jax.tree.map(jnp.mean, losses)
        value = in_units.raw_value(jax.lax.stop_gradient(outputs.value))
        return loss, {**metrics, **value_moments(value, advantages.target)}

    (total, metrics), slopes = jax.value_and_grad(mean_loss, has_aux=True)(learner.weights.network)
    return slopes, {"losses/total": total, **metrics}


def _of_all(same: PyTree[Array]) -> Any:
    """Returns the first of equal leaves `[N, ...]`, or None if there are no leaves."""
    return jax.tree.map(lambda leaf: leaf[0], same) if jax.tree.leaves(same) else None


def _outputs(policy: NetworkPolicy, weights: PolicyWeights, minibatch: Batch) -> Outputs:
    """Outputs for each sequence `[N, T]` of a minibatch."""
    return jax.vmap(partial(_unroll, policy, weights))(minibatch.samples, minibatch.sequences.start_memory)


def _unroll(policy: NetworkPolicy, weights: PolicyWeights, steps: StepValues, start_memory: Memory) -> Outputs:
    """Outputs for ONE environment's sequence `[T, ...]`: by a scan over the memory, by a vmap without memory."""

    def evaluate(memory, step):
        output = policy.forward(weights, memory, step.observation, step.action_mask)
        distribution = output.distribution
        return Outputs(distribution.log_prob(step.action), distribution.entropy(), output.value, output.memory)

    def scan_step(memory, inputs):
        step, begins = inputs
        outputs = evaluate(jax.tree.map(partial(jnp.where, begins), reset_memory, memory), step)
        return outputs.memory, outputs

    if not policy.recurrent:
        return jax.vmap(partial(evaluate, start_memory))(steps)
    reset_memory = policy.start_memory()
    begins = beginnings(steps.terminated | steps.truncated)
    return jax.lax.scan(scan_step, start_memory, (steps, begins))[1]


def _vtrace(
    policy: NetworkPolicy, config: Any, weights: PolicyWeights, minibatch: Batch, outputs: Outputs
) -> Advantages:
    """V-trace advantages and targets of each sequence `[N, T]`, in the units of rewards.

    Final observations are evaluated only if an episode of the minibatch was truncated.
    """
    steps: StepValues = minibatch.samples
    raw_value = lambda memory, observation: weights.raw_value(
        policy.forward(weights, memory, observation, ()).value
    )
    value_n, value = jax.vmap(raw_value), weights.raw_value(outputs.value)
    final_value = steps.final_value
    if is_missing(final_value):
        final_value = jax.lax.cond(
            jnp.any(steps.truncated),
            lambda: jax.vmap(value_n)(outputs.memory, steps.final_observation),
            lambda: jnp.zeros_like(steps.reward),
        )
    last_memory = jax.tree.map(lambda leaf: leaf[:, -1], outputs.memory)
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
    return jax.vmap(estimate)(log_ratio, steps.reward, value, next_value, done)


def _loss(
    config: Any,
    log_prob: Float[Array, ""],
    entropy: Float[Array, ""],
    value: Float[Array, ""],
    old_log_prob: Float[Array, ""],
    advantages: Advantages,
) -> tuple[Float[Array, ""], Metrics]:
    """Loss of one step (Espeholt et al., 2018, section 4.2)."""
    log_ratio = log_prob - old_log_prob
    policy_loss = policy_gradient_loss(log_prob, advantages.advantage)
    value_loss = squared_value_loss(value, advantages.target)
    loss = policy_loss + config.vf_coef * value_loss - config.ent_coef * entropy
    return loss, {
        "losses/policy": policy_loss,
        "losses/value": value_loss,
        "losses/entropy": entropy,
        "losses/approx_kl": approximate_kl(log_ratio),
        "losses/rho": jnp.minimum(config.clip_rho, jnp.exp(log_ratio)),
    }
