"""IMPALA (Espeholt et al., ICML 2018) as a graph of four fragments.

The learner takes whole sequences, as some policy collected them, and corrects by V-trace for that policy
being another than its own: because the weights that collected were some updates old, or because the
learner passes over a batch more than once. The graph knows nothing of asynchrony. Executed
synchronously, in one pass and one minibatch, all ratios are 1.

Departures from the paper: losses are means over samples, not sums, so that they do not grow with the
batch; and truncated episodes are bootstrapped from their final observation.

Shape letters: `T` steps, `E` environments held here, `N` sequences of a minibatch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PyTree

from rollmill.algorithms.building import configured, graph_of, loops_of, parts_of
from rollmill.algorithms.fragments import MakeNetwork, NetworkPolicy, PolicyWeights
from rollmill.algorithms.losses import approximate_kl, policy_gradient_loss, squared_value_loss
from rollmill.algorithms.on_policy import ActorCriticLearner, beginnings, take_in
from rollmill.algorithms.reports import value_moments
from rollmill.algorithms.returns import Advantages, bootstrap_values, vtrace
from rollmill.algorithms.sizes import check_fractions
from rollmill.core.bounds import Count, Fraction, NonNegative, Positive, Range, check_bounds
from rollmill.core.errors import unknown_name
from rollmill.core.types import Environment, HostEnvironment, Memory, Observation, Params
from rollmill.dataflow import Batch, Graph, Metrics, Reduce, Trajectory
from rollmill.networks import NetworkConfig

OPTIMIZERS = ("rmsprop", "adam")


@dataclass(frozen=True)
class IMPALAConfig:
    """Hyperparameters of IMPALA, under the field's names."""

    total_timesteps: Count = 500_000
    """Environment steps of the whole training, over all environments."""
    num_envs: Count = 16
    """Environments that run side by side, over all actors."""
    num_steps: Count = 16
    """Steps of a sequence (the paper's unroll length)."""
    update_epochs: Count = 1
    """Passes over the batch in one iteration; V-trace corrects for those after the first."""
    num_minibatches: Count = 1
    """Minibatches of one pass, cut between environments."""
    optimizer: Literal["rmsprop", "adam"] = "rmsprop"
    """RMSProp, as published, or Adam."""
    learning_rate: NonNegative = 3e-3
    """Step size, at the start where it is annealed."""
    anneal_lr: bool = True
    """Let the step size fall linearly, to zero after the last of all planned updates."""
    rms_decay: Fraction = 0.99
    """Decay of RMSProp's running mean of squared gradients."""
    rms_eps: Positive = 1e-5
    """Added to that mean before its root is divided by; the paper's 0.1 belongs to sums over samples."""
    gamma: Fraction = 0.99
    """Discount factor."""
    clip_rho: Annotated[float, Range(0, exclusive=True, finite=False)] = 1.0
    """Bound on the ratio that weighs a step's error, and the policy's gradient (rho-bar)."""
    clip_c: Annotated[float, Range(0, exclusive=True, finite=False)] = 1.0
    """Bound on the ratios that carry errors back in time (c-bar)."""
    vtrace_lambda: Fraction = 1.0
    """Decay of what is carried back; 1 as published."""
    ent_coef: NonNegative = 0.01
    """Weight of the entropy bonus."""
    vf_coef: NonNegative = 0.5
    """Weight of the value loss."""
    max_grad_norm: Annotated[float, Range(0, finite=False)] = 0.5
    """Gradients are scaled down to this global norm; the paper's 40 belongs to sums over samples."""
    normalize_observations: bool = False
    """Standardise observations by running statistics, which are part of the training state."""
    normalize_rewards: bool = False
    """Divide rewards by the running standard deviation of the discounted return."""
    num_shards: Count | None = None
    """Logical shards that shuffling stays inside, a multiple of the device count; chosen if left out."""
    network: NetworkConfig = field(default_factory=NetworkConfig)
    """The actor-critic network."""

    def __post_init__(self) -> None:
        check_bounds(self)


