"""Numbers among an environment's parameters that options set by name: `make("CartPole-v1", gravity=3.7)`."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from rollmill.core.errors import UsageError
from rollmill.core.types import Environment, Params
from rollmill.envs.options import like

MAX_WHOLE = 2**24
"""Largest whole number that float32 holds with all smaller ones."""


def number_names(params: Params) -> list[str]:
    """Returns the names of the fields of a dataclass of parameters that are single numbers."""
    if not dataclasses.is_dataclass(params):
        return []
    return [field.name for field in dataclasses.fields(params) if _is_number(getattr(params, field.name))]


def with_numbers(env: Environment, numbers: Mapping[str, Any]) -> Environment:
    """Returns an environment with other numbers among its parameters, which programs take as inputs.

    Raises:
        UsageError: a value has another type than the number in its place, or is too large or not finite.
    """
    if not numbers:
        return env
    values = {name: like(env.name, name, value, getattr(env.params, name)) for name, value in numbers.items()}
    for name, value in values.items():
        if not math.isfinite(value):
            raise UsageError(f"{env.name}: {name}={value!r} has to be finite.")
        if isinstance(value, int) and abs(value) > MAX_WHOLE:
            raise UsageError(f"{env.name}: {name}={value!r} has to lie between -{MAX_WHOLE} and {MAX_WHOLE}.")
    return env._replace(params=dataclasses.replace(env.params, **values), inputs=tuple(sorted(values)))


def numbers_of(params: Params, names: tuple[str, ...]) -> dict[str, float]:
    """Returns numbers of the parameters by name."""
    return {name: float(getattr(params, name)) for name in names}


def replaced(params: Params, numbers: Mapping[str, Any]) -> Params:
    """Returns parameters with these numbers, which may be traced, each of the type of the one in its place."""
    types = {name: jnp.asarray(getattr(params, name)).dtype for name in numbers}
    typed = {name: jnp.asarray(value).astype(types[name]) for name, value in numbers.items()}
    return dataclasses.replace(params, **typed) if typed else params


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) <= MAX_WHOLE
