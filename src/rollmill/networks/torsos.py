"""Torsos: from an observation to features, below the heads of a network.

A torso maps `(observation, memory)` to `(features, memory)`; one without memory has memory `()`.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeAlias, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from gymnasium import spaces
from jaxtyping import Array, Float

from rollmill.core.errors import UsageError
from rollmill.core.types import Key, Memory, Observation
from rollmill.networks.layers import (
    Convolution,
    GRUCell,
    LayerNorm,
    Linear,
    convolution,
    gru_cell,
    layer_norm,
    linear,
)
from rollmill.networks.observations import ImageLayout, ObservationLeaf, as_image, images, join, leaves

Activation: TypeAlias = Callable[[Array], Array]
ConvolutionSizes: TypeAlias = tuple[tuple[int, int, int], ...]
"""(channels, kernel size, stride) of each layer."""


@runtime_checkable
class Torso(Protocol):
    """The part of an actor or a critic below its head."""

    out_features: int

    def initial_memory(self) -> Memory:
        """The memory at the start of an episode."""
        ...

    def __call__(self, observation: Observation, memory: Memory, /) -> tuple[Float[Array, " features"], Memory]:
        """The features of one observation, and the next memory."""
        ...


class MLP(eqx.Module):
    """Fully connected layers, each followed by the activation."""

    layers: tuple[Linear, ...]
    activation: Activation = eqx.field(static=True)

    def __call__(self, x: Float[Array, " inputs"]) -> Float[Array, " features"]:
        """Maps one vector."""
        for layer in self.layers:
            x = self.activation(layer(x))
        return x


class CNN(eqx.Module):
    """Convolutions, each followed by a ReLU; the result is flattened to one vector."""

    layers: tuple[Convolution, ...]

    def __call__(self, image: Float[Array, "height width channels"]) -> Float[Array, " features"]:
        """Maps one image."""
        for layer in self.layers:
            image = jax.nn.relu(layer(image))
        return image.reshape(-1)


class ResidualBlock(eqx.Module):
    """Two normalised convolutions beside the identity (He et al. 2016)."""

    first: Convolution
    first_norm: LayerNorm
    second: Convolution
    second_norm: LayerNorm

    def __call__(self, image: Float[Array, "height width C"]) -> Float[Array, "height width C"]:
        """Maps one image to another of its size."""
        inner = jax.nn.relu(self.first_norm(self.first(image)))
        return jax.nn.relu(image + self.second_norm(self.second(inner)))


class ResNet(eqx.Module):
    """A convolution and residual blocks that keep the size of the image; the result is flattened to one vector.

    As AlphaZero's (Silver et al., Nature 2017), but with layer normalisation instead of batch normalisation.
    """

    stem: Convolution
    norm: LayerNorm
    blocks: tuple[ResidualBlock, ...]

    def __call__(self, image: Float[Array, "height width channels"]) -> Float[Array, " features"]:
        """Maps one image."""
        image = jax.nn.relu(self.norm(self.stem(image)))
        for block in self.blocks:
            image = block(image)
        return image.reshape(-1)


class FeedForwardTorso(eqx.Module):
    """A `CNN` or `ResNet` for each image of the observation, concatenated with its other leaves, then an `MLP`."""

    cnns: tuple[CNN | ResNet, ...]
    mlp: MLP
    images: tuple[ObservationLeaf, ...] = eqx.field(static=True)
    vectors: tuple[ObservationLeaf, ...] = eqx.field(static=True)
    out_features: int = eqx.field(static=True)

    def initial_memory(self) -> Memory:
        """`()`: no memory."""
        return ()

    def __call__(self, observation: Observation, memory: Memory) -> tuple[Float[Array, " features"], Memory]:
        """The features of one observation; `memory` passes through."""
        from_images = [cnn(as_image(leaf, observation)) for cnn, leaf in zip(self.cnns, self.images, strict=True)]
        return self.mlp(jnp.concatenate([*from_images, join(self.vectors, observation)])), memory


class RecurrentTorso(eqx.Module):
    """An encoder followed by a gated recurrent unit, whose hidden state is both features and memory."""

    encoder: FeedForwardTorso
    cell: GRUCell
    out_features: int = eqx.field(static=True)

    def initial_memory(self) -> Memory:
        """A hidden state of zeros, `[out_features]`."""
        return jnp.zeros(self.out_features, jnp.float32)

    def __call__(self, observation: Observation, memory: Memory) -> tuple[Float[Array, " features"], Memory]:
        """The hidden state after one observation, as features and as memory."""
        encoded, _ = self.encoder(observation, ())
        hidden = self.cell(encoded, memory)
        return hidden, hidden


def mlp(key: Key, in_features: int, hidden_sizes: tuple[int, ...], *, activation: Activation) -> MLP:
    """An `MLP` with orthogonal weights of gain sqrt(2); without hidden sizes it is the identity."""
    keys = jax.random.split(key, max(len(hidden_sizes), 1))
    ins = (in_features, *hidden_sizes[:-1])
    return MLP(tuple(map(linear, keys, ins, hidden_sizes)), activation)


def cnn(key: Key, shape: tuple[int, ...], convolutions: ConvolutionSizes = ()) -> tuple[CNN, int]:
    """A `CNN` for images of `shape` (height, width, channels), and its number of features.

    Args:
        key: random key of the weights.
        shape: height, width and channels of one image.
        convolutions: (channels, kernel size, stride) of each layer; if empty, chosen by image size:
            from 36 pixels the layers of Mnih et al. (2015), "Human-level control through deep
            reinforcement learning", from 16 two smaller ones, below the one layer of Young and Tian
            (2019), "MinAtar".

    Raises:
        UsageError: a kernel is larger than the input of its layer.
    """
    sizes = convolutions or _default_convolutions(min(shape[:2]))
    height, width, channels = shape
    layers = []
    for layer_key, (out_channels, size, stride) in zip(jax.random.split(key, len(sizes)), sizes, strict=True):
        if min(height, width) < size:
            raise UsageError(
                f"the convolutions {sizes} do not fit images of {shape[0]} x {shape[1]}: a kernel of {size} "
                f"meets {height} x {width}. Give smaller kernels or strides, or torso='mlp'."
            )
        layers.append(convolution(layer_key, channels, out_channels, size=size, stride=stride))
        height, width = (height - size) // stride + 1, (width - size) // stride + 1
        channels = out_channels
    return CNN(tuple(layers)), height * width * channels


def resnet(key: Key, shape: tuple[int, ...], *, channels: int, num_blocks: int) -> tuple[ResNet, int]:
    """A `ResNet` for images of `shape` (height, width, channels), and its number of features.

    Args:
        key: random key of the weights.
        shape: height, width and channels of one image.
        channels: of all layers.
        num_blocks: number of residual blocks.
    """
    stem_key, *block_keys = jax.random.split(key, num_blocks + 1)
    height, width, in_channels = shape
    stem = convolution(stem_key, in_channels, channels, size=3, stride=1, padding="SAME")
    blocks = tuple(_residual_block(block_key, channels) for block_key in block_keys)
    return ResNet(stem, layer_norm(channels), blocks), height * width * channels


def _residual_block(key: Key, channels: int) -> ResidualBlock:
    first, second = (
        convolution(each, channels, channels, size=3, stride=1, padding="SAME") for each in jax.random.split(key)
    )
    return ResidualBlock(first, layer_norm(channels), second, layer_norm(channels))


def feed_forward_torso(
    key: Key,
    space: spaces.Space,
    *,
    hidden_sizes: tuple[int, ...],
    activation: Activation,
    convolutions: ConvolutionSizes = (),
    convolve: bool = True,
    image_layout: ImageLayout = "auto",
    make_cnn: Callable[[Key, tuple[int, ...]], tuple[CNN | ResNet, int]] | None = None,
) -> FeedForwardTorso:
    """A torso for observations of `space`; with `convolve`, its `Box` leaves of rank 3 are images.

    `make_cnn` makes what convolves images of a shape, and the number of its features; by default a `cnn`.
    """
    mlp_key, cnn_key = jax.random.split(key)
    image_leaves = images(space, image_layout) if convolve else ()
    vectors = tuple(leaf for leaf in leaves(space) if not (convolve and leaf.image))
    keys = jax.random.split(cnn_key, max(len(image_leaves), 1))
    make_cnn = make_cnn or partial(cnn, convolutions=convolutions)
    cnns = [make_cnn(k, leaf.image_shape) for k, leaf in zip(keys, image_leaves, strict=False)]
    in_features = sum(size for _, size in cnns) + sum(leaf.size for leaf in vectors)
    return FeedForwardTorso(
        cnns=tuple(stack for stack, _ in cnns),
        mlp=mlp(mlp_key, in_features, hidden_sizes, activation=activation),
        images=image_leaves,
        vectors=vectors,
        out_features=(in_features, *hidden_sizes)[-1],
    )


def recurrent_torso(key: Key, encoder: FeedForwardTorso, *, size: int) -> RecurrentTorso:
    """A torso with a gated recurrent unit of `size` over the features of `encoder`."""
    return RecurrentTorso(encoder, gru_cell(key, encoder.out_features, size), size)


def _default_convolutions(pixels: int) -> ConvolutionSizes:
    if pixels >= 36:
        return ((32, 8, 4), (64, 4, 2), (64, 3, 1))
    if pixels >= 16:
        return ((32, 4, 2), (64, 3, 2))
    return ((16, min(3, pixels), 1),)
