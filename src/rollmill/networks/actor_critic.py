"""Composes actor-critics from torsos and heads, as described by `NetworkConfig`."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from gymnasium import spaces
from jaxtyping import Array, Float

from rollmill.core.bounds import Count, Range
from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.field_help import with_field_help
from rollmill.core.schema import check_fields
from rollmill.core.spaces import space_text
from rollmill.core.types import Key, Memory, Observation
from rollmill.networks.base import Distribution, LegalActions, Output
from rollmill.networks.heads import ActionHead, action_head
from rollmill.networks.layers import GRUCell, Linear, LSTMCell, gru_cell, linear, lstm_cell
from rollmill.networks.observations import leaves
from rollmill.networks.registry import find_network, is_torso
from rollmill.networks.torsos import (
    FeedForwardTorso,
    OwnTorso,
    Torso,
    feed_forward_torso,
    impala_cnn,
    mlp,
    own_torso,
    recurrent_torso,
    residual_mlp,
    resnet,
)

ACTIVATIONS = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "swish": jax.nn.swish,
    "gelu": jax.nn.gelu,
    "elu": jax.nn.elu,
}
LAYOUTS = ("auto", "channels_first", "channels_last")
TORSOS = ("auto", "mlp", "cnn", "gru", "lstm", "resnet", "impala")
CELLS: Mapping[str, Callable[[Key, int, int], GRUCell | LSTMCell]] = {"gru": gru_cell, "lstm": lstm_cell}
"""Recurrent torsos, by name, with the function that makes their cell."""
AFTER_TORSO = (
    *("hidden_sizes", "layer_norm", "residual", "activation", "shared_torso", "recurrent_size"),
    *("state_dependent_std", "squash_actions", "initial_log_std", "learn_std"),
)
"""Settings that also apply after a registered torso."""
READERS = {
    "recurrent_size": tuple(CELLS),
    "num_blocks": ("resnet",),
    "channels": ("resnet",),
    "stages": ("impala",),
    "convolutions": ("auto", "cnn", *CELLS),
}
"""Settings that only some torsos read, with the names of these torsos."""


@with_field_help
@dataclasses.dataclass(frozen=True)
class NetworkConfig:
    """Settings of an algorithm's networks: actor-critics, and the value networks of DQN, SAC and TD3."""

    torso: Literal["auto", "mlp", "cnn", "gru", "lstm", "resnet", "impala"] = "auto"
    """Layers before the head. `auto` convolves images and flattens everything else, `mlp` flattens everything, and
    `cnn` requires an image. `gru` and `lstm` add a recurrent unit to `auto`. `resnet` uses residual blocks instead
    of convolutions, for boards. `impala` is the deep residual network of Espeholt et al. (2018), for images of
    games."""

    hidden_sizes: tuple[Count, ...] = (64, 64)
    """Widths of the fully connected layers, which follow the convolutions and precede the recurrent unit."""

    layer_norm: bool = False
    """Normalise the outputs of each fully connected layer before its activation (Ba et al. 2016)."""

    residual: bool = False
    """Use normalised residual blocks instead of fully connected layers, one for each entry of `hidden_sizes`,
    which must be equal (Lee et al. 2025, SimBa)."""

    activation: Literal["tanh", "relu", "swish", "gelu", "elu"] = "tanh"
    """Activation function of the fully connected layers. Convolutions use ReLU."""

    convolutions: tuple[tuple[Count, Count, Count], ...] = ()
    """Channels, kernel size and stride of each convolution. If empty, they depend on the size of the image."""

    image_layout: Literal["auto", "channels_first", "channels_last"] = "auto"
    """Position of the channel axis of images. `auto` takes the first axis if it is short and the other two are
    longer, as in (4, 84, 84), and the last axis otherwise."""

    num_blocks: Count = 4
    """Number of residual blocks of `resnet`."""

    channels: Count = 64
    """Number of channels in the residual blocks of `resnet`."""

    stages: tuple[Count, ...] = (16, 32, 32)
    """Channels of each stage of `impala`. Each stage halves the image."""

    shared_torso: bool = False
    """Let actor and critic share one torso. Otherwise each has a torso."""

    recurrent_size: Count = 64
    """Number of units of the recurrent layer."""

    state_dependent_std: bool = False
    """Compute the standard deviation of a continuous policy from the features. Otherwise it is a learned
    parameter, independent of the state."""

    squash_actions: bool = False
    """Squash continuous actions into the bounds of their space with a tanh."""

    initial_log_std: Annotated[float, Range()] = 0.0
    """Initial logarithm of a continuous policy's standard deviation."""

    learn_std: bool = True
    """Learn the standard deviation of a continuous policy. Otherwise it stays at `initial_log_std`."""

    name: str | None = None
    """Name of a registered network (`rollmill.register_network`) to use instead of the settings above. A
    registered torso is followed by the layers of `hidden_sizes`."""

    def __post_init__(self) -> None:
        check_fields(self)


