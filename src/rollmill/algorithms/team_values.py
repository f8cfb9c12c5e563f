"""Shared parts of algorithms that factorise the value of a team into the values of its agents: VDN and QMIX.

Each agent computes action values from its own observation, and chooses its action from these values only. A
mixing function computes the value of the team from the values of the actions that its agents chose. It is
monotonic in each of these values, so the best action of the team consists of the best action of each agent
(Rashid et al., 2018, equation 4).

The reward of the team is the mean reward of its active agents, which is their common reward if their rewards are
equal. The value of an inactive agent counts as 0.

Shape letters: `A` agents of a kind, `n` actions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from rollmill.algorithms.agent_views import (
    AgentView,
    CriticSees,
    agent_environment,
    central_features,
    keys_of_agents,
    may_become_inactive,
    observation_space_of,
    over_agents,
    require_multi_agent,
    split_key,
    with_agent_ids,
)
from rollmill.algorithms.dqn import STEPS_PER_UPDATE, DQNLearner, QLearningConfig, q_learning_graph
from rollmill.algorithms.environment_fragments import EnvironmentFunctions
from rollmill.algorithms.epsilon_greedy import EpsilonGreedy, ValueAgent, value_agent
from rollmill.algorithms.off_policy import (
    OffPolicyParts,
    check_discrete,
    check_interval,
    functional_network,
    prepare_off_policy,
    uniform_replay,
)
from rollmill.algorithms.sharing import ParameterSet, parameter_sets, set_of
from rollmill.algorithms.value_distributions import Mean
from rollmill.core.bounds import Count, Rate, ScheduledFraction, ScheduledPositive
from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.field_help import with_field_help
from rollmill.core.types import (
    Action,
    AgentKind,
    Environment,
    GymnasiumObject,
    HostEnvironment,
    Key,
    Memory,
    Observation,
    Params,
    StartHost,
)
from rollmill.dataflow import Decision, Graph, MeanGradients, Metrics, Replay, Step, Transitions
from rollmill.envs import as_environment
from rollmill.networks import NetworkConfig, action_values


@with_field_help
@dataclass(frozen=True)
class TeamConfig(QLearningConfig):
    """Hyperparameters that VDN and QMIX have in common, named as in the literature."""

    total_timesteps: Count = 500_000
    """Number of environment steps of the whole run, over all environments. A step of all agents counts once."""
    learning_rate: Rate = 5e-4
    """Learning rate of Adam. If it is annealed, this is the initial value."""
    adam_eps: ScheduledPositive = 1e-5
    """Epsilon of Adam."""
    start_epsilon: ScheduledFraction = 1.0
    """Share of random actions of each agent at the beginning."""
    end_epsilon: ScheduledFraction = 0.05
    """Share of random actions of each agent after exploration."""
    double: bool = True
    """Use double Q-learning: the networks choose the next actions, and the target networks compute their value."""
    n_step: Count = 1
    """Maximum number of steps in the return of a transition."""
    huber: bool = False
    """Use the Huber loss, whose slope is at most 1, instead of a squared loss."""
    team: tuple[str, ...] = ()
    """Kinds of agents that form the team, which must be all of them. It may be left out if there is only one
    kind."""
    sharing: dict[str, str] = field(default_factory=dict)
    """Name of the parameter set of each kind of agents, or "independent" for separate weights of each agent.
    Default: one set for each kind."""
    agent_ids: bool = True
    """Add a one-hot encoding of the agent's index to its observation. The index counts the agents that share its
    parameters."""
    network: NetworkConfig = field(
        default_factory=partial(NetworkConfig, activation="relu", hidden_sizes=(64, 64))
    )
    """Network of the action values of every parameter set."""


class TeamNetworks(NamedTuple):
    """Weights of the action values of each parameter set, and of the mixing function."""

    agents: dict[str, PyTree[Array]]
    """Weights by parameter set, with a leading axis of agents for independent ones."""
    mixer: PyTree[Array]
    """Weights of the mixing function, `()` if it has none."""


Mix = Callable[[PyTree[Array], Float[Array, " A"], AgentView], Float[Array, ""]]
"""`(weights, values of all agents, view) -> value of the team`. Values of inactive agents are 0."""


class Team(NamedTuple):
    """The networks of a team as functions of their weights."""

    kinds: tuple[AgentKind, ...]
    sets: tuple[ParameterSet, ...]
    agents: dict[str, ValueAgent]
    """Action values of ONE agent, by parameter set."""
    agent_ids: bool
    """True if observations get a one-hot of the agent's index."""
    mix: Mix
    start_mixer: Callable[[Key], PyTree[Array]]

    def start(self, key: Key) -> TeamNetworks:
        """Returns the initial weights of the team's networks."""
        keys = split_key(key, len(self.sets))
        agents = {group.name: self._start(group, k) for group, k in zip(self.sets, keys, strict=True)}
        return TeamNetworks(agents, self.start_mixer(jax.random.fold_in(key, len(self.sets))))

    def values(self, networks: dict[str, PyTree[Array]], view: AgentView) -> dict[str, Float[Array, "A n"]]:
        """Returns the action values of each kind's agents."""
        return self._of_each(lambda agent: agent.values, networks, view.agents)

    def best(self, values: dict[str, Float[Array, "A n"]], action_mask: PyTree) -> dict[str, Action]:
        """Returns the legal action with the highest value for each agent, `[A]` for each kind."""
        masks = _masks(action_mask)

        def of(kind: AgentKind) -> Action:
            agent = self.agents[set_of(self.sets, kind.name).name]
            mode = lambda values, mask: agent.distribution(values, mask).mode()
            return jax.vmap(mode)(values[kind.name], masks.get(kind.name, ()))

        return {kind.name: of(kind) for kind in self.kinds}

    def total(
        self,
        mixer: PyTree[Array],
        view: AgentView,
        values: dict[str, Float[Array, "A n"]],
        actions: dict[str, Action],
    ) -> Float[Array, ""]:
        """Returns the value of the team if its agents choose these actions."""

        def of(kind: AgentKind) -> Float[Array, " A"]:
            agent = self.agents[set_of(self.sets, kind.name).name]
            chosen = jax.vmap(agent.of_action)(values[kind.name], actions[kind.name])
            return jnp.where(view.active[kind.name], chosen, 0)

        return self.mix(mixer, jnp.concatenate([of(kind) for kind in self.kinds]), view)

    def explore(
        self, weights: EpsilonGreedy, key: Key, memory: Memory, observation: Observation, action_mask: PyTree
    ) -> Decision:
        """Draws a random legal action for each agent with probability epsilon, independently of the others, and
        otherwise chooses its best one.
        """
        return self._decide(lambda agent: agent.explore, weights, key, memory, observation, action_mask)

    def act(
        self, weights: EpsilonGreedy, key: Key, memory: Memory, observation: Observation, action_mask: PyTree
    ) -> Decision:
        """Chooses the best legal action for each agent."""
        return self._decide(lambda agent: agent.act, weights, key, memory, observation, action_mask)

    def _start(self, group: ParameterSet, key: Key) -> PyTree[Array]:
        start = self.agents[group.name].outputs.init
        return jax.lax.map(start, jax.random.split(key, group.size)) if group.independent else start(key)

    def _decide(
        self,
        choose: Callable[[ValueAgent], Callable[..., Decision]],
        weights: EpsilonGreedy,
        key: Key,
        memory: Memory,
        observation: Observation,
        action_mask: PyTree,
    ) -> Decision:
        keys, masks = keys_of_agents(self.kinds, key), _masks(action_mask)

        def of(agent: ValueAgent) -> Callable[..., Action]:
            decide = choose(agent)

            def action(network: PyTree[Array], observation: Observation, key: Key, mask: PyTree) -> Action:
                return decide(weights._replace(network=network), key, (), observation, mask).action

            return action

        agents = observation.agents if isinstance(observation, AgentView) else observation
        masks = {kind.name: masks.get(kind.name, ()) for kind in self.kinds}
        return Decision(self._of_each(of, weights.network, agents, keys, masks), memory, ())

    def _of_each(
        self,
        of: Callable[[ValueAgent], Callable],
        networks: dict[str, PyTree[Array]],
        observations: dict[str, Observation],
        *inputs: dict[str, PyTree],
    ) -> dict[str, Any]:
        """Applies a function of ONE agent's weights, observation and inputs to the agents of each kind."""

        def over(kind: AgentKind) -> Any:
            group, observation = set_of(self.sets, kind.name), observations[kind.name]
            if self.agent_ids:
                observation = with_agent_ids(group, kind, observation)
            own = [each[kind.name] for each in inputs]
            return over_agents(group, of(self.agents[group.name]), networks, observation, *own)

        return {kind.name: over(kind) for kind in self.kinds}


