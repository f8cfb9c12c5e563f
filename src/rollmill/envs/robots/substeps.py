"""Several physics steps of a robot for one step of a task."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rollmill import physics
from rollmill.core.errors import UsageError
from rollmill.core.schema import coerce


def advance(
    model: physics.Model, state: physics.RobotState, control: Float[Array, " n"], count: int
) -> physics.RobotState:
    """Returns the state after a number of steps with the same controls."""
    return jax.lax.fori_loop(0, count, lambda _, state: physics.step(model, state, control), state)


def in_float32(params: physics.Params) -> physics.Params:
    """Casts a robot's parameters to float32, for environments."""
    return jax.tree.map(lambda values: np.asarray(values, np.float32), params)


def checked_count(name: str, value: int) -> int:
    """Returns a number of steps or iterations, at least 1."""
    count = coerce(name, int, value)
    if count < 1:
        raise UsageError(f"{name} has to be at least 1, got {count}.")
    return count


def uniform(key: Array, size: int, bound: Float[Array, ""] | float) -> Float[Array, " size"]:
    """Returns numbers drawn uniformly within plus and minus a bound."""
    return bound * jax.random.uniform(key, (size,), jnp.float32, -1.0, 1.0)