class SharedActorCritic(eqx.Module):
    """An actor-critic whose actor and critic share one torso. The torso may be recurrent."""

    shares_torso: ClassVar[bool] = True
    torso: Torso
    actor: ActionHead
    critic: Linear

    def initial_memory(self) -> Memory:
        """Returns the memory of the torso at the start of an episode."""
        return self.torso.initial_memory()

    def __call__(self, observation: Observation, memory: Memory, action_mask: LegalActions = None) -> Output:
        """Runs the torso once for both heads."""
        features, memory = self.torso(observation, memory)
        return Output(self.actor(features, action_mask), self.critic(features)[0], memory)

    def policy(
        self, observation: Observation, memory: Memory, action_mask: LegalActions = None
    ) -> tuple[Distribution, Memory]:
        """Returns the action distribution and the next memory, without computing the value."""
        features, memory = self.torso(observation, memory)
        return self.actor(features, action_mask), memory

    def advance(
        self,
        observation: Observation,
        critic_observation: Observation,
        memory: Memory,
        action_mask: LegalActions = None,
    ) -> Output:
        """Returns the distribution, the value and the next memory, running the shared torso once.

        Both observations must be equal.
        """
        return self(observation, memory, action_mask)

    def value(self, observation: Observation, memory: Memory) -> Float[Array, ""]:
        """Returns the predicted return of an observation, without computing the action distribution."""
        features, _ = self.torso(observation, memory)
        return self.critic(features)[0]


class SeparateActorCritic(eqx.Module):
    """An actor-critic whose actor and critic each have a torso.

    Its memory is the pair of the torsos' memories, or `()` if they have none.
    """

    actor_torso: Torso
    actor: ActionHead
    critic_torso: Torso
    critic: Linear

    def initial_memory(self) -> Memory:
        """Returns the memories of actor and critic at the start of an episode."""
        return _join(self.actor_torso.initial_memory(), self.critic_torso.initial_memory())

    def __call__(self, observation: Observation, memory: Memory, action_mask: LegalActions = None) -> Output:
        """Runs each torso once."""
        return self.advance(observation, observation, memory, action_mask)

    def advance(
        self,
        observation: Observation,
        critic_observation: Observation,
        memory: Memory,
        action_mask: LegalActions = None,
    ) -> Output:
        """Returns the distribution, the value and the next memory, with one observation for each torso."""
        actor_memory, critic_memory = _split(memory)
        actor_features, actor_memory = self.actor_torso(observation, actor_memory)
        critic_features, critic_memory = self.critic_torso(critic_observation, critic_memory)
        distribution, value = self.actor(actor_features, action_mask), self.critic(critic_features)[0]
        return Output(distribution, value, _join(actor_memory, critic_memory))

    def policy(
        self, observation: Observation, memory: Memory, action_mask: LegalActions = None
    ) -> tuple[Distribution, Memory]:
        """Returns the action distribution and the next memory, without computing the value.

        The critic's part of the memory is unchanged.
        """
        actor_memory, critic_memory = _split(memory)
        features, actor_memory = self.actor_torso(observation, actor_memory)
        return self.actor(features, action_mask), _join(actor_memory, critic_memory)

    def value(self, observation: Observation, memory: Memory) -> Float[Array, ""]:
        """Returns the predicted return of an observation, without computing the action distribution."""
        features, _ = self.critic_torso(observation, _split(memory)[1])
        return self.critic(features)[0]


def actor_critic(
    key: Key,
    observation_space: spaces.Space,
    action_space: spaces.Space,
    config: NetworkConfig = NetworkConfig(),  # noqa: B008 - frozen
    *,
    critic_space: spaces.Space | None = None,
) -> Any:
    """Makes an actor-critic network for these spaces, as `config` describes.

    Args:
        key: random key of the weights.
        observation_space: the actor's observation space, and by default the critic's.
        action_space: the action space.
        config: the network's settings.
        critic_space: the critic's observation space, if it differs. Then only `policy`, `value` and `advance` of
            the network may be called.

    Raises:
        UsageError: the settings or the spaces do not allow such a network.

    Examples:
        >>> network = rollmill.actor_critic(jax.random.key(0), spaces.Box(-1.0, 1.0, (4,)), spaces.Discrete(2))
    """
    check_config(config, observation_space)
    if config.name is not None and not is_torso(config.name):
        more_spaces = () if critic_space is None else (critic_space,)
        return find_network(config.name)(key, observation_space, action_space, *more_spaces)
    torso_key, critic_torso_key, actor_key, critic_key = jax.random.split(key, 4)
    torso = complete_torso(torso_key, observation_space, config)
    actor = action_head(
        actor_key,
        action_space,
        torso.out_features,
        state_dependent_std=config.state_dependent_std,
        squash=config.squash_actions,
        initial_log_std=config.initial_log_std,
        learn_std=config.learn_std,
    )
    if config.shared_torso:
        if critic_space not in (None, observation_space):
            raise UsageError(
                "shared_torso=True needs a critic with the same observations as the actor. hint: leave "
                "shared_torso off."
            )
        return SharedActorCritic(torso, actor, linear(critic_key, torso.out_features, 1, gain=1.0))
    critic_torso = complete_torso(critic_torso_key, critic_space or observation_space, config)
    critic = linear(critic_key, critic_torso.out_features, 1, gain=1.0)
    return SeparateActorCritic(torso, actor, critic_torso, critic)


