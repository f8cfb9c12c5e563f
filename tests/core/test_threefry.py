"""Random numbers without loops: JAX's streams, bit for bit, and no loop in a compiled program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

from rollmill.core.threefry import rolled_threefry, small_programs, threefry, unroll_threefry

# The vectors that are published with the generator, for 20 rounds: key, counter, result.
KNOWN = [
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize("function", [threefry, rolled_threefry])
@pytest.mark.parametrize(("key", "count", "expected"), KNOWN)
def test_known_vectors(key, count, expected, function):
    words = function(*(jnp.uint32(word) for word in (*key, *count)))
    assert tuple(int(word) for word in words) == expected


def test_streams_are_those_of_jax():
    key = np.array([7, 0xDEADBEEF], np.uint32)
    counts = np.arange(64, dtype=np.uint32)
    expected = threefry_2x32(key, counts)
    words = threefry(jnp.uint32(key[0]), jnp.uint32(key[1]), *jnp.asarray(counts.reshape(2, 32)))
    np.testing.assert_array_equal(np.concatenate(words), expected)


def test_a_program_draws_without_loops():
    unroll_threefry()

    def draws(key):
        key, other = jax.random.split(key)
        return jax.random.normal(key, (8,)), jax.random.randint(other, (8,), 0, 100)

    text = jax.jit(draws).lower(jax.random.key(0)).compile().as_text()
    assert "while" not in text


def test_a_small_program_draws_the_same_by_loops():
    unroll_threefry()
    draws = lambda key: jax.random.bits(jax.random.fold_in(key, 3), (5, 3))
    key = jax.random.key(7)
    fast = jax.jit(draws).lower(key)
    with small_programs():
        small = jax.jit(lambda key: draws(key)).lower(key)
    assert "while" in small.as_text() and "while" not in fast.as_text()
    np.testing.assert_array_equal(small.compile()(key), fast.compile()(key))


def test_keys_are_computed_before_the_keys_that_are_made_of_them():
    """Several generations in one fused operation take jaxlib 0.11 minutes to compile."""
    unroll_threefry()

    def chain(key, index):
        for generation in range(6):
            key = jax.random.fold_in(key, index + generation)
        return jax.random.uniform(key, (4,))

    lowered = jax.jit(jax.vmap(chain, in_axes=(None, 0))).lower(jax.random.key(0), jnp.arange(8))
    text = lowered.as_text()
    assert text.count("optimization_barrier") == text.count("func.func private @threefry2x32") > 1
    lowered.compile({"xla_backend_optimization_level": 3})  # a compiler that hangs fails the run by its time limit
