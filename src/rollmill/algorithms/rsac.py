"""Recurrent soft actor-critic (Ni et al., "Recurrent Model-Free RL Can Be a Strong Baseline for Many POMDPs").

The paper is from ICML 2022. RSAC is SAC with recurrent networks. Actor and critics each have a recurrent unit of
their own, as the paper recommends. The policy advances the memories of all of them, and the replay memory stores
the memories before each rollout. Networks and target critics begin a sequence with the stored memories, and go
through a burn-in (Kapturowski et al., "R2D2", ICLR 2019).

Departures from the paper: sequences begin with stored memories instead of zeros, and the networks do not see the
previous action and reward. A sequence may contain the end of an episode, where the memories begin anew.

Shape letters: `N` sequences of a minibatch, `T` steps of a sequence after the burn-in.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from rollmill.algorithms.hyperparameters import current_config, current_hyperparameters
from rollmill.algorithms.off_policy import explores_at_random, prepare_off_policy
from rollmill.algorithms.sac import (
    SACConfig,
    SACLearner,
    SACNetworks,
    SoftAgent,
    SoftView,
    soft_agent,
    soft_graph,
    soft_loss,
)
from rollmill.algorithms.stored_sequences import (
    check_sequences,
    divide,
    legal_after,
    next_outputs,
    sequence_replay,
    unroll,
)
from rollmill.core.bounds import Count, Range, Rate, ScheduledFraction
from rollmill.core.field_help import with_field_help
from rollmill.core.types import Environment, GymnasiumObject, HostEnvironment, Key, Memory, Observation, Params
from rollmill.dataflow import Batch, Decision, Graph, Metrics, PolicyOutputs, Sequence, Transitions
from rollmill.dataflow.fragment_results import value_and_gradients
from rollmill.networks import NetworkConfig, recurrent_critic, recurrent_stochastic_actor

STEPS_PER_UPDATE = 4
"""Default number of environment steps per update."""


@with_field_help
@dataclass(frozen=True)
class RSACConfig(SACConfig):
    """Hyperparameters of recurrent SAC, named as in the literature."""

    num_steps: Count = 16
    """Number of steps of each environment in one iteration. Stored sequences begin every `num_steps` steps."""
    gradient_steps: Count | None = None
    """Number of updates in one iteration. Default: one for every four of the `num_envs` x `num_steps` collected
    environment steps, and at least one."""
    batch_size: Count = 32
    """Number of sequences in the minibatch of one update."""
    learning_starts: Count = 2_000
    """Number of environment steps with random actions that are stored before learning begins."""
    learning_rate: Rate = 1e-3
    """Learning rate of Adam for the actor. If it is annealed, this is the initial value."""
    tau: ScheduledFraction = 0.02
    """Fraction by which the target critics move towards the critics at each update."""
    sequence_length: Count = 32
    """Number of steps in a sequence, including the burn-in. It must be a multiple of `num_steps`."""
    burn_in: Annotated[int, Range(0)] = 8
    """Number of steps at the beginning of a sequence that only refresh the stored recurrent states."""
    network: NetworkConfig = field(
        default_factory=partial(NetworkConfig, torso="gru", activation="relu", hidden_sizes=(64,))
    )
    """Network of the actor, and of each critic. Its torso must be recurrent: `gru` or `lstm`. In critics of
    continuous actions, layers of `hidden_sizes` also follow the recurrent unit, and read the action."""


class RSACMemory(NamedTuple):
    """Memories of the networks, each with a recurrent unit of its own."""

    actor: Memory
    critics: tuple[Memory, Memory]


class RSACWeights(NamedTuple):
    """Weights that the RSAC policy needs to act, and to advance the memories of the critics."""

    actor: PyTree[Array]
    critics: PyTree[Array]
    is_random: Bool[Array, ""]
    """Whether actions are still random."""


def rsac(
    env: Environment | HostEnvironment | GymnasiumObject | str,
    config: RSACConfig | Mapping[str, Any] | None = None,
    *,
    params: Params | None = None,
    network: NetworkConfig | str | None = None,
    **overrides: Any,
) -> Graph:
    """Builds recurrent SAC for an environment with bounded continuous actions or discrete actions.

    The result is a graph that `rollmill.train` trains.

    Args:
        env: an id, the result of `rollmill.make` or `gymnasium.make`, or your own `Environment`.
        config: hyperparameters. Single hyperparameters can be given as keyword arguments instead:
            `rsac(env, num_envs=8)`.
        params: parameters that replace the environment's own. A leaf with an additional leading axis
            `[num_envs, ...]` holds one value for each environment.
        network: a `NetworkConfig` that replaces `config.network`, or the name of a torso.
        **overrides: fields of `RSACConfig` to replace. `learning_rate` may be an Optax schedule, which is a
            function of the number of updates and replaces annealing.

    Raises:
        UsageError: a name, type or size is invalid, the network has no memory, or the action space is neither a
            bounded `Box` nor `Discrete`.

    Examples:
        >>> algorithm = rollmill.rsac("TMaze-v0", total_timesteps=100_000)
    """
    parts = prepare_off_policy(
        RSACConfig,
        env,
        config,
        overrides,
        params=params,
        network=network,
        replay=sequence_replay,
        check=partial(check_sequences, "rsac", "sac"),
        steps_per_update=STEPS_PER_UPDATE,
    )
    agent = soft_agent("rsac", parts, recurrent_stochastic_actor, recurrent_critic)
    return soft_graph(
        "rsac",
        parts,
        agent,
        policy=partial(_explore, agent),
        greedy=partial(_act, agent),
        weights=lambda learner: RSACWeights(
            learner.networks.actor, learner.networks.critics, explores_at_random(parts.config, learner.progress)
        ),
        gradients=partial(_gradients, agent),
        outputs=PolicyOutputs(distribution=partial(_distribution, agent)),
        start_memory=partial(_start_memory, agent),
    )


# --- the fragments ------------------------------------------------------------------------------------


def _start_memory(agent: SoftAgent) -> RSACMemory:
    of_critic = agent.critic.start_memory()
    return RSACMemory(agent.actor.start_memory(), (of_critic, of_critic))


def _explore(
    agent: SoftAgent,
    weights: RSACWeights,
    key: Key,
    memory: RSACMemory,
    observation: Observation,
    action_mask: PyTree,
) -> Decision:
    """Returns an action drawn from the policy, or a random action before learning begins."""
    features, of_actor = agent.actor.advance(weights.actor, memory.actor, observation)
    of_critics = tuple(
        agent.critic.advance(critic, before, observation)[1]
        for critic, before in zip(weights.critics, memory.critics, strict=True)
    )
    action = agent.exploring_action(weights, key, features, action_mask)
    return Decision(action, RSACMemory(of_actor, of_critics), ())


def _act(
    agent: SoftAgent,
    weights: RSACWeights,
    key: Key,
    memory: RSACMemory,
    observation: Observation,
    action_mask: PyTree,
) -> Decision:
    """Returns the policy's most likely action. The memories of the critics are unchanged."""
    features, of_actor = agent.actor.advance(weights.actor, memory.actor, observation)
    action = agent.distribution(weights.actor, features, action_mask).mode()
    return Decision(action, memory._replace(actor=of_actor), ())