def check_config(config: NetworkConfig, observation_space: spaces.Space) -> None:
    """Raises a `UsageError` that names the first invalid network setting."""
    if config.name is not None:
        _check_beside_own(config, config.name)
    for name, choices in (("torso", TORSOS), ("image_layout", LAYOUTS), ("activation", ACTIVATIONS)):
        if (value := getattr(config, name)) not in choices:
            raise unknown_name(name, value, choices)
    _check_readers(config)
    if config.state_dependent_std and not config.learn_std:
        raise UsageError(
            "state_dependent_std=True learns the standard deviation, so it cannot be combined with "
            "learn_std=False. hint: leave learn_std on."
        )
    if config.residual and config.layer_norm:
        raise UsageError("residual=True already normalises its layers. hint: leave layer_norm out.")
    sizes = (
        *config.hidden_sizes,
        config.recurrent_size,
        config.num_blocks,
        config.channels,
        *config.stages,
        *(n for layer in config.convolutions for n in layer),
    )
    if min(sizes) < 1:
        raise UsageError(f"the sizes of a network must be at least 1, got {min(sizes)} in {config}.")
    if config.torso in ("cnn", "resnet", "impala") and not any(leaf.image for leaf in leaves(observation_space)):
        raise UsageError(
            f"torso={config.torso!r} needs a Box of rank 3 (an image), got the observation space "
            f"{space_text(observation_space)}. hint: use torso='auto'."
        )


def _check_readers(config: NetworkConfig) -> None:
    """Raises a `UsageError` for a setting that the torso does not read, unless it has its default."""
    default = NetworkConfig()
    for name, torsos in READERS.items():
        value = getattr(config, name)
        if config.torso not in torsos and value != getattr(default, name):
            raise UsageError(
                f"{name}={value} has no effect with torso={config.torso!r}. Torsos with this setting: "
                f"{', '.join(torsos)}. hint: leave {name} out, or choose torso={torsos[0]!r}."
            )


def _check_beside_own(config: NetworkConfig, name: str) -> None:
    """Raises a `UsageError` for settings of parts that a registered network makes itself."""
    defaults = NetworkConfig()
    changed = [f.name for f in dataclasses.fields(config) if getattr(config, f.name) != getattr(defaults, f.name)]
    beside = (
        "name",
        "image_layout",
        *(AFTER_TORSO if is_torso(name) else ()),
    )  # the layout is resolved from the space
    refused = [setting for setting in changed if setting not in beside]
    if "torso" in refused and is_torso(name) and config.torso in CELLS:
        refused.remove("torso")
    if refused:
        raise UsageError(
            f"{', '.join(refused)} has no effect with the network {name!r}, which is created by its own "
            "function. hint: leave it out."
        )


def configured_torso(
    key: Key, space: spaces.Space, config: NetworkConfig, *, action_space: spaces.Space | None = None
) -> FeedForwardTorso | OwnTorso:
    """Builds the torso that `config` describes, without a recurrent unit.

    With an action space, the torso's input is a dictionary of an observation and an action.
    """
    make_mlp = residual_mlp if config.residual else partial(mlp, normalised=config.layer_norm)
    if config.name is not None:
        return own_torso(
            key,
            config.name,
            find_network(config.name),
            space,
            action_space=action_space,
            hidden_sizes=config.hidden_sizes,
            activation=ACTIVATIONS[config.activation],
            make_mlp=make_mlp,
        )
    if action_space is not None:
        space = spaces.Dict({"action": action_space, "observation": space})
    image_networks = {
        "resnet": partial(resnet, channels=config.channels, num_blocks=config.num_blocks),
        "impala": partial(impala_cnn, stages=config.stages),
    }
    return feed_forward_torso(
        key,
        space,
        hidden_sizes=config.hidden_sizes,
        activation=ACTIVATIONS[config.activation],
        convolutions=config.convolutions,
        convolve=config.torso != "mlp",
        image_layout=config.image_layout,
        make_cnn=image_networks.get(config.torso),
        make_mlp=make_mlp,
    )


def complete_torso(key: Key, space: spaces.Space, config: NetworkConfig) -> Torso:
    """Builds the torso that `config` describes, with its recurrent unit if it has one."""
    encoder_key, cell_key = jax.random.split(key)
    encoder = configured_torso(encoder_key, space, config)
    if config.torso not in CELLS:
        return encoder
    return recurrent_torso(cell_key, encoder, size=config.recurrent_size, make_cell=CELLS[config.torso])


def _join(actor_memory: Memory, critic_memory: Memory) -> Memory:
    pair = (actor_memory, critic_memory)
    return pair if jax.tree.leaves(pair) else ()


def _split(memory: Memory) -> tuple[Memory, Memory]:
    return memory or ((), ())
