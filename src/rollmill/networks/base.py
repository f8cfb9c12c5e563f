"""Protocols of networks and their action distributions.

Everything is about ONE observation, unbatched, and callers map over many with `jax.vmap`.
"""

from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, Bool, Float

from rollmill.core.types import Action, Key, Memory, Observation


@runtime_checkable
class Distribution(Protocol):
    """A distribution over the elements of one action space, as a pytree of arrays."""

    def sample(self, key: Key, /) -> Action:
        """Samples one action, in the shape and dtype of the space."""
        ...

    def sample_and_log_prob(self, key: Key, /) -> tuple[Action, Float[Array, ""]]:
        """Samples one action, and returns its log-probability, equal to `log_prob(action)`."""
        ...

    def log_prob(self, action: Action, /) -> Float[Array, ""]:
        """Log of the probability (discrete) or of the density (continuous) of the whole action."""
        ...

    def entropy(self) -> Float[Array, ""]:
        """Entropy of the whole action in nats. It is deterministic."""
        ...

    def mode(self) -> Action:
        """Returns the greedy action."""
        ...


class Output(NamedTuple):
    """A network's output for one observation."""

    distribution: Distribution
    """Distribution over actions."""
    value: Float[Array, ""]
    """Expected return, `[]` in float32."""
    memory: Memory
    """Memory to pass with the next observation of the same episode."""


@runtime_checkable
class ActorCritic(Protocol):
    """A policy and a value function as one pytree, whose inexact array leaves are the weights.

    `equinox.partition(network, equinox.is_inexact_array)` splits the weights from the rest. If actor and critic
    share most of their computation, an attribute `shares_torso = True` makes rollout kernels compute values along
    with actions.
    """

    def initial_memory(self) -> Memory:
        """Returns the memory at the start of an episode, independent of the weights.

        `()` for a network without memory.
        """
        ...

    def __call__(
        self, observation: Observation, memory: Memory, action_mask: Bool[Array, "..."] | None = None
    ) -> Output:
        """Returns the network's output. True in `action_mask` marks a legal action."""
        ...

    def value(self, observation: Observation, memory: Memory) -> Float[Array, ""]:
        """Returns the value for bootstrapping, without evaluating the actor."""
        ...


@runtime_checkable
class AgentNetwork(Protocol):
    """An actor and a critic with different observations, for agents that share their parameters.

    The critic's additional input may exist in training only, so actor and critic are called separately.
    """

    def initial_memory(self) -> Memory:
        """Returns the memory at the start of an episode, or `()` for a network without memory."""
        ...

    def policy(
        self, observation: Observation, memory: Memory, action_mask: Bool[Array, "..."] | None = None
    ) -> tuple[Distribution, Memory]:
        """One agent's action distribution, and the next memory. True in `action_mask` marks a legal action."""
        ...

    def value(self, observation: Observation, memory: Memory) -> Float[Array, ""]:
        """One agent's expected return, from the critic's observation."""
        ...
