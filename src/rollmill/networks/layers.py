"""Layers with weights, and their initialisation.

Weights are stored as `[inputs, outputs]`, so that a batch under `jax.vmap` is one plain `x @ w`. Shape letters:
`I` inputs, `O` outputs, `H` hidden units, `G` gates times `H`. Images are height, width, channels.
"""

import functools
import math
from typing import Literal, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rollmill.core.types import Key
from rollmill.networks import wide_inputs
from rollmill.networks.orthogonal import orthogonal

Padding: TypeAlias = Literal["SAME", "VALID"]


class Linear(eqx.Module):
    """A fully connected layer, `x @ weight + bias`."""

    weight: Float[Array, "I O"]
    bias: Float[Array, " O"]

    def __call__(self, x: Float[Array, " I"]) -> Float[Array, " O"]:
        """Maps one vector."""
        return wide_inputs.product(x, self.weight) + self.bias


class Convolution(eqx.Module):
    """A two-dimensional convolution of one image."""

    kernel: Float[Array, "size size I O"]
    bias: Float[Array, " O"]
    stride: int = eqx.field(static=True)
    padding: Padding = eqx.field(static=True, default="VALID")
    """`VALID` for no padding, or `SAME` for zero padding that keeps the size of the image (at stride 1)."""

    def __call__(self, image: Float[Array, "height width I"]) -> Float[Array, "rows columns O"]:
        """Maps one image."""
        strides, layout = (self.stride, self.stride), ("NHWC", "HWIO", "NHWC")
        batch = jax.lax.conv_general_dilated(
            image[None], self.kernel, strides, padding=self.padding, dimension_numbers=layout
        )
        return batch[0] + self.bias[None, None]


class LayerNorm(eqx.Module):
    """Normalises a vector or an image to mean 0 and variance 1, then scales and shifts each channel.

    See Ba et al., "Layer Normalization" (2016). Unlike batch normalisation it uses only one input, so a network
    has no state besides its weights.
    """

    scale: Float[Array, " I"]
    shift: Float[Array, " I"]

    def __call__(self, x: Float[Array, "*image I"]) -> Float[Array, "*image I"]:
        """Normalises one vector, or one image."""
        centred = x - jnp.mean(x)
        deviation = jnp.sqrt(jnp.mean(jnp.square(centred)) + 1e-5)
        channels = (1,) * (x.ndim - 1) + self.scale.shape
        return centred / deviation * self.scale.reshape(channels) + self.shift.reshape(channels)


class GRUCell(eqx.Module):
    """A gated recurrent unit (Cho et al. 2014), whose three gates are computed by two matrix products.

    The columns of `x @ input_weight + bias` and of `h @ hidden_weight` are in the order r, z, n. With `r =
    sigmoid(x_r + h_r)`, `z = sigmoid(x_z + h_z)` and `n = tanh(x_n + r (h_n + candidate_bias))`, the next state is
    `n + z (h - n)`.
    """

    input_weight: Float[Array, "I G"]
    hidden_weight: Float[Array, "H G"]
    bias: Float[Array, " G"]
    candidate_bias: Float[Array, " H"]

    def initial_state(self) -> Float[Array, " H"]:
        """Returns the hidden state at the start of an episode, all zeros."""
        return jnp.zeros(self.candidate_bias.shape, jnp.float32)

    def __call__(
        self, x: Float[Array, " I"], hidden: Float[Array, " H"]
    ) -> tuple[Float[Array, " H"], Float[Array, " H"]]:
        """Returns the output after one input, and the next state, which for this unit are the same."""
        x_r, x_z, x_n = jnp.split(x @ self.input_weight + self.bias, 3)
        h_r, h_z, h_n = jnp.split(hidden @ self.hidden_weight, 3)
        reset, update = jax.nn.sigmoid(x_r + h_r), jax.nn.sigmoid(x_z + h_z)
        candidate = jnp.tanh(x_n + reset * (h_n + self.candidate_bias))
        after = candidate + update * (hidden - candidate)
        return after, after


class LSTMState(NamedTuple):
    """The state of an LSTM between two inputs: its hidden output and its cell."""

    hidden: Float[Array, " H"]
    """The last output of the unit."""
    cell: Float[Array, " H"]