def team_parts(
    name: str,
    kind: type[Any],
    env: Environment | HostEnvironment | GymnasiumObject | str,
    config: Any,
    overrides: dict[str, Any],
    *,
    params: Params | None,
    network: NetworkConfig | str | None,
    sees: CriticSees,
) -> OffPolicyParts:
    """Checks the inputs of an algorithm for a team, and prepares them for a graph.

    `sees` is "central" if the mixing function reads the central features of the environment. The other arguments
    are as for `prepare_off_policy`. Raises a `UsageError` for invalid names, types or sizes, and for an
    environment that is not a team with `Discrete` actions.
    """
    parts = prepare_off_policy(
        kind,
        env,
        config,
        overrides,
        params=params,
        network=network,
        replay=_replay_of,
        steps_per_update=STEPS_PER_UPDATE,
        prepare_environment=partial(_team_environment, name, sees),
    )
    check_interval("target_interval", parts.config.target_interval)
    return parts


def team_of(parts: OffPolicyParts, mix: Mix, start_mixer: Callable[[Key], PyTree[Array]]) -> Team:
    """Creates the team of an environment. The function `mix` computes the team's value from its agents' values."""
    config: Any = parts.config
    sets = parameter_sets(parts.env.agents, config.sharing)

    def agent(group: ParameterSet) -> ValueAgent:
        actions = check_discrete(group.name, group.kinds[0].action_space, "")
        space = observation_space_of(group, agent_ids=config.agent_ids)
        make = partial(
            action_values,
            observation_space=space,
            action_space=actions,
            config=config.network,
            duelling=False,
        )
        return value_agent(functional_network(make), Mean(config.huber), actions)

    agents = {group.name: agent(group) for group in sets}
    return Team(parts.env.agents, sets, agents, config.agent_ids, mix, start_mixer)


