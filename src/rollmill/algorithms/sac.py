"""Soft actor-critic with an automatic temperature (Haarnoja et al., 2018, "Algorithms and Applications").

If actions are discrete, expectations are computed over all actions (Christodoulou, 2019). The gradients of
critics, actor and temperature use the same minibatch and the same weights.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, NamedTuple

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
from rollmill.core.bounds import Count, Positive, Range, Scheduled, ScheduledPositive
from rollmill.core.errors import UsageError
from rollmill.core.field_help import with_field_help
from rollmill.core.spaces import space_text
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
from rollmill.dataflow import Decision, Graph, Hyperparameters, MeanGradients, Metrics, PolicyOutputs, Transitions
from rollmill.networks import NetworkConfig, action_critic, action_values, stochastic_actor

DISCRETE_ENTROPY = 0.89
"""Target entropy of discrete actions, as a fraction of the maximum. Christodoulou (2019) uses 0.98."""


@with_field_help
@dataclass(frozen=True)
class SACConfig(OffPolicyConfig):
    """Hyperparameters of SAC, named as in the literature."""

    STATIC_FIELDS: ClassVar[tuple[str, ...]] = ("initial_temperature",)
    """Numeric hyperparameters that are constants of compiled programs."""

    learning_starts: Count = 5_000
    """Number of environment steps with random actions that are stored before learning begins."""
    critic_learning_rate: ScheduledPositive = 1e-3
    """Learning rate of Adam for the critics and the temperature."""
    initial_temperature: Positive = 1.0
    """Initial temperature, which is the weight of the entropy."""
    learn_temperature: bool = True
    """Learn the temperature, so that the policy's entropy stays near the target."""
    target_entropy: Annotated[Scheduled, Range()] | None = None
    """Target entropy in nats, for continuous actions scaled to the range from -1 to 1. Default: minus the number
    of continuous actions, or 0.89 of the maximum entropy of the legal discrete actions."""


class SACNetworks(NamedTuple):
    """Parameters of SAC that are differentiated, or the states of their optimisers."""

    actor: PyTree[Array]
    critics: PyTree[Array]
    """Parameters of the two critics."""
    log_temperature: PyTree[Array]


class SACLearner(eqx.Module):
    """Learner state of SAC: networks, target critics and optimiser states."""

    networks: SACNetworks
    targets: PyTree[Array]
    """The two critics that targets are computed with."""
    optimisers: SACNetworks
    progress: StepCounts
    hyperparameters: Hyperparameters = eqx.field(default_factory=dict)
    """Hyperparameters that the fragments read."""

    @property
    def updates_done(self) -> Float[Array, ""]:
        """Number of updates that the learner has made so far."""
        return self.progress.updates_done


class SACWeights(NamedTuple):
    """Weights that the SAC policy needs to act."""

    actor: PyTree[Array]
    is_random: Bool[Array, ""]
    """Whether actions are still random."""


def sac(
    env: Environment | HostEnvironment | GymnasiumObject | str,
    config: SACConfig | Mapping[str, Any] | None = None,
    *,
    params: Params | None = None,
    network: NetworkConfig | str | None = None,
    **overrides: Any,
) -> Graph:
    """Builds SAC for an environment with bounded continuous actions or discrete actions.

    The result is a graph that `rollmill.train` trains.

    Args:
        env: an id, the result of `rollmill.make` or `gymnasium.make`, or your own `Environment`.
        config: hyperparameters. Single hyperparameters can be given as keyword arguments instead:
            `sac(env, num_envs=8)`.
        params: parameters that replace the environment's own. A leaf with an additional leading axis
            `[num_envs, ...]` holds one value for each environment.
        network: a `NetworkConfig` that replaces `config.network`, or the name of a torso.
        **overrides: fields of `SACConfig` to replace. `learning_rate` may be an Optax schedule, which is a
            function of the number of updates and replaces annealing.

    Raises:
        UsageError: a name, type or size is invalid, or the action space is neither a bounded `Box` nor `Discrete`.

    Examples:
        >>> algorithm = rollmill.sac("Pendulum-v1", total_timesteps=100_000)
    """
    parts = prepare_off_policy(SACConfig, env, config, overrides, params=params, network=network)
    discrete = isinstance(parts.env.action_space, spaces.Discrete)
    make_critic = partial(action_values, duelling=False) if discrete else action_critic
    agent = soft_agent("sac", parts, stochastic_actor, make_critic)
    return soft_graph(
        "sac",
        parts,
        agent,
        policy=partial(_explore, agent),
        greedy=partial(_act, agent),
        weights=lambda learner: SACWeights(
            learner.networks.actor, explores_at_random(parts.config, learner.progress)
        ),
        gradients=MeanGradients(partial(_loss, agent), lambda learner: learner.networks),
        outputs=PolicyOutputs(
            distribution=lambda weights, memory, observation, action_mask: agent.distribution(
                weights.actor, observation, action_mask
            )
        ),
    )


