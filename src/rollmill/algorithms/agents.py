"""Defines the policies of multi-agent algorithms, for ONE environment.

Shape letter: `A` agents of a kind.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Float, PyTree

from rollmill.algorithms.agent_views import (
    AgentView,
    CriticSees,
    central_features,
    central_size_of,
    central_struct,
    keys_of_agents,
    may_become_inactive,
    observation_space_of,
    over_agents,
    split_key,
    with_agent_ids,
)
from rollmill.algorithms.network_policy import compact_leaf, weights_and_rest
from rollmill.algorithms.opponent_pool import Opponents, networks_of_kind
from rollmill.algorithms.sharing import ParameterSet, set_of
from rollmill.core.errors import ContractError, UsageError
from rollmill.core.spaces import struct
from rollmill.core.types import Action, AgentKind, Environment, HostEnvironment, Key, Memory, Observation
from rollmill.core.user_frame import attribute_to_user_code
from rollmill.dataflow import Decision, Step, is_large
from rollmill.envs import RunningStatistics, initial_statistics, normalise, normalised_struct
from rollmill.networks import AgentNetwork, Distribution, Output, RecurrentAgentNetwork

MakeAgentNetwork = Callable[[Key, spaces.Space, spaces.Space, spaces.Space], AgentNetwork]
"""`(key, observation space, action space, critic's observation space) -> network`, for one parameter set."""


class AgentExtras(NamedTuple):
    """Outputs of a multi-agent policy that the learner needs besides the actions, by kind, `[A]` each."""

    log_prob: dict[str, Float[Array, "..."]]
    """Log-probabilities of the actions."""
    final_value: dict[str, Float[Array, "..."]] | tuple[()] = ()
    """Values after truncated steps, and 0 after other steps. `()` unless `compact_step` has added them."""
    value: dict[str, Float[Array, "..."]] | tuple[()] = ()
    """Values as the networks predict them, if any network has a memory, since critics then have to see every step
    in order. Otherwise `()`."""


class AgentWeights(eqx.Module):
    """Weights of all networks of a multi-agent policy, and the statistics that normalise observations."""

    networks: dict[str, PyTree[Array]]
    """Weights of each parameter set, with a leading axis of agents for independent ones."""
    agents: dict[str, RunningStatistics] | None
    """Statistics of ONE agent's observation, for each kind, or None if observations are not normalised."""
    central: RunningStatistics | None
    """Statistics of the central features, or None if there are none or they are not normalised."""
    opponents: Opponents | None = None
    """Earlier weights with which some agents act while others learn, or None without a pool of opponents."""


class SetNetwork(NamedTuple):
    """Network of one parameter set, as functions of its weights."""

    make: Callable[[Key], AgentNetwork]
    skeleton: PyTree[jax.ShapeDtypeStruct]
    """Shapes of the weights."""
    static: PyTree
    """Parts of the network that are not weights, such as functions and sizes."""

    def start_weights(self, key: Key) -> PyTree[Array]:
        """Returns the initial weights of the parameter set's network."""
        return eqx.filter(self.make(key), eqx.is_inexact_array)

    def start_memory(self) -> Memory:
        """Returns the memory of ONE agent at the start of an episode, or `()` for a network without memory."""
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.skeleton)
        return eqx.combine(zeros, self.static).initial_memory()

    def policy(
        self, weights: PyTree[Array], observation: Observation, memory: Memory, mask: PyTree
    ) -> tuple[Distribution, Memory]:
        """Returns the action distribution of ONE agent, and its memory after a step of the actor."""
        network: AgentNetwork = eqx.combine(weights, self.static)
        return network.policy(observation, memory, None if isinstance(mask, tuple) else mask)

    def value(self, weights: PyTree[Array], observation: Observation, memory: Memory) -> Float[Array, ""]:
        """Returns the critic's value for ONE agent. `observation` is the input of the critic."""
        network: AgentNetwork = eqx.combine(weights, self.static)
        return network.value(observation, memory)

    def advance(
        self,
        weights: PyTree[Array],
        observation: Observation,
        critic_observation: Observation,
        memory: Memory,
        mask: PyTree,
    ) -> Output:
        """Returns the action distribution and the value of ONE agent, and its next memory."""
        network: AgentNetwork = eqx.combine(weights, self.static)
        mask = None if isinstance(mask, tuple) else mask
        if isinstance(network, RecurrentAgentNetwork):
            return network.advance(observation, critic_observation, memory, mask)
        distribution, memory = network.policy(observation, memory, mask)
        return Output(distribution, network.value(critic_observation, memory), memory)


