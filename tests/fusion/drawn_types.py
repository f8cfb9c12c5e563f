"""Types of drawn programs, and the arguments that they are called with."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

FLOATS = ("float32", "float16", "bfloat16")
SIGNED, UNSIGNED = ("int8", "int16", "int32"), ("uint8", "uint16", "uint32")
INTEGERS = (*SIGNED, *UNSIGNED)
NUMBERS = (*FLOATS, *INTEGERS, "bool")

HELD = {"float32": 50, "float16": 16, "bfloat16": 4}
"""Magnitudes up to which sums and products of a few whole numbers are exact."""

EDGES = {
    "float32": [0, -0.0, 1, -1, 2, 3, -7, 50, 2.5, -0.5, np.nan, np.inf, -np.inf, 2.0**31, -(2.0**31), 300],
    "float16": [0, -0.0, 1, -1, 2, 3, -7, np.nan, np.inf, -np.inf, 300, -60000],
    "bfloat16": [0, -0.0, 1, -1, 2, 3, -4, np.nan, np.inf, -np.inf, 256, -(2.0**31)],
    "bool": [False, True],
}
SOME_INTEGERS = [0, 1, 2, 3, -1, 7, 31, 32, 33, -2, -9, 100]


class Type(NamedTuple):
    """Type and shape of an array; the type `key` is that of random keys."""

    dtype: str
    shape: tuple[int, ...] = ()


ARGUMENTS = (
    Type("float32", (4,)),
    Type("float32", (2, 3)),
    Type("float32", (40,)),
    Type("float16", (3,)),
    Type("bfloat16", (3,)),
    *(Type(dtype, (3 + n % 2,)) for n, dtype in enumerate(INTEGERS)),
    Type("int32"),
    Type("bool", (4,)),
    Type("key"),
)


def edges_of(dtype: str) -> list[Any]:
    """Values at which ways of computing could disagree."""
    if dtype in EDGES:
        return EDGES[dtype]
    limits = np.iinfo(dtype)
    return [n for n in SOME_INTEGERS if n >= limits.min] + [limits.min, limits.max, limits.max - 1]


def arguments(seed: int, samples: int) -> dict[int, Any]:
    """Arrays `[samples, ...]` for the arguments, half of them ordinary numbers and half edges."""
    draw = np.random.default_rng(seed)
    found = {}
    for number, (dtype, shape) in enumerate(ARGUMENTS):
        if dtype == "key":
            found[number] = jax.random.split(jax.random.key(seed), samples)
            continue
        size = (samples, *shape)
        edges = draw.choice(np.asarray(edges_of(dtype), object), size)
        low, high = (0, 2) if dtype == "bool" else (0, 9) if dtype in UNSIGNED else (-4, 8)
        ordinary = draw.integers(low, high, size)
        mixed = np.where(draw.random(size) < 0.5, edges, ordinary)
        found[number] = jnp.asarray(mixed.astype(jnp.dtype(dtype)))
    return found