def soft_graph(name: str, parts: OffPolicyParts, agent: "SoftAgent", **fragments: Any) -> Graph:
    """Assembles the graph of a soft actor-critic, whose learner is a `SACLearner`.

    Args:
        name: name of the algorithm.
        parts: result of `prepare_off_policy`, whose configuration is a `SACConfig`.
        agent: the networks.
        **fragments: the other arguments of `off_policy_graph`.
    """
    optimisers = SACOptimisers(adam(parts), adam(parts, "critic_learning_rate"))
    numbers = learner_hyperparameters(parts)
    return off_policy_graph(
        name,
        parts,
        start_learner=partial(_start, agent, optimisers, numbers),
        update=partial(_update, agent, optimisers),
        report=partial(_report, learning_rate_metric(parts)),
        hyperparameters=numbers,
        **fragments,
    )


class SoftAgent(NamedTuple):
    """Networks of a soft actor-critic as functions, with the action space and the hyperparameters.

    Networks with a memory are called with the features of their torso instead of an observation.
    """

    actor: FunctionalNetwork
    """Returns the action distribution for an observation and a mask of legal actions."""
    critic: FunctionalNetwork
    """Returns the value of a continuous action for an observation, or the values of all discrete actions."""
    action_space: spaces.Box | spaces.Discrete
    config: Any
    """Hyperparameters, with the values of a learner if it holds them."""

    def now(self, learner: SACLearner) -> "SoftAgent":
        """Returns the agent with the hyperparameters that a learner holds."""
        return self._replace(config=current_config(self.config, current_hyperparameters(learner)))

    @property
    def is_discrete(self) -> bool:
        """Whether the actions are discrete."""
        return isinstance(self.action_space, spaces.Discrete)

    @property
    def log_unit(self) -> float:
        """Logarithm of the action volume relative to actions between -1 and 1."""
        assert isinstance(self.action_space, spaces.Box)
        low, high = (np.asarray(bound, np.float64) for bound in (self.action_space.low, self.action_space.high))
        return float(np.sum(np.log(0.5 * (high - low))))

    def target_entropy(self, action_mask: PyTree) -> float | Float[Array, ""]:
        """Returns the target entropy for these legal actions."""
        if self.config.target_entropy is not None:
            return self.config.target_entropy
        if isinstance(self.action_space, spaces.Box):
            return -float(math.prod(self.action_space.shape))
        if isinstance(action_mask, tuple):
            return DISCRETE_ENTROPY * math.log(int(self.action_space.n))
        return DISCRETE_ENTROPY * jnp.log(jnp.maximum(jnp.sum(action_mask), 1).astype(jnp.float32))

    def distribution(self, actor: PyTree[Array], observation: Observation, action_mask: PyTree) -> Any:
        """Returns the action distribution."""
        return self.actor(actor, observation, None if isinstance(action_mask, tuple) else action_mask)

    def exploring_action(self, weights: Any, key: Key, observation: Observation, action_mask: PyTree) -> Action:
        """Returns an action drawn from the policy, or a random action before learning begins."""
        policy_key, random_key = jax.random.split(key)
        action = self.distribution(weights.actor, observation, action_mask).sample(policy_key)
        return jnp.where(weights.is_random, random_action(self.action_space, random_key, action_mask), action)


