"""Torsos, which map an observation to features for the head of a network.

A torso maps `(observation, memory)` to `(features, memory)`. Without a recurrent unit, its memory is `()`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeAlias, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from gymnasium import spaces
from jaxtyping import Array, Float

from rollmill.core.errors import ContractError, UsageError
from rollmill.core.spaces import struct
from rollmill.core.types import Key, Memory, Observation
from rollmill.core.user_frame import attribute_to_user_code
from rollmill.networks.layers import (
    Convolution,
    GRUCell,
    LayerNorm,
    Linear,
    LSTMCell,
    convolution,
    layer_norm,
    linear,
    max_pool,
)
from rollmill.networks.observations import ImageLayout, ObservationLeaf, as_image, images, join, leaves

Activation: TypeAlias = Callable[[Array], Array]
ConvolutionSizes: TypeAlias = tuple[tuple[int, int, int], ...]
"""Channels, kernel size and stride of each convolution."""


@runtime_checkable
class Torso(Protocol):
    """Protocol of the layers of an actor or a critic below its head."""

    out_features: int

    def initial_memory(self) -> Memory:
        """Returns the torso's memory at the start of an episode, or `()` if it is not recurrent."""
        ...

    def __call__(self, observation: Observation, memory: Memory, /) -> tuple[Float[Array, " features"], Memory]:
        """Returns the features of one observation, and the next memory."""
        ...


class MLP(eqx.Module):
    """Fully connected layers, each followed by an optional normalisation and an activation."""

    layers: tuple[Linear, ...]
    norms: tuple[LayerNorm, ...]
    """One normalisation per layer, or none."""
    activation: Activation = eqx.field(static=True)

    def __call__(self, x: Float[Array, " inputs"]) -> Float[Array, " features"]:
        """Maps one vector."""
        for number, layer in enumerate(self.layers):
            x = layer(x)
            x = self.activation(self.norms[number](x) if self.norms else x)
        return x


class FeedForwardBlock(eqx.Module):
    """A residual block `x + down(activation(up(norm(x))))` with a hidden layer four times as wide as `x`."""

    norm: LayerNorm
    up: Linear
    down: Linear
    activation: Activation = eqx.field(static=True)

    def __call__(self, x: Float[Array, " width"]) -> Float[Array, " width"]:
        """Maps one vector to another of its size."""
        return x + self.down(self.activation(self.up(self.norm(x))))


class ResidualMLP(eqx.Module):
    """A linear layer, followed by `FeedForwardBlock`s and a final normalisation.

    See Lee et al., "SimBa: Simplicity Bias for Scaling Up Parameters in Deep Reinforcement Learning" (2025).
    """

    stem: Linear
    blocks: tuple[FeedForwardBlock, ...]
    norm: LayerNorm

    def __call__(self, x: Float[Array, " inputs"]) -> Float[Array, " width"]:
        """Maps one vector."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class CNN(eqx.Module):
    """Convolutions, each followed by a ReLU. The output is flattened to one vector."""

    layers: tuple[Convolution, ...]

    def __call__(self, image: Float[Array, "height width channels"]) -> Float[Array, " features"]:
        """Maps one image."""
        for layer in self.layers:
            image = jax.nn.relu(layer(image))
        return image.reshape(-1)


class ResidualBlock(eqx.Module):
    """A residual block of two normalised convolutions (He et al. 2016)."""

    first: Convolution
    first_norm: LayerNorm
    second: Convolution
    second_norm: LayerNorm

    def __call__(self, image: Float[Array, "height width C"]) -> Float[Array, "height width C"]:
        """Maps one image to another of its size."""
        inner = jax.nn.relu(self.first_norm(self.first(image)))
        return jax.nn.relu(image + self.second_norm(self.second(inner)))


class ResNet(eqx.Module):
    """A convolution and residual blocks that keep the size of the image. The output is flattened.

    As in AlphaZero (Silver et al., Nature 2017), but with layer normalisation instead of batch normalisation.
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


class PlainResidualBlock(eqx.Module):
    """A residual block of two convolutions without normalisation, each preceded by a ReLU."""

    first: Convolution
    second: Convolution

    def __call__(self, image: Float[Array, "height width C"]) -> Float[Array, "height width C"]:
        """Maps one image to another of its size."""
        return image + self.second(jax.nn.relu(self.first(jax.nn.relu(image))))


