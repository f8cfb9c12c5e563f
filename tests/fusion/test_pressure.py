"""Register pressure and code size are read off a program, before anything is compiled."""

import jax
import jax.numpy as jnp
import pytest

from rollmill.fusion import Pressure, lower_function, pressure_of
from rollmill.fusion.backends.base import MAX_PRODUCTS
from rollmill.fusion.backends.cpu.launches import machine_code
from rollmill.fusion.backends.triton.launches import INSTRUCTION_CACHE, MAX_NODES, REGISTER_ROOM, hopeless_on_gpu

NUMBER = jax.ShapeDtypeStruct((), jnp.float32)
VECTOR = jax.ShapeDtypeStruct((24,), jnp.float32)
ROW = jax.ShapeDtypeStruct((64,), jnp.float32)


def pressure(function, *each, uniform=()):
    return pressure_of(lower_function(function, each, uniform).program)


def in_turns(x):
    for _ in range(100):
        x = jnp.sin(x) + 1.0
    return x


def test_a_chain_of_operations_holds_one_number():
    found = pressure(in_turns, NUMBER)
    assert found.operations == 202 and found.live == 2, found
    assert found.instructions > 200


def test_what_is_read_again_is_held():
    few = pressure(lambda x: jnp.stack([jnp.sum(jnp.sin(x)), jnp.sum(x)]), VECTOR)
    held = pressure(lambda x: (s := jnp.sin(x), s * jnp.sum(s))[1], VECTOR)
    assert few.live == 24 + 3, "a sine, and the sum before and after it"
    assert 2 * 24 > held.live >= 24 + 1, "each sine once more, after the sum"


def test_rows_are_registers_of_the_lanes_that_share_them():
    matrix = jnp.ones((64, 48), jnp.float32)
    found = pressure(lambda m, x: jnp.tanh(x @ m), ROW, uniform=(matrix,))
    assert found.live == 64 // 2 + 48 // 2
    assert found.instructions == 64 * 48 // 64 + 48 * 5 // 2


def test_loops_hold_what_they_carry_and_what_a_turn_needs():
    turn = lambda n, x: x * 0.5 + jnp.sum(jnp.cos(x + n.astype(jnp.float32)))
    loop = pressure(lambda x: jax.lax.fori_loop(0, 1000, turn, x), VECTOR)
    once = pressure(lambda x: turn(jnp.int32(1), x), VECTOR)
    assert once.live <= loop.live <= 2 * (24 + 1) + once.live
    assert loop.instructions < 2 * once.instructions + 100, "the code of a loop is there once"


def test_operations_in_loops_are_counted():
    """A program is long if its loops are: Triton looks at all of their operations, too."""
    turn = lambda n, x: in_turns(x + n.astype(jnp.float32))
    program = lower_function(lambda x: jax.lax.fori_loop(0, 1000, turn, x), [NUMBER]).program
    found = pressure_of(program)
    assert len(program.nodes()) < 10 and 200 < found.operations < 220
    assert found.looped > 0.9 * found.instructions


def test_instructions_behind_branches_are_counted_apart():
    def reset_where_it_ends(x):
        return jnp.where(x > 0.0, jax.random.normal(key_of(x)), x * 2.0)

    key_of = lambda x: jax.random.fold_in(jax.random.key(0), jax.lax.bitcast_convert_type(x, jnp.int32))
    found = pressure(reset_where_it_ends, NUMBER)
    assert found.instructions < 30 < 200 < found.guarded, found


@pytest.mark.parametrize(
    ("held", "instructions", "hopeless"),
    [
        (REGISTER_ROOM, 10 * INSTRUCTION_CACHE, False),
        (10 * REGISTER_ROOM, INSTRUCTION_CACHE, False),
        (REGISTER_ROOM + 1, INSTRUCTION_CACHE + 1, True),
    ],
)
def test_hopeless_is_what_fits_neither_registers_nor_the_instruction_cache(held, instructions, hopeless):
    reason = hopeless_on_gpu(Pressure(1_000, held, instructions, 0, 0))
    assert (reason is not None) == hopeless
    assert machine_code().hopeless(Pressure(1_000, held, instructions, 0, 0)) is None
    if reason:
        assert f"{held:,} numbers" in reason and f"{instructions:,} instructions" in reason


def test_loops_are_faster_in_kernels_whatever_they_hold():
    size = 2 * INSTRUCTION_CACHE
    assert hopeless_on_gpu(Pressure(1_000, 10 * REGISTER_ROOM, size, 0, 0, looped=size // 2)) is not None
    assert hopeless_on_gpu(Pressure(1_000, 10 * REGISTER_ROOM, size, 0, 0, looped=size // 2 + 1)) is None


def test_what_compiles_for_minutes_is_hopeless():
    assert hopeless_on_gpu(Pressure(MAX_NODES, 1, MAX_NODES, 0, 0)) is None
    assert "takes minutes to compile" in str(hopeless_on_gpu(Pressure(MAX_NODES + 1, 1, 1, 0, 0)))


def test_very_many_products_are_hopeless_everywhere():
    weights = jnp.ones((3, 3, 4, 16), jnp.float32)
    layout = ("NHWC", "HWIO", "NHWC")
    convolve = lambda w, x: jax.lax.conv_general_dilated(x[None], w, (1, 1), "VALID", dimension_numbers=layout)
    image = jax.ShapeDtypeStruct((10, 10, 4), jnp.float32)
    found = pressure(convolve, image, uniform=(weights,))
    assert found.products == 64 <= MAX_PRODUCTS
    for hopeless in (hopeless_on_gpu, machine_code().hopeless):
        assert hopeless(Pressure(1_000, 1, 1_000, MAX_PRODUCTS, 0)) is None
        assert "matrix products" in str(hopeless(Pressure(1_000, 1, 1_000, MAX_PRODUCTS + 1, 0)))
