"""Schedules of hyperparameters in string form: `linear:1e-3:0`, `cosine:1e-3:1e-5`, `constant:1e-3`."""

import math
from typing import Any, NamedTuple

from rollmill.core.errors import UsageError

EXPECTED_SCHEDULE = (
    "a number or a schedule: constant:VALUE, linear:FIRST:LAST or cosine:FIRST:LAST, such as linear:1e-3:0, from "
    "the beginning to the end of training"
)
_NUMBERS = {"constant": 1, "linear": 2, "cosine": 2}


class NumberSchedule(NamedTuple):
    """A number that changes from `first` at the beginning of a run to `last` at its end. Both may be traced."""

    shape: str
    """Shape of the schedule: `constant`, `linear`, or `cosine`, which is half a period of a cosine (Loshchilov and
    Hutter, "SGDR", 2017)."""
    first: Any
    last: Any

    def at(self, done: Any) -> Any:
        """Returns the number after the fraction `done` of the run, as a float32 array of the same shape.

        `done` is a number or an array. Fractions above 1 count as 1.
        """
        import jax.numpy as jnp  # imported here, because every command imports this module, and few need JAX

        part = jnp.clip(jnp.asarray(done, jnp.float32), 0.0, 1.0)
        if self.shape == "constant":
            return jnp.full_like(part, self.first)
        if self.shape == "cosine":
            part = 0.5 - 0.5 * jnp.cos(jnp.float32(math.pi) * part)
        return jnp.float32(self.first) + jnp.float32(self.last - self.first) * part


def parse_schedule(name: str, text: str) -> NumberSchedule:
    """Parses a schedule such as `linear:1e-3:0`. Both values must be finite.

    Raises a `UsageError` with the option's `name` if the schedule is invalid.
    """
    shape, *numbers = text.split(":")
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        values = []
    if len(values) != _NUMBERS.get(shape):
        raise UsageError(f"{name}={text!r} must be {EXPECTED_SCHEDULE}.")
    if not all(map(math.isfinite, values)):
        raise UsageError(
            f"{name}={text!r} must be a schedule of finite numbers. hint: inf is allowed only as a constant."
        )
    return NumberSchedule(shape, values[0], values[-1])
