"""Multi-agent PPO as a graph: MAPPO and IPPO.

MAPPO (Yu et al., "The Surprising Effectiveness of PPO in Cooperative Multi-Agent Games", NeurIPS 2022) trains
decentralised actors with a centralised critic: each agent's value is computed from central features of the
environment together with the agent's own observation. IPPO (de Witt et al., "Is Independent Learning All You Need
in the StarCraft Multi-Agent Challenge?", 2020) gives critics the observations of their actors instead.

Agents of one kind share their parameters, unless `sharing` says otherwise. Each parameter set learns as in PPO. It
has its own optimiser and gradient clipping, so agents with opposed aims do not affect each other's step sizes.
With a single agent, IPPO is PPO.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import jax.numpy as jnp
import optax
from gymnasium import spaces
from jaxtyping import Array, Bool

from rollmill.algorithms.agent_views import CriticSees, agent_environment, require_multi_agent
from rollmill.algorithms.agents import AgentPolicy, MakeAgentNetwork, agent_policy
from rollmill.algorithms.building import (
    Choices,
    assemble_graph,
    end_iteration_of,
    loops_of,
    numbers_to_hold,
    optimiser_of,
    schedule_of,
    validate_config,
)
from rollmill.algorithms.environment_fragments import EnvironmentFunctions
from rollmill.algorithms.multi_agent import UNFUSED, prepare, report, start_learner, update
from rollmill.algorithms.multi_agent_losses import condition, mean_gradients
from rollmill.algorithms.opponent_pool import kinds_with_opponents
from rollmill.algorithms.ppo import sample_loss
from rollmill.algorithms.roles import check_rates, numbers_of_roles
from rollmill.algorithms.sharing import ParameterSet, parameter_sets
from rollmill.core.bounds import (
    Count,
    Fraction,
    NonNegative,
    Range,
    Rate,
    Scheduled,
    ScheduledFraction,
    ScheduledNonNegative,
    ScheduledPositive,
)
from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.field_help import with_field_help
from rollmill.core.schema import check_fields
from rollmill.core.types import Environment, GymnasiumObject, HostEnvironment, Key, Params
from rollmill.dataflow import Graph, Loops, Metrics, PolicyOutputs, UnfusedPolicy
from rollmill.envs import as_environment
from rollmill.networks import AgentNetwork, NetworkConfig, actor_critic


@with_field_help
@dataclass(frozen=True)
class MAPPOConfig:
    """Hyperparameters of MAPPO and IPPO, named as in the literature."""

    total_timesteps: Count = 1_000_000
    """Number of environment steps of the whole run, over all environments. A step of all agents counts once."""
    num_envs: Count = 64
    """Number of parallel environments."""
    num_steps: Count = 64
    """Number of steps of each environment in one iteration."""
    update_epochs: Count = 4
    """Number of epochs (passes over the batch) in one iteration."""
    num_minibatches: Count = 4
    """Number of minibatches in one epoch. All agents of one environment step are in the same minibatch. With a
    recurrent network, so are all steps of one environment."""
    learning_rate: Rate = 1e-3
    """Learning rate of Adam. If it is annealed, this is the initial value."""
    anneal_lr: bool = True
    """Anneal the learning rate linearly to zero over all planned updates."""
    gamma: ScheduledFraction = 0.99
    """Discount factor."""
    gae_lambda: ScheduledFraction = 0.95
    """Decay of generalised advantage estimation, from 0 (one-step) to 1 (Monte Carlo)."""
    clip_coef: ScheduledPositive = 0.2
    """Clipping range of the policy's ratio around 1, and of a clipped value around the old value."""
    clip_vloss: bool = True
    """Clip the value loss like the policy loss."""
    norm_adv: bool = True
    """Standardise the advantages of each minibatch, for each kind over its active agents."""
    ent_coef: ScheduledNonNegative = 0.01
    """Weight of the entropy bonus."""
    vf_coef: ScheduledNonNegative = 0.5
    """Weight of the value loss."""
    max_grad_norm: Annotated[Scheduled, Range(0, finite=False)] = 0.5
    """Maximum global norm of the gradients of each parameter set. Gradients with a larger norm are scaled down to
    it."""
    target_kl: NonNegative | None = None
    """Skip the remaining epochs of an iteration once the last minibatch of an epoch exceeds this KL divergence in
    any parameter set."""
    normalize_observations: bool = False
    """Standardise observations and central features with running statistics."""
    normalize_values: bool = True
    """Standardise the targets of critics with running statistics for each kind of agents."""
    sharing: dict[str, str] = field(default_factory=dict)
    """Name of the parameter set of each kind of agents, or "independent" for separate weights of each agent.
    Default: one set for each kind."""
    learning_rates: dict[str, NonNegative] = field(default_factory=dict)
    """Learning rates of single parameter sets by name. They replace `learning_rate`, and are annealed in the same
    way."""
    gammas: dict[str, Fraction] = field(default_factory=dict)
    """Discount factors of single kinds of agents by name. They replace `gamma`."""
    ent_coefs: dict[str, NonNegative] = field(default_factory=dict)
    """Weights of the entropy bonus of single kinds of agents by name. They replace `ent_coef`."""
    frozen: tuple[str, ...] = ()
    """Names of parameter sets that do not learn. Their weights stay as initialised or loaded."""
    pool_size: Annotated[int, Range(0, finite=False)] = 0
    """Number of earlier weights that are kept as opponents. In some iterations, one kind of agent acts with
    earlier weights while the others learn. With 0, agents train only against the newest weights."""
    pool_every: Count = 10
    """Number of iterations between additions to the pool. New weights replace the oldest."""
    pool_share: Fraction = 0.2
    """Share of the iterations in which one kind of agent, drawn at random, acts with weights from the pool."""
    pool_roles: tuple[str, ...] = ()
    """Kinds of agents that may act with weights from the pool. Default: all kinds that learn."""
    agent_ids: bool = False
    """Add a one-hot encoding of the agent's index to its observation. The index counts the agents that share its
    parameters."""
    num_shards: Count | None = None
    """Number of logical shards within which samples are shuffled, a multiple of the device count. Default:
    automatic."""
    network: NetworkConfig = field(default_factory=NetworkConfig)
    """Network of every parameter set."""
    networks: dict[str, NetworkConfig] = field(default_factory=dict)
    """Networks of single parameter sets by name, which replace `network`. They can be set only in Python."""

    def __post_init__(self) -> None:
        check_fields(self)


