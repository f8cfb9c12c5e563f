"""A function that no kernel can compute is refused, with the primitive, its line, and a way out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollmill.fusion import CannotFuse, lower_function
from rollmill.fusion.lower.values import MAX_SCALARS
from wordings import raises

VECTOR = jax.ShapeDtypeStruct((4,), jnp.float32)
IMAGE = jax.ShapeDtypeStruct((16, 16, 3), jnp.float32)
NUMBER = jax.ShapeDtypeStruct((), jnp.float32)


def call_back(x):
    return jax.pure_callback(np.sin, VECTOR, x) + 1  # calls Python


def call_back_in_order(x):
    jax.experimental.io_callback(lambda v: None, None, x)  # calls Python
    return x


def print_something(x):
    jax.debug.print("x is {}", x)  # calls Python
    return x * 2


def convolve(x):
    kernel = jnp.ones((3, 3, 3, 2), jnp.float32)
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x[None], kernel, (1, 1), "VALID", dimension_numbers=layout)  # convolves


def convolve_many_channels(x):
    kernel = jnp.ones((3, 3, 3, 24), jnp.float32)
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x[None], kernel, (1, 1), "SAME", dimension_numbers=layout)  # convolves


def pool(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (5, 5, 1), (1, 1, 1), "SAME")  # pools


def invert(x):
    return jnp.linalg.inv(jnp.eye(20, dtype=jnp.float32) + x[0])  # inverts


def factorise(x):
    return jnp.linalg.cholesky(jnp.broadcast_to(x[0] * jnp.eye(7), (18, 7, 7)))  # factorises


def decompose(x):
    return jnp.linalg.eigh(x[:, None] * x[None])[0]  # decomposes


def transform(x):
    return jnp.abs(jnp.fft.fft(jnp.tile(x, 65)))  # transforms


def transform_planes(x):
    return jnp.abs(jnp.fft.fft2(x[:, None] * x[None]))  # transforms planes


def incomplete_gamma(x):
    return jax.scipy.special.gammainc(2.0, jnp.abs(x))  # sums


def use_other_generator(x):
    key = jax.random.key(x[0].astype(jnp.int32), impl="rbg")  # makes a key
    return jax.random.uniform(key)


def fill_an_array(x):
    return jnp.cumsum(x[0] + jnp.arange(2000.0))  # too many


def sort_much(x):
    return jnp.sort(x[0] * jnp.arange(100.0))  # sorts


def hold_history(x):
    return jax.lax.scan(lambda c, _: (jnp.sin(c), c), x, length=3000)[1]  # holds


CASES = {
    "pure_callback": (call_back, VECTOR, "pure_callback", "# calls Python", "jax.numpy"),
    "io_callback": (call_back_in_order, VECTOR, "io_callback", "# calls Python", "cannot call Python"),
    "debug_print": (print_something, VECTOR, "debug_", "# calls Python", "debugging"),
    "convolution": (convolve, IMAGE, "conv_general_dilated", "# convolves", "10,584 multiplications"),
    "channels": (convolve_many_channels, IMAGE, "conv_general_dilated", "# convolves", "the limit of 128"),
    "pooling": (pool, IMAGE, "reduce_window_max", "# pools", "768 windows of 25 numbers"),
    "inverse": (invert, VECTOR, "lu", "# inverts", "a matrix of 20 x 20"),
    "factors": (factorise, VECTOR, "cholesky", "# factorises", "18 matrices of 7 x 7"),
    "eigenvalues": (decompose, VECTOR, "eigh", "# decomposes", "kernels do not support this primitive"),
    "fft": (transform, VECTOR, "fft", "# transforms", "the limit of 64"),
    "fft2": (transform_planes, VECTOR, "fft", "# transforms planes", "over 2 axes"),
    "gamma": (incomplete_gamma, VECTOR, "igamma", "# sums", "kernels do not support this primitive"),
    "rbg": (use_other_generator, VECTOR, "random_seed", "# makes a key", "threefry2x32"),
    "large": (fill_an_array, VECTOR, "cumsum", "# too many", f"more than the {MAX_SCALARS}"),
    "long sort": (sort_much, VECTOR, "sort", "# sorts", "the limit of 64"),
    "long scan": (hold_history, NUMBER, "scan", "# holds", "the limit of 128"),
}


@pytest.mark.parametrize("name", CASES)
def test_message_says_what_and_where(name):
    function, struct, primitive, source, way_out = CASES[name]
    with pytest.raises(CannotFuse) as refusal:
        lower_function(function, (struct,))
    text = str(refusal.value)
    assert text.startswith(primitive) and source in text and way_out in text, text
    assert "test_refusals.py" in text


def test_state_that_does_not_fit():
    with raises("shape-is-numbers-each-environment", "(64, 64)", "4096", kind=CannotFuse):
        lower_function(lambda board: board.sum(), (jax.ShapeDtypeStruct((64, 64), jnp.int32),))


def test_other_keys_as_arguments():
    key = jax.eval_shape(lambda: jax.random.key(0, impl="rbg"))
    with raises("random-keys-kind-only-jaxs", kind=CannotFuse):
        lower_function(jax.random.uniform, (key,))


def test_wide_numbers():
    with jax.enable_x64(True), raises("cannot-be-fused", "float64"):
        lower_function(lambda x: x.astype(jnp.float64) * 2, (VECTOR,))


def test_what_nobody_needs_is_not_refused():
    lowered = lower_function(lambda x: (call_back(x), x * 2)[1], (VECTOR,))
    assert {node.op for node in lowered.program.nodes()} == {"input", "constant", "mul"}
