"""Threefry-2x32 without loops, for programs on CPUs: the streams of JAX's default random keys, bit for bit.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). JAX compiles it to a loop of five turns on a
CPU. A training draws many small arrays, for each of which that loop runs some forty tiny operations one after the
other; without the loop it is one fused operation.
"""

from functools import cache

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p
from jax.interpreters import mlir

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
"""Distances in bits by which words are rotated, by turns."""

PARITY = 0x1BD11BDA
"""The constant of the key schedule."""

TURNS = 5
"""Turns of four rounds."""


def threefry(key_0: jax.Array, key_1: jax.Array, count_0: jax.Array, count_1: jax.Array) -> list[jax.Array]:
    """Returns two random words for two words of key and two of counter, element by element; uint32 `[...]` each.

    Keys are mostly made from others. Each generation is computed before the next one: several in one fused
    operation take jaxlib 0.11 minutes to compile.
    """
    # Operations of `lax`, for tracing operators of arrays takes several times longer, and programs draw often.
    shape = jnp.broadcast_shapes(key_0.shape, key_1.shape, count_0.shape, count_1.shape)
    spread = lambda word: word if word.shape == shape else jnp.broadcast_to(word, shape)
    number = cache(lambda value: lax.full(shape, value, jnp.uint32))
    key_0, key_1 = lax.optimization_barrier((key_0, key_1))
    keys = (key_0, key_1, key_0 ^ key_1 ^ jnp.uint32(PARITY))
    x, y = lax.add(spread(count_0), spread(key_0)), lax.add(spread(count_1), spread(key_1))
    for turn in range(TURNS):
        for distance in ROTATIONS[turn % 2]:
            x = lax.add(x, y)
            left, right = lax.shift_left(y, number(distance)), lax.shift_right_logical(y, number(32 - distance))
            y = lax.bitwise_xor(x, lax.bitwise_or(left, right))
        x = lax.add(x, spread(keys[(turn + 1) % 3]))
        y = lax.add(lax.add(y, spread(keys[(turn + 2) % 3])), number(turn + 1))
    return [x, y]


def unroll_threefry() -> None:
    """Makes programs compiled for CPUs from now on draw random numbers without loops."""
    traced_once = jax.jit(threefry, inline=True)  # for equal shapes in all programs of a process
    mlir.register_lowering(threefry2x32_p, mlir.lower_fun(traced_once, multiple_results=True), platform="cpu")
