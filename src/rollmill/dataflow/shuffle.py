"""Computes a random permutation element by element, without sorting or memory."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from rollmill.core.types import Key

ROUNDS = 32


def permutation(key: Key, size: int) -> UInt32[Array, " size"]:
    """Returns a pseudo-random permutation of `0 .. size - 1`.

    The swap-or-not shuffle (Hoang, Morris and Rogaway, "An Enciphering Scheme Based on a Card Shuffle", CRYPTO
    2012) pairs `x` with `k - x mod size` in each round, and swaps the pair if a hashed bit of it is set. Each
    round is a bijection for any size.
    """
    if size == 1:  # the CPU compiler of XLA (jaxlib 0.10.2) fails on the rounds below if the modulus is 1
        return jnp.zeros(1, jnp.uint32)
    offsets, salts = jax.random.bits(key, (2, ROUNDS), jnp.uint32)
    n = jnp.uint32(size)

    def swap_or_not(x, round_):
        offset, salt = round_
        partner = jnp.where(x > offset, offset + n - x, offset - x)
        swap = _mix(jnp.maximum(x, partner) ^ salt) >> 31
        return jnp.where(swap == 1, partner, x), None

    x = jnp.arange(size, dtype=jnp.uint32)
    shuffled, _ = jax.lax.scan(swap_or_not, x, (offsets % n, salts), unroll=True)
    # Without the barrier, XLA fuses all rounds into each gather, and LLVM (jaxlib 0.11 and 0.12) takes exponential
    # time to vectorise the result.
    return jax.lax.optimization_barrier(shuffled)


def _mix(x: UInt32[Array, "*n"]) -> UInt32[Array, "*n"]:
    """Mixes bits: every input bit changes about half of the output bits (finaliser of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
