"""Advances a robot by several physics steps for one step of a task.

Either `rollmill.physics` or a function that replaces it computes the steps.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rollmill import physics
from rollmill.core.errors import UsageError
from rollmill.core.schema import coerce

PHYSICS = ("jax", "warp", "mujoco")
"""Names of the simulators: `rollmill.physics`, MuJoCo Warp and C MuJoCo."""

Advance: TypeAlias = Callable[[physics.RobotState, Array, int], physics.RobotState]
"""`(state, controls, number of steps) -> state`."""

_stand_in: ContextVar[Advance | None] = ContextVar("stand_in", default=None)


def advance(
    model: physics.Model, state: physics.RobotState, control: Float[Array, " n"], count: int
) -> physics.RobotState:
    """Returns the state of a robot after several physics steps with the same controls."""
    if (other := _stand_in.get()) is not None:
        return other(state, control, count)
    return jax.lax.fori_loop(0, count, lambda _, state: physics.step(model, state, control), state)


@contextmanager
def advanced_by(other: Advance) -> Iterator[None]:
    """Context manager in which `other` advances traced robot tasks, instead of their own function."""
    token = _stand_in.set(other)
    try:
        yield
    finally:
        _stand_in.reset(token)


def in_float32(params: physics.Params) -> physics.Params:
    """Casts the parameters of a robot to float32, which environments use."""
    return jax.tree.map(lambda values: np.asarray(values, np.float32), params)


def checked_count(name: str, value: int) -> int:
    """Returns a number of steps or iterations, or raises a `UsageError` if it is below 1."""
    count = coerce(name, int, value)
    if count < 1:
        raise UsageError(f"{name} must be at least 1, got {count}.")
    return count


def uniform(key: Array, size: int, bound: Float[Array, ""] | float) -> Float[Array, " size"]:
    """Draws an array of values uniformly between `-bound` and `bound`."""
    return bound * jax.random.uniform(key, (size,), jnp.float32, -1.0, 1.0)
