"""Deep Q-networks (Mnih et al., 2015) with double Q-learning, duelling networks, n-step returns and priorities.

These four extensions are options (van Hasselt et al., 2016; Wang et al., 2016; Hessel et al., 2018; Schaul et al.,
2016). A fifth option learns distributions of returns (Bellemare et al., 2017; Dabney et al., 2018).

Departures from the paper: Adam replaces RMSProp, and the loss is squared unless `huber` is set. By default, double
Q-learning is on, returns extend over three steps, and the target network moves at every update.

Shape letter: `N` samples of a minibatch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from gymnasium import spaces
from jaxtyping import Array, Float, PyTree

from rollmill.algorithms.epsilon_greedy import EpsilonGreedy, ValueAgent, value_agent
from rollmill.algorithms.hyperparameters import as_data, current_config, current_hyperparameters
from rollmill.algorithms.off_policy import (
    OffPolicyParts,
    StepCounts,
    adam,
    check_discrete,
    check_interval,
    count_update,
    functional_network,
    initial_progress,
    learner_hyperparameters,
    learning_rate_metric,
    off_policy_graph,
    prepare_off_policy,
    scale_weights,
    uniform_replay,
    update_target,
)
from rollmill.algorithms.optimisers import Optimiser, descend
from rollmill.algorithms.value_distributions import ValueDistribution, ValueHead, ValueLoss, value_head
from rollmill.core.bounds import Count, Fraction, Range, Rate, Scheduled, ScheduledFraction, ScheduledPositive
from rollmill.core.field_help import with_field_help
from rollmill.core.schema import check_fields
from rollmill.core.types import Environment, GymnasiumObject, HostEnvironment, Key, Params
from rollmill.dataflow import (
    Batch,
    Graph,
    Hyperparameters,
    MeanGradients,
    Metrics,
    PolicyOutputs,
    PrioritisedReplay,
    Replay,
    Transitions,
)
from rollmill.networks import NetworkConfig, action_values

EXPLORATION_STEPS = "exploration_steps"
"""Environment steps over which the share of random actions falls."""

STEPS_PER_UPDATE = 4
"""Default number of environment steps per update (Mnih et al., Nature 2015, table 1)."""


@with_field_help
@dataclass(frozen=True)
class QLearningConfig:
    """Hyperparameters that DQN, R2D2, VDN and QMIX have in common, named as in the literature."""

    STATIC_FIELDS: ClassVar[tuple[str, ...]] = ("exploration_fraction",)
    """Numeric hyperparameters that are constants in compiled programs, or determine other hyperparameters."""

    total_timesteps: Count = 500_000
    """Number of environment steps of the whole run, over all environments."""
    num_envs: Count = 8
    """Number of parallel environments."""
    num_steps: Count = 1
    """Number of steps of each environment in one iteration, before `gradient_steps` updates."""
    gradient_steps: Count | None = None
    """Number of updates in one iteration. Default: one for every four of the `num_envs` x `num_steps` collected
    environment steps, and at least one."""
    buffer_size: Count = 100_000
    """Number of steps that the replay memory holds, over all environments."""
    batch_size: Count = 128
    """Number of transitions in the minibatch of one update."""
    learning_starts: Count = 1_000
    """Number of environment steps that are stored before learning begins."""
    learning_rate: Rate = 1e-3
    """Learning rate of Adam. If it is annealed, this is the initial value."""
    anneal_lr: bool = True
    """Anneal the learning rate linearly to zero over all planned updates."""
    adam_eps: ScheduledPositive = 1e-8
    """Epsilon of Adam."""
    max_grad_norm: Annotated[Scheduled, Range(0, finite=False)] = 10.0
    """Maximum global norm of the gradients. Gradients with a larger norm are scaled down to it."""
    gamma: ScheduledFraction = 0.99
    """Discount factor."""
    tau: ScheduledFraction = 0.02
    """Fraction by which the target network moves towards the network. 1 copies the network."""
    target_interval: Count = 1
    """Number of updates between two moves of the target network."""
    start_epsilon: ScheduledFraction = 1.0
    """Share of random actions at the beginning."""
    end_epsilon: ScheduledFraction = 0.05
    """Share of random actions after exploration."""
    exploration_fraction: Fraction = 0.3
    """Fraction of the run over which the share of random actions falls linearly."""
    num_shards: Count | None = None
    """Number of logical shards within which samples are drawn, a multiple of the device count. Default:
    automatic."""

    def __post_init__(self) -> None:
        check_fields(self)


@with_field_help
@dataclass(frozen=True)
class DQNConfig(QLearningConfig):
    """Hyperparameters of DQN, named as in the literature."""

    STATIC_FIELDS = (
        *QLearningConfig.STATIC_FIELDS,
        "priority_exponent",
        "weight_exponent",
        "min_value",
        "max_value",
    )
    """Numeric hyperparameters that are constants in compiled programs, or determine other hyperparameters."""

    double: bool = True
    """Use double Q-learning: the network chooses the next action, and the target network computes its value."""
    duelling: bool = False
    """Use a duelling network, which computes the value of an action as the sum of the state's value and an
    advantage."""
    n_step: Count = 3
    """Maximum number of steps in the return of a transition."""
    huber: bool = False
    """Use the Huber loss, whose slope is at most 1, instead of a squared loss."""
    prioritised: bool = False
    """Draw transitions with probabilities that grow with their errors (prioritised replay)."""
    priority_exponent: Fraction = 0.6
    """Exponent that converts an error to a priority in prioritised replay."""
    weight_exponent: Fraction = 0.4
    """Exponent of the importance weights in prioritised replay. Weights are scaled to a mean of 1."""
    value_distribution: ValueDistribution = "none"
    """Learn distributions of returns instead of means. `c51` learns the probabilities of fixed returns, and
    `quantiles` learns quantiles."""
    num_atoms: Annotated[int, Range(2)] | None = None
    """Number of returns or quantiles in a distribution. Default: 51."""
    min_value: Annotated[float, Range()] | None = None
    """Lowest return of `c51`. Default: -100."""
    max_value: Annotated[float, Range()] | None = None
    """Highest return of `c51`. Default: 100."""
    network: NetworkConfig = field(
        default_factory=partial(NetworkConfig, activation="relu", hidden_sizes=(120, 84))
    )
    """The action-value network."""


class DQNLearner(eqx.Module):
    """Learner state of DQN: action-value network, target network, optimiser state and progress."""

    network: PyTree[Array]
    target: PyTree[Array]
    optimiser: PyTree[Array]
    progress: StepCounts
    hyperparameters: Hyperparameters = eqx.field(default_factory=dict)
    """Hyperparameters that the fragments read."""

    @property
    def updates_done(self) -> Float[Array, ""]:
        """Number of updates that the learner has made so far."""
        return self.progress.updates_done


def dqn(
    env: Environment | HostEnvironment | GymnasiumObject | str,
    config: DQNConfig | Mapping[str, Any] | None = None,
    *,
    params: Params | None = None,
    network: NetworkConfig | str | None = None,
    **overrides: Any,
) -> Graph:
    """Builds DQN for an environment with discrete actions, as a graph that `rollmill.train` trains.

    Args:
        env: an id, the result of `rollmill.make` or `gymnasium.make`, or your own `Environment`.
        config: hyperparameters. Single hyperparameters can be given as keyword arguments instead:
            `dqn(env, num_envs=8)`.
        params: parameters that replace the environment's own. A leaf with an additional leading axis
            `[num_envs, ...]` holds one value for each environment.
        network: a `NetworkConfig` that replaces `config.network`, or the name of a torso.
        **overrides: fields of `DQNConfig` to replace. `learning_rate` may be an Optax schedule, which is a
            function of the number of updates and replaces annealing.

    Raises:
        UsageError: a name, type or size is invalid, or the action space is not `Discrete`.

    Examples:
        >>> algorithm = rollmill.dqn("CartPole-v1", total_timesteps=500_000)
    """
    parts = prepare_off_policy(
        DQNConfig,
        env,
        config,
        overrides,
        params=params,
        network=network,
        replay=_replay_of,
        steps_per_update=STEPS_PER_UPDATE,
    )
    chosen: DQNConfig = parts.config
    check_interval("target_interval", chosen.target_interval)
    actions = check_discrete("dqn", parts.env.action_space, "sac, td3 and ppo support continuous actions")
    head = _head_of(chosen)
    outputs = functional_network(partial(_network, parts.env.observation_space, actions, chosen, head.atoms))
    agent = value_agent(outputs, head, actions)
    compare = partial(_compare, agent, chosen)
    exponents = chosen.priority_exponent, chosen.weight_exponent
    prioritised = PrioritisedReplay(parts.replay, *exponents, partial(_errors, compare))
    return q_learning_graph(
        "dqn",
        parts,
        outputs.init,
        policy=agent.explore,
        greedy=agent.act,
        gradients=MeanGradients(partial(_loss, compare), lambda learner: learner.network),
        outputs=PolicyOutputs(q_values=lambda weights, observation: agent.values(weights.network, observation)),
        store=prioritised if chosen.prioritised else None,
    )


def q_learning_graph(
    name: str,
    parts: OffPolicyParts,
    start: Callable[[Key], PyTree[Array]],
    *,
    acting: Callable[[PyTree[Array]], PyTree[Array]] = lambda network: network,
    **fragments: Any,
) -> Graph:
    """Assembles the graph of an algorithm that learns action values and acts epsilon-greedily.

    Args:
        name: name of the algorithm.
        parts: result of `prepare_off_policy`, whose configuration is a `QLearningConfig`.
        start: returns the initial weights.
        acting: returns the part of the weights that the policy needs.
        **fragments: the other arguments of `off_policy_graph`.
    """
    config: QLearningConfig = parts.config
    optimiser, rate = adam(parts), learning_rate_metric(parts)
    numbers = learner_hyperparameters(parts, **{EXPLORATION_STEPS: _exploration_steps(config)})
    return off_policy_graph(
        name,
        parts,
        start_learner=partial(_start, start, optimiser, numbers),
        weights=lambda learner: EpsilonGreedy(acting(learner.network), _epsilon(config, learner)),
        update=partial(_update, config, optimiser),
        report=lambda learner, batch: {
            **rate(learner, learner.optimiser),
            "exploration/epsilon": _epsilon(config, learner),
        },
        hyperparameters=numbers,
        condition=scale_weights,
        **fragments,
    )


def _head_of(config: DQNConfig) -> ValueHead:
    low, high = config.min_value, config.max_value
    return value_head(config.value_distribution, huber=config.huber, atoms=config.num_atoms, low=low, high=high)


def _network(
    observation_space: spaces.Space, action_space: spaces.Discrete, config: DQNConfig, atoms: int | None, key: Key
) -> Any:
    return action_values(
        key, observation_space, action_space, config.network, duelling=config.duelling, atoms=atoms
    )


def _replay_of(config: DQNConfig) -> Replay:
    return uniform_replay(config)._replace(n_step=config.n_step)


# --- the fragments ------------------------------------------------------------------------------------


def _start(
    start: Callable[[Key], PyTree[Array]], optimiser: Optimiser, numbers: Mapping[str, float], key: Key
) -> DQNLearner:
    """Returns the learner before its first step, with a target network equal to the network."""
    network, held = start(key), as_data(numbers)
    return DQNLearner(network, network, optimiser.init(network), initial_progress(), held)


def _exploration_steps(config: QLearningConfig) -> float:
    """Returns the number of environment steps over which the share of random actions falls to its final value."""
    return max(config.exploration_fraction * config.total_timesteps, 1.0)


def _epsilon(config: Any, learner: DQNLearner) -> Float[Array, ""]:
    """Returns the current share of random actions."""
    config = current_config(config, current_hyperparameters(learner))
    steps = learner.hyperparameters[EXPLORATION_STEPS]
    explored = learner.progress.fraction_of(steps)
    return config.start_epsilon + explored * (config.end_epsilon - config.start_epsilon)


def _compare(
    agent: ValueAgent, config: DQNConfig, network: PyTree[Array], target: PyTree[Array], sample: Transitions
) -> tuple[ValueLoss, Float[Array, ""]]:
    """Compares an action's value with its target. Also returns the value."""
    outputs = agent.of_action(agent.outputs(network, sample.observation), sample.action)
    next_outputs = agent.outputs(target, sample.next_observation)
    chooser = agent.values(network, sample.next_observation) if config.double else agent.head.means(next_outputs)
    next_action = agent.distribution(chooser, sample.next_action_mask).mode()
    next_chosen = agent.of_action(next_outputs, next_action)
    comparison = agent.head.compare(outputs, next_chosen, sample.reward, sample.discount)
    return comparison, agent.head.means(outputs[None])[0]


