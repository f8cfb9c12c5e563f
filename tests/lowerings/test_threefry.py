"""Random numbers without loops: JAX's streams, bit for bit, and no loop in a compiled program."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry2x32_p, threefry_2x32

from rollmill.lowerings.threefry import rolled_threefry, small_programs, unroll_threefry

# The vectors that are published with the generator, for 20 rounds: key, counter, result.
KNOWN = [
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]


def unrolled(*words):
    """Two random words by a program without loops."""
    unroll_threefry()
    return jax.jit(lambda *words: threefry2x32_p.bind(*words))(*words)


@pytest.mark.parametrize("function", [unrolled, rolled_threefry])
@pytest.mark.parametrize(("key", "count", "expected"), KNOWN)
def test_known_vectors(key, count, expected, function):
    words = function(*(jnp.uint32(word) for word in (*key, *count)))
    assert tuple(int(word) for word in words) == expected


def test_streams_are_those_of_jax():
    key = np.array([7, 0xDEADBEEF], np.uint32)
    counts = np.arange(64, dtype=np.uint32)
    expected = threefry_2x32(key, counts)
    words = unrolled(jnp.uint32(key[0]), jnp.uint32(key[1]), *jnp.asarray(counts.reshape(2, 32)))
    np.testing.assert_array_equal(np.concatenate(words), expected)


def test_words_are_repeated_to_the_shape_of_the_result():
    keys, first = np.arange(6, dtype=np.uint32).reshape(2, 3, 1), np.uint32(5)
    second = np.arange(12, dtype=np.uint32).reshape(1, 3, 4)
    words = unrolled(keys, keys + 1, first, second)
    whole = np.broadcast_arrays(keys, keys + 1, first, second)
    np.testing.assert_array_equal(words, rolled_threefry(*map(jnp.asarray, whole)))


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


def test_an_exported_program_draws_for_any_number_of_keys():
    unroll_threefry()
    draws = jax.jit(jax.vmap(lambda key: jax.random.bits(jax.random.fold_in(key, 3), (2,))))
    (count,) = jax.export.symbolic_shape("b")
    keys = jax.random.split(jax.random.key(7), 5)
    program = jax.export.export(draws, platforms=["cpu"])(jax.ShapeDtypeStruct((count,), keys.dtype))
    np.testing.assert_array_equal(program.call(keys), draws(keys))


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