class AgentPolicy(NamedTuple):
    """Networks of all agents as functions of their weights, created by `agent_policy`."""

    kinds: tuple[AgentKind, ...]
    sets: tuple[ParameterSet, ...]
    networks: dict[str, SetNetwork]
    critic: CriticSees
    shows_active: bool
    """True if agents can become inactive."""
    central: jax.ShapeDtypeStruct | None
    """Shape of the environment's central features, or None if it has none."""
    agent_ids: bool
    """True if observations get a one-hot of the agent's index."""
    normalises: bool
    """True if observations are normalised."""

    def start_weights(self, key: Key) -> AgentWeights:
        """Returns the initial weights of all parameter sets."""
        keys = split_key(key, len(self.sets))
        networks = {group.name: self._start(group, k) for group, k in zip(self.sets, keys, strict=True)}
        if not self.normalises:
            return AgentWeights(networks, None, None)
        agents = {kind.name: initial_statistics(normalised_struct(kind.observation_space)) for kind in self.kinds}
        central = None if self.central is None else initial_statistics(self.central)
        return AgentWeights(networks, agents, central)

    def _start(self, group: ParameterSet, key: Key) -> PyTree[Array]:
        start = self.networks[group.name].start_weights
        if not group.independent:
            return start(key)
        # without `vmap`, each agent gets exactly the weights of a single agent
        return jax.lax.map(start, jax.random.split(key, group.size))

    def start_memory(self) -> Memory:
        """Returns the initial memories of each kind's agents, `[A]`, or `()` if the network has no memory."""

        def of(kind: AgentKind) -> Memory:
            memory = self.networks[set_of(self.sets, kind.name).name].start_memory()
            return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (kind.count, *leaf.shape)), memory)

        memories = {kind.name: of(kind) for kind in self.kinds}
        return memories if jax.tree.leaves(memories) else ()

    @property
    def recurrent(self) -> bool:
        """Returns whether any network has a memory."""
        return bool(jax.tree.leaves(jax.eval_shape(self.start_memory)))

    def normalise(self, weights: AgentWeights, view: AgentView) -> AgentView:
        """Normalises the observations of an `AgentView`, which may have any leading axes."""
        central = view.central if weights.central is None else normalise(weights.central, view.central)
        return AgentView(self.normalise_agents(weights, view.agents), view.active, central)

    def normalise_agents(self, weights: AgentWeights, agents: dict[str, Observation]) -> dict[str, Observation]:
        """Normalises each kind's observations, which may have any leading axes."""
        if weights.agents is None:
            return agents
        return {name: normalise(statistics, agents[name]) for name, statistics in weights.agents.items()}

    def policies(
        self,
        networks: dict[str, PyTree[Array]],
        agents: dict[str, Observation],
        memory: Memory,
        mask: PyTree,
        opponents: Opponents | None = None,
    ) -> dict[str, tuple[Distribution, Memory]]:
        """Returns the action distributions and next memories of each kind's agents, `[A]`, for normalised
        observations.
        """
        masks = {} if isinstance(mask, tuple) else mask

        def of(kind: AgentKind) -> tuple[Distribution, Memory]:
            policy = self.networks[set_of(self.sets, kind.name).name].policy
            observation = self._with_agent_ids(kind, agents[kind.name])
            own = networks_of_kind(self.sets, kind.name, networks, opponents)
            remembered = memory[kind.name] if memory else ()
            return self._over_agents(kind, policy, own, observation, remembered, masks.get(kind.name, ()))

        return {kind.name: of(kind) for kind in self.kinds}

    def distributions(
        self, networks: dict[str, PyTree[Array]], agents: dict[str, Observation], memory: Memory, mask: PyTree
    ) -> dict[str, Distribution]:
        """Returns the action distributions of each kind's agents, `[A]`, for normalised observations."""
        by_kind = self.policies(networks, agents, memory, mask)
        return {name: distributions for name, (distributions, _) in by_kind.items()}

    def advance(
        self, networks: dict[str, PyTree[Array]], view: AgentView, memory: Memory, mask: PyTree
    ) -> dict[str, Output]:
        """Returns distributions, values and next memories of each kind's agents for a normalised `AgentView`."""
        central, masks = self._central(view), {} if isinstance(mask, tuple) else mask

        def of(kind: AgentKind) -> Output:
            network = self.networks[set_of(self.sets, kind.name).name]

            def advance(weights: PyTree[Array], observation: Observation, memory: Memory, mask: PyTree) -> Output:
                critic_observation = observation if central is None else (observation, central)
                return network.advance(weights, observation, critic_observation, memory, mask)

            observation = self._with_agent_ids(kind, view.agents[kind.name])
            inputs = observation, memory[kind.name], masks.get(kind.name, ())
            return self._over_agents(kind, advance, networks, *inputs)

        return {kind.name: of(kind) for kind in self.kinds}

    def distributions_of(
        self, weights: AgentWeights, memory: Memory, observation: Observation, action_mask: PyTree
    ) -> dict[str, Distribution]:
        """Returns action distributions of each kind's agents, `[A]`, for raw observations or a raw `AgentView`."""
        agents = observation.agents if isinstance(observation, AgentView) else observation
        return self.distributions(weights.networks, self.normalise_agents(weights, agents), memory, action_mask)

    def values(
        self, networks: dict[str, PyTree[Array]], view: AgentView, memory: Memory
    ) -> dict[str, Float[Array, "..."]]:
        """Returns the values for each kind's agents, `[A]`, from a normalised `AgentView`."""
        central = self._central(view)

        def of(kind: AgentKind) -> Float[Array, " A"]:
            network = self.networks[set_of(self.sets, kind.name).name]
            critic_input = lambda observation: observation if central is None else (observation, central)
            value = lambda weights, observation, memory: network.value(weights, critic_input(observation), memory)
            observation = self._with_agent_ids(kind, view.agents[kind.name])
            return self._over_agents(kind, value, networks, observation, memory[kind.name] if memory else ())

        return {kind.name: of(kind) for kind in self.kinds}

    @property
    def is_large(self) -> bool:
        """Whether the observation of an agent has a large leaf (`dataflow.is_large`), such as an image."""
        return any(
            is_large(leaf) for kind in self.kinds for leaf in jax.tree.leaves(struct(kind.observation_space))
        )

    @property
    def compaction(self) -> Callable[[AgentWeights, Step], Step] | None:
        """Returns `compact_step` if observations are large, and otherwise None.

        Without `compact_step`, final observations would double the size of a trajectory.
        """
        return self.compact_step if self.is_large else None

    def compact_step(self, weights: AgentWeights, step: Step) -> Step:
        """Replaces large final observations of all environments' steps, `[E, ...]`, by the values of the critics.

        Values are computed only if an episode was truncated in this step.
        """
        view: AgentView = step.final_observation
        of_one = lambda one, memory: self.values(weights.networks, self.normalise(weights, one), memory)
        value = jax.lax.cond(
            jnp.any(step.truncated),
            lambda: jax.vmap(of_one)(view, step.final_memory),
            lambda: jax.tree.map(jnp.zeros_like, step.reward),
        )
        final_value = {name: jnp.where(step.truncated[:, None], by_agent, 0.0) for name, by_agent in value.items()}
        agents, central = jax.tree.map(compact_leaf, (view.agents, view.central))
        return step._replace(
            extras=step.extras._replace(final_value=final_value),
            final_observation=AgentView(agents, view.active, central),
        )

    def sample(
        self, weights: AgentWeights, key: Key, memory: Memory, observation: Observation, action_mask: PyTree
    ) -> Decision:
        """Samples all agents' actions as in training, given raw observations or a raw `AgentView`.

        The kinds of agents in `weights.opponents` act with earlier weights. Critics with a memory need an
        `AgentView`.
        """
        return self._sample(weights, key, memory, observation, action_mask, weights.opponents)

    def stochastic(
        self, weights: AgentWeights, key: Key, memory: Memory, observation: Observation, action_mask: PyTree
    ) -> Decision:
        """Samples all agents' actions, using only the newest weights."""
        return self._sample(weights, key, memory, observation, action_mask, None)

    def _sample(
        self,
        weights: AgentWeights,
        key: Key,
        memory: Memory,
        observation: Observation,
        action_mask: PyTree,
        opponents: Opponents | None,
    ) -> Decision:
        keys = keys_of_agents(self.kinds, key)

        def draw(name: str, distributions: Distribution) -> tuple[Action, Float[Array, " A"]]:
            return jax.vmap(lambda one, k: one.sample_and_log_prob(k))(distributions, keys[name])

        if self.recurrent and isinstance(observation, AgentView):
            outputs = self.advance(weights.networks, self.normalise(weights, observation), memory, action_mask)
            value = {name: output.value for name, output in outputs.items()}
            by_kind = {name: (output.distribution, output.memory) for name, output in outputs.items()}
            return self._decision(draw, by_kind, value)
        return self._decide(draw, weights, memory, observation, action_mask, opponents)

    def greedy(
        self, weights: AgentWeights, key: Key, memory: Memory, observation: Observation, action_mask: PyTree
    ) -> Decision:
        """Returns all agents' most likely actions, given raw observations or a raw `AgentView`."""

        def choose(name: str, distributions: Distribution) -> tuple[Action, Float[Array, " A"]]:
            action = jax.vmap(lambda one: one.mode())(distributions)
            return action, jax.vmap(lambda one, a: one.log_prob(a))(distributions, action)

        return self._decide(choose, weights, memory, observation, action_mask)

    def _decide(
        self,
        choose: Callable,
        weights: AgentWeights,
        memory: Memory,
        observation: Observation,
        action_mask: PyTree,
        opponents: Opponents | None = None,
    ) -> Decision:
        agents = observation.agents if isinstance(observation, AgentView) else observation
        agents = self.normalise_agents(weights, agents)
        return self._decision(
            choose, self.policies(weights.networks, agents, memory, action_mask, opponents), value=()
        )

    def _decision(
        self,
        choose: Callable,
        by_kind: dict[str, tuple[Distribution, Memory]],
        value: dict[str, Float[Array, " A"]] | tuple[()],
    ) -> Decision:
        chosen = {name: choose(name, distributions) for name, (distributions, _) in by_kind.items()}
        actions = {name: action for name, (action, _) in chosen.items()}
        memories = {name: memory for name, (_, memory) in by_kind.items()}
        log_prob = {name: log_prob for name, (_, log_prob) in chosen.items()}
        memory = memories if jax.tree.leaves(memories) else ()
        return Decision(actions, memory, AgentExtras(log_prob, value=value))

    def _over_agents(
        self, kind: AgentKind, function: Callable, networks: Mapping[str, PyTree[Array]], *inputs: PyTree
    ) -> Any:
        """Lifts a function of the weights and inputs of ONE agent over the agents of a kind."""
        return over_agents(set_of(self.sets, kind.name), function, networks, *inputs)

    def _with_agent_ids(self, kind: AgentKind, observation: Observation) -> Observation:
        """Returns the observations of a kind's agents, with a one-hot of each agent's index if `agent_ids`."""
        return with_agent_ids(set_of(self.sets, kind.name), kind, observation) if self.agent_ids else observation

    def _central(self, view: AgentView) -> Float[Array, " features"] | None:
        """Returns the common input of all critics, or None if each critic only sees its agent's observation."""
        return None if self.critic == "own" else central_features(self.kinds, view, shows_active=self.shows_active)


