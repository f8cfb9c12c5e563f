"""Recurrent replay distributed DQN (Kapturowski et al., "R2D2", ICLR 2019).

R2D2 is DQN with a recurrent network. Its replay memory stores the recurrent state before each rollout, and draws
overlapping sequences of rollouts. The first steps of a sequence are a burn-in: they refresh the stored state with
the present weights, and are not learned from. Targets are n-step returns by double Q-learning, rescaled by `h(x) =
sign(x) (sqrt(|x| + 1) - 1) + x / 1000`.

Departures from the paper: all environments explore with the same share of random actions, which falls. The loss is
a mean over the steps of a sequence. A new sequence gets the highest priority of its shard. A sequence may contain
the end of an episode, where the recurrent state begins anew. The network does not see the previous action and
reward.

Shape letters: `N` sequences of a minibatch, `T` steps of a sequence after the burn-in, `n` actions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from gymnasium import spaces
from jaxtyping import Array, Float, PyTree

from rollmill.algorithms.dqn import DQNLearner, QLearningConfig, q_learning_graph
from rollmill.algorithms.epsilon_greedy import ValueAgent, value_agent
from rollmill.algorithms.hyperparameters import current_config, current_hyperparameters
from rollmill.algorithms.off_policy import check_discrete, check_interval, functional_network, prepare_off_policy
from rollmill.algorithms.returns import n_step_returns
from rollmill.algorithms.stored_sequences import (
    check_sequences,
    divide,
    legal_after,
    next_outputs,
    sequence_replay,
    unroll,
)
from rollmill.algorithms.value_distributions import Mean
from rollmill.core.bounds import Count, Fraction, Range, ScheduledFraction
from rollmill.core.field_help import with_field_help
from rollmill.core.types import Environment, GymnasiumObject, HostEnvironment, Key, Params
from rollmill.dataflow import Batch, Graph, Loops, Metrics, PrioritisedSequences, Sequence, SequenceReplay
from rollmill.dataflow.fragment_results import value_and_gradients
from rollmill.networks import NetworkConfig, action_values

STEPS_PER_UPDATE = 32
"""Default number of environment steps per update."""

RESCALING = 1e-3
"""Minimum slope of value rescaling, as published. It makes the rescaling invertible."""


@with_field_help
@dataclass(frozen=True)
class R2D2Config(QLearningConfig):
    """Hyperparameters of R2D2, named as in the literature."""

    STATIC_FIELDS = (*QLearningConfig.STATIC_FIELDS, "priority_exponent", "weight_exponent")
    """Numeric hyperparameters that are constants in compiled programs, or determine other hyperparameters."""

    num_steps: Count = 16
    """Number of steps of each environment in one iteration. Stored sequences begin every `num_steps` steps."""
    gradient_steps: Count | None = None
    """Number of updates in one iteration. Default: one for every 32 of the `num_envs` x `num_steps` collected
    environment steps, and at least one."""
    batch_size: Count = 32
    """Number of sequences in the minibatch of one update."""
    sequence_length: Count = 32
    """Number of steps in a sequence, including the burn-in. It must be a multiple of `num_steps`."""
    burn_in: Annotated[int, Range(0)] = 8
    """Number of steps at the beginning of a sequence that only refresh the stored recurrent state."""
    learning_starts: Count = 2_000
    """Number of environment steps that are stored before learning begins."""
    duelling: bool = True
    """Use a duelling network, which computes the value of an action as the sum of the state's value and an
    advantage."""
    n_step: Count = 5
    """Maximum number of steps in a return. Returns end with their episode and with the sequence."""
    rescale_values: bool = True
    """Learn rescaled values, so that returns of different sizes give errors of similar size."""
    prioritised: bool = True
    """Draw sequences with probabilities that grow with their errors."""
    max_error_share: ScheduledFraction = 0.9
    """Share of the largest error of a sequence in its priority. The rest is the mean error."""
    priority_exponent: Fraction = 0.9
    """Exponent that converts an error to a priority."""
    weight_exponent: Fraction = 0.6
    """Exponent of the importance weights. Weights are scaled to a mean of 1."""
    network: NetworkConfig = field(
        default_factory=partial(NetworkConfig, torso="gru", activation="relu", hidden_sizes=(64,))
    )
    """The action-value network. Its torso must be recurrent: `gru` or `lstm`."""


class Differences(NamedTuple):
    """Comparison of the values of a minibatch's actions with their targets, after the burn-in."""

    error: Float[Array, "N T"]
    """Target minus value, in rescaled units."""
    value: Float[Array, "N T"]
    """Value of the action taken, in the units of rewards."""


