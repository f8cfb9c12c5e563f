"""Convolutions in the order of axes that XLA's CPU backend computes fast, also inside of loops and branches."""

import itertools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollmill.lowerings.convolutions import order_convolutions

FAST = re.compile(r"dim_labels=b(\d*)f_\1io->b\1f")

SPACES = [  # strides, padding, dilation of the input, dilation of the kernel
    ((1, 1), ((0, 0), (0, 0)), (1, 1), (1, 1)),
    ((2, 3), ((1, 0), (2, 1)), (1, 1), (1, 1)),
    ((1, 1), ((2, 2), (1, 3)), (2, 3), (1, 1)),
    ((2, 1), ((0, 1), (0, -1)), (1, 1), (2, 1)),
]
LAYOUTS = [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("NCHW", "HWIO", "NHWC"), ("CHWN", "IHWO", "HWNC")]


@pytest.fixture(autouse=True)
def ordered():
    order_convolutions()


def spread(array, dilation):
    """Zeros between the numbers along the two last axes."""
    rows, columns = array.shape[-2:]
    wide = np.zeros(
        (*array.shape[:-2], (rows - 1) * dilation[0] + 1, (columns - 1) * dilation[1] + 1), array.dtype
    )
    wide[..., :: dilation[0], :: dilation[1]] = array
    return wide


def padded(image, padding):
    """Zeros around the two last axes; a negative width takes numbers away."""
    image = np.pad(image, ((0, 0), (0, 0), *((max(low, 0), max(high, 0)) for low, high in padding)))
    cut = [slice(max(-low, 0), size - max(-high, 0)) for (low, high), size in zip(padding, image.shape[2:])]  # noqa: B905
    return image[:, :, cut[0], cut[1]]


def by_definition(image, kernel, strides, padding, groups=1):
    """NCHW and OIHW: each output is the sum of the products under the kernel, of the inputs of its group."""
    image = padded(image, padding)
    outputs, inputs, height, width = kernel.shape
    rows = (image.shape[2] - height) // strides[0] + 1
    columns = (image.shape[3] - width) // strides[1] + 1
    result = np.zeros((len(image), outputs, rows, columns), image.dtype)
    for o, r, c in itertools.product(range(outputs), range(rows), range(columns)):
        first = o // (outputs // groups) * inputs
        top, left = r * strides[0], c * strides[1]
        window = image[:, first : first + inputs, top : top + height, left : left + width]
        result[:, o, r, c] = (window * kernel[o]).sum((1, 2, 3))
    return result


def arranged(array, axes, layout):
    return array.transpose([axes.index(axis) for axis in layout])


@pytest.mark.parametrize("layout", LAYOUTS, ids="-".join)
@pytest.mark.parametrize("space", SPACES)
def test_values_are_those_of_the_definition(space, layout):
    strides, padding, spread_image, spread_kernel = space
    draws = np.random.default_rng(0)
    image = draws.integers(-4, 5, (2, 3, 7, 8)).astype(np.float32)
    kernel = draws.integers(-4, 5, (4, 3, 3, 2)).astype(np.float32)
    expected = by_definition(spread(image, spread_image), spread(kernel, spread_kernel), strides, padding)
    convolve = lambda x, w: jax.lax.conv_general_dilated(
        x, w, strides, padding, lhs_dilation=spread_image, rhs_dilation=spread_kernel, dimension_numbers=layout
    )
    found = jax.jit(convolve)(arranged(image, "NCHW", layout[0]), arranged(kernel, "OIHW", layout[1]))
    np.testing.assert_array_equal(found, arranged(expected, "NCHW", layout[2]))  # whole numbers: exact


@pytest.mark.parametrize("dtype", [np.float32, np.complex64, np.int32, jnp.bfloat16])
def test_groups_and_types(dtype):
    draws = np.random.default_rng(1)
    image, kernel = draws.integers(-3, 4, (2, 4, 5, 5)), draws.integers(-3, 4, (6, 2, 2, 2))
    if dtype is np.complex64:
        image, kernel = image + 1j * image[:, ::-1], kernel - 2j * kernel[::-1]
    image, kernel = image.astype(dtype), kernel.astype(dtype)
    wide = np.complex64 if dtype is np.complex64 else np.float32
    expected = by_definition(image.astype(wide), kernel.astype(wide), (1, 1), ((0, 0), (0, 0)), groups=2)
    convolve = lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), "VALID", feature_group_count=2)
    found = jax.jit(convolve)(image, kernel)
    assert found.dtype == dtype
    np.testing.assert_array_equal(np.asarray(found).astype(wide), expected)


