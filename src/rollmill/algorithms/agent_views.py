"""Views of the agents of an environment, for the fragments of multi-agent algorithms.

An `AgentView` contains the observations of all agents in one environment step, and a dictionary of kinds contains
their actions. Multi-agent graphs therefore have the same loops and edges as other graphs. A host environment
returns active agents and observations separately, and its view shares their arrays.

Shape letters: `A` agents of a kind, `n` environments.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Bool, Float, PyTree

from rollmill.algorithms.building import refuse_params
from rollmill.algorithms.environment_fragments import EnvironmentFunctions, environment_functions, host_functions
from rollmill.algorithms.sharing import ParameterSet
from rollmill.algorithms.sizes import steps_each
from rollmill.core.errors import ContractError, UsageError
from rollmill.core.types import (
    AgentKind,
    Environment,
    HostEnvironment,
    HostFailure,
    HostStep,
    HostVector,
    Key,
    Observation,
    Params,
    StartHost,
    State,
)
from rollmill.core.user_frame import attribute_to_user_code
from rollmill.envs import active_agents
from rollmill.envs.host import start_for_evaluation
from rollmill.networks import flat_size, flatten

CriticSees = Literal["central", "own"]
"""Input of critics: central features and their agent's observation, or the observation only."""


class AgentView(NamedTuple):
    """Observations of all agents of a multi-agent environment, and which agents are active."""

    agents: dict[str, Observation]
    """Observations of each kind, `[A, ...]`."""
    active: dict[str, Bool[Array, "..."]]
    """Active agents of each kind, `[A]`."""
    central: PyTree[Float[Array, "..."]]
    """Central features, `[features]`, or `()` if the environment has none or the algorithm does not use them."""


def view_agents(env: Environment, *, critic: CriticSees) -> Environment:
    """Wraps a multi-agent environment so that its observation is an `AgentView`.

    The view adds active agents and central features. The transform belongs inside auto-reset, so that the final
    observations of truncated episodes also contain them, for bootstrapping.
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


def over_agents(
    group: ParameterSet, function: Callable, networks: Mapping[str, PyTree[Array]], *inputs: PyTree
) -> Any:
    """Lifts a function of the weights and inputs of ONE agent over agents of a parameter set."""
    axis = 0 if group.independent else None
    return jax.vmap(function, in_axes=(axis, *(0,) * len(inputs)))(networks[group.name], *inputs)


def with_agent_ids(group: ParameterSet, kind: AgentKind, observation: Observation) -> Observation:
    """Adds to the observations of a kind's agents a one-hot of each agent's index in the parameter set, unless the
    agents have separate weights.
    """
    if group.independent:
        return observation
    first = group.first(kind)
    return (observation, jnp.eye(group.size, dtype=jnp.float32)[first : first + kind.count])


def observation_space_of(group: ParameterSet, *, agent_ids: bool) -> spaces.Space:
    """Returns the space of one agent's observations, as `with_agent_ids` returns them if `agent_ids`."""
    space = group.kinds[0].observation_space
    if not agent_ids or group.independent:
        return space
    return spaces.Tuple((space, spaces.Box(0.0, 1.0, (group.size,))))


def keys_of_agents(kinds: tuple[AgentKind, ...], key: Key) -> dict[str, Array]:
    """Splits a key into one for each agent, `[A]` for each kind."""
    stops = np.cumsum([kind.count for kind in kinds]).tolist()
    keys = split_key(key, stops[-1])
    return {kind.name: keys[stop - kind.count : stop] for kind, stop in zip(kinds, stops, strict=True)}


def central_features(
    kinds: tuple[AgentKind, ...], view: AgentView, *, shows_active: bool
) -> Float[Array, " features"]:
    """Returns the central features of the environment.

    If the environment has none, all observations are joined to one vector, with zeros for inactive agents. With
    `shows_active`, the vector also contains the flags of active agents.
    """
    if not isinstance(view.central, tuple):
        return view.central
    parts = []
    for kind in kinds:
        flat = jax.vmap(partial(flatten, kind.observation_space))(view.agents[kind.name])
        parts.append(jnp.where(view.active[kind.name][:, None], flat, 0).reshape(-1))
    active = [view.active[kind.name].astype(jnp.float32) for kind in kinds]
    return jnp.concatenate([*parts, *(active if shows_active else ())])


def central_size_of(env: Environment | HostEnvironment) -> int:
    """Returns the length of an environment's vector of `central_features`."""
    central = central_struct(env)
    if central is not None:
        return central.shape[0]
    observations = sum(kind.count * flat_size(kind.observation_space) for kind in env.agents)
    return observations + (sum(kind.count for kind in env.agents) if may_become_inactive(env) else 0)