def r2d2(
    env: Environment | HostEnvironment | GymnasiumObject | str,
    config: R2D2Config | Mapping[str, Any] | None = None,
    *,
    params: Params | None = None,
    network: NetworkConfig | str | None = None,
    **overrides: Any,
) -> Graph:
    """Builds R2D2 for an environment with discrete actions, as a graph that `rollmill.train` trains.

    Args:
        env: an id, the result of `rollmill.make` or `gymnasium.make`, or your own `Environment`.
        config: hyperparameters. Single hyperparameters can be given as keyword arguments instead:
            `r2d2(env, num_envs=8)`.
        params: parameters that replace the environment's own. A leaf with an additional leading axis
            `[num_envs, ...]` holds one value for each environment.
        network: a `NetworkConfig` that replaces `config.network`, or the name of a torso.
        **overrides: fields of `R2D2Config` to replace. `learning_rate` may be an Optax schedule, which is a
            function of the number of updates and replaces annealing.

    Raises:
        UsageError: a name, type or size is invalid, the network has no memory, or the action space is not
            `Discrete`.

    Examples:
        >>> algorithm = rollmill.r2d2("TMaze-v0", total_timesteps=100_000)
    """
    parts = prepare_off_policy(
        R2D2Config,
        env,
        config,
        overrides,
        params=params,
        network=network,
        replay=sequence_replay,
        check=_check,
        steps_per_update=STEPS_PER_UPDATE,
    )
    chosen: R2D2Config = parts.config
    actions = check_discrete("r2d2", parts.env.action_space, "ppo has recurrent networks for continuous actions")
    outputs = functional_network(partial(_network, parts.env.observation_space, actions, chosen))
    agent = value_agent(outputs, Mean(huber=False), actions)
    compare = partial(differences, agent, chosen)
    exponents = chosen.priority_exponent, chosen.weight_exponent
    prioritised = PrioritisedSequences(parts.replay, *exponents, partial(_errors, compare, chosen))
    return q_learning_graph(
        "r2d2",
        parts,
        outputs.init,
        policy=agent.explore,
        greedy=agent.act,
        gradients=partial(_gradients, compare),
        store=prioritised if chosen.prioritised else None,
        start_memory=outputs.start_memory,
    )


def _network(observation_space: spaces.Space, action_space: spaces.Discrete, config: R2D2Config, key: Key) -> Any:
    return action_values(
        key, observation_space, action_space, config.network, duelling=config.duelling, sequences=True
    )


def _check(config: R2D2Config, replay: SequenceReplay, loops: Loops) -> None:
    check_sequences("r2d2", "dqn", config, replay, loops)
    check_interval("target_interval", config.target_interval)


# --- the fragments ------------------------------------------------------------------------------------


def _gradients(compare: Any, learner: DQNLearner, minibatch: Batch) -> tuple[PyTree[Array], Metrics]:
    """Returns the gradients of the mean loss over the steps of a minibatch's sequences."""

    def loss(network: PyTree[Array]) -> tuple[Float[Array, ""], Metrics]:
        found: Differences = compare(network, learner, minibatch.samples)
        weight = minibatch.samples.weight[:, None]
        metrics = {"losses/td_error": jnp.mean(jnp.abs(found.error)), "losses/q": jnp.mean(found.value)}
        return jnp.mean(weight * 0.5 * jnp.square(found.error)), metrics

    (total, metrics), slopes = value_and_gradients(loss, learner.network)
    return slopes, {"losses/total": total, **metrics}


def _errors(compare: Any, config: Any, learner: DQNLearner, minibatch: Batch) -> Float[Array, " N"]:
    """Returns the error of each sequence, which determines its priority (section 2.3 of the paper)."""
    error = jnp.abs(compare(learner.network, learner, minibatch.samples).error)
    share = current_config(config, current_hyperparameters(learner)).max_error_share
    return share * jnp.max(error, axis=1) + (1 - share) * jnp.mean(error, axis=1)


def differences(
    agent: ValueAgent, config: Any, network: PyTree[Array], learner: DQNLearner, sequences: Sequence
) -> Differences:
    """Compares the values of a minibatch's actions under `network` with their targets.

    Both networks begin with the stored memory, and go through the burn-in. Only the values have gradients.
    """
    config = current_config(config, current_hyperparameters(learner))
    divided, memory = divide(sequences, config.burn_in), sequences.start_memory
    steps = divided.steps
    online, target = (unroll(agent.outputs, each, memory, divided) for each in (network, learner.target))
    next_online = next_outputs(agent.outputs, jax.lax.stop_gradient(network), online, divided)
    next_target = next_outputs(agent.outputs, learner.target, target, divided)
    of_action = jax.vmap(jax.vmap(agent.of_action))
    value = of_action(online.outputs, steps.action)
    best = lambda values, legal: agent.distribution(values, legal).mode()
    next_value = of_action(next_target, jax.vmap(jax.vmap(best))(next_online, legal_after(steps)))
    into, back = (rescale_values, undo_rescaling) if config.rescale_values else (jnp.asarray, jnp.asarray)
    next_value = jnp.where(steps.terminated, 0, back(next_value))
    returns = jax.vmap(partial(n_step_returns, gamma=config.gamma, n=config.n_step))
    done = steps.terminated | steps.truncated
    wanted = jax.lax.stop_gradient(into(returns(steps.reward, next_value, done)))
    return Differences(wanted - value, back(value))


def rescale_values(values: Float[Array, "..."]) -> Float[Array, "..."]:
    """Rescales returns by `h` (Pohlen et al., 2018, proposition 3.2)."""
    return jnp.sign(values) * (jnp.sqrt(jnp.abs(values) + 1) - 1) + RESCALING * values


def undo_rescaling(values: Float[Array, "..."]) -> Float[Array, "..."]:
    """Inverts `rescale_values`.

    The quotient is written without a difference of nearly equal numbers, which would lose half of the digits.
    """
    size = jnp.abs(values) + 1 + RESCALING
    root = 2 * size / (1 + jnp.sqrt(1 + 4 * RESCALING * size))
    return jnp.sign(values) * (jnp.square(root) - 1)
