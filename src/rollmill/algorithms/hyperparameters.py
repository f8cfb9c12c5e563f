"""Hyperparameters as data: numbers that a learner holds, so that changing one compiles nothing.

A compiled program reads them from the training state, as it reads weights. Those that choose shapes or code stay
constants of the program: sizes and counts, switches, None, an infinite bound, and a schedule given as text or as a
function. The network's own settings matter at the start alone.
"""

import copy
import math
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import TypeAlias, TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rollmill.dataflow import Hyperparameters

Config = TypeVar("Config")

Number: TypeAlias = float | int | Float[Array | np.ndarray, ""]
"""A number, or one that a learner holds and that may be traced."""

PLANNED_UPDATES = "planned_updates"
"""Updates of the whole training, over which a learning rate is annealed."""

OF_THE_LOOPS = ("target_kl",)
"""Hyperparameters that end an iteration's learning, which programs contain."""


def numbers_of(config: object, *, constant: Collection[str] = (), **further: float | int) -> dict[str, float]:
    """Returns the hyperparameters that are data: the finite floats of a configuration, by name.

    Args:
        config: dataclass of the hyperparameters.
        constant: fields that the algorithm reads where it has no learner, such as in its policy.
        **further: numbers that derive from others.
    """
    values = {field.name: getattr(config, field.name) for field in fields(config)}  # type: ignore[arg-type]
    is_number = lambda name, value: isinstance(value, float) and math.isfinite(value) and name not in constant
    chosen = {name: value for name, value in values.items() if is_number(name, value)}
    return {**chosen, **{name: float(value) for name, value in further.items()}}


def as_data(numbers: Mapping[str, float]) -> Hyperparameters:
    """Returns these numbers as arrays, for a learner to hold."""
    return {name: jnp.float32(value) for name, value in numbers.items()}


def current(config: Config, held: Hyperparameters) -> Config:
    """Returns the configuration with the numbers that a learner holds in the place of its own.

    Code reads `current(config, learner.hyperparameters).gamma` as it would read `config.gamma`. The copy is not
    checked again, because its numbers may be traced.
    """
    named = {field.name for field in fields(config)}  # type: ignore[arg-type]
    now = copy.copy(config)
    for name in held.keys() & named:
        object.__setattr__(now, name, held[name])
    return now