class DownsamplingStage(eqx.Module):
    """A convolution, max pooling over 3 x 3 windows that halves the image, and two residual blocks."""

    convolution: Convolution
    blocks: tuple[PlainResidualBlock, ...]

    def __call__(self, image: Float[Array, "height width channels"]) -> Float[Array, "rows columns C"]:
        """Maps one image to one of half its size, rounded up."""
        image = max_pool(self.convolution(image), size=3, stride=2)
        for block in self.blocks:
            image = block(image)
        return image


class ImpalaCNN(eqx.Module):
    """The deep residual network of Espeholt et al., "IMPALA" (2018), figure 3, without its recurrent unit.

    Each stage halves the image. The output passes a ReLU and is flattened to one vector.
    """

    stages: tuple[DownsamplingStage, ...]

    def __call__(self, image: Float[Array, "height width channels"]) -> Float[Array, " features"]:
        """Maps one image."""
        for stage in self.stages:
            image = stage(image)
        return jax.nn.relu(image).reshape(-1)


ImageNetwork: TypeAlias = CNN | ResNet | ImpalaCNN
"""A network that maps an image to features."""


class FeedForwardTorso(eqx.Module):
    """Torso without memory: an `ImageNetwork` per image, and an `MLP` over their features and other leaves."""

    cnns: tuple[ImageNetwork, ...]
    mlp: MLP | ResidualMLP
    images: tuple[ObservationLeaf, ...] = eqx.field(static=True)
    vectors: tuple[ObservationLeaf, ...] = eqx.field(static=True)
    out_features: int = eqx.field(static=True)

    def initial_memory(self) -> Memory:
        """Returns `()`, because this torso has no memory."""
        return ()

    def __call__(self, observation: Observation, memory: Memory) -> tuple[Float[Array, " features"], Memory]:
        """Returns the features of one observation, and passes `memory` through."""
        from_images = [cnn(as_image(leaf, observation)) for cnn, leaf in zip(self.cnns, self.images, strict=True)]
        return self.mlp(jnp.concatenate([*from_images, join(self.vectors, observation)])), memory


class OwnTorso(eqx.Module):
    """Torso registered by the user: a module that maps an observation to features, followed by an `MLP`."""

    own: Any
    mlp: MLP | ResidualMLP
    action: tuple[ObservationLeaf, ...] = eqx.field(static=True)
    """Leaves of an action that the `MLP` reads in addition to the features, in critics of actions. The torso's
    input is then a dictionary of observation and action."""
    out_features: int = eqx.field(static=True)

    def initial_memory(self) -> Memory:
        """Returns `()`, because this torso has no memory."""
        return ()

    def __call__(self, observation: Observation, memory: Memory) -> tuple[Float[Array, " features"], Memory]:
        """Returns the features of an observation, or of it with an action, and the unchanged `memory`."""
        if not self.action:
            return self.mlp(self.own(observation)), memory
        features = self.own(observation["observation"])
        return self.mlp(jnp.concatenate([features, join(self.action, observation["action"])])), memory


class RecurrentTorso(eqx.Module):
    """Torso with memory: an encoder followed by a recurrent unit.

    The features are the unit's output, and the memory is its state.
    """

    encoder: FeedForwardTorso | OwnTorso
    cell: GRUCell | LSTMCell
    out_features: int = eqx.field(static=True)

    def initial_memory(self) -> Memory:
        """Returns the state of the recurrent unit at the start of an episode, arrays `[out_features]` of zeros."""
        return self.cell.initial_state()

    def __call__(self, observation: Observation, memory: Memory) -> tuple[Float[Array, " features"], Memory]:
        """Returns the unit's output after one observation, and its state."""
        encoded, _ = self.encoder(observation, ())
        return self.cell(encoded, memory)


def mlp(
    key: Key, in_features: int, hidden_sizes: tuple[int, ...], *, activation: Activation, normalised: bool = False
) -> MLP:
    """Returns an `MLP` with orthogonal weights of gain sqrt(2). Without hidden sizes it is the identity."""
    keys = jax.random.split(key, max(len(hidden_sizes), 1))
    ins = (in_features, *hidden_sizes[:-1])
    norms = tuple(map(layer_norm, hidden_sizes)) if normalised else ()
    return MLP(tuple(map(linear, keys, ins, hidden_sizes)), norms, activation)


