"""Exceptions of docs/numbers.md in which kernels give one answer, and XLA more than one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_compare import QUICKLY, WAYS, results
from drawn_types import INTEGERS, SIGNED
from fused_runs import lowered_for

lax = jax.lax


def by_xla(function, x):
    return np.asarray(jax.jit(jax.vmap(function), compiler_options=QUICKLY)(x))


def by_kernel(way, function, x):
    (found,) = results(WAYS[way], lowered_for(function, (x,)), x)
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_top_k_puts_nan_first_and_xla_puts_it_where_its_sign_says(dtype, way):
    nan = np.float32(np.nan)
    row = [1, np.copysign(nan, -1), nan, np.inf, -np.inf]
    x = jnp.asarray(np.array([row, row], np.float32)).astype(dtype)
    places = lambda x: lax.top_k(x, 5)[1]
    assert by_kernel(way, places, x).tolist() == [[1, 2, 3, 0, 4]] * 2
    assert by_xla(places, x).tolist() == [[2, 3, 0, 4, 1]] * 2
    one_nan = lambda x: places(jnp.where(jnp.isnan(x), jnp.nan, x))
    assert by_xla(one_nan, x).tolist() == [[1, 2, 3, 0, 4]] * 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_partition_has_each_element_once(dtype, way):
    """It is one `top_k` of the array, and one of the negated array."""
    x = jnp.array([[1, jnp.nan, 3, 2], [jnp.nan, jnp.nan, 0, -jnp.inf]], dtype)
    for kth in range(4):
        for function in (jnp.partition, jnp.argpartition, lambda x, kth: jnp.partition(-x, kth)):
            ordered = lambda x, function=function, kth=kth: function(x, kth)
            found, right = by_kernel(way, ordered, x), by_xla(ordered, x)
            np.testing.assert_array_equal(found.astype(np.float32), right.astype(np.float32))
    known = lambda x: jnp.argpartition(jnp.array([2, np.nan, 1], dtype), 1) + 0 * x[2].astype(jnp.int32)
    np.testing.assert_array_equal(by_kernel(way, known, x), by_xla(known, x))


@pytest.mark.parametrize("way", WAYS)
def test_zero_divided_by_itself_has_all_bits(way):
    for dtype in INTEGERS:
        x = jnp.array([0, 1, 3, 0], dtype)
        right = [-1 if dtype in SIGNED else np.iinfo(dtype).max, 1, 1]
        right.append(right[0])
        for divide in (lax.div, jnp.floor_divide):
            found = by_kernel(way, lambda x, divide=divide: divide(x, x), x)
            assert found.tolist() == right, dtype
        # From jaxlib 0.11 on it is 1 on a CPU, but not in all of its programs.
        assert by_xla(lambda x: lax.div(x, x), x).tolist()[0] in (right[0], 1), dtype
