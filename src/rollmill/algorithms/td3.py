"""Twin delayed deep deterministic policy gradients (Fujimoto et al., ICML 2018).

Departures from the paper: gradients of critics and actor use the same minibatch and weights, so the actor follows
the critic before its update. Noise is relative to half the action range.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Bool, Float, PyTree

from rollmill.algorithms.hyperparameters import as_data, current_config, current_hyperparameters
from rollmill.algorithms.off_policy import (
    FunctionalNetwork,
    OffPolicyConfig,
    OffPolicyParts,
    StepCounts,
    adam,
    check_continuous,
    check_interval,
    count_update,
    explores_at_random,
    functional_network,
    initial_progress,
    learner_hyperparameters,
    learning_rate_metric,
    off_policy_graph,
    prepare_off_policy,
    random_action,
    update_target,
)
from rollmill.algorithms.optimisers import Optimiser, descend
from rollmill.core.bounds import Count, Rate, ScheduledNonNegative
from rollmill.core.field_help import with_field_help
from rollmill.core.types import (
    Action,
    Environment,
    GymnasiumObject,
    HostEnvironment,
    Key,
    Memory,
    Observation,
    Params,
)
from rollmill.dataflow import COMPUTED, Decision, Graph, Hyperparameters, MeanGradients, Metrics, Transitions
from rollmill.networks import NetworkConfig, action_critic, deterministic_actor

ACTOR_METRICS = ("losses/policy", "losses/total", "losses/gradient_norm")
"""Metrics that are computed only in updates of the actor."""


@with_field_help
@dataclass(frozen=True)
class TD3Config(OffPolicyConfig):
    """Hyperparameters of TD3, named as in the literature."""

    learning_starts: Count = 25_000
    """Number of environment steps with random actions that are stored before learning begins."""
    learning_rate: Rate = 3e-4
    """Learning rate of Adam. If it is annealed, this is the initial value."""
    policy_delay: Count = 2
    """Number of critic updates for each update of the actor and the target networks."""
    exploration_noise: ScheduledNonNegative = 0.1
    """Standard deviation of the exploration noise added to actions, in multiples of half the width of the action
    space."""
    target_noise: ScheduledNonNegative = 0.2
    """Standard deviation of the noise added to the target actor's actions, in multiples of half the width of the
    action space."""
    target_noise_clip: ScheduledNonNegative = 0.5
    """Bound of the noise added to the target actor's actions, in multiples of half the width of the action
    space."""


class TD3Networks(NamedTuple):
    """Parameters of TD3 that are differentiated, or the states of their optimisers."""

    actor: PyTree[Array]
    critics: PyTree[Array]
    """Parameters of all critics."""


class TD3Learner(eqx.Module):
    """Learner state of TD3: networks, target networks and optimiser states."""

    networks: TD3Networks
    targets: TD3Networks
    optimisers: TD3Networks
    progress: StepCounts
    hyperparameters: Hyperparameters = eqx.field(default_factory=dict)
    """Hyperparameters that the fragments read."""

    @property
    def updates_done(self) -> Float[Array, ""]:
        """Number of updates that the learner has made so far."""
        return self.progress.updates_done


class TD3Weights(NamedTuple):
    """Weights that the TD3 policy needs to act."""

    actor: PyTree[Array]
    is_random: Bool[Array, ""]
    """Whether actions are still random."""
    exploration_noise: Float[Array, ""]
    """Standard deviation of the noise of an action."""


def td3(
    env: Environment | HostEnvironment | GymnasiumObject | str,
    config: TD3Config | Mapping[str, Any] | None = None,
    *,
    params: Params | None = None,
    network: NetworkConfig | str | None = None,
    **overrides: Any,
) -> Graph:
    """Builds TD3 for an environment with bounded continuous actions, as a graph that `rollmill.train` trains.

    Args:
        env: an id, the result of `rollmill.make` or `gymnasium.make`, or your own `Environment`.
        config: hyperparameters. Single hyperparameters can be given as keyword arguments instead:
            `td3(env, num_envs=8)`.
        params: parameters that replace the environment's own. A leaf with an additional leading axis
            `[num_envs, ...]` holds one value for each environment.
        network: a `NetworkConfig` that replaces `config.network`, or the name of a torso.
        **overrides: fields of `TD3Config` to replace. `learning_rate` may be an Optax schedule, which is a
            function of the number of updates and replaces annealing.

    Raises:
        UsageError: a name, type or size is invalid, or the action space is not a bounded `Box`.

    Examples:
        >>> algorithm = rollmill.td3("Pendulum-v1", total_timesteps=100_000)
    """
    parts = prepare_off_policy(TD3Config, env, config, overrides, params=params, network=network)
    check_interval("policy_delay", parts.config.policy_delay)
    return deterministic_graph("td3", parts, adam(parts), num_critics=2, delay=parts.config.policy_delay)


def deterministic_graph(
    name: str, parts: OffPolicyParts, of_critics: Optimiser, *, num_critics: int, delay: int
) -> Graph:
    """Returns the graph of deterministic policy gradients, which TD3 and DDPG share.

    Args:
        name: name of the algorithm.
        parts: result of `prepare_off_policy`. If the configuration has `target_noise`, the target's actions are
            smoothed.
        of_critics: function that returns the optimiser of the critics.
        num_critics: number of critics. The target uses the lowest of their values.
        delay: critic updates for each update of the actor and the target networks.
    """
    agent = _agent_of(name, parts, num_critics, delay)
    optimisers = _Optimisers(adam(parts, interval=delay), of_critics)
    rate, numbers = learning_rate_metric(parts, interval=delay), learner_hyperparameters(parts)
    return off_policy_graph(
        name,
        parts,
        policy=partial(_explore, agent),
        greedy=partial(_act, agent),
        start_learner=partial(_start, agent, optimisers, numbers),
        weights=lambda learner: TD3Weights(
            learner.networks.actor,
            explores_at_random(parts.config, learner.progress),
            current_config(parts.config, current_hyperparameters(learner)).exploration_noise,
        ),
        gradients=MeanGradients(partial(_loss, agent), lambda learner: learner.networks),
        update=partial(_update, agent, optimisers),
        report=lambda learner, batch: rate(learner, learner.optimisers.actor),
        hyperparameters=numbers,
    )


class _DeterministicAgent(NamedTuple):
    """Networks as functions, with the bounds and the noise of actions."""

    actor: FunctionalNetwork
    critic: FunctionalNetwork
    action_space: spaces.Box
    config: Any
    num_critics: int
    delay: int

    @property
    def smooths(self) -> bool:
        """True if noise smooths the target's actions."""
        return hasattr(self.config, "target_noise")

    def disturbed(self, action: Action, noise: Float[Array, "..."]) -> Action:
        """Returns an action with noise, in halves of the action space's width, within the bounds."""
        low, high = (
            jnp.asarray(np.asarray(b, np.float32)) for b in (self.action_space.low, self.action_space.high)
        )
        return jnp.clip(action + noise * 0.5 * (high - low), low, high)


