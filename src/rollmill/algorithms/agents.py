"""Several agents as the environment and policy fragments of a graph, for ONE environment.

Everything that all agents see and do in one environment step is one observation and one action: `AgentView`
in, a dictionary from kinds to actions out. So a graph of many agents has the loops and edges of any other.

Shape letter: `A` agents of a kind.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Bool, Float, PyTree

from rollmill.algorithms.fragments import weights_and_rest
from rollmill.algorithms.sharing import ParameterSet, set_of
from rollmill.core.errors import ContractError, UsageError
from rollmill.core.own_line import blaming
from rollmill.core.spaces import struct
from rollmill.core.types import (
    Action,
    AgentKind,
    Environment,
    Key,
    Memory,
    Observation,
    Params,
    State,
)
from rollmill.dataflow import Decision
from rollmill.envs import RunningStatistics, active_agents, initial_statistics, normalise
from rollmill.networks import AgentNetwork, Distribution, flat_size, flatten

MakeAgentNetwork = Callable[[Key, spaces.Space, spaces.Space, spaces.Space], AgentNetwork]
"""`(key, what the actor sees, action space, what the critic sees) -> network`, for one parameter set."""

CriticSees = Literal["central", "own"]


class AgentView(NamedTuple):
    """What an algorithm sees of an environment of several agents."""

    agents: dict[str, Observation]
    """Kind to observations `[A, ...]`."""
    active: dict[str, Bool[Array, "..."]]
    """Kind to `[A]`: whether an agent takes part."""
    central: PyTree[Float[Array, "..."]]
    """What the environment shows a centralised critic, `[features]`; `()` where it, or the algorithm, has none."""


def view_agents(env: Environment, *, critic: CriticSees) -> Environment:
    """Folds who is active and the central features into the observation; goes inside of auto-reset.

    Final observations of truncated episodes then carry them too, for the value to bootstrap from.
    """

    def view(observation: Observation, state: State, params: Params) -> AgentView:
        central = env.central(state, params) if env.central is not None and critic == "central" else ()
        return AgentView(observation, active_agents(env, state, params), central)

    def reset(key, params):
        observation, state = env.reset(key, params)
        return view(observation, state, params), state

    def step(key, state, action, params):
        timestep = env.step(key, state, action, params)
        return timestep._replace(observation=view(timestep.observation, timestep.state, params))

    return env._replace(reset=reset, step=step)


class AgentWeights(eqx.Module):
    """What the policy needs: the networks' weights, and the statistics that observations are normalised with."""

    networks: dict[str, PyTree[Array]]
    """Name of a parameter set to weights; with a leading axis of agents where each has its own."""
    agents: dict[str, RunningStatistics] | None
    """Kind to statistics of ONE agent's observation."""
    central: RunningStatistics | None


class SetNetwork(NamedTuple):
    """The network of a parameter set as functions of its weights."""

    make: Callable[[Key], AgentNetwork]
    static: PyTree
    """All of the network that is no weight."""

    def start_weights(self, key: Key) -> PyTree[Array]:
        """Weights before training."""
        return eqx.filter(self.make(key), eqx.is_inexact_array)

    def distribution(self, weights: PyTree[Array], seen: Observation, mask: PyTree) -> Distribution:
        """What ONE agent may do."""
        network: AgentNetwork = eqx.combine(weights, self.static)
        return network.policy(seen, (), None if isinstance(mask, tuple) else mask)[0]

    def value(self, weights: PyTree[Array], seen: Observation) -> Float[Array, ""]:
        """The value of ONE agent's observation."""
        network: AgentNetwork = eqx.combine(weights, self.static)
        return network.value(seen, ())


