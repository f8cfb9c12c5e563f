"""Register pressure and code size are read off a program, before anything is compiled."""

import jax
import jax.numpy as jnp

from rollmill.fusion import Pressure, estimate_pressure, lower_function, many_products
from rollmill.fusion.backends.base import MAX_PRODUCTS
from rollmill.fusion.backends.triton.launches import compile_seconds_on_gpu
from rollmill.fusion.opt.segments import MAX_NODES

NUMBER = jax.ShapeDtypeStruct((), jnp.float32)
VECTOR = jax.ShapeDtypeStruct((24,), jnp.float32)
ROW = jax.ShapeDtypeStruct((64,), jnp.float32)


def pressure(function, *each, uniform=()):
    return estimate_pressure(lower_function(function, each, uniform).program)


def in_turns(x):
    for _ in range(100):
        x = jnp.sin(x) + 1.0
    return x


def test_a_chain_of_operations_holds_one_number():
    found = pressure(in_turns, NUMBER)
    assert found.num_operations == 202 and found.live_registers == 2, found
    assert found.num_instructions > 200


def test_what_is_read_again_is_held():
    few = pressure(lambda x: jnp.stack([jnp.sum(jnp.sin(x)), jnp.sum(x)]), VECTOR)
    held = pressure(lambda x: (s := jnp.sin(x), s * jnp.sum(s))[1], VECTOR)
    assert few.live_registers == 24 + 3, "a sine, and the sum before and after it"
    assert 2 * 24 > held.live_registers >= 24 + 1, "each sine once more, after the sum"


def test_rows_are_registers_of_the_lanes_that_share_them():
    matrix = jnp.ones((64, 48), jnp.float32)
    found = pressure(lambda m, x: jnp.tanh(x @ m), ROW, uniform=(matrix,))
    assert found.live_registers == 64 // 2 + 48 // 2
    assert found.num_instructions == 64 * 48 // 64 + 48 * 5 // 2


def test_loops_hold_what_they_carry_and_what_a_turn_needs():
    turn = lambda n, x: x * 0.5 + jnp.sum(jnp.cos(x + n.astype(jnp.float32)))
    loop = pressure(lambda x: jax.lax.fori_loop(0, 1000, turn, x), VECTOR)
    once = pressure(lambda x: turn(jnp.int32(1), x), VECTOR)
    assert once.live_registers <= loop.live_registers <= 2 * (24 + 1) + once.live_registers
    assert loop.num_instructions < 2 * once.num_instructions + 100, "the code of a loop is there once"


def test_operations_in_loops_are_counted():
    """A program is long if its loops are: Triton looks at all of their operations, too."""
    turn = lambda n, x: in_turns(x + n.astype(jnp.float32))
    program = lower_function(lambda x: jax.lax.fori_loop(0, 1000, turn, x), [NUMBER]).program
    found = estimate_pressure(program)
    assert len(program.nodes()) < 10 and 200 < found.num_operations < 220
    assert found.num_instructions > 200


def test_instructions_behind_branches_are_counted_apart():
    def reset_where_it_ends(x):
        return jnp.where(x > 0.0, jax.random.normal(key_of(x)), x * 2.0)

    key_of = lambda x: jax.random.fold_in(jax.random.key(0), jax.lax.bitcast_convert_type(x, jnp.int32))
    found = pressure(reset_where_it_ends, NUMBER)
    assert found.num_instructions < 30 < 200 < found.guarded_instructions, found


def test_only_long_steps_are_expected_to_compile_for_long():
    """What they hold, and their instructions, say nothing of how fast their kernels are."""
    pressure = lambda operations: Pressure(operations, 10_000, 1_000_000, 0, 0)
    assert compile_seconds_on_gpu(pressure(MAX_NODES)) == 0
    assert compile_seconds_on_gpu(pressure(MAX_NODES + 1)) > 30
    assert 120 < compile_seconds_on_gpu(pressure(17_325)) < 160, "robots:Ant, which took 129 s"


def test_convolutions_have_very_many_products():
    weights = jnp.ones((3, 3, 4, 16), jnp.float32)
    layout = ("NHWC", "HWIO", "NHWC")
    convolve = lambda w, x: jax.lax.conv_general_dilated(x[None], w, (1, 1), "VALID", dimension_numbers=layout)
    image = jax.ShapeDtypeStruct((10, 10, 4), jnp.float32)
    found = pressure(convolve, image, uniform=(weights,))
    assert found.num_products == 64 <= MAX_PRODUCTS
    assert many_products(Pressure(1_000, 1, 1_000, MAX_PRODUCTS, 0)) is None
    assert "matrix products" in str(many_products(Pressure(1_000, 1, 1_000, MAX_PRODUCTS + 1, 0)))
