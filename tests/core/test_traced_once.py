"""A function that is traced once computes what it computes when it is called."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollmill.core.trace_cache import TracedOnce
from rollmill.runs.equality import certainly_same


class Counted:
    """A function of an array and of a dictionary, which counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x, params):
        self.calls += 1
        return {"scaled": x * params["third"] * params["third"], "same": x}


@pytest.fixture
def counted():
    return Counted()


def test_a_second_trace_does_not_call_it(counted):
    once, params = TracedOnce(counted), {"third": 1 / 3}
    x = jnp.arange(6, dtype=jnp.float32)
    first = jax.jit(lambda x: once(x, params))(x[0])
    second = jax.vmap(lambda x: once(x, params))(x)
    assert counted.calls == 1
    plain = jax.vmap(lambda x: Counted()(x, params))(x)
    np.testing.assert_array_equal(second["scaled"], plain["scaled"])
    np.testing.assert_array_equal(second["same"], x)
    assert first["scaled"] == 0


def test_python_numbers_stay_constants_of_double_precision(counted):
    once, params = TracedOnce(lambda x, p: x * (p["third"] * p["third"])), {"third": 1 / 3}
    program = jax.make_jaxpr(lambda x: once(x, params))(jnp.float32(2))
    assert str(program) == str(jax.make_jaxpr(lambda x: x * ((1 / 3) * (1 / 3)))(jnp.float32(2)))


@pytest.mark.parametrize(
    ("x", "params"),
    [
        (jnp.float16(1), {"third": 1 / 3}),
        (jnp.float32([1]), {"third": 1 / 3}),
        (jnp.float32(1), {"third": 2 / 3}),
        (jnp.float32(1), {"third": np.float32(1)}),
        (jnp.float32(1), {"third": 1 / 3, "more": 0}),
    ],
)
def test_other_types_and_other_constants_are_traced_anew(counted, x, params):
    once = TracedOnce(counted)
    jax.make_jaxpr(lambda x: once(x, {"third": 1 / 3}))(jnp.float32(1))
    jax.make_jaxpr(lambda x: once(x, params))(x)
    assert counted.calls == 2


def test_outside_of_a_trace_it_is_called(counted):
    once = TracedOnce(counted)
    for _ in range(2):
        once(jnp.float32(1), {"third": 1.0})
    with jax.disable_jit():
        jax.vmap(lambda x: once(x, {"third": 1.0}))(jnp.ones(2))
    assert counted.calls == 3


def test_a_value_of_an_outer_trace_is_not_kept():
    def outer(by):
        once = TracedOnce(lambda x: x * by)
        return [jax.vmap(once)(jnp.float32([2])) for _ in range(2)]

    for by in (5, 7):
        np.testing.assert_array_equal(jax.jit(outer)(jnp.float32(by)), np.float32([[2 * by]] * 2))


def test_two_of_the_same_function_are_the_same(counted):
    one, other = TracedOnce(counted), TracedOnce(counted)
    jax.make_jaxpr(lambda x: one(x, {"third": 1.0}))(jnp.float32(1))
    assert certainly_same(one, other)
    assert not certainly_same(one, TracedOnce(jnp.sin))


@pytest.mark.parametrize(
    "constant", [False, 3, 0.5, np.bool_(True), np.float32(2), jnp.asarray(False), jnp.uint8(7)]
)
def test_a_constant_result_is_an_array_of_its_type(constant):
    once, types = TracedOnce(lambda x: (x, jnp.asarray(constant))), []

    for _ in range(2):
        program = jax.make_jaxpr(lambda x: types.append(jax.typeof(once(x)[1])))
        program(jnp.float32(1))
    expected = jax.eval_shape(lambda: jnp.asarray(constant))
    assert types[0] == types[1]
    assert (types[0].shape, types[0].dtype, types[0].weak_type) == ((), expected.dtype, expected.weak_type)