def _errors(compare: Any, learner: DQNLearner, minibatch: Batch) -> Float[Array, " N"]:
    each = lambda sample: compare(learner.network, learner.target, sample)[0].error
    return jax.vmap(each)(minibatch.samples)


def _loss(
    compare: Any, network: PyTree[Array], learner: DQNLearner, sample: Transitions, sequence: PyTree[Array]
) -> tuple[Float[Array, ""], Metrics]:
    """Returns the loss of ONE transition."""
    comparison, value = compare(network, learner.target, sample)
    clipped = {} if comparison.clipped is None else {"losses/clipped_returns": comparison.clipped}
    metrics = {"losses/td_error": jnp.abs(comparison.error), "losses/q": value, **clipped}
    return sample.weight * comparison.loss, metrics


def _update(
    config: Any, optimiser: Optimiser, learner: DQNLearner, gradients: PyTree[Array], *, share: float = 1.0
) -> DQNLearner:
    """Makes one optimiser step, and updates the target network if it is due. Returns the new learner."""
    held = current_hyperparameters(learner)
    network, state = descend(optimiser, learner.network, learner.optimiser, gradients, held, share=share)
    progress = count_update(learner.progress, interval=config.target_interval)
    is_due = progress.updates % config.target_interval == 0
    tau = jnp.where(is_due, current_config(config, held).tau, 0.0)
    return DQNLearner(
        network, update_target(learner.target, network, tau), state, progress, learner.hyperparameters
    )
