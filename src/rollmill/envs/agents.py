"""Environments of several agents: the spaces of all agents together, and who takes part.

Shape letter: `A` agents of a kind.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Bool, PyTree

from rollmill.core.spaces import possible_choices, repeated
from rollmill.core.types import AgentKind, Environment, Params, State


def joint_spaces(agents: Iterable[AgentKind]) -> tuple[spaces.Space, spaces.Space]:
    """The observation and the action space of an environment of these agents: dictionaries from kinds."""
    observation = {kind.name: repeated(kind.observation_space, kind.count) for kind in agents}
    action = {kind.name: repeated(kind.action_space, kind.count) for kind in agents}
    return spaces.Dict(observation), spaces.Dict(action)


def active_agents(env: Environment, state: State, params: Params) -> dict[str, Bool[Array, " A"]]:
    """Which agents of each kind take part; all of the kinds that `env.active` leaves out."""
    everybody = {kind.name: jnp.ones(kind.count, bool) for kind in env.agents}
    return everybody if env.active is None else {**everybody, **env.active(state, params)}


def reward_struct(env: Environment) -> PyTree[jax.ShapeDtypeStruct]:
    """Shape and dtype of one step's reward: `[]`, or a dictionary from kinds to `[A]`."""
    if not env.agents:
        return jax.ShapeDtypeStruct((), jnp.float32)
    return {kind.name: jax.ShapeDtypeStruct((kind.count,), jnp.float32) for kind in env.agents}


def possible_masks(env: Environment) -> PyTree[np.ndarray]:
    """An action mask of all choices; of several agents, a dictionary with the kinds whose actions are discrete.

    None where there is no discrete action.
    """
    if not env.agents:
        return possible_choices(env.action_space)
    each = {kind.name: possible_choices(repeated(kind.action_space, kind.count)) for kind in env.agents}
    return {name: possible for name, possible in each.items() if possible is not None} or None