def _distribution(
    agent: SoftAgent, weights: RSACWeights, memory: RSACMemory, observation: Observation, action_mask: PyTree
) -> Any:
    features, _ = agent.actor.advance(weights.actor, memory.actor, observation)
    return agent.distribution(weights.actor, features, action_mask)


def _gradients(agent: SoftAgent, learner: SACLearner, minibatch: Batch) -> tuple[SACNetworks, Metrics]:
    """Returns the gradients of the mean loss over the steps of a minibatch's sequences."""

    def mean_loss(networks: SACNetworks) -> tuple[Array, Metrics]:
        inputs = _inputs(agent, networks, learner, minibatch.samples)
        losses, metrics = jax.vmap(jax.vmap(partial(soft_loss, agent, networks, learner)))(*inputs)
        return jnp.mean(losses), jax.tree.map(jnp.mean, metrics)

    (total, metrics), slopes = value_and_gradients(mean_loss, learner.networks)
    return slopes, {"losses/total": total, **metrics}


def _inputs(
    agent: SoftAgent, networks: SACNetworks, learner: SACLearner, sequences: Sequence
) -> tuple[Transitions, SoftView, SoftView]:
    """Returns each step after the burn-in as a transition, and the networks' features before and after it."""
    config = current_config(agent.config, current_hyperparameters(learner))
    divided, memory = divide(sequences, config.burn_in), sequences.start_memory
    steps = divided.steps
    actor = unroll(agent.actor, networks.actor, memory.actor, divided)
    critics, targets = (
        [unroll(agent.critic, *each, divided) for each in zip(weights, memory.critics, strict=True)]
        for weights in (networks.critics, learner.targets)
    )
    now = SoftView(actor.outputs, tuple(critic.outputs for critic in critics))
    after = SoftView(
        next_outputs(agent.actor, jax.lax.stop_gradient(networks.actor), actor, divided),
        tuple(next_outputs(agent.critic, *each, divided) for each in zip(learner.targets, targets, strict=True)),
    )
    length = steps.reward.shape[1]
    transitions = Transitions(
        observation=(),
        action_mask=steps.action_mask,
        action=steps.action,
        reward=steps.reward,
        discount=jnp.where(steps.terminated, 0, config.gamma),
        next_observation=(),
        next_action_mask=legal_after(steps),
        weight=jnp.broadcast_to(sequences.weight[:, None], steps.reward.shape),
        key=jax.vmap(partial(jax.random.split, num=length))(sequences.key),
    )
    return transitions, now, after