def mappo(
    env: Environment | HostEnvironment | GymnasiumObject | str,
    config: MAPPOConfig | Mapping[str, Any] | None = None,
    *,
    params: Params | None = None,
    network: MakeAgentNetwork | NetworkConfig | str | None = None,
    **overrides: Any,
) -> Graph:
    """Builds MAPPO for a multi-agent environment, as a graph that `rollmill.train` trains.

    Args:
        env: an id, the result of `rollmill.make`, or your own `Environment` that lists its `agents`.
        config: hyperparameters. Single hyperparameters can be given as keyword arguments instead:
            `mappo(env, num_envs=8)`.
        params: parameters that replace the environment's own. A leaf with an additional leading axis
            `[num_envs, ...]` holds one value for each environment.
        network: a `NetworkConfig` that replaces `config.network`, or a function that creates your own network of a
            parameter set: `(key, observation_space, action_space, critic_space) -> AgentNetwork`.
        **overrides: fields of `MAPPOConfig` to replace. `learning_rate` may be an Optax schedule, which is a
            function of the number of updates and replaces annealing.

    Raises:
        UsageError: a name, type or size is invalid, agents with different spaces share parameters, a recurrent
            network is combined with `pool_size`, or the environment has a single agent.

    Examples:
        >>> algorithm = rollmill.mappo("TagGridWorld-Small-v0", total_timesteps=1_000_000)
    """
    return _graph("mappo", env, config, params, network, overrides, critic="central")


def ippo(
    env: Environment | HostEnvironment | GymnasiumObject | str,
    config: MAPPOConfig | Mapping[str, Any] | None = None,
    *,
    params: Params | None = None,
    network: MakeAgentNetwork | NetworkConfig | str | None = None,
    **overrides: Any,
) -> Graph:
    """Builds IPPO for a multi-agent environment. Each critic sees only the observation of its agent.

    See `mappo` for arguments and errors.

    Examples:
        >>> algorithm = rollmill.ippo("TagGridWorld-Small-v0", total_timesteps=1_000_000)
    """
    return _graph("ippo", env, config, params, network, overrides, critic="own")


