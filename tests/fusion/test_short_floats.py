"""Floats of 16 bits: kernels round after each operation, and docs/numbers.md says where XLA does not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_compare import QUICKLY, WAYS, results
from fused_runs import lowered_for

lax = jax.lax


def every_number(dtype):
    return lax.bitcast_convert_type(jnp.arange(1 << 16, dtype=jnp.uint16), jnp.dtype(dtype))


def by_xla(function, x):
    return np.asarray(jax.jit(jax.vmap(function), compiler_options=QUICKLY)(x))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_logistic_function_of_every_number(dtype, way):
    x = every_number(dtype)
    (found,) = results(WAYS[way], lowered_for(jax.nn.sigmoid, (x,)), x)
    # Each of the four operations is rounded: 1 / (1 + exp(-0.00589)), about 0.5015, is 0.50390625 in bfloat16.
    wide = lambda numbers: numbers.astype(np.float64)
    np.testing.assert_allclose(wide(found), wide(by_xla(jax.nn.sigmoid, x)), rtol=0, atol=2.0**-126)  # denormals


EXACT = ("exp", "exp2", "log", "log1p", "tanh", "sin", "cos", "tan", "atan", "sinh", "cosh", "cbrt", "erf", "erfc")
"""Functions that XLA computes in float32, and then rounds, as kernels do."""
BY_STEPS = ("asin", "acos", "asinh", "acosh", "atanh", "expm1")
"""Functions that XLA computes by several operations, each of them rounded to 16 bits."""
TIES, STEPS = 16, 12_000
"""Bounds on how many of all numbers have other results; docs/numbers.md has those that were measured."""


def all_functions(x):
    return tuple(getattr(lax, name)(x) for name in (*EXACT, *BY_STEPS))


@functools.cache
def all_by_xla(dtype):
    x = every_number(dtype)
    return x, jax.jit(jax.vmap(all_functions), compiler_options=QUICKLY)(x)


def units_apart(mine, other):
    """Distances in units of the last place; 0 where both are NaN, or one is denormal in float32."""
    wide = [np.asarray(each).astype(np.float32) for each in (mine, other)]
    bits = [np.asarray(each).view(np.uint16).astype(np.int32) for each in (mine, other)]
    places = [np.where(each >= 1 << 15, (1 << 15) - each, each) for each in bits]
    ignored = np.isnan(wide[0]) & np.isnan(wide[1]) | np.any(np.abs(wide) < 2.0**-126, axis=0)
    return np.where(ignored, 0, np.abs(places[0] - places[1]))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_functions_of_every_number(dtype, way):
    x, right = all_by_xla(dtype)
    found = results(WAYS[way], lowered_for(all_functions, (x,)), x)
    normal = np.abs(np.asarray(x).astype(np.float32)) >= 2.0**-126
    for name, mine, other in zip((*EXACT, *BY_STEPS), found, right, strict=True):
        apart = units_apart(mine, other)[normal]
        rounded_often = name in BY_STEPS and (name, dtype) != ("expm1", "bfloat16")
        assert np.count_nonzero(apart) <= (STEPS if rounded_often else TIES), name
        assert apart.max() <= (2 if rounded_often else 1), name


def twice(x):
    """A product with two constants, which XLA multiplies with each other first."""
    return x.dtype.type(0.02) * (x.dtype.type(1.414) * x)


def twice_apart(x):
    return x.dtype.type(0.02) * lax.optimization_barrier(x.dtype.type(1.414) * x)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_products_with_two_constants(dtype, way):
    x = jnp.asarray(np.random.default_rng(0).normal(size=4096), dtype)
    (found,) = results(WAYS[way], lowered_for(twice, (x,)), x)
    # Rounded after each product, by NumPy.
    np.testing.assert_array_equal(found, twice(np.asarray(x)))
    np.testing.assert_array_equal(found, by_xla(twice_apart, x))
    unfused = by_xla(twice, x).astype(np.float64)
    if dtype == "bfloat16":
        np.testing.assert_array_equal(found.astype(np.float64), unfused)
    else:
        assert np.all(np.abs(found - unfused) <= 1.01 * np.spacing(np.abs(found)))


WITHOUT_LIBRARY = {"xla_cpu_experimental_ynn_fusion_type": ""}
"""Reductions are not handed to a library, which rounds fewer of the numbers that go in and come out."""


def by_xla_alone(function, x):
    try:
        return np.asarray(jax.jit(jax.vmap(function), compiler_options=QUICKLY | WITHOUT_LIBRARY)(x))
    except jax.errors.JaxRuntimeError as error:
        pytest.skip(f"this XLA has no such library: {error}")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "function", [jax.nn.softmax, lambda x: jnp.sqrt(jnp.sum(x * x))], ids=["softmax", "length"]
)
def test_sums_of_rounded_numbers(function, way):
    """Weights of six regimes, of a number in 20 of which XLA's library rounds differently."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1024, 6)), jnp.bfloat16)
    (found,) = results(WAYS[way], lowered_for(function, (x,)), x)
    np.testing.assert_array_equal(found, by_xla_alone(function, x))
