"""What an algorithm may ask of a network and of the distribution that it returns.

Everything is about ONE observation, unbatched; whoever has many maps over them with `jax.vmap`.
"""

from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, Bool, Float

from rollmill.core.types import Action, Key, Memory, Observation


@runtime_checkable
class Distribution(Protocol):
    """A distribution over the elements of one action space; a pytree of arrays."""

    def sample(self, key: Key, /) -> Action:
        """One action, in the shape and dtype of the space."""
        ...

    def sample_and_log_prob(self, key: Key, /) -> tuple[Action, Float[Array, ""]]:
        """One action and its log-probability, which agrees with `log_prob(action)`."""
        ...

    def log_prob(self, action: Action, /) -> Float[Array, ""]:
        """Log of the probability (discrete) or of the density (continuous) of the whole action."""
        ...

    def entropy(self) -> Float[Array, ""]:
        """Entropy of the whole action in nats; deterministic."""
        ...

    def mode(self) -> Action:
        """The action to take without exploring."""
        ...


class Output(NamedTuple):
    """What a network says about one observation.

    `distribution` is over actions, `value` the expected return `[]` in float32, and `memory` what to
    pass with the next observation of the same episode.
    """

    distribution: Distribution
    value: Float[Array, ""]
    memory: Memory


@runtime_checkable
class ActorCritic(Protocol):
    """A policy and a value function as one pytree, whose inexact array leaves are the weights.

    `equinox.partition(network, equinox.is_inexact_array)` splits the weights from the rest. Where actor and critic
    have most in common, an attribute `shares_torso` that is True lets values be computed along with actions.
    """

    def initial_memory(self) -> Memory:
        """The memory at the start of an episode, which no weight decides; `()` for one that remembers nothing."""
        ...

    def __call__(
        self, observation: Observation, memory: Memory, action_mask: Bool[Array, "..."] | None = None
    ) -> Output:
        """What the network says; True in `action_mask` marks a legal action."""
        ...

    def value(self, observation: Observation, memory: Memory) -> Float[Array, ""]:
        """The value alone, to bootstrap from; the actor is not evaluated."""
        ...


@runtime_checkable
class AgentNetwork(Protocol):
    """An actor and a critic that may see different things, for agents that share their parameters.

    What the critic sees besides the agent's own observation may exist in training only, so that the two are
    asked separately.
    """

    def initial_memory(self) -> Memory:
        """The memory at the start of an episode; `()` for a network that remembers nothing."""
        ...

    def policy(
        self, observation: Observation, memory: Memory, action_mask: Bool[Array, "..."] | None = None
    ) -> tuple[Distribution, Memory]:
        """What one agent may do, and the next memory; True in `action_mask` marks a legal action."""
        ...

    def value(self, observation: Observation, memory: Memory) -> Float[Array, ""]:
        """What one agent may expect, from what the critic sees."""
        ...
