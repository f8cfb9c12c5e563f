"""Networks of off-policy algorithms: action values, and policies without a critic.

All of them take ONE observation without a batch axis. Callers use `jax.vmap` for batches.
"""

import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Float

from rollmill.core.errors import UsageError
from rollmill.core.types import Action, Key, Memory, Observation
from rollmill.networks.actor_critic import CELLS, NetworkConfig, check_config, complete_torso, configured_torso
from rollmill.networks.base import Distribution
from rollmill.networks.heads import ActionHead, action_head, finite_bounds
from rollmill.networks.layers import Linear, linear
from rollmill.networks.registry import is_torso
from rollmill.networks.torsos import FeedForwardTorso, OwnTorso, Torso

UNREAD = ("shared_torso", "state_dependent_std", "squash_actions")
"""Network settings that no network of this module reads."""

UNREAD_WITHOUT_STD = (*UNREAD, "initial_log_std", "learn_std")
"""Network settings that networks without a standard deviation do not read."""


class ActionValues(eqx.Module):
    """Predicts the values of all actions of a `Discrete` space (Mnih et al., 2015), or `K` outputs per action."""

    torso: Torso
    head: Linear
    atoms: int | None = eqx.field(static=True, default=None)

    def initial_memory(self) -> Memory:
        """Returns the memory of the torso at the start of an episode."""
        return self.torso.initial_memory()

    def advance(self, observation: Observation, memory: Memory) -> tuple[Float[Array, "n ..."], Memory]:
        """Returns the value of each action, and the next memory."""
        features, memory = self.torso(observation, memory)
        values = self.head(features)
        return (values if self.atoms is None else values.reshape(-1, self.atoms)), memory

    def __call__(self, observation: Observation) -> Float[Array, "n ..."]:
        """Returns the value of each action, for a torso without memory."""
        return self.advance(observation, ())[0]


class DuellingActionValues(eqx.Module):
    """Predicts action values as the sum of a state value and advantages (Wang et al., ICML 2016, equation 9)."""

    torso: Torso
    value: Linear
    advantage: Linear
    atoms: int | None = eqx.field(static=True, default=None)

    def initial_memory(self) -> Memory:
        """Returns the memory of the torso at the start of an episode."""
        return self.torso.initial_memory()

    def advance(self, observation: Observation, memory: Memory) -> tuple[Float[Array, "n ..."], Memory]:
        """Returns the value of each action, and the next memory."""
        features, memory = self.torso(observation, memory)
        value, advantage = self.value(features), self.advantage(features)
        if self.atoms is None:
            return value + advantage - jnp.mean(advantage), memory
        advantage = advantage.reshape(-1, self.atoms)
        return value[None] + advantage - jnp.mean(advantage, axis=0, keepdims=True), memory

    def __call__(self, observation: Observation) -> Float[Array, "n ..."]:
        """Returns the value of each action, for a torso without memory."""
        return self.advance(observation, ())[0]


class ActionCritic(eqx.Module):
    """Predicts the value of one continuous action, which its torso reads together with the observation."""

    torso: FeedForwardTorso | OwnTorso
    head: Linear

    def __call__(self, observation: Observation, action: Action) -> Float[Array, ""]:
        """Returns the value of an action."""
        return self.head(self.torso({"action": action, "observation": observation}, ())[0])[0]


class StochasticActor(eqx.Module):
    """A policy network without a critic, whose output is an action distribution."""

    torso: FeedForwardTorso | OwnTorso
    head: ActionHead

    def __call__(self, observation: Observation, action_mask: Any = None) -> Distribution:
        """Returns the action distribution. True in `action_mask` marks a legal action."""
        return self.head(self.torso(observation, ())[0], action_mask)


class RecurrentNetwork(eqx.Module):
    """A recurrent torso and a head, which is called separately, once the features of whole sequences are known."""

    torso: Torso
    head: Any

    def initial_memory(self) -> Memory:
        """Returns the memory of the torso at the start of an episode."""
        return self.torso.initial_memory()

    def advance(self, observation: Observation, memory: Memory) -> tuple[Float[Array, " features"], Memory]:
        """Returns the features of one observation, and the next memory."""
        return self.torso(observation, memory)

    def __call__(self, features: Float[Array, " features"], *inputs: Any) -> Any:
        """Returns the head's output for features and its other inputs: a mask of actions, or an action."""
        return self.head(features, *inputs)


class DeterministicActor(eqx.Module):
    """A policy network that outputs one action within the bounds of a `Box`."""

    torso: FeedForwardTorso | OwnTorso
    head: Linear
    low: tuple[float, ...] = eqx.field(static=True)
    high: tuple[float, ...] = eqx.field(static=True)
    shape: tuple[int, ...] = eqx.field(static=True)

    def __call__(self, observation: Observation) -> Float[Array, "..."]:
        """Returns the action."""
        raw = jnp.tanh(self.head(self.torso(observation, ())[0])).reshape(self.shape)
        low, high = (
            jnp.asarray(np.asarray(bound, np.float32).reshape(self.shape)) for bound in (self.low, self.high)
        )
        return low + (high - low) * 0.5 * (raw + 1)