@pytest.mark.parametrize("rank", [1, 3])
def test_lines_and_volumes(rank):
    image = np.arange(2.0 * 3 * 4**rank, dtype=np.float32).reshape(2, 3, *[4] * rank)
    kernel = np.ones((1, 3, *[2] * rank), np.float32)
    found = jax.jit(lambda x, w: jax.lax.conv(x, w, (2,) * rank, "VALID"))(image, kernel)
    halves = image.reshape(2, 3, *[2, 2] * rank)  # windows that do not overlap: their sums
    expected = halves.sum((1, *range(3, 3 + 2 * rank, 2)))[:, None]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


class Network(eqx.Module):
    """A user's own network, with channels first."""

    first: eqx.nn.Conv2d
    second: eqx.nn.Conv2d

    def __init__(self, key):
        keys = jax.random.split(key)
        self.first = eqx.nn.Conv2d(3, 4, 4, stride=2, key=keys[0])
        self.second = eqx.nn.Conv2d(4, 5, 3, padding=1, key=keys[1])

    def __call__(self, image):
        return self.second(jax.nn.relu(self.first(image)))


def loss(network, images):
    return jnp.sum(jnp.square(jax.vmap(network)(images)))


def in_a_loop(network, images):
    """Gradients of each batch, in a scan, and outputs, in a branch of it."""

    def step(carry, batch):
        shown = jax.lax.cond(batch[0, 0, 0, 0] > -9, lambda: jax.vmap(network)(batch), lambda: jnp.zeros(OUTPUTS))
        return carry, (eqx.filter_grad(loss)(network, batch), shown)

    return jax.lax.scan(step, 0, images)[1]


OUTPUTS = (2, 5, 5, 5)
"""A batch of two images of 12 x 12 after a stride of two."""


def test_all_convolutions_of_a_loop_are_in_the_fast_order():
    network, images = Network(jax.random.key(0)), jnp.ones((3, 2, 3, 12, 12))
    weights, rest = eqx.partition(network, eqx.is_array)
    program = jax.jit(lambda weights, images: in_a_loop(eqx.combine(weights, rest), images))
    text = program.lower(weights, images).compile().as_text()
    convolutions = [line for line in text.splitlines() if " convolution(" in line]
    # Two of the branch, two of the loss, the gradients of two kernels and that of one input.
    assert len(convolutions) >= 5  # the branch's may be the loss's
    assert [line for line in convolutions if not FAST.search(line)] == []


def test_gradients_in_a_loop_are_those_outside_of_it():
    network, images = Network(jax.random.key(0)), jax.random.normal(jax.random.key(1), (3, 2, 3, 12, 12))
    gradients, shown = eqx.filter_jit(in_a_loop)(network, images)
    for n, batch in enumerate(images):
        expected = eqx.filter_jit(eqx.filter_grad(loss))(network, batch)
        jax.tree.map(
            lambda e, g, n=n: np.testing.assert_allclose(g[n], e, rtol=1e-4, atol=1e-4), expected, gradients
        )
        np.testing.assert_allclose(shown[n], jax.vmap(network)(batch), rtol=1e-4, atol=1e-4)


def test_several_networks_side_by_side_have_the_gradients_of_each():
    networks = eqx.filter_vmap(Network)(jax.random.split(jax.random.key(2), 3))
    images = jax.random.normal(jax.random.key(3), (2, 3, 12, 12))
    together = eqx.filter_jit(eqx.filter_vmap(eqx.filter_grad(loss), in_axes=(eqx.if_array(0), None)))(
        networks, images
    )
    for n in range(3):
        network = jax.tree.map(lambda leaf, n=n: leaf[n] if eqx.is_array(leaf) else leaf, networks)
        expected = eqx.filter_grad(loss)(network, images)
        jax.tree.map(
            lambda e, t, n=n: np.testing.assert_allclose(t[n], e, rtol=1e-4, atol=1e-4), expected, together
        )