class StepValues(NamedTuple):
    """What IMPALA learns from: `[T, E, ...]` in a batch, `[N, T, ...]` in a minibatch."""

    observation: Observation
    action_mask: PyTree[Bool[Array, "..."]]
    action: PyTree[Array]
    log_prob: Float[Array, "..."]
    """By the policy that collected."""
    reward: Float[Array, "..."]
    terminated: Bool[Array, "..."]
    truncated: Bool[Array, "..."]
    final_observation: Observation


class Ends(NamedTuple):
    """The ends of each sequence: `[E, ...]` in a batch, `[N, ...]` in a minibatch."""

    start_memory: Memory
    """Memory of the policy that collected, before the first step."""
    last_observation: Observation
    """Where the sequence was cut."""


class Outputs(NamedTuple):
    """What the network that learns says of each step `[T]`."""

    log_prob: Float[Array, "..."]
    entropy: Float[Array, "..."]
    value: Float[Array, "..."]
    memory: Memory
    """After the step, before any reset."""


def impala(
    env: Environment | HostEnvironment | gymnasium.Env | str,
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
            `[num_envs, ...]`, differs from environment to environment.
        network: a `NetworkConfig` instead of `config.network`, or the name of its torso; or your own, as the
            function that makes it, `(key, observation_space, action_space) -> ActorCritic`.
        **overrides: fields of `IMPALAConfig` to replace. `learning_rate` may be a schedule of Optax, which
            gives the step size after a number of updates, in the place of annealing.

    Raises:
        UsageError: for names, types and sizes that cannot be used, spaces that IMPALA cannot handle, and
            environments of several agents.
    """
    config, choices = configured(IMPALAConfig, config, network, overrides)
    check_fractions({name: getattr(config, name) for name in ("gamma", "vtrace_lambda", "rms_decay")})
    parts = parts_of(env, choices, params=params)
    loops = loops_of(config, by_sequence=True, epochs=config.update_epochs, num_minibatches=config.num_minibatches)
    return graph_of(
        "impala",
        parts,
        choices,
        loops,
        scaling=_scaling(config),
        prepare=partial(prepare, parts.policy),
        gradients=partial(gradients, parts.policy, config),
    )


def _scaling(config: IMPALAConfig) -> optax.GradientTransformation:
    if config.optimizer not in OPTIMIZERS:
        raise unknown_name("optimizer", config.optimizer, OPTIMIZERS)
    if config.optimizer == "adam":
        return optax.scale_by_adam(eps=1e-5)
    return optax.scale_by_rms(decay=config.rms_decay, eps=config.rms_eps)


# --- the fragments and what lies between them ---------------------------------------------------------


def prepare(
    policy: NetworkPolicy, learner: ActorCriticLearner, trajectory: Trajectory, *, reduce: Reduce, replicas: int
) -> tuple[ActorCriticLearner, Batch]:
    """A rollout as sequences, and statistics for the next one; values are left to `gradients`."""
    steps, weights = trajectory.steps, learner.weights
    after, reward = take_in(learner, steps, reduce=reduce, replicas=replicas)
    samples = StepValues(
        observation=policy.normalise(weights, steps.observation),
        action_mask=steps.action_mask,
        action=steps.action,
        log_prob=steps.extras.log_prob,
        reward=reward,
        terminated=steps.terminated,
        truncated=steps.truncated,
        final_observation=policy.normalise(weights, steps.final_observation),
    )
    ends = Ends(trajectory.start_memory, policy.normalise(weights, trajectory.observation))
    return after, Batch(samples, ends)


def gradients(
    policy: NetworkPolicy, config: IMPALAConfig, learner: ActorCriticLearner, minibatch: Batch
) -> tuple[PyTree[Array], Metrics]:
    """Of the mean loss over a minibatch of sequences, with respect to the network's weights."""

    def mean_loss(network):
        weights = PolicyWeights(network, learner.weights.observations)
        said = jax.vmap(partial(_unroll, policy, weights))(minibatch.samples, minibatch.sequences.start_memory)
        still = jax.lax.stop_gradient(weights)
        learned = jax.lax.stop_gradient(_targets(policy, config, still, minibatch, said))
        losses = jax.vmap(jax.vmap(partial(_loss, config)))(
            said.log_prob, said.entropy, said.value, minibatch.samples.log_prob, learned
        )
        loss, metrics = jax.tree.map(jnp.mean, losses)
        return loss, {**metrics, **value_moments(jax.lax.stop_gradient(said.value), learned.target)}

    (total, metrics), slopes = jax.value_and_grad(mean_loss, has_aux=True)(learner.weights.network)
    return slopes, {"losses/total": total, **metrics}


def _unroll(policy: NetworkPolicy, weights: PolicyWeights, steps: StepValues, start_memory: Memory) -> Outputs:
    """ONE environment's sequence `[T, ...]`, the memory carried along it; at once where there is none."""

    def say(memory, step):
        output = policy.forward(weights, memory, step.observation, step.action_mask)
        distribution = output.distribution
        return Outputs(distribution.log_prob(step.action), distribution.entropy(), output.value, output.memory)

    def carry_on(memory, now):
        step, begins = now
        said = say(jax.tree.map(partial(jnp.where, begins), fresh, memory), step)
        return said.memory, said

    if not policy.recurrent:
        return jax.vmap(partial(say, start_memory))(steps)
    fresh = policy.start_memory()
    begins = beginnings(steps.terminated | steps.truncated)
    return jax.lax.scan(carry_on, start_memory, (steps, begins))[1]


def _targets(
    policy: NetworkPolicy, config: IMPALAConfig, weights: PolicyWeights, minibatch: Batch, said: Outputs
) -> Advantages:
    """V-trace of each sequence `[N, T]`.

    Final observations are evaluated only where an episode of the minibatch was truncated.
    """
    steps: StepValues = minibatch.samples
    value_of = jax.vmap(lambda memory, seen: policy.forward(weights, memory, seen, ()).value)
    final_value = jax.lax.cond(
        jnp.any(steps.truncated),
        lambda: jax.vmap(value_of)(said.memory, steps.final_observation),
        lambda: jnp.zeros_like(steps.reward),
    )
    last_memory = jax.tree.map(lambda leaf: leaf[:, -1], said.memory)
    last_value = value_of(last_memory, minibatch.sequences.last_observation)
    next_value = jax.vmap(bootstrap_values)(said.value, last_value, final_value, steps.terminated, steps.truncated)
    correct = partial(
        vtrace,
        gamma=config.gamma,
        clip_rho=config.clip_rho,
        clip_c=config.clip_c,
        trace_decay=config.vtrace_lambda,
    )
    done = steps.terminated | steps.truncated
    return jax.vmap(correct)(said.log_prob - steps.log_prob, steps.reward, said.value, next_value, done)


def _loss(
    config: IMPALAConfig,
    log_prob: Float[Array, ""],
    entropy: Float[Array, ""],
    value: Float[Array, ""],
    old_log_prob: Float[Array, ""],
    learned: Advantages,
) -> tuple[Float[Array, ""], Metrics]:
    """Loss of one step (Espeholt et al., 2018, section 4.2)."""
    log_ratio = log_prob - old_log_prob
    policy_loss = policy_gradient_loss(log_prob, learned.advantage)
    value_loss = squared_value_loss(value, learned.target)
    loss = policy_loss + config.vf_coef * value_loss - config.ent_coef * entropy
    return loss, {
        "losses/policy": policy_loss,
        "losses/value": value_loss,
        "losses/entropy": entropy,
        "losses/approx_kl": approximate_kl(log_ratio),
        "losses/rho": jnp.minimum(config.clip_rho, jnp.exp(log_ratio)),
    }