def agent_policy(
    env: Environment | HostEnvironment,
    sets: tuple[ParameterSet, ...],
    make_networks: Mapping[str, MakeAgentNetwork],
    *,
    critic: CriticSees,
    agent_ids: bool,
    normalise_observations: bool,
) -> AgentPolicy:
    """Creates the policy for a multi-agent environment without transforms.

    Each parameter set gets a network. `critic` is the input of critics. `agent_ids` adds a one-hot agent index to
    the observations of agents with shared parameters. `normalise_observations` standardises observations, and
    central features, by running statistics.
    """
    central = central_struct(env) if critic == "central" else None
    central_size = central_size_of(env) if critic == "central" else None
    networks = {
        group.name: _set_network(group, make_networks[group.name], agent_ids=agent_ids, central_size=central_size)
        for group in sets
    }
    return AgentPolicy(
        env.agents, sets, networks, critic, may_become_inactive(env), central, agent_ids, normalise_observations
    )


def _set_network(
    group: ParameterSet, make_network: MakeAgentNetwork, *, agent_ids: bool, central_size: int | None
) -> SetNetwork:
    kind = group.kinds[0]
    actor_space = observation_space_of(group, agent_ids=agent_ids)
    critic_space = actor_space
    if central_size is not None:
        critic_space = spaces.Tuple((actor_space, spaces.Box(-np.inf, np.inf, (central_size,))))

    def make(key: Key) -> AgentNetwork:
        return make_network(key, actor_space, kind.action_space, critic_space)

    weights, static = weights_and_rest(make)
    network = SetNetwork(make, weights, static)
    memory = jax.eval_shape(network.start_memory)
    if jax.tree.leaves(memory):
        _check_recurrent(group, network, actor_space)
    with attribute_to_user_code(f"the network of {group.name}"):
        value = jax.eval_shape(network.value, weights, struct(critic_space), memory)
        jax.eval_shape(lambda w, s, m: network.policy(w, s, m, ())[0].mode(), weights, struct(actor_space), memory)
    if (value.shape, value.dtype) != ((), jnp.float32):
        raise ContractError(
            f"the network of {group.name}: value(...) must return one float32 [], got "
            f"{value.dtype}{list(value.shape)}."
        )
    return network


def _check_recurrent(group: ParameterSet, network: SetNetwork, actor_space: spaces.Space) -> None:
    """Raises a `UsageError` for a network with a memory that these algorithms do not support."""
    if not isinstance(eqx.combine(network.skeleton, network.static), RecurrentAgentNetwork):
        raise UsageError(
            f"the network of {group.name} has a memory, so it needs a method "
            "`advance(observation, critic_observation, memory, action_mask) -> Output`. hint: see "
            "`rollmill.networks.RecurrentAgentNetwork`."
        )
    if any(map(is_large, jax.tree.leaves(struct(actor_space)))):
        raise UsageError(
            f"the network of {group.name} has a memory, but its observations are images. Multi-agent algorithms "
            "support a memory only with smaller observations. hint: use a torso without memory, such as "
            "torso='auto'."
        )
