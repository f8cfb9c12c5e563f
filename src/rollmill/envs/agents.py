"""Environments of several agents: the spaces of all agents together, and who takes part.

Shape letter: `A` agents of a kind.
"""

from collections.abc import Iterable

import jax.numpy as jnp
from gymnasium import spaces
from jaxtyping import Array, Bool

from rollmill.core.spaces import repeated
from rollmill.core.types import AgentKind, Environment, Params, State


def joint_spaces(agents: Iterable[AgentKind]) -> tuple[spaces.Space, spaces.Space]:
    """The observation and the action space of an environment of these agents: dictionaries from kinds."""
    observation = {kind.name: repeated(kind.observation_space, kind.count) for kind in agents}
    action = {kind.name: repeated(kind.action_space, kind.count) for kind in agents}
    return spaces.Dict(observation), spaces.Dict(action)


def active_agents(env: Environment, state: State, params: Params) -> dict[str, Bool[Array, " A"]]:
    """Of each kind, which agents take part; all of the kinds that `env.active` leaves out."""
    everybody = {kind.name: jnp.ones(kind.count, bool) for kind in env.agents}
    return everybody if env.active is None else {**everybody, **env.active(state, params)}
