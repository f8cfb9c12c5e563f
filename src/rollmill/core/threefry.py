"""Computes Threefry-2x32 without loops, for programs on CPUs. The results equal the random bits of JAX.

Threefry comes from Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). On a CPU, JAX compiles it
to a loop of five iterations. Training draws many small arrays, and for each array the loop runs about forty tiny
operations. Without the loop, there is one fused operation.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p
from jax.interpreters import mlir

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
"""Distances in bits by which words are rotated in successive rounds of Threefry."""

PARITY = 0x1BD11BDA
"""Parity constant of Threefry's key schedule."""

TURNS = 5
"""Number of groups of four rounds in Threefry."""


def threefry(key_0: jax.Array, key_1: jax.Array, count_0: jax.Array, count_1: jax.Array) -> list[jax.Array]:
    """Computes two random words from two key words and two counter words, element by element, as uint32.

    Most keys are derived from other keys. Each generation of keys is computed separately, because jaxlib 0.11
    takes minutes to compile several generations in one fused operation.
    """
    # Functions of `lax`, because tracing the operators of arrays takes several times longer.
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


def rolled_threefry(
    key_0: jax.Array, key_1: jax.Array, count_0: jax.Array, count_1: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes `threefry` with a loop over the rounds, which compiles faster and runs slower."""
    shape = jnp.broadcast_shapes(key_0.shape, key_1.shape, count_0.shape, count_1.shape)
    of_keys = jnp.broadcast_shapes((1,) * len(shape), key_0.shape, key_1.shape)
    key_0, key_1 = jnp.broadcast_to(key_0, of_keys), jnp.broadcast_to(key_1, of_keys)
    last = key_0 ^ key_1 ^ jnp.uint32(PARITY)
    distances = jnp.asarray(ROTATIONS, jnp.uint32)

    # A turn begins by adding key words, and the last key words are added after the loop, because XLA compiles
    # operations before a loop separately, and fuses operations after it with those that use the result.
    def turn(number: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        x, y, first, second, third = carry
        x, y = x + first, y + second + number.astype(jnp.uint32)
        for place in range(len(ROTATIONS[0])):
            distance = distances[number % 2, place]
            x = x + y
            y = x ^ ((y << distance) | (y >> (32 - distance)))
        return x, y, second, third, first

    counts = (jnp.broadcast_to(count, shape) for count in (count_0, count_1))
    x, y, first, second, _ = lax.fori_loop(0, TURNS, turn, (*counts, key_0, key_1, last))
    return x + first, y + second + jnp.uint32(TURNS)


_is_rolled: ContextVar[bool] = ContextVar("is_rolled", default=False)


@contextmanager
def small_programs() -> Iterator[None]:
    """Context manager in which random numbers are compiled to loops, for CPU programs that run only once."""
    before = _is_rolled.set(True)
    try:
        yield
    finally:
        _is_rolled.reset(before)


def unroll_threefry() -> None:
    """Makes CPU programs lowered from now on draw random bits without loops, except inside `small_programs`."""
    unrolled, rolled = (
        # a jitted function is traced only once for equal shapes
        mlir.lower_fun(jax.jit(function, inline=True), multiple_results=True)
        for function in (threefry, rolled_threefry)
    )

    def lowered(*args: Any, **parameters: Any) -> Any:
        return (rolled if _is_rolled.get() else unrolled)(*args, **parameters)

    mlir.register_lowering(threefry2x32_p, lowered, platform="cpu")
