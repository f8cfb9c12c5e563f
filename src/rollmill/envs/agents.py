"""Functions for multi-agent environments: joint spaces, active agents, action masks and random actions.

Shape letter: `A` agents of a kind.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Bool, PyTree

from rollmill.core.spaces import possible_choices, repeat_space, sample
from rollmill.core.types import Action, AgentKind, Environment, HostEnvironment, Key, Params, State


def joint_spaces(agents: Iterable[AgentKind]) -> tuple[spaces.Space, spaces.Space]:
    """Returns the joint observation and action spaces of these agents, as dictionaries of kinds."""
    observation = {kind.name: repeat_space(kind.observation_space, kind.count) for kind in agents}
    action = {kind.name: repeat_space(kind.action_space, kind.count) for kind in agents}
    return spaces.Dict(observation), spaces.Dict(action)


def kinds_by_name(names: Sequence[str], sizes: Sequence[object]) -> dict[str, list[int]]:
    """Groups agents by name into kinds, and returns the indices of each kind's agents.

    Names have the form `adversary_0`. Agents whose names differ only in the number belong to one kind, unless
    their spaces differ.
    """
    by_stem: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        by_stem.setdefault(re.sub(r"[-_ ]?\d+$", "", name) or "agent", []).append(place)
    kinds: dict[str, list[int]] = {}
    for stem, places in by_stem.items():
        same = all(sizes[place] == sizes[places[0]] for place in places)
        kinds |= {stem: places} if same else {names[place]: [place] for place in places}
    return kinds


def active_agents(env: Environment, state: State, params: Params) -> dict[str, Bool[Array, " A"]]:
    """Returns the active agents of each kind, or all agents of kinds that `env.active` leaves out."""
    all_active = {kind.name: jnp.ones(kind.count, bool) for kind in env.agents}
    return all_active if env.active is None else {**all_active, **env.active(state, params)}


def legal_actions(env: Environment, state: State, params: Params) -> PyTree[Bool[Array, "..."]]:
    """Returns the environment's action mask, or `()` if all actions are legal."""
    return () if env.action_mask is None else env.action_mask(state, params)


def reward_struct(env: Environment | HostEnvironment) -> PyTree[jax.ShapeDtypeStruct]:
    """Returns the shape and dtype of one step's reward: `[]`, or `[A]` for each kind of agents."""
    if not env.agents:
        return jax.ShapeDtypeStruct((), jnp.float32)
    return {kind.name: jax.ShapeDtypeStruct((kind.count,), jnp.float32) for kind in env.agents}


def possible_masks(env: Environment | HostEnvironment) -> PyTree[np.ndarray]:
    """Returns the action mask in which all choices are legal, or None if no action is discrete.

    In a multi-agent environment, the result is a dictionary with a mask for each kind that has discrete actions.
    """
    if not env.agents:
        return possible_choices(env.action_space)
    choices = {kind.name: possible_choices(repeat_space(kind.action_space, kind.count)) for kind in env.agents}
    return {name: mask for name, mask in choices.items() if mask is not None} or None


def random_action(key: Key, env: Environment | HostEnvironment, mask: PyTree[Bool[Array, "..."]]) -> Action:
    """Draws a random action, uniform over the legal actions of a space.

    If a `Box` has no bound on one side, it counts as extending one unit beyond the other side.
    """
    action = sample(key, env.action_space)
    if not env.agents:
        return action if isinstance(mask, tuple) else _draw_legal(key, env.action_space, mask)
    keys = jax.random.split(key, len(env.agents))
    masks = {} if isinstance(mask, tuple) else mask
    for kind, kind_key in zip(env.agents, keys, strict=True):
        if kind.name in masks:
            space = repeat_space(kind.action_space, kind.count)
            action[kind.name] = _draw_legal(kind_key, space, masks[kind.name])
    return action


def _draw_legal(key: Key, space: Any, mask: Bool[Array, "..."]) -> Action:
    """Draws from a `Discrete` or `MultiDiscrete` space, uniformly over the choices that `mask` allows."""
    possible = possible_choices(space)
    assert possible is not None
    pick = jax.random.categorical(key, jnp.where(mask & possible, 0.0, -jnp.inf))
    return pick + jnp.asarray(space.start, pick.dtype)