def _graph(
    name: str,
    env: Environment | HostEnvironment | GymnasiumObject | str,
    config: MAPPOConfig | Mapping[str, Any] | None,
    params: Params | None,
    network: MakeAgentNetwork | NetworkConfig | str | None,
    overrides: dict[str, Any],
    *,
    critic: CriticSees,
) -> Graph:
    config, choices = validate_config(MAPPOConfig, env, config, network, overrides)
    make_network = choices.network
    env = require_multi_agent(as_environment(env), name)
    environment, host = agent_environment(env, config, params=params, critic=critic)
    sets = parameter_sets(env.agents, config.sharing)
    policy = agent_policy(
        env,
        sets,
        _networks(sets, config) if make_network is None else {group.name: make_network for group in sets},
        critic=critic,
        agent_ids=config.agent_ids,
        normalise_observations=config.normalize_observations,
    )
    if policy.recurrent and config.pool_size:
        raise UsageError(
            f"pool_size={config.pool_size} needs networks without memory, because a pool changes weights in the "
            "middle of episodes. hint: choose another torso, or leave pool_size out."
        )
    loops = loops_of(
        config,
        by_sequence=policy.recurrent,
        epochs=config.update_epochs,
        num_minibatches=config.num_minibatches,
    )
    custom = choices.made_in_python(params=params)
    return _assemble(name, env, environment, policy, choices, loops, custom=custom)._replace(host=host)


def _assemble(
    name: str,
    env: Environment | HostEnvironment,
    environment: EnvironmentFunctions,
    policy: AgentPolicy,
    choices: Choices,
    loops: Loops,
    *,
    custom: list[str],
) -> Graph:
    config: MAPPOConfig = choices.config
    optimiser = optimiser_of(choices, lambda config: optax.scale_by_adam(eps=1e-5), loops)
    check_rates(config, is_function=choices.schedule is not None)
    numbers = numbers_to_hold(config, loops, **numbers_of_roles(config, policy.sets))
    opponents = kinds_with_opponents(config, policy.sets)
    trained = tuple(group for group in policy.sets if group.name not in config.frozen)
    return assemble_graph(
        name,
        env,
        environment,
        config,
        custom=custom,
        loops=loops,
        policy=UnfusedPolicy(policy.sample, UNFUSED) if policy.recurrent else policy.sample,
        gradients=mean_gradients(policy, sample_loss, config),
        update=partial(update, trained, optimiser),
        start_memory=policy.start_memory,
        start_learner=partial(
            start_learner,
            policy,
            optimiser,
            numbers,
            normalise_values=config.normalize_values,
            pool_size=config.pool_size,
            opponents=opponents,
        ),
        weights=lambda learner: learner.weights,
        prepare=partial(prepare, policy, config, opponents),
        condition=partial(
            condition,
            policy.sets,
            standardise=config.norm_adv,
            num_rows=loops.num_envs * loops.num_steps // loops.num_minibatches,
        ),
        greedy=policy.greedy,
        stochastic=policy.stochastic if config.pool_size else None,
        compact_step=policy.compaction,
        keep_learning=None if config.target_kl is None else partial(_all_below, config.target_kl),
        end_iteration=end_iteration_of(choices, loops, numbers),
        report=partial(report, trained, partial(schedule_of, choices, loops)),
        outputs=PolicyOutputs(distribution=policy.distributions_of),
        hyperparameters=numbers,
    )


def _networks(sets: tuple[ParameterSet, ...], config: MAPPOConfig) -> dict[str, MakeAgentNetwork]:
    """Returns the functions that create the networks, by parameter set."""
    names = [group.name for group in sets]
    for name in config.networks:
        if name not in names:
            raise unknown_name("parameter set in networks", name, names)
    return {name: partial(_make, config.networks.get(name, config.network)) for name in names}


def _make(
    config: NetworkConfig,
    key: Key,
    observation_space: spaces.Space,
    action_space: spaces.Space,
    critic_space: spaces.Space,
) -> AgentNetwork:
    return actor_critic(key, observation_space, action_space, config, critic_space=critic_space)


def _all_below(target_kl: float, metrics: Metrics) -> Bool[Array, ""]:
    divergences = [value for name, value in metrics.items() if name.startswith("losses/approx_kl")]
    return jnp.max(jnp.stack(divergences)) <= target_kl
