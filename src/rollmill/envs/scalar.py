"""The type of one physics constant in an environment's parameters."""

from typing import TypeAlias

from jaxtyping import Array, Float

Scalar: TypeAlias = Float[Array, "..."] | float
"""A Python float by default; a float32 array `[]`, or `[E]` with one value per replica, where it varies."""