class _Optimisers(NamedTuple):
    actor: Optimiser
    critics: Optimiser


def _agent_of(name: str, parts: OffPolicyParts, num_critics: int, delay: int) -> _DeterministicAgent:
    space = check_continuous(name, parts.env.action_space, "dqn, sac and ppo support discrete actions")
    make = {
        "observation_space": parts.env.observation_space,
        "action_space": space,
        "config": parts.config.network,
    }
    actor, critic = partial(deterministic_actor, **make), partial(action_critic, **make)
    return _DeterministicAgent(
        functional_network(actor), functional_network(critic), space, parts.config, num_critics, delay
    )


# --- the fragments ------------------------------------------------------------------------------------


def _explore(
    agent: _DeterministicAgent,
    weights: TD3Weights,
    key: Key,
    memory: Memory,
    observation: Observation,
    action_mask: PyTree,
) -> Decision:
    """Returns the policy's action with noise, or a random action before learning begins."""
    noise_key, random_key = jax.random.split(key)
    action = agent.actor(weights.actor, observation)
    noise = weights.exploration_noise * jax.random.normal(noise_key, action.shape)
    random = random_action(agent.action_space, random_key, action_mask)
    return Decision(jnp.where(weights.is_random, random, agent.disturbed(action, noise)), memory, ())