class SACOptimisers(NamedTuple):
    """Optimisers of a soft actor-critic."""

    actor: Optimiser
    others: Optimiser
    """Optimiser of the critics and of the temperature, each with a state of its own."""


class SoftView(NamedTuple):
    """Inputs of the networks in ONE step: observations, or features of recurrent networks."""

    actor: PyTree[Array]
    critics: tuple[PyTree[Array], ...]
    """The input of each critic."""


def soft_agent(
    name: str, parts: OffPolicyParts, make_actor: Callable[..., Any], make_critic: Callable[..., Any]
) -> SoftAgent:
    """Returns the agent of a soft actor-critic, given the functions that make its networks.

    Raises a `UsageError` if the action space is neither a bounded `Box` nor `Discrete`.
    """
    observation_space, space, config = parts.env.observation_space, parts.env.action_space, parts.config
    if not isinstance(space, spaces.Box | spaces.Discrete):
        raise UsageError(
            f"{name} needs a Discrete action space or a bounded Box, got {space_text(space)}. hint: ppo "
            "supports other action spaces."
        )
    if isinstance(space, spaces.Box) and not np.all(space.low < space.high):
        raise UsageError(
            f"{name} needs different lower and upper bounds for every action, but some bounds are equal in "
            f"{space_text(space)}. hint: remove these actions from the space."
        )
    given = {"observation_space": observation_space, "action_space": space, "config": config.network}
    actor, critic = (functional_network(partial(make, **given)) for make in (make_actor, make_critic))
    return SoftAgent(actor, critic, space, config)


# --- the fragments ------------------------------------------------------------------------------------


def _explore(
    agent: SoftAgent, weights: SACWeights, key: Key, memory: Memory, observation: Observation, action_mask: PyTree
) -> Decision:
    return Decision(agent.exploring_action(weights, key, observation, action_mask), memory, ())


def _act(
    agent: SoftAgent, weights: SACWeights, key: Key, memory: Memory, observation: Observation, action_mask: PyTree
) -> Decision:
    """Returns the policy's most likely action."""
    return Decision(agent.distribution(weights.actor, observation, action_mask).mode(), memory, ())


def _start(agent: SoftAgent, optimisers: SACOptimisers, numbers: Mapping[str, float], key: Key) -> SACLearner:
    held, (actor_key, first_key, second_key) = as_data(numbers), jax.random.split(key, 3)
    critics = agent.critic.init(first_key), agent.critic.init(second_key)
    temperature = jnp.log(jnp.float32(agent.config.initial_temperature))
    networks = SACNetworks(agent.actor.init(actor_key), critics, temperature)
    states = SACNetworks(
        optimisers.actor.init(networks.actor),
        optimisers.others.init(networks.critics),
        optimisers.others.init(temperature),
    )
    return SACLearner(networks, critics, states, initial_progress(), held)


def _loss(
    agent: SoftAgent, networks: SACNetworks, learner: SACLearner, sample: Transitions, sequence: PyTree[Array]
) -> tuple[Float[Array, ""], Metrics]:
    """Returns the losses of ONE transition, in which all networks read the observation."""
    now, after = (SoftView(seen, (seen, seen)) for seen in (sample.observation, sample.next_observation))
    return soft_loss(agent, networks, learner, sample, now, after)


