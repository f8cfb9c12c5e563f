"""Sets numeric parameters of an environment by name, as in `make("CartPole-v1", gravity=3.7)`.

A number may follow a schedule over training (`linear:9.8:20`), or be drawn for each episode (`uniform:5:15`).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rollmill.core.errors import UsageError
from rollmill.core.schedules import NumberSchedule, parse_schedule
from rollmill.core.types import Action, Environment, Key, Observation, Params, State, Timestep
from rollmill.envs.options import like
from rollmill.envs.transforms import vary, wrap

MAX_WHOLE = 2**24
"""Largest integer up to which float32 represents every integer exactly."""

UNIFORM = "uniform"
"""Name of the distribution for a number drawn uniformly for each episode."""


def number_names(params: Params) -> list[str]:
    """Returns the names of the scalar fields of a parameter dataclass."""
    if not dataclasses.is_dataclass(params):
        return []
    return [field.name for field in dataclasses.fields(params) if _is_number(getattr(params, field.name))]


def with_numbers(env: Environment, numbers: Mapping[str, Any]) -> Environment:
    """Returns an environment with some parameters replaced by program inputs.

    Outside a run, its parameters hold a schedule's final value, and a distribution's mean.

    Raises:
        UsageError: a value has another type than the parameter that it replaces, or is too large or not finite.
    """
    if not numbers:
        return env
    inputs = {name: _course(env, name, value) for name, value in sorted(numbers.items())}
    values = {
        name: (first + last) / 2 if shape == UNIFORM else last for name, (shape, first, last) in inputs.items()
    }
    return env._replace(params=dataclasses.replace(env.params, **values), inputs=inputs)


def _course(env: Environment, name: str, value: Any) -> NumberSchedule:
    """Returns the schedule or the distribution that an option describes."""
    default = getattr(env.params, name)
    if isinstance(value, str) and ":" in value:
        return _parse(env, name, value, default)
    value = like(env.name, name, value, default)
    if not math.isfinite(value):
        raise UsageError(f"{env.name}: {name}={value!r} must be finite.")
    if isinstance(value, int) and abs(value) > MAX_WHOLE:
        raise UsageError(f"{env.name}: {name}={value!r} must lie between -{MAX_WHOLE} and {MAX_WHOLE}.")
    return NumberSchedule("constant", value, value)


def _parse(env: Environment, name: str, text: str, default: Any) -> NumberSchedule:
    if not isinstance(default, float):
        raise UsageError(f"{env.name}: {name}={text!r} must be an integer, like its default {default!r}.")
    shape, _, ends = text.partition(":")
    if shape == UNIFORM:
        return _parse_distribution(env, name, text, ends)
    try:
        return parse_schedule(name, text)
    except UsageError as error:
        raise UsageError(f"{env.name}: {error} hint: uniform:LOW:HIGH draws a number for each episode.") from None


def _parse_distribution(env: Environment, name: str, text: str, ends: str) -> NumberSchedule:
    try:
        bounds = parse_schedule(name, f"linear:{ends}")
    except UsageError:
        raise UsageError(f"{env.name}: {name}={text!r} must be uniform:LOW:HIGH, with finite numbers.") from None
    if bounds.first > bounds.last:
        raise UsageError(f"{env.name}: {name}={text!r} has a lower bound above its upper bound.")
    return bounds._replace(shape=UNIFORM)


def replace_params(params: Params, numbers: Mapping[str, Any]) -> Params:
    """Replaces values of an environment's parameters, cast to the old types. The new values may be traced."""
    types = {name: jnp.asarray(getattr(params, name)).dtype for name in numbers}
    typed = {name: jnp.asarray(value).astype(types[name]) for name, value in numbers.items()}
    return dataclasses.replace(params, **typed) if typed else params


def held_numbers(inputs: Mapping[str, NumberSchedule]) -> dict[str, float]:
    """Returns the first and the last value of each schedule or distribution, as `NAME` and `NAME:SHAPE`."""
    firsts = {name: float(course.first) for name, course in inputs.items()}
    lasts = {
        f"{name}:{course.shape}": float(course.last)
        for name, course in inputs.items()
        if course.shape != "constant"
    }
    return {**firsts, **lasts}


def with_ends(inputs: Mapping[str, NumberSchedule], held: Mapping[str, Any]) -> dict[str, NumberSchedule]:
    """Replaces the ends of schedules in an environment's inputs with a learner's values, which may be traced."""
    return {
        name: NumberSchedule(shape, held[name], held.get(f"{name}:{shape}", held[name]))
        for name, (shape, _, _) in inputs.items()
    }


class EpisodeParams(eqx.Module):
    """Parameters of an environment, and the bounds between which some of them are drawn for each episode."""

    own: Params
    low: dict[str, Float[Array, "..."]]
    high: dict[str, Float[Array, "..."]]


def now_of(params: Params, inputs: Mapping[str, NumberSchedule], done: float | Float[Array, ""]) -> Params:
    """Returns an environment's parameters at the point of the run given by the fraction `done`.

    The result is an `EpisodeParams` if some parameters are drawn for each episode.
    """
    values = {name: course.at(done) for name, course in inputs.items() if course.shape != UNIFORM}
    own, drawn = (
        replace_params(params, values),
        {n: course for n, course in inputs.items() if course.shape == UNIFORM},
    )
    if not drawn:
        return own
    ends = ({name: jnp.float32(course[end]) for name, course in drawn.items()} for end in (1, 2))
    return EpisodeParams(own, *ends)


def drawing(env: Environment) -> Environment:
    """Returns an environment that draws new values for each episode, for all parameters with a distribution."""
    if not any(course.shape == UNIFORM for course in env.inputs.values()):
        return env

    def reset(key: Key, params: EpisodeParams) -> tuple[Observation, State]:
        return env.reset(key, params.own)

    def step(key: Key, state: State, action: Action, params: EpisodeParams) -> Timestep:
        return env.step(key, state, action, params.own)

    inner = wrap(env, reset, step, unwrap=lambda state, params: (state, params.own))
    return vary(inner._replace(params=now_of(env.params, env.inputs, 1.0)), _draw)


def _draw(key: Key, params: EpisodeParams) -> EpisodeParams:
    values = {}
    for number, (name, low) in enumerate(sorted(params.low.items())):
        share = jax.random.uniform(jax.random.fold_in(key, number))
        values[name] = low + share * (params.high[name] - low)
    return EpisodeParams(replace_params(params.own, values), params.low, params.high)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) <= MAX_WHOLE