def residual_mlp(
    key: Key, in_features: int, hidden_sizes: tuple[int, ...], *, activation: Activation
) -> ResidualMLP:
    """Returns a `ResidualMLP` with orthogonal weights.

    Their gain is 1 in the first layer, sqrt(2) before an activation, and one over the number of blocks at the end
    of each block. Deep networks therefore begin near the identity.

    Args:
        key: random key of the weights.
        in_features: number of inputs.
        hidden_sizes: width of each block. All of them must be equal, and there must be at least one.
        activation: activation function inside the blocks.

    Raises:
        UsageError: the widths differ, or there are none.
    """
    if len(set(hidden_sizes)) != 1:
        raise UsageError(
            f"hidden_sizes={hidden_sizes}: residual blocks need one or more widths that are all equal. hint: "
            "hidden_sizes=(128, 128) gives two blocks of width 128."
        )
    width = hidden_sizes[0]
    stem_key, *block_keys = jax.random.split(key, len(hidden_sizes) + 1)
    blocks = tuple(
        _feed_forward_block(each, width, activation, end_gain=1.0 / len(hidden_sizes)) for each in block_keys
    )
    return ResidualMLP(linear(stem_key, in_features, width, gain=1.0), blocks, layer_norm(width))


def _feed_forward_block(key: Key, width: int, activation: Activation, *, end_gain: float) -> FeedForwardBlock:
    up_key, down_key = jax.random.split(key)
    up, down = linear(up_key, width, 4 * width), linear(down_key, 4 * width, width, gain=end_gain)
    return FeedForwardBlock(layer_norm(width), up, down, activation)


def cnn(key: Key, shape: tuple[int, ...], convolutions: ConvolutionSizes = ()) -> tuple[CNN, int]:
    """Returns a `CNN` for images of `shape` (height, width, channels), and its number of features.

    Args:
        key: random key of the weights.
        shape: height, width and channels of one image.
        convolutions: (channels, kernel size, stride) of each layer. If empty, the layers depend on the image
            size: for 36 pixels or more, the layers of Mnih et al. (2015), "Human-level control through deep
            reinforcement learning", for 16 pixels or more, two smaller layers, and for smaller images, the
            single layer of Young and Tian (2019), "MinAtar".

    Raises:
        UsageError: a kernel is larger than the input of its layer.
    """
    sizes = convolutions or _default_convolutions(min(shape[:2]))
    height, width, channels = shape
    layers = []
    for layer_key, (out_channels, size, stride) in zip(jax.random.split(key, len(sizes)), sizes, strict=True):
        if min(height, width) < size:
            raise UsageError(
                f"the convolutions {sizes} do not fit images of {shape[0]} x {shape[1]}: a kernel of {size} is "
                f"larger than its input of {height} x {width}. hint: use smaller kernels or strides, or "
                "torso='mlp'."
            )
        layers.append(convolution(layer_key, channels, out_channels, size=size, stride=stride))
        height, width = (height - size) // stride + 1, (width - size) // stride + 1
        channels = out_channels
    return CNN(tuple(layers)), height * width * channels


def resnet(key: Key, shape: tuple[int, ...], *, channels: int, num_blocks: int) -> tuple[ResNet, int]:
    """Returns a `ResNet` for images of `shape` (height, width, channels), and its number of features.

    Args:
        key: random key of the weights.
        shape: height, width and channels of one image.
        channels: number of channels of every layer.
        num_blocks: number of residual blocks.
    """
    stem_key, *block_keys = jax.random.split(key, num_blocks + 1)
    height, width, in_channels = shape
    stem = _same_convolution(stem_key, in_channels, channels)
    blocks = tuple(_residual_block(block_key, channels) for block_key in block_keys)
    return ResNet(stem, layer_norm(channels), blocks), height * width * channels


def _residual_block(key: Key, channels: int) -> ResidualBlock:
    first, second = (_same_convolution(each, channels, channels) for each in jax.random.split(key))
    return ResidualBlock(first, layer_norm(channels), second, layer_norm(channels))


