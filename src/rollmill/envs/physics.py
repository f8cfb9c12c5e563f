"""What environments with physics share: the type of a constant, and angles within one turn."""

import math
from typing import TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, Float

Scalar: TypeAlias = Float[Array, "..."] | float
"""A Python float by default; a float32 array `[]`, or `[E]` with one value per replica, where it varies."""


def wrapped(angle: Float[Array, ""]) -> Float[Array, ""]:
    """The same direction within [-pi, pi] (rad)."""
    return angle - 2 * math.pi * jnp.round(angle / (2 * math.pi))
