"""Convolutions as machine code: values, gradients, and which ones are left to XLA."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollmill.lowerings.convolutions import order_convolutions
from rollmill.programs import own_convolution

pytest.importorskip("llvmlite")
pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="machine code of CPUs")

LAST = ("NHWC", "HWIO", "NHWC")
FIRST = ("NCHW", "OIHW", "NCHW")
NONE = ((0, 0), (0, 0))


@pytest.fixture(autouse=True)
def ordered():
    order_convolutions(own_convolution)


def whole_numbers(shape: tuple[int, ...], seed: int) -> jax.Array:
    """Small ones, so that all sums are exact."""
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, shape), jnp.float32)


def by_definition(image: jax.Array, kernel: jax.Array, strides: Any, padding: Any) -> jax.Array:
    """A matrix product for each place of the kernel."""
    image = jnp.pad(image, ((0, 0), *padding, (0, 0)))
    rows, columns = (
        (size - taps) // stride + 1
        for size, taps, stride in zip(image.shape[1:3], kernel.shape, strides, strict=False)
    )
    products = (
        image[:, a : a + rows * strides[0] : strides[0], b : b + columns * strides[1] : strides[1]][
            :, :rows, :columns
        ]
        @ kernel[a, b]
        for a, b in itertools.product(range(kernel.shape[0]), range(kernel.shape[1]))
    )
    return functools.reduce(jnp.add, products)


def convolved(image: jax.Array, kernel: jax.Array, strides: Any, padding: Any, layout: Any = LAST) -> jax.Array:
    """By JAX's primitive, in a layout."""
    arranged = lambda array, axes, wanted: array.transpose([axes.index(axis) for axis in wanted])
    image, kernel = arranged(image, LAST[0], layout[0]), arranged(kernel, LAST[1], layout[1])
    out = jax.lax.conv_general_dilated(image, kernel, strides, padding, dimension_numbers=layout)
    return arranged(out, layout[2], LAST[2])


def with_gradients(convolve: Any, image: jax.Array, kernel: jax.Array, seed: int = 2) -> Any:
    """The result, and gradients of a weighted sum of it."""

    def both(image: jax.Array, kernel: jax.Array) -> Any:
        result, pull = jax.vjp(convolve, image, kernel)
        return result, *pull(whole_numbers(result.shape, seed))

    return jax.jit(both).lower(image, kernel)