def soft_loss(
    agent: SoftAgent,
    networks: SACNetworks,
    learner: SACLearner,
    sample: Transitions,
    now: SoftView,
    after: SoftView,
) -> tuple[Float[Array, ""], Metrics]:
    """Returns the losses of ONE transition, each differentiated only with respect to its own network.

    Args:
        agent: the networks as functions.
        networks: parameters with respect to which the loss is differentiated.
        learner: learner state, of which the target critics are used.
        sample: the transition. Its observations are not used.
        now: inputs of the networks before the step. The inputs of each network may depend on its parameters.
        after: inputs of the actor and of the target critics after the step.
    """
    agent, (next_key, key) = agent.now(learner), jax.random.split(sample.key)
    constant, after, fixed = jax.lax.stop_gradient((networks, after, now.critics))
    temperature = jnp.exp(constant.log_temperature)
    evaluate = _discrete_values if agent.is_discrete else _continuous_values
    next_distribution = agent.distribution(constant.actor, after.actor, sample.next_action_mask)
    next_value, next_entropy = evaluate(agent, next_distribution, learner.targets, after.critics, next_key)
    target = sample.reward + sample.discount * (next_value + temperature * next_entropy)
    values = [
        _value_of(agent, critic, seen, sample.action)
        for critic, seen in zip(networks.critics, now.critics, strict=True)
    ]
    critic_loss = sample.weight * 0.5 * jnp.sum(jnp.square(jnp.stack(values) - target))
    distribution = agent.distribution(networks.actor, now.actor, sample.action_mask)
    value, entropy = evaluate(agent, distribution, constant.critics, fixed, key)
    actor_loss = -value - temperature * entropy
    excess = jax.lax.stop_gradient(entropy) - agent.target_entropy(sample.action_mask)
    temperature_loss = jnp.exp(networks.log_temperature) * excess if agent.config.learn_temperature else 0.0
    return critic_loss + actor_loss + temperature_loss, {
        "losses/critic": critic_loss,
        "losses/policy": actor_loss,
        "losses/entropy": entropy,
        "losses/q": value,
    }


def _continuous_values(
    agent: SoftAgent, distribution: Any, critics: PyTree[Array], inputs: tuple[PyTree[Array], ...], key: Key
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the lower value of a sampled action, and its negative log-density as if bounds were -1 and 1.

    This makes the entropies, and therefore the temperature, independent of the unit of the actions.
    """
    action, log_prob = distribution.unclipped_sample_and_log_prob(key)
    values = [agent.critic(critic, seen, action) for critic, seen in zip(critics, inputs, strict=True)]
    return jnp.minimum(*values), -log_prob - agent.log_unit


def _discrete_values(
    agent: SoftAgent, distribution: Any, critics: PyTree[Array], inputs: tuple[PyTree[Array], ...], key: Key
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the expected lower value of an action, and the entropy."""
    values = jnp.minimum(*[agent.critic(critic, seen) for critic, seen in zip(critics, inputs, strict=True)])
    return jnp.sum(jax.nn.softmax(distribution.logits) * values), distribution.entropy()


def _value_of(agent: SoftAgent, critic: PyTree[Array], seen: PyTree[Array], action: Action) -> Float[Array, ""]:
    if not isinstance(agent.action_space, spaces.Discrete):
        return agent.critic(critic, seen, action)
    values = agent.critic(critic, seen)
    is_taken = jax.nn.one_hot(action - int(agent.action_space.start), values.size, dtype=jnp.bool_)
    return jnp.sum(jnp.where(is_taken, values, 0))


def _update(
    agent: SoftAgent, optimisers: SACOptimisers, learner: SACLearner, gradients: SACNetworks, *, share: float = 1.0
) -> SACLearner:
    steps = SACNetworks(optimisers.actor, optimisers.others, optimisers.others)
    held = current_hyperparameters(learner)
    moved = [
        descend(optimiser, network, state, slopes, held, share=share)
        for optimiser, network, state, slopes in zip(
            steps, learner.networks, learner.optimisers, gradients, strict=True
        )
    ]
    networks, states = (SACNetworks(*parts) for parts in zip(*moved, strict=True))
    targets = update_target(learner.targets, networks.critics, agent.now(learner).config.tau)
    return SACLearner(networks, targets, states, count_update(learner.progress), learner.hyperparameters)


def _report(rate: Callable[[SACLearner, PyTree[Array]], Metrics], learner: SACLearner, batch: Any) -> Metrics:
    return {
        **rate(learner, learner.optimisers.actor),
        "losses/temperature": jnp.exp(learner.networks.log_temperature),
    }
