"""How exactly kernels compute on GPUs."""

from typing import Literal, TypeAlias

Numerics: TypeAlias = Literal["float32", "tf32", "bfloat16"]
"""Precision of matrix products and of a policy's functions: exact, or with 10 or 7 bits of mantissa."""