def central_struct(env: Environment | HostEnvironment) -> jax.ShapeDtypeStruct | None:
    """Returns the shape and dtype of an environment's central features, or None if it has none."""
    if isinstance(env, HostEnvironment) or env.central is None:
        return None
    central = env.central
    with attribute_to_user_code(f"{env.name}: central"):
        of_start = lambda key: central(env.reset(key, env.params)[1], env.params)
        features = jax.eval_shape(of_start, jax.random.key(0))
    is_struct = isinstance(features, jax.ShapeDtypeStruct)
    if not is_struct or len(features.shape) != 1 or features.dtype != jnp.float32:
        raise ContractError(f"{env.name}: central must return one float32 vector, got {features}.")
    return features


def may_become_inactive(env: Environment | HostEnvironment) -> bool:
    """Returns whether agents may leave an episode before it ends. Always True for host environments."""
    return isinstance(env, HostEnvironment) or env.active is not None


def split_key(key: Key, count: int) -> Array:
    """Splits a key into `[count]` keys. A count of 1 returns the key itself.

    IPPO with one agent therefore uses the same random keys as PPO.
    """
    return key[None] if count == 1 else jax.random.split(key, count)


def require_multi_agent(
    env: Environment | HostEnvironment, algorithm: str, *, single: str = "ppo"
) -> Environment | HostEnvironment:
    """Returns the environment, or raises a `UsageError` if it has a single agent, for which `single` is a similar
    algorithm.
    """
    if not env.agents:
        is_game = isinstance(env, Environment) and env.num_players > 1
        other = "alphazero" if is_game else single
        raise UsageError(
            f"{env.name} has one agent, but {algorithm} needs a multi-agent environment. hint: use {other}, or "
            "list the kinds of agents: rollmill.Environment(..., agents=(rollmill.AgentKind(...), ...))."
        )
    return env


def agent_environment(
    env: Environment | HostEnvironment,
    config: Any,
    *,
    params: Params | None,
    critic: CriticSees,
    final_mask: bool = False,
) -> tuple[EnvironmentFunctions, StartHost | None]:
    """Returns the functions of a multi-agent environment, and the start function of a host environment.

    `params` replaces the environment's own parameters. `final_mask` records the legal actions of final states, if
    a JAX environment has action masks. Raises a `UsageError` if a host environment is given parameters.
    """
    if isinstance(env, HostEnvironment):
        refuse_params(env, params)
        return host_functions(env, view=add_agent_views), StartViewed(env.start)
    view = partial(view_agents, critic=critic)
    functions = environment_functions(
        env,
        params=params,
        num_envs=config.num_envs,
        final_mask=final_mask,
        view=view,
        planned_steps=steps_each(config),
    )
    return functions, None


def add_agent_views(step: HostStep) -> HostStep:
    """Returns a host step in which each observation is an `AgentView`, which includes the active agents.

    The arrays are shared with the original step.
    """
    info = dict(step.info)
    active, final_active = info.pop("active"), info.pop("final_active")
    info["final_observation"] = AgentView(info["final_observation"], final_active, ())
    return step._replace(observation=AgentView(step.observation, active, ()), info=info)


def remove_agent_views(step: HostStep) -> HostStep:
    """Reverts `add_agent_views`: returns a host step with plain observations and separate active agents."""
    view, final = step.observation, step.info["final_observation"]
    info = {**step.info, "final_observation": final.agents, "active": view.active, "final_active": final.active}
    return step._replace(observation=view.agents, info=info)


@dataclass(frozen=True)
class StartViewed:
    """A `StartHost` of multi-agent environments that return observations as an `AgentView`."""

    start: StartHost

    @property
    def for_evaluation(self) -> StartHost:
        """Returns the `StartHost` of the environments for evaluations, whose spaces do not differ."""
        return StartViewed(start_for_evaluation(self.start))

    def __call__(
        self, indices: Sequence[int], /, *, seed: int, generation: int = 0, gamma: float | None = None
    ) -> HostVector:
        """Starts the environments. The arguments are described at `StartHost`."""
        return ViewedVector(self.start(indices, seed=seed, generation=generation, gamma=gamma))


class ViewedVector:
    """A `core.types.HostVector` that returns multi-agent observations as an `AgentView`."""

    def __init__(self, vector: HostVector) -> None:
        self._vector = vector

    @property
    def num_envs(self) -> int:
        """Number of environments, `n`."""
        return self._vector.num_envs

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of the current environments, in order."""
        return self._vector.seeds

    def reset(self, *, out: HostStep | None = None) -> HostStep:
        """Starts an episode in each environment."""
        return add_agent_views(self._vector.reset(out=None if out is None else remove_agent_views(out)))

    def step(self, actions: PyTree[np.ndarray], *, out: HostStep | None = None) -> HostStep:
        """Applies one action to each environment, and resets each environment whose episode ends."""
        return add_agent_views(self._vector.step(actions, out=None if out is None else remove_agent_views(out)))

    def drain_failures(self) -> list[HostFailure]:
        """Returns the failures of environments since the last call, in order."""
        return self._vector.drain_failures()

    def close(self) -> None:
        """Closes all environments."""
        self._vector.close()
