"""Parallelised Q-network (Gallici et al., "Simplifying Deep Temporal Difference Learning", ICLR 2025).

PQN is Q-learning without a replay memory and without a target network. Layer normalisation keeps it stable. Each
iteration learns the lambda returns of a rollout of many environments, in epochs and minibatches as in PPO.

Departures from the paper: truncated episodes are bootstrapped from their final observation, and the share of
random actions depends on the number of updates.

Shape letters: `T` steps, `E` environments of this replica, `n` actions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from rollmill.algorithms.building import (
    assemble_graph,
    environment_parts,
    loops_of,
    numbers_to_hold,
    optimiser_of,
    schedule_of,
    validate_config,
    with_layout,
)
from rollmill.algorithms.epsilon_greedy import EpsilonGreedy, ValueAgent, value_agent
from rollmill.algorithms.hyperparameters import PLANNED_UPDATES, as_data, current_config, current_hyperparameters
from rollmill.algorithms.off_policy import check_discrete, functional_network, refuse_network
from rollmill.algorithms.on_policy import IMAGES_AT_ONCE, no_condition, over_steps
from rollmill.algorithms.optimisers import (
    Annealing,
    Optimiser,
    count_planned_update,
    descend,
    no_updates,
    rate_now,
)
from rollmill.algorithms.returns import bootstrap_values, lambda_returns
from rollmill.algorithms.value_distributions import Mean
from rollmill.core.bounds import Count, Range, Rate, Scheduled, ScheduledFraction, ScheduledPositive
from rollmill.core.field_help import with_field_help
from rollmill.core.schema import check_fields
from rollmill.core.types import FINAL_MASK, Environment, GymnasiumObject, HostEnvironment, Key, Params
from rollmill.dataflow import (
    Batch,
    ElementwiseUpdate,
    Graph,
    Hyperparameters,
    MeanGradients,
    Metrics,
    PolicyOutputs,
    Reduce,
    Trajectory,
    is_large,
)
from rollmill.networks import NetworkConfig, action_values


@with_field_help
@dataclass(frozen=True)
class PQNConfig:
    """Hyperparameters of PQN, named as in the literature."""

    total_timesteps: Count = 500_000
    """Number of environment steps of the whole run, over all environments."""
    num_envs: Count = 32
    """Number of parallel environments."""
    num_steps: Count = 64
    """Number of steps of each environment in one iteration."""
    update_epochs: Count = 4
    """Number of epochs (passes over the batch) in one iteration."""
    num_minibatches: Count = 16
    """Number of minibatches in one epoch."""
    learning_rate: Rate = 5e-4
    """Learning rate of RAdam. If it is annealed, this is the initial value."""
    anneal_lr: bool = True
    """Anneal the learning rate linearly to zero over all planned updates."""
    adam_eps: ScheduledPositive = 1e-8
    """Epsilon of RAdam."""
    max_grad_norm: Annotated[Scheduled, Range(0, finite=False)] = 10.0
    """Maximum global norm of the gradients. Gradients with a larger norm are scaled down to it."""
    gamma: ScheduledFraction = 0.99
    """Discount factor."""
    td_lambda: ScheduledFraction = 0.95
    """Decay of lambda returns, from 0 (one-step Q-learning) to 1 (sum of rewards to the end of the rollout)."""
    start_epsilon: ScheduledFraction = 1.0
    """Share of random actions at the beginning."""
    end_epsilon: ScheduledFraction = 0.05
    """Share of random actions after exploration."""
    exploration_fraction: ScheduledFraction = 0.2
    """Fraction of the updates over which the share of random actions falls linearly."""
    num_shards: Count | None = None
    """Number of logical shards within which samples are shuffled, a multiple of the device count. Default:
    automatic."""
    network: NetworkConfig = field(
        default_factory=partial(NetworkConfig, activation="relu", hidden_sizes=(128, 128), layer_norm=True)
    )
    """The action-value network. Without `layer_norm`, nothing keeps the values stable."""

    def __post_init__(self) -> None:
        check_fields(self)


class PQNLearner(eqx.Module):
    """Learner state of PQN: the action-value network, the optimiser state and the number of updates."""

    network: PyTree[Array]
    optimiser: PyTree[Array]
    progress: Annealing
    hyperparameters: Hyperparameters = eqx.field(default_factory=dict)
    """Hyperparameters that the fragments read."""

    @property
    def updates_done(self) -> Float[Array, ""]:
        """Number of updates that the learner has made so far."""
        return self.progress.updates


class PQNSamples(NamedTuple):
    """Training samples: `[T, E, ...]` in a batch, `[N, ...]` in a minibatch."""

    observation: PyTree[Array]
    action: PyTree[Array]
    target: Float[Array, "..."]


def pqn(
    env: Environment | HostEnvironment | GymnasiumObject | str,
    config: PQNConfig | Mapping[str, Any] | None = None,
    *,
    params: Params | None = None,
    network: NetworkConfig | str | None = None,
    **overrides: Any,
) -> Graph:
    """Builds PQN for an environment with discrete actions, as a graph that `rollmill.train` trains.

    Args:
        env: an id, the result of `rollmill.make` or `gymnasium.make`, or your own `Environment`.
        config: hyperparameters. Single hyperparameters can be given as keyword arguments instead:
            `pqn(env, num_envs=8)`.
        params: parameters that replace the environment's own. A leaf with an additional leading axis
            `[num_envs, ...]` holds one value for each environment.
        network: a `NetworkConfig` that replaces `config.network`, or the name of a torso.
        **overrides: fields of `PQNConfig` to replace. `learning_rate` may be an Optax schedule, which is a
            function of the number of updates and replaces annealing.

    Raises:
        UsageError: a name, type or size is invalid, or the action space is not `Discrete`.

    Examples:
        >>> algorithm = rollmill.pqn("CartPole-v1", total_timesteps=500_000)
    """
    _, choices = validate_config(PQNConfig, env, config, network, overrides)
    refuse_network(choices)
    env, environment, host = environment_parts(env, choices.config, params=params, final_mask=True)
    chosen = with_layout(choices.config, env)
    actions = check_discrete(
        "pqn", env.action_space, "ppo supports all action spaces, sac and td3 continuous actions"
    )
    make = partial(
        action_values,
        observation_space=env.observation_space,
        action_space=actions,
        config=chosen.network,
        duelling=False,
    )
    agent = value_agent(functional_network(make), Mean(huber=False), actions)
    loops = loops_of(
        chosen, by_sequence=False, epochs=chosen.update_epochs, num_minibatches=chosen.num_minibatches
    )
    optimiser = optimiser_of(choices, lambda config: optax.scale_by_radam(eps=config.adam_eps), loops)
    numbers = numbers_to_hold(chosen, loops)
    return assemble_graph(
        "pqn",
        env,
        environment,
        chosen,
        custom=choices.made_in_python(params=params),
        loops=loops,
        policy=agent.explore,
        gradients=MeanGradients(partial(_loss, agent), lambda learner: learner.network),
        update=ElementwiseUpdate(partial(_update, optimiser)),
        start_memory=lambda: (),
        start_learner=partial(_start, agent, optimiser, numbers),
        weights=lambda learner: EpsilonGreedy(learner.network, _epsilon(chosen, learner)),
        prepare=partial(_prepare, agent, chosen),
        condition=no_condition,
        greedy=agent.act,
        host=host,
        report=partial(_report, chosen, partial(schedule_of, choices, loops)),
        outputs=PolicyOutputs(q_values=lambda weights, observation: agent.values(weights.network, observation)),
        hyperparameters=numbers,
    )


# --- the fragments ------------------------------------------------------------------------------------


def _start(agent: ValueAgent, optimiser: Optimiser, numbers: Mapping[str, float], key: Key) -> PQNLearner:
    network = agent.outputs.init(key)
    return PQNLearner(network, optimiser.init(network), no_updates(), as_data(numbers))


def _epsilon(config: Any, learner: PQNLearner) -> Float[Array, ""]:
    config, share = current_config(config, current_hyperparameters(learner)), learner.updates_done
    share = share / (learner.hyperparameters[PLANNED_UPDATES] * jnp.maximum(config.exploration_fraction, 1e-8))
    return config.start_epsilon + jnp.minimum(share, 1) * (config.end_epsilon - config.start_epsilon)


def _prepare(
    agent: ValueAgent, config: Any, learner: PQNLearner, trajectory: Trajectory, *, reduce: Reduce, replicas: int
) -> tuple[PQNLearner, Batch]:
    """Computes the lambda returns of a rollout, by the best legal action of each observation."""
    config, steps = current_config(config, current_hyperparameters(learner)), trajectory.steps
    best = jax.vmap(partial(_best, agent, learner.network))
    large = any(is_large(jax.ShapeDtypeStruct(x.shape[2:], x.dtype)) for x in jax.tree.leaves(steps.observation))
    of_steps = partial(over_steps, best, at_once=IMAGES_AT_ONCE if large else None)
    after = steps.info[FINAL_MASK] if jax.tree.leaves(steps.action_mask) else ()
    last_mask = jax.tree.map(lambda mask: mask[-1], after)
    final_value = jax.lax.cond(
        jnp.any(steps.truncated),
        lambda: of_steps(after, steps.final_observation),
        lambda: jnp.zeros_like(steps.reward),
    )
    next_value = jax.vmap(bootstrap_values, in_axes=(1, 0, 1, 1, 1), out_axes=1)(
        of_steps(steps.action_mask, steps.observation),
        best(last_mask, trajectory.observation),
        final_value,
        steps.terminated,
        steps.truncated,
    )
    returns = jax.vmap(partial(lambda_returns, td_lambda=config.td_lambda), in_axes=1, out_axes=1)
    discount = jnp.broadcast_to(jnp.float32(config.gamma), steps.reward.shape)
    target = returns(steps.reward, next_value, discount, steps.terminated | steps.truncated)
    return learner, Batch(PQNSamples(steps.observation, steps.action, target))


def _best(
    agent: ValueAgent, network: PyTree[Array], action_mask: PyTree, observation: PyTree[Array]
) -> Float[Array, ""]:
    """Returns the value of the best legal action, or of the first action if none is legal."""
    values = agent.values(network, observation)
    return agent.of_action(values, agent.distribution(values, action_mask).mode())


def _loss(
    agent: ValueAgent, network: PyTree[Array], learner: PQNLearner, sample: PQNSamples, sequence: PyTree[Array]
) -> tuple[Float[Array, ""], Metrics]:
    """Returns the loss of ONE sample."""
    value = agent.of_action(agent.values(network, sample.observation), sample.action)
    error = sample.target - value
    return 0.5 * jnp.square(error), {"losses/td_error": jnp.abs(error), "losses/q": value}


def _update(
    optimiser: Optimiser, learner: PQNLearner, gradients: PyTree[Array], *, share: float = 1.0
) -> PQNLearner:
    held = current_hyperparameters(learner)
    network, state = descend(optimiser, learner.network, learner.optimiser, gradients, held, share=share)
    return PQNLearner(network, state, count_planned_update(learner.progress, share), learner.hyperparameters)


def _report(config: PQNConfig, schedule: Any, learner: PQNLearner, batch: Batch) -> Metrics:
    rate = rate_now(schedule(learner.hyperparameters), learner.optimiser)
    return {"learning_rate": rate, "exploration/epsilon": _epsilon(config, learner)}