def _act(
    agent: _DeterministicAgent,
    weights: TD3Weights,
    key: Key,
    memory: Memory,
    observation: Observation,
    action_mask: PyTree,
) -> Decision:
    """Returns the policy's action."""
    return Decision(agent.actor(weights.actor, observation), memory, ())


def _start(
    agent: _DeterministicAgent, optimisers: _Optimisers, numbers: Mapping[str, float], key: Key
) -> TD3Learner:
    held, (actor_key, *critic_keys) = as_data(numbers), jax.random.split(key, 1 + agent.num_critics)
    networks = TD3Networks(agent.actor.init(actor_key), tuple(map(agent.critic.init, critic_keys)))
    states = TD3Networks(optimisers.actor.init(networks.actor), optimisers.critics.init(networks.critics))
    return TD3Learner(networks, networks, states, initial_progress(), held)


def _loss(
    agent: _DeterministicAgent,
    networks: TD3Networks,
    learner: TD3Learner,
    sample: Transitions,
    sequence: PyTree[Array],
) -> tuple[Float[Array, ""], Metrics]:
    """Returns the losses of ONE transition, each differentiated only with respect to its own network."""
    config, targets = current_config(agent.config, current_hyperparameters(learner)), learner.targets
    next_action = agent.actor(targets.actor, sample.next_observation)
    if agent.smooths:
        noise = config.target_noise * jax.random.normal(sample.key, next_action.shape)
        noise = jnp.clip(noise, -config.target_noise_clip, config.target_noise_clip)
        next_action = agent.disturbed(next_action, noise)
    next_values = [agent.critic(c, sample.next_observation, next_action) for c in targets.critics]
    next_value = reduce(jnp.minimum, next_values)
    target = sample.reward + sample.discount * next_value
    values = jnp.stack([agent.critic(c, sample.observation, sample.action) for c in networks.critics])
    critic_loss = sample.weight * 0.5 * jnp.sum(jnp.square(values - target))

    def actor_loss() -> Float[Array, ""]:
        action = agent.actor(networks.actor, sample.observation)
        return -agent.critic(jax.lax.stop_gradient(networks.critics[0]), sample.observation, action)

    moves = _moves_actor(agent, learner)
    policy_loss = jax.lax.cond(moves, actor_loss, lambda: jnp.float32(0))
    return critic_loss + policy_loss, {
        "losses/critic": critic_loss,
        "losses/policy": policy_loss,
        "losses/q": jnp.mean(values),
        **{COMPUTED + name: moves.astype(jnp.float32) for name in ACTOR_METRICS},
    }


def _moves_actor(agent: _DeterministicAgent, learner: TD3Learner) -> Bool[Array, ""]:
    return (learner.progress.updates + 1) % agent.delay == 0


def _update(
    agent: _DeterministicAgent,
    optimisers: _Optimisers,
    learner: TD3Learner,
    gradients: TD3Networks,
    *,
    share: float = 1.0,
) -> TD3Learner:
    before, states, held = learner.networks, learner.optimisers, current_hyperparameters(learner)
    critics, critics_state = descend(
        optimisers.critics, before.critics, states.critics, gradients.critics, held, share=share
    )
    moved = descend(optimisers.actor, before.actor, states.actor, gradients.actor, held, share=share)
    moves = _moves_actor(agent, learner)
    if_due = lambda new, old: jax.tree.map(partial(jnp.where, moves), new, old)
    actor, actor_state = if_due(moved, (before.actor, states.actor))
    networks = TD3Networks(actor, critics)
    targets = if_due(
        update_target(learner.targets, networks, current_config(agent.config, held).tau), learner.targets
    )
    progress = count_update(learner.progress, interval=agent.delay)
    optimisers_after = TD3Networks(actor_state, critics_state)
    return TD3Learner(networks, targets, optimisers_after, progress, learner.hyperparameters)
