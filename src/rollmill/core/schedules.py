"""Schedules of a number over a training, written as text: `linear:1e-3:0`, `cosine:1e-3:1e-5`, `constant:1e-3`."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from rollmill.core.errors import UsageError

FORMS = "constant:VALUE, linear:FIRST:LAST or cosine:FIRST:LAST"
_NUMBERS = {"constant": 1, "linear": 2, "cosine": 2}


class NumberSchedule(NamedTuple):
    """A number that changes from `first` at the beginning of a training to `last` at its end."""

    shape: str
    """`constant`, `linear` or `cosine`: half a period of the cosine (Loshchilov and Hutter, "SGDR", 2017)."""
    first: float
    last: float

    def at(self, done: float | Float[Array, "..."]) -> Float[Array, "..."]:
        """The number where a fraction of the training is done; that of the end for more than 1."""
        part = jnp.clip(jnp.asarray(done, jnp.float32), 0.0, 1.0)
        if self.shape == "cosine":
            part = 0.5 - 0.5 * jnp.cos(jnp.float32(math.pi) * part)
        return jnp.float32(self.first) + jnp.float32(self.last - self.first) * part


def parse_schedule(name: str, text: str) -> NumberSchedule:
    """The schedule of a text.

    Args:
        name: name of the option, for messages.
        text: such as `linear:1e-3:0`.

    Raises:
        UsageError: it is no schedule.
    """
    shape, *numbers = text.split(":")
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        values = []
    if len(values) != _NUMBERS.get(shape):
        raise UsageError(
            f"{name}={text!r} must be a number or a schedule: {FORMS}, such as linear:1e-3:0, from the "
            "beginning to the end of the training."
        )
    return NumberSchedule(shape, values[0], values[-1])