class AgentPolicy(NamedTuple):
    """The networks of all agents as functions of their weights; made by `agent_policy`."""

    kinds: tuple[AgentKind, ...]
    sets: tuple[ParameterSet, ...]
    networks: dict[str, SetNetwork]
    critic: CriticSees
    shows_active: bool
    """Whether agents can go out at all."""
    central: jax.ShapeDtypeStruct | None
    """The shape of the environment's central features."""
    agent_ids: bool
    normalises: bool

    def start_weights(self, key: Key) -> AgentWeights:
        """Weights before training."""
        keys = split_key(key, len(self.sets))
        networks = {group.name: self._start(group, k) for group, k in zip(self.sets, keys, strict=True)}
        if not self.normalises:
            return AgentWeights(networks, None, None)
        agents = {kind.name: initial_statistics(struct(kind.observation_space)) for kind in self.kinds}
        central = None if self.central is None else initial_statistics(self.central)
        return AgentWeights(networks, agents, central)

    def _start(self, group: ParameterSet, key: Key) -> PyTree[Array]:
        start = self.networks[group.name].start_weights
        if not group.independent:
            return start(key)
        return jax.lax.map(start, jax.random.split(key, group.size))  # batched QR may hang XLA's CPU backend

    def start_memory(self) -> Memory:
        """These policies remember nothing."""
        return ()

    def normalise(self, weights: AgentWeights, view: AgentView) -> AgentView:
        """The view as the networks get it; any leading axes."""
        central = view.central if weights.central is None else normalise(weights.central, view.central)
        return AgentView(self.normalise_agents(weights, view.agents), view.active, central)

    def normalise_agents(self, weights: AgentWeights, agents: dict[str, Observation]) -> dict[str, Observation]:
        """The agents' observations as the networks get them; any leading axes."""
        if weights.agents is None:
            return agents
        return {name: normalise(of_one, agents[name]) for name, of_one in weights.agents.items()}

    def distributions(
        self, networks: dict[str, PyTree[Array]], agents: dict[str, Observation], mask: PyTree
    ) -> dict[str, Distribution]:
        """Kind to the distributions `[A]` of its agents' actions, for normalised observations."""
        masks = {} if isinstance(mask, tuple) else mask

        def of(kind: AgentKind) -> Distribution:
            say = self.networks[set_of(self.sets, kind.name).name].distribution
            return self._each(kind, say, networks, self._seen(kind, agents[kind.name]), masks.get(kind.name, ()))

        return {kind.name: of(kind) for kind in self.kinds}

    def values(self, networks: dict[str, PyTree[Array]], view: AgentView) -> dict[str, Float[Array, "..."]]:
        """Kind to the values `[A]` of its agents, for a normalised view."""
        central = self._central(view)

        def of(kind: AgentKind) -> Float[Array, " A"]:
            network = self.networks[set_of(self.sets, kind.name).name]
            value = lambda weights, seen: network.value(weights, seen if central is None else (seen, central))
            return self._each(kind, value, networks, self._seen(kind, view.agents[kind.name]))

        return {kind.name: of(kind) for kind in self.kinds}

    def sample(
        self, weights: AgentWeights, key: Key, memory: Memory, observation: Observation, action_mask: PyTree
    ) -> Decision:
        """Actions drawn from the policies, for a raw view, or the agents' raw observations alone."""
        keys = self._keys(key)

        def draw(name: str, distributions: Distribution) -> tuple[Action, Float[Array, " A"]]:
            return jax.vmap(lambda one, k: one.sample_and_log_prob(k))(distributions, keys[name])

        return self._decide(draw, weights, observation, action_mask)

    def greedy(
        self, weights: AgentWeights, key: Key, memory: Memory, observation: Observation, action_mask: PyTree
    ) -> Decision:
        """The most likely actions, for a raw view, or the agents' raw observations alone."""

        def choose(name: str, distributions: Distribution) -> tuple[Action, Float[Array, " A"]]:
            action = jax.vmap(lambda one: one.mode())(distributions)
            return action, jax.vmap(lambda one, a: one.log_prob(a))(distributions, action)

        return self._decide(choose, weights, observation, action_mask)

    def _decide(
        self, choose: Callable, weights: AgentWeights, observation: Observation, action_mask: PyTree
    ) -> Decision:
        agents = observation.agents if isinstance(observation, AgentView) else observation
        found = self.distributions(weights.networks, self.normalise_agents(weights, agents), action_mask)
        chosen = {name: choose(name, distributions) for name, distributions in found.items()}
        actions = {name: action for name, (action, _) in chosen.items()}
        return Decision(actions, (), {name: log_prob for name, (_, log_prob) in chosen.items()})

    def _keys(self, key: Key) -> dict[str, Array]:
        """A key for each agent, `[A]`."""
        stops = np.cumsum([kind.count for kind in self.kinds]).tolist()
        keys = split_key(key, stops[-1])
        return {kind.name: keys[stop - kind.count : stop] for kind, stop in zip(self.kinds, stops, strict=True)}

    def _each(self, kind: AgentKind, function: Callable, networks: dict[str, PyTree[Array]], *seen: PyTree) -> Any:
        """Lifts a function of weights and what ONE agent sees over the agents of a kind."""
        group = set_of(self.sets, kind.name)
        axis = 0 if group.independent else None
        return jax.vmap(function, in_axes=(axis, *(0,) * len(seen)))(networks[group.name], *seen)

    def _seen(self, kind: AgentKind, observation: Observation) -> Observation:
        """What each agent of a kind sees, with its number where it is told."""
        group = set_of(self.sets, kind.name)
        if not self.agent_ids or group.independent:
            return observation
        first = group.first(kind)
        return (observation, jnp.eye(group.size, dtype=jnp.float32)[first : first + kind.count])

    def _central(self, view: AgentView) -> Float[Array, " features"] | None:
        """What all critics see besides; None where each has its agent's own observation only."""
        if self.critic == "own":
            return None
        return view.central if self.central is not None else self._joined(view)

    def _joined(self, view: AgentView) -> Float[Array, " features"]:
        """All observations in one vector: zeros in the place of agents that are out, then who is active."""
        parts = []
        for kind in self.kinds:
            flat = jax.vmap(partial(flatten, kind.observation_space))(view.agents[kind.name])
            parts.append(jnp.where(view.active[kind.name][:, None], flat, 0).reshape(-1))
        present = [view.active[kind.name].astype(jnp.float32) for kind in self.kinds]
        return jnp.concatenate([*parts, *(present if self.shows_active else ())])


