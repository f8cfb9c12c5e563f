"""Helpers for environments with physics: the type of a constant, and wrapped angles."""

import math
from typing import TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, Float

Scalar: TypeAlias = Float[Array, "..."] | float
"""A constant of an environment: a float, or a float32 array `[]`, or `[E]` with one value for each environment."""


def wrap_angle(angle: Float[Array, ""]) -> Float[Array, ""]:
    """Wraps an angle (rad) to the range [-pi, pi]."""
    return angle - 2 * math.pi * jnp.round(angle / (2 * math.pi))
