"""Random numbers of CPU programs by machine code: bit for bit those of JAX, in programs that can be stored."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry2x32_p
from jax.sharding import NamedSharding, PartitionSpec

from rollmill import programs
from rollmill.core.threefry import MAX_CODED, THREEFRY_CALL, rolled_threefry, unroll_threefry
from rollmill.programs.program_store import unknown_calls


@pytest.fixture(autouse=True)
def machine_code():
    unroll_threefry(programs.register_threefry_code)
    jax.clear_caches()  # of draws that were lowered without machine code


def lower(function, *arguments):
    return jax.jit(function).lower(*arguments)


def words_of(*words):
    return lower(lambda *words: threefry2x32_p.bind(*words), *words).compile()(*words)


# the vectors that are published with the generator
@pytest.mark.parametrize(
    ("key", "count", "expected"),
    [
        ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_known_vectors(key, count, expected):
    assert tuple(int(word) for word in words_of(*map(jnp.uint32, (*key, *count)))) == expected


SHAPES = {
    "one key": ((), (), (7,), (7,)),
    "one key, matrix": ((), (), (3, 21), (3, 21)),
    "a key for each word": ((33,), (33,), (33,), (33,)),
    "a key for each row": ((5, 1), (5, 1), (1, 9), (1, 9)),
    "one of the keys is a scalar": ((), (5,), (5,), (5,)),
    "one counter is a scalar": ((4,), (4,), (), (4,)),
    "scalars": ((), (), (), ()),
    "nothing": ((), (), (0, 3), (0, 3)),
    "no key": ((0,), (0,), (0,), (0,)),
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
def test_words_equal_those_of_a_loop_for_all_shapes(shapes):
    random = np.random.default_rng(3)
    words = [random.integers(0, 2**32, shape, dtype=np.uint32) for shape in shapes]
    whole = np.broadcast_arrays(*words)
    np.testing.assert_array_equal(words_of(*words), jax.jit(rolled_threefry)(*whole))


@pytest.mark.parametrize("count", [*range(1, 40), 1_000, 4_099])
def test_all_lengths(count):
    counts = np.arange(2 * count, dtype=np.uint32).reshape(2, count)
    keys = np.uint32(11), np.uint32(5)
    loop = jax.jit(rolled_threefry)(*(np.full(count, key) for key in keys), *counts)
    np.testing.assert_array_equal(words_of(*keys, *counts), loop)


def test_a_program_calls_the_code_and_can_be_stored():
    lowered = lower(lambda key: jax.random.normal(key, (8,)), jax.random.key(0))
    assert THREEFRY_CALL in lowered.as_text()
    assert not unknown_calls(lowered)


def test_many_words_are_left_to_xla():
    draws = lambda size: lower(lambda key: jax.random.bits(key, (size,)), jax.random.key(0)).as_text()
    assert THREEFRY_CALL in draws(MAX_CODED)
    assert THREEFRY_CALL not in draws(4 * MAX_CODED)


def test_a_program_for_several_devices_is_left_to_xla():
    mesh = jax.make_mesh((2,), ("i",), devices=jax.devices()[:2])
    draws = jax.jit(
        jax.vmap(lambda key: jax.random.bits(key, (4,))), out_shardings=NamedSharding(mesh, PartitionSpec("i"))
    )
    keys = jax.random.split(jax.random.key(0), 6)
    assert THREEFRY_CALL not in draws.lower(keys).as_text()
    np.testing.assert_array_equal(draws(keys), jax.vmap(lambda key: jax.random.bits(key, (4,)))(keys))


def test_an_exported_program_needs_no_code():
    draws = jax.jit(lambda key: jax.random.bits(key, (3,)))
    key = jax.random.key(2)
    exported = jax.export.export(draws, platforms=["cpu"])(key)
    assert THREEFRY_CALL not in exported.mlir_module()
    np.testing.assert_array_equal(exported.call(key), draws(key))


def test_without_llvm_numbers_are_left_to_xla(monkeypatch):
    import sys

    draws = lambda: lower(lambda key: jax.random.bits(key, (3,)), jax.random.key(0))
    expected = draws().compile()(jax.random.key(0))
    monkeypatch.setitem(sys.modules, "rollmill.fusion.backends.cpu.threefry", None)  # an import then fails
    jax.clear_caches()
    lowered = draws()
    assert THREEFRY_CALL not in lowered.as_text()
    np.testing.assert_array_equal(lowered.compile()(jax.random.key(0)), expected)