class LSTMCell(eqx.Module):
    """A long short-term memory unit (Hochreiter and Schmidhuber 1997) with the forget gate of Gers et al. (2000).

    The columns of `x @ input_weight + h @ hidden_weight + bias` are in the order i, f, g, o. The next cell state
    is `c' = sigmoid(f) c + sigmoid(i) tanh(g)`, and the output is `sigmoid(o) tanh(c')`.
    """

    input_weight: Float[Array, "I G"]
    hidden_weight: Float[Array, "H G"]
    bias: Float[Array, " G"]

    def initial_state(self) -> LSTMState:
        """Returns the state at the start of an episode, all zeros."""
        zeros = jnp.zeros(self.hidden_weight.shape[0], jnp.float32)
        return LSTMState(zeros, zeros)

    def __call__(self, x: Float[Array, " I"], state: LSTMState) -> tuple[Float[Array, " H"], LSTMState]:
        """Returns the output after one input, and the next state."""
        gates = x @ self.input_weight + state.hidden @ self.hidden_weight + self.bias
        into, forget, candidate, out = jnp.split(gates, 4)
        cell = jax.nn.sigmoid(forget) * state.cell + jax.nn.sigmoid(into) * jnp.tanh(candidate)
        hidden = jax.nn.sigmoid(out) * jnp.tanh(cell)
        return hidden, LSTMState(hidden, cell)


def max_pool(image: Float[Array, "height width C"], *, size: int, stride: int) -> Float[Array, "rows columns C"]:
    """Returns the maximum over sliding windows of an image, with `SAME` padding at the borders.

    It compares shifted copies of the image, by rows and then by columns. Gradients and exported programs need
    nothing else.
    """
    return _largest_along(_largest_along(image, 0, size, stride), 1, size, stride)


def _largest_along(
    image: Float[Array, "height width C"], axis: int, size: int, stride: int
) -> Float[Array, "..."]:
    length = image.shape[axis]
    windows = -(-length // stride)
    missing = max((windows - 1) * stride + size - length, 0)
    before, after = (_least(image, axis, count) for count in (missing // 2, missing - missing // 2))
    padded = jnp.concatenate([before, image, after], axis)
    last = (windows - 1) * stride + 1
    shifted = (jax.lax.slice_in_dim(padded, i, i + last, stride, axis) for i in range(size))
    return functools.reduce(jnp.maximum, shifted)


def _least(image: Float[Array, "height width C"], axis: int, count: int) -> Float[Array, "..."]:
    """Returns rows or columns below every number. ONNX has no `jnp.pad` for batches of any size."""
    return jnp.full(image.shape[:axis] + (count,) + image.shape[axis + 1 :], -jnp.inf, jnp.float32)


def linear(key: Key, in_features: int, out_features: int, *, gain: float = math.sqrt(2.0)) -> Linear:
    """Returns a `Linear` layer with orthogonal weights, multiplied by `gain`, and zero bias."""
    return Linear(orthogonal(key, (in_features, out_features), gain), _zeros(out_features))


def convolution(
    key: Key,
    in_channels: int,
    out_channels: int,
    *,
    size: int,
    stride: int,
    gain: float = math.sqrt(2.0),
    padding: Padding = "VALID",
) -> Convolution:
    """Returns a `Convolution` with orthogonal filters multiplied by `gain`, and zero bias."""
    kernel = orthogonal(key, (size, size, in_channels, out_channels), gain)
    return Convolution(kernel, _zeros(out_channels), stride, padding)


def layer_norm(channels: int) -> LayerNorm:
    """Returns a `LayerNorm` with a scale of one and a shift of zero."""
    return LayerNorm(jnp.ones(channels, jnp.float32), _zeros(channels))


def gru_cell(key: Key, in_features: int, size: int) -> GRUCell:
    """Returns a `GRUCell` with six orthogonal matrices and zero biases."""
    input_weight, hidden_weight = _recurrent_weights(key, in_features, size, gates=3)
    return GRUCell(input_weight, hidden_weight, _zeros(3 * size), _zeros(size))


def lstm_cell(key: Key, in_features: int, size: int) -> LSTMCell:
    """Returns an `LSTMCell` with orthogonal matrices and zero biases, but a bias of one in the forget gates."""
    input_weight, hidden_weight = _recurrent_weights(key, in_features, size, gates=4)
    return LSTMCell(input_weight, hidden_weight, _zeros(4 * size).at[size : 2 * size].set(1.0))


def _zeros(size: int) -> Float[Array, " size"]:
    return jnp.zeros(size, jnp.float32)


def _recurrent_weights(
    key: Key, in_features: int, size: int, *, gates: int
) -> tuple[Float[Array, "I G"], Float[Array, "H G"]]:
    input_key, hidden_key = jax.random.split(key)
    inputs = _orthogonal_blocks(input_key, in_features, size, gates)
    return inputs, _orthogonal_blocks(hidden_key, size, size, gates)


def _orthogonal_blocks(key: Key, rows: int, size: int, count: int) -> Float[Array, "rows columns"]:
    blocks = jax.vmap(lambda block_key: orthogonal(block_key, (rows, size), 1.0))(jax.random.split(key, count))
    return jnp.concatenate(list(blocks), axis=1)