CASES = {
    "the first layer of Mnih et al.": ((3, 20, 28, 4), (8, 8, 4, 32), (4, 4), NONE, LAST),
    "their second": ((3, 10, 10, 32), (4, 4, 32, 64), (2, 2), NONE, LAST),
    "their third": ((3, 5, 6, 64), (3, 3, 64, 64), (1, 1), NONE, LAST),
    "strides that leave a rest": ((5, 13, 11, 16), (5, 4, 16, 16), (3, 2), NONE, LAST),
    "padding of all sides": ((2, 9, 7, 16), (3, 3, 16, 32), (2, 2), ((1, 0), (2, 3)), LAST),
    "one place of the kernel": ((4, 6, 6, 16), (1, 1, 16, 16), (2, 3), NONE, LAST),
    "strides wider than the kernel": ((4, 9, 9, 16), (2, 2, 16, 16), (3, 4), NONE, LAST),
    "more outputs than registers": ((2, 4, 5, 16), (2, 3, 16, 80), (1, 1), ((1, 1), (1, 1)), LAST),
    "many images": ((37, 6, 6, 16), (3, 3, 16, 16), (1, 1), NONE, LAST),
    "channels first": ((3, 8, 6, 16), (3, 2, 16, 32), (2, 1), ((0, 1), (1, 0)), FIRST),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_and_gradients_are_those_of_the_definition(case: Any) -> None:
    image_shape, kernel_shape, strides, padding, layout = case
    image, kernel = whole_numbers(image_shape, 0), whole_numbers(kernel_shape, 1)
    lowered = with_gradients(lambda x, w: convolved(x, w, strides, padding, layout), image, kernel)
    assert "stablehlo.convolution" not in lowered.as_text() or kernel_shape[2] % 16
    found = lowered.compile()(image, kernel)
    expected = with_gradients(lambda x, w: by_definition(x, w, strides, padding), image, kernel)
    for one, other in zip(found, expected.compile()(image, kernel), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_number_that_is_not_finite_reaches_the_places_that_see_it_and_no_other() -> None:
    image, kernel = whole_numbers((2, 6, 6, 16), 0).at[1, 0, 5, 3].set(jnp.nan), whole_numbers((3, 3, 16, 16), 1)
    found = jax.jit(lambda x, w: convolved(x, w, (1, 1), ((1, 1), (1, 1))))(image, kernel)
    expected = np.zeros((2, 6, 6, 16), bool)
    expected[1, :2, 4:] = True
    np.testing.assert_array_equal(np.isnan(found), expected)


def test_kernels_of_several_seeds_side_by_side() -> None:
    image, kernels = whole_numbers((3, 7, 7, 16), 0), whole_numbers((2, 3, 3, 16, 16), 1)
    gradients = jax.grad(lambda w, x: jnp.sum(jnp.square(convolved(x, w, (2, 2), NONE))))
    together = jax.jit(jax.vmap(gradients, in_axes=(0, None)))(kernels, image)
    for n in range(2):
        np.testing.assert_array_equal(together[n], jax.jit(gradients)(kernels[n], image))


def test_gradients_in_a_loop_and_in_a_branch() -> None:
    images, kernel = whole_numbers((3, 4, 7, 7, 16), 0), whole_numbers((3, 3, 16, 16), 1)
    loss = lambda convolve: lambda w, x: jnp.sum(jnp.square(convolve(x, w, (2, 2), NONE)))
    gradient = jax.grad(loss(convolved))

    def step(total: jax.Array, image: jax.Array) -> Any:
        return jax.lax.cond(image[0, 0, 0, 0] < 9, lambda: total + gradient(kernel, image), lambda: total), None

    found = jax.jit(lambda: jax.lax.scan(step, jnp.zeros_like(kernel), images)[0])()
    np.testing.assert_array_equal(found, sum(jax.grad(loss(by_definition))(kernel, image) for image in images))


LEFT_TO_XLA = {
    "outputs that fill no vector": ((4, 6, 6, 4), (3, 3, 4, 3), jnp.float32, {}),
    "short floats": ((4, 6, 6, 4), (3, 3, 4, 16), jnp.bfloat16, {}),
    "groups": ((4, 6, 6, 4), (3, 3, 2, 16), jnp.float32, {"feature_group_count": 2}),
    "a kernel with gaps": ((4, 9, 9, 4), (3, 3, 4, 16), jnp.float32, {"rhs_dilation": (2, 2)}),
    "no image": ((0, 6, 6, 4), (3, 3, 4, 16), jnp.float32, {}),
}


@pytest.mark.parametrize("case", LEFT_TO_XLA.values(), ids=LEFT_TO_XLA)
def test_convolutions_without_machine_code_are_xlas(case: Any) -> None:
    image_shape, kernel_shape, dtype, others = case
    image, kernel = whole_numbers(image_shape, 0).astype(dtype), whole_numbers(kernel_shape, 1).astype(dtype)
    convolve = lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=LAST, **others)
    lowered = jax.jit(convolve).lower(image, kernel)
    assert "rollmill_" not in lowered.as_text()
    numbers = np.asarray(lowered.compile()(image, kernel), np.float32)
    order_convolutions()
    jax.clear_caches()
    np.testing.assert_array_equal(numbers, np.asarray(jax.jit(convolve)(image, kernel), np.float32))


def test_exported_programs_hold_no_code_of_this_processor() -> None:
    convolve = jax.jit(lambda x, w: convolved(x, w, (1, 1), NONE))
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 6, 6, 4), (3, 3, 4, 16))]
    assert "rollmill_" in convolve.lower(*shapes).as_text()
    assert "rollmill_" not in jax.export.export(convolve, platforms=["cpu"])(*shapes).mlir_module()