def impala_cnn(key: Key, shape: tuple[int, ...], *, stages: tuple[int, ...]) -> tuple[ImpalaCNN, int]:
    """Returns an `ImpalaCNN` for images of `shape` (height, width, channels), and its number of features.

    Args:
        key: random key of the weights.
        shape: height, width and channels of one image.
        stages: channels of each stage.
    """
    height, width, channels = shape
    made = []
    for stage_key, out_channels in zip(jax.random.split(key, len(stages)), stages, strict=True):
        first, *rest = jax.random.split(stage_key, 5)
        before = _same_convolution(first, channels, out_channels)
        inside = [_same_convolution(each, out_channels, out_channels) for each in rest]
        blocks = PlainResidualBlock(inside[0], inside[1]), PlainResidualBlock(inside[2], inside[3])
        made.append(DownsamplingStage(before, blocks))
        height, width, channels = -(-height // 2), -(-width // 2), out_channels
    return ImpalaCNN(tuple(made)), height * width * channels


def _same_convolution(key: Key, in_channels: int, out_channels: int) -> Convolution:
    return convolution(key, in_channels, out_channels, size=3, stride=1, padding="SAME")


def feed_forward_torso(
    key: Key,
    space: spaces.Space,
    *,
    hidden_sizes: tuple[int, ...],
    activation: Activation,
    convolutions: ConvolutionSizes = (),
    convolve: bool = True,
    image_layout: ImageLayout = "auto",
    make_cnn: Callable[[Key, tuple[int, ...]], tuple[ImageNetwork, int]] | None = None,
    make_mlp: Callable[..., MLP | ResidualMLP] = mlp,
) -> FeedForwardTorso:
    """Returns a torso without memory for observations of `space`.

    With `convolve`, its `Box` leaves of rank 3 are treated as images. `make_cnn` makes the network for images of a
    given shape and returns it with its number of features, by default a `cnn`. `make_mlp` makes the layers after
    it, and takes the arguments of `mlp`.
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
        mlp=make_mlp(mlp_key, in_features, hidden_sizes, activation=activation),
        images=image_leaves,
        vectors=vectors,
        out_features=(in_features, *hidden_sizes)[-1],
    )


def own_torso(
    key: Key,
    name: str,
    factory: Callable[[Key, spaces.Space], Any],
    space: spaces.Space,
    *,
    action_space: spaces.Space | None = None,
    hidden_sizes: tuple[int, ...],
    activation: Activation,
    make_mlp: Callable[..., MLP | ResidualMLP] = mlp,
) -> OwnTorso:
    """Builds a torso registered by the user, and the layers after it.

    `factory` makes the torso from a key and the observation space. `make_mlp` makes the layers, and takes the
    arguments of `mlp`. With an action space, the layers also read an action. Raises a `ContractError` with the
    torso's name if the torso raises an exception or does not return a vector of floats.
    """
    own_key, mlp_key = jax.random.split(key)
    with attribute_to_user_code(f"the torso {name}"):
        own = factory(own_key, space)
        features = eqx.filter_eval_shape(own, struct(space))
    if not isinstance(features, jax.ShapeDtypeStruct) or (len(features.shape), features.dtype) != (1, jnp.float32):
        raise ContractError(f"the torso {name} must return one float32 vector, got {features}.")
    action = () if action_space is None else tuple(leaves(action_space))
    in_features = features.shape[0] + sum(leaf.size for leaf in action)
    layers = make_mlp(mlp_key, in_features, hidden_sizes, activation=activation)
    return OwnTorso(own, layers, action, (in_features, *hidden_sizes)[-1])


def recurrent_torso(
    key: Key,
    encoder: FeedForwardTorso | OwnTorso,
    *,
    size: int,
    make_cell: Callable[[Key, int, int], GRUCell | LSTMCell],
) -> RecurrentTorso:
    """Returns a torso with a recurrent unit of `size` outputs after `encoder`.

    Args:
        key: random key of the unit's weights.
        encoder: torso whose features are the unit's inputs.
        size: number of the unit's outputs.
        make_cell: `gru_cell`, `lstm_cell`, or another function of a key, the number of inputs and the size.
    """
    return RecurrentTorso(encoder, make_cell(key, encoder.out_features, size), size)


def _default_convolutions(pixels: int) -> ConvolutionSizes:
    if pixels >= 36:
        return ((32, 8, 4), (64, 4, 2), (64, 3, 1))
    if pixels >= 16:
        return ((32, 4, 2), (64, 3, 2))
    return ((16, min(3, pixels), 1),)