def action_values(
    key: Key,
    observation_space: spaces.Space,
    action_space: spaces.Discrete,
    config: NetworkConfig,
    *,
    duelling: bool,
    atoms: int | None = None,
    sequences: bool = False,
) -> ActionValues | DuellingActionValues:
    """Makes a network that predicts the value of each action, or `atoms` outputs per action.

    With `sequences`, the algorithm learns from whole sequences, so the network may be recurrent.
    """
    _refuse(UNREAD_WITHOUT_STD, config)
    torso_key, head_key, value_key = jax.random.split(key, 3)
    torso, size = _torso(torso_key, observation_space, config, sequences=sequences), atoms or 1
    head = linear(head_key, torso.out_features, int(action_space.n) * size, gain=1.0)
    if not duelling:
        return ActionValues(torso, head, atoms)
    return DuellingActionValues(torso, linear(value_key, torso.out_features, size, gain=1.0), head, atoms)


def action_critic(
    key: Key, observation_space: spaces.Space, action_space: spaces.Box, config: NetworkConfig
) -> ActionCritic:
    """Makes a network that predicts the value of one continuous action."""
    torso_key, head_key = jax.random.split(key)
    torso = _torso(torso_key, observation_space, config, action_space=action_space)
    return ActionCritic(torso, linear(head_key, torso.out_features, 1, gain=1.0))


def stochastic_actor(
    key: Key, observation_space: spaces.Space, action_space: spaces.Space, config: NetworkConfig
) -> StochasticActor:
    """Makes a policy network with squashed continuous actions and state-dependent standard deviations."""
    torso_key, head_key = jax.random.split(key)
    torso = _torso(torso_key, observation_space, config)
    return StochasticActor(torso, _stochastic_head(head_key, action_space, torso.out_features, config))


def recurrent_stochastic_actor(
    key: Key, observation_space: spaces.Space, action_space: spaces.Space, config: NetworkConfig
) -> RecurrentNetwork:
    """Makes a policy network as `stochastic_actor` does, with a memory."""
    torso_key, head_key = jax.random.split(key)
    torso = _torso(torso_key, observation_space, config, sequences=True)
    return RecurrentNetwork(torso, _stochastic_head(head_key, action_space, torso.out_features, config))


def recurrent_critic(
    key: Key, observation_space: spaces.Space, action_space: spaces.Box | spaces.Discrete, config: NetworkConfig
) -> RecurrentNetwork:
    """Makes a critic with a memory, which predicts the value of one continuous action, or of all discrete ones.

    The recurrent unit reads observations. The value of a continuous action is computed from its features and the
    action by further layers of `hidden_sizes`.
    """
    torso_key, head_key = jax.random.split(key)
    torso = _torso(torso_key, observation_space, config, sequences=True)
    if isinstance(action_space, spaces.Discrete):
        return RecurrentNetwork(torso, linear(head_key, torso.out_features, int(action_space.n), gain=1.0))
    features = spaces.Box(-np.inf, np.inf, (torso.out_features,), np.float32)
    after = NetworkConfig(
        torso="mlp",
        hidden_sizes=config.hidden_sizes,
        layer_norm=config.layer_norm,
        residual=config.residual,
        activation=config.activation,
    )
    return RecurrentNetwork(torso, action_critic(head_key, features, action_space, after))


def deterministic_actor(
    key: Key, observation_space: spaces.Space, action_space: spaces.Box, config: NetworkConfig
) -> DeterministicActor:
    """Makes a policy network that outputs one action within the bounds of its space."""
    _refuse(UNREAD_WITHOUT_STD, config)
    torso_key, head_key = jax.random.split(key)
    torso = _torso(torso_key, observation_space, config)
    head = linear(head_key, torso.out_features, math.prod(action_space.shape), gain=0.01)
    low, high = finite_bounds(action_space)
    return DeterministicActor(torso, head, low, high, action_space.shape)


def _stochastic_head(key: Key, space: spaces.Space, in_features: int, config: NetworkConfig) -> ActionHead:
    if not config.learn_std:
        raise UsageError(
            "learn_std=False is not supported, because this policy learns a standard deviation for each state. "
            "hint: leave learn_std on."
        )
    return action_head(
        key,
        space,
        in_features,
        state_dependent_std=True,
        squash=isinstance(space, spaces.Box),
        initial_log_std=config.initial_log_std,
    )


def _torso(
    key: Key,
    space: spaces.Space,
    config: NetworkConfig,
    *,
    action_space: spaces.Space | None = None,
    sequences: bool = False,
) -> Any:
    _refuse(UNREAD, config)
    recurrent = config.torso in CELLS
    if recurrent and not sequences:
        raise UsageError(
            f"torso={config.torso!r} needs whole sequences, but pqn and algorithms with a replay memory learn "
            "from single steps, except for r2d2 and rsac. hint: use torso='auto', r2d2 for discrete actions, or "
            "rsac, which is recurrent SAC."
        )
    if config.name is not None and not is_torso(config.name):
        raise UsageError(
            f"network={config.name!r} is registered as an actor-critic, but algorithms with a replay memory "
            "create their own networks from NetworkConfig(hidden_sizes, activation, torso, convolutions). hint: "
            "register a torso, which every algorithm supports: rollmill.register_network(name, factory, "
            "torso=True)."
        )
    check_config(config, space)
    if recurrent:
        return complete_torso(key, space, config)
    return configured_torso(key, space, config, action_space=action_space)


def _refuse(settings: Sequence[str], config: NetworkConfig) -> None:
    """Raises a `UsageError` if any of these settings differs from its default."""
    default = NetworkConfig()
    changed = [name for name in settings if getattr(config, name) != getattr(default, name)]
    if changed:
        raise UsageError(
            f"{', '.join(changed)} has no effect on the networks of this algorithm. Only actor-critic networks "
            "use it, such as the network of ppo. hint: leave it out."
        )