def agent_policy(
    env: Environment,
    sets: tuple[ParameterSet, ...],
    make_networks: Mapping[str, MakeAgentNetwork],
    *,
    critic: CriticSees,
    agent_ids: bool,
    normalise_observations: bool,
) -> AgentPolicy:
    """The policy of an environment of several agents.

    Args:
        env: the environment, without transforms.
        sets: which agents share parameters.
        make_networks: name of a parameter set to the function that makes its network.
        critic: whether critics see the central features besides their agent's own observation.
        agent_ids: tell agents that share parameters apart by a one-hot of their number.
        normalise_observations: standardise observations, and central features, by running statistics.
    """
    central = _central_struct(env) if critic == "central" else None
    more = _central_size(env, central) if critic == "central" else None
    networks = {
        group.name: _set_network(group, make_networks[group.name], agent_ids=agent_ids, central=more)
        for group in sets
    }
    shows_active = env.active is not None
    return AgentPolicy(
        env.agents, sets, networks, critic, shows_active, central, agent_ids, normalise_observations
    )


def _set_network(
    group: ParameterSet, make_network: MakeAgentNetwork, *, agent_ids: bool, central: int | None
) -> SetNetwork:
    kind = group.kinds[0]
    own = kind.observation_space
    if agent_ids and not group.independent:
        own = spaces.Tuple((own, spaces.Box(0.0, 1.0, (group.size,))))
    seen = own if central is None else spaces.Tuple((own, spaces.Box(-np.inf, np.inf, (central,))))

    def make(key: Key) -> AgentNetwork:
        return make_network(key, own, kind.action_space, seen)

    weights, static = weights_and_rest(make)
    network = SetNetwork(make, static)
    if jax.tree.leaves(eqx.filter_eval_shape(lambda key: make(key).initial_memory(), jax.random.key(0))):
        raise UsageError(
            f"the network of {group.name} is recurrent, which MAPPO and IPPO do not support yet; use a torso "
            "without memory, such as torso='auto'."
        )
    with blaming(f"the network of {group.name}"):
        found = jax.eval_shape(network.value, weights, struct(seen))
        jax.eval_shape(lambda w, s: network.distribution(w, s, ()).mode(), weights, struct(own))
    if (found.shape, found.dtype) != ((), jnp.float32):
        raise ContractError(
            f"the network of {group.name}: value(...) is {found.dtype}{list(found.shape)}, "
            "expected one float32 []."
        )
    return network


def _central_struct(env: Environment) -> jax.ShapeDtypeStruct | None:
    central = env.central
    if central is None:
        return None
    with blaming(f"{env.name}: central"):
        found = jax.eval_shape(lambda key: central(env.reset(key, env.params)[1], env.params), jax.random.key(0))
    if not isinstance(found, jax.ShapeDtypeStruct) or len(found.shape) != 1 or found.dtype != jnp.float32:
        raise ContractError(f"{env.name}: central returned {found}, expected one vector of float32.")
    return found


def _central_size(env: Environment, central: jax.ShapeDtypeStruct | None) -> int:
    if central is not None:
        return central.shape[0]
    each = sum(kind.count * flat_size(kind.observation_space) for kind in env.agents)
    return each + (sum(kind.count for kind in env.agents) if env.active is not None else 0)


def split_key(key: Key, count: int) -> Array:
    """`[count]` keys; of one, the key itself, so that a lone agent draws what it would draw by itself."""
    return key[None] if count == 1 else jax.random.split(key, count)


def several_agents(env: Environment, algorithm: str) -> Environment:
    """The environment itself; a `UsageError` where it has a single agent."""
    if not env.agents:
        raise UsageError(f"{env.name} has one agent; {algorithm} is for environments with several. Use ppo.")
    return env