def team_graph(name: str, parts: OffPolicyParts, team: Team) -> Graph:
    """Assembles the graph of an algorithm for a team."""
    return q_learning_graph(
        name,
        parts,
        team.start,
        acting=lambda networks: networks.agents,
        policy=team.explore,
        greedy=team.act,
        gradients=MeanGradients(partial(_loss, team, parts.config), lambda learner: learner.network),
    )


def state_features(env: Environment | HostEnvironment, view: AgentView) -> Float[Array, " features"]:
    """Returns the features of the environment's state that mixing functions read, as the critics of MAPPO do."""
    return central_features(env.agents, view, shows_active=may_become_inactive(env))


# --- the environment ----------------------------------------------------------------------------------


def _team_environment(
    name: str, sees: CriticSees, env: Any, config: Any, *, params: Params | None, final_mask: bool
) -> tuple[Environment | HostEnvironment, EnvironmentFunctions, StartHost | None]:
    """Prepares the environment of a team, as `environment_parts` does for a single agent."""
    env = require_multi_agent(as_environment(env), name, single="dqn")
    _check_team(name, env, config.team)
    for kind in env.agents:
        check_discrete(f"{name} for the agents {kind.name}", kind.action_space, "mappo supports all action spaces")
    if isinstance(env, HostEnvironment) and env.has_action_mask:
        raise UsageError(
            f"{name} does not support {env.name}, a host environment with action masks for several agents, "
            "because such environments do not report the legal actions of final states. hint: train it with "
            "mappo or ippo."
        )
    functions, host = agent_environment(env, config, params=params, critic=sees, final_mask=final_mask)
    return env, functions, host


def _check_team(name: str, env: Environment | HostEnvironment, team: Sequence[str]) -> None:
    """Raises a `UsageError` if the agents of an environment are not known to be one team."""
    kinds = [kind.name for kind in env.agents]
    for each in team:
        if each not in kinds:
            raise unknown_name("kind of agents in team", each, kinds)
    others = [kind for kind in kinds if kind not in team]
    if not others or (not team and len(kinds) == 1):
        return
    listed = ", ".join(kinds)
    if team:
        raise UsageError(
            f"team={list(team)} leaves out {', '.join(others)} of {env.name}, but {name} trains all agents as one "
            "team. hint: train kinds with different aims with mappo or ippo."
        )
    raise UsageError(
        f"{env.name} has several kinds of agents ({listed}), but {name} trains one team with a common reward. "
        "hint: train kinds with different aims with mappo or ippo. If all kinds share one aim, list them: "
        f"--team {' '.join(kinds)} (team={kinds} in Python)."
    )


def _replay_of(config: Any) -> Replay:
    return uniform_replay(config)._replace(n_step=config.n_step, convert=_with_team_reward)


def _with_team_reward(step: Step) -> Step:
    """Replaces the rewards of a step's agents by the mean reward of the active ones."""
    reward: Any = step.reward
    active = step.observation.active
    rewards = [jnp.where(active[name], each, 0).sum(axis=-1) for name, each in reward.items()]
    count = _sum([each.astype(jnp.float32).sum(axis=-1) for each in active.values()])
    return step._replace(reward=_sum(rewards) / jnp.maximum(count, 1))


def _any_active(view: AgentView) -> Bool[Array, ""]:
    return jnp.any(jnp.concatenate(list(view.active.values())))


def _sum(parts: list[Float[Array, "..."]]) -> Float[Array, "..."]:
    return sum(parts[1:], start=parts[0])


def _masks(action_mask: PyTree) -> dict[str, PyTree]:
    return {} if isinstance(action_mask, tuple) else action_mask


# --- the loss -----------------------------------------------------------------------------------------


def _loss(
    team: Team,
    config: Any,
    networks: TeamNetworks,
    learner: DQNLearner,
    sample: Transitions,
    sequence: PyTree[Array],
) -> tuple[Float[Array, ""], Metrics]:
    """Returns the loss of ONE transition of the team."""
    view, after, target = sample.observation, sample.next_observation, learner.target
    total = team.total(networks.mixer, view, team.values(networks.agents, view), sample.action)
    next_values = team.values(target.agents, after)
    chooser = team.values(networks.agents, after) if config.double else next_values
    next_actions = team.best(chooser, sample.next_action_mask)
    next_total = team.total(target.mixer, after, next_values, next_actions)
    discount = jnp.where(_any_active(after), sample.discount, 0)  # a team without active agents earns nothing
    comparison = Mean(config.huber).compare(total, next_total, sample.reward, discount)
    metrics = {"losses/td_error": jnp.abs(comparison.error), "losses/q": total}
    return sample.weight * comparison.loss, metrics
