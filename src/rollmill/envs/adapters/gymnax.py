"""`gymnax:ID`: environments of gymnax (Lange, 2022), versions 1.x and 0.0.x.

The adapter calls `step_env`, which does not reset. In 1.x, `done` means terminated, and a method reports
truncation. In 0.0.x, `done` includes the time limit. The adapter therefore computes the step a second time without
the limit to find out whether it terminated. The compiler merges the two computations.
"""

import dataclasses
import importlib
import importlib.metadata
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.types import Action, Environment, Key, Params, State, Timestep
from rollmill.envs.adapters import import_extra
from rollmill.envs.adapters.gymnax_drawings import draw_of
from rollmill.envs.adapters.promotion import promoting
from rollmill.envs.numbers import number_names, with_numbers
from rollmill.envs.options import keyword_names, like, unknown_option
from rollmill.gpus.jax_settings import standard_promotion

NO_LIMIT = 2**30
"""Time limit that no episode reaches, in steps."""

Step = Callable[[Key, State, Action, Params], Timestep]


def make(name: str, **options: Any) -> Environment:
    """Makes the gymnax environment called `name`.

    Args:
        name: an id of gymnax, such as `CartPole-v1`.
        **options: values of the environment's parameters, such as `max_steps_in_episode=100`. Other options are
            passed on to `gymnax.make`.

    Returns:
        The environment with separate `truncated` and `terminated`, no auto-reset, rewards in float32 and
        every leaf strongly typed. It is traced under standard JAX promotion, which gymnax needs.

    Raises:
        UsageError: gymnax is not installed, or has no such environment or option.
    """
    gymnax = import_extra("gymnax", "gymnax")
    if name not in gymnax.registered_envs:
        raise unknown_name("gymnax environment", name, gymnax.registered_envs)
    with standard_promotion():
        source, params, numbers = _make(gymnax, name, options)
        observed = _space(source.observation_space(params))
        env = Environment(
            name=f"gymnax:{name}",
            reset=source.reset_env,
            step=_step_of_1(source) if _major_version() >= 1 else _step_of_0(source),
            observation_space=observed,
            action_space=_space(source.action_space(params)),
            params=params,
            draw=draw_of(name, source, observed),
        )
        return promoting(with_numbers(env, numbers))


def _make(gymnax: ModuleType, name: str, options: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Returns the gymnax environment and its parameters, updated by `options`."""
    try:
        source, params = gymnax.make(name)
    except OSError as error:  # raised by urllib, for example, if the environment's data cannot be downloaded
        raise UsageError(
            f"gymnax:{name} needs data that could not be read or downloaded: {type(error).__name__}: {error}. "
            "hint: connect this machine to the network once; gymnax stores the download."
        ) from error
    defaults = {entry.name: getattr(params, entry.name) for entry in dataclasses.fields(params)}
    others = {option: value for option, value in options.items() if option not in defaults}
    known = [*keyword_names(type(source)), *defaults]
    for option in others:
        if option not in known:
            raise unknown_option(f"gymnax:{name}", option, known)
    if others:
        source, params = gymnax.make(name, **others)
    names = number_names(params)
    numbers = {option: value for option, value in options.items() if option in names}
    others = {n: value for n, value in options.items() if n in defaults and n not in numbers}
    params = params.replace(**{n: like(f"gymnax:{name}", n, value, defaults[n]) for n, value in others.items()})
    return source, params, numbers


def _major_version() -> int:
    return int(importlib.metadata.version("gymnax").partition(".")[0])


def _step_of_1(source: Any) -> Step:
    def step(key: Key, state: State, action: Action, params: Params) -> Timestep:
        observation, next_state, reward, terminated, info = source.step_env(key, state, action, params)
        truncated = source.is_truncated(next_state, params)
        return Timestep(observation, next_state, reward, terminated, truncated, info)

    return step


def _step_of_0(source: Any) -> Step:
    def step(key: Key, state: State, action: Action, params: Params) -> Timestep:
        observation, next_state, reward, done, info = source.step_env(key, state, action, params)
        unlimited = params.replace(max_steps_in_episode=NO_LIMIT)
        terminated = jnp.asarray(source.step_env(key, state, action, unlimited)[3], bool)
        truncated = (next_state.time >= params.max_steps_in_episode) | (done & ~terminated)
        return Timestep(observation, next_state, reward, terminated, truncated, info)

    return step


def _space(space: Any) -> spaces.Space:
    kinds = importlib.import_module("gymnax.environments.spaces")
    if isinstance(space, kinds.Discrete):
        return spaces.Discrete(int(space.n))
    if isinstance(space, kinds.Box):
        return _box(space)
    if isinstance(space, kinds.Dict):
        return spaces.Dict({name: _space(part) for name, part in space.spaces.items()})
    if isinstance(space, kinds.Tuple):
        return spaces.Tuple([_space(part) for part in space.spaces])
    raise UsageError(f"the gymnax space {space} has no counterpart in Gymnasium.")


def _box(space: Any) -> spaces.Box:
    """Returns a `Box` in which the largest float of its dtype, which means "unbounded" in gymnax, is infinite."""
    dtype = np.dtype(space.dtype)
    low, high = (np.broadcast_to(np.asarray(bound), space.shape) for bound in (space.low, space.high))
    if np.issubdtype(dtype, np.floating):
        largest = np.finfo(dtype).max
        low, high = np.where(low <= -largest, -np.inf, low), np.where(high >= largest, np.inf, high)
    return spaces.Box(low.astype(dtype), high.astype(dtype), tuple(space.shape), dtype.type)
