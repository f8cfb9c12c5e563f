"""Protocols of networks and action distributions.

All methods take ONE observation without a batch axis. Callers use `jax.vmap` for batches.
"""

from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from jaxtyping import Array, Bool, Float

from rollmill.core.types import Action, Key, Memory, Observation

LegalActions: TypeAlias = Bool[Array, "..."] | tuple[()] | None
"""Legal actions, marked by True. All are legal if it is None, or `()`, as the fragments of a graph receive it."""


@runtime_checkable
class Distribution(Protocol):
    """Protocol of a distribution over one action space, a pytree of arrays."""

    def sample(self, key: Key, /) -> Action:
        """Samples one action, in the shape and dtype of the space."""
        ...

    def sample_and_log_prob(self, key: Key, /) -> tuple[Action, Float[Array, ""]]:
        """Samples one action, and returns it with its log-probability, equal to `log_prob(action)`."""
        ...

    def log_prob(self, action: Action, /) -> Float[Array, ""]:
        """Returns the log-probability of a discrete action, or the log-density of a continuous action."""
        ...

    def entropy(self) -> Float[Array, ""]:
        """Returns the entropy of the distribution in nats. It is deterministic."""
        ...

    def mode(self) -> Action:
        """Returns the greedy action: the most probable action, or the mean of a Gaussian."""
        ...


class Output(NamedTuple):
    """The output of an actor-critic for one observation."""

    distribution: Distribution
    """Distribution over actions."""
    value: Float[Array, ""]
    """Predicted return, `[]` in float32."""
    memory: Memory
    """Memory to pass to the network with the next observation of the same episode."""


@runtime_checkable
class ActorCritic(Protocol):
    """Protocol of a policy and a value function in one pytree, whose inexact array leaves are the weights.

    `equinox.partition(network, equinox.is_inexact_array)` separates the weights from the rest. A network whose
    actor and critic share most of their computation may set the attribute `shares_torso = True`. Rollout kernels
    then compute values along with actions.
    """

    def initial_memory(self) -> Memory:
        """Returns the memory at the start of an episode, which does not depend on the weights.

        A network without memory returns `()`.
        """
        ...

    def __call__(
        self, observation: Observation, memory: Memory, action_mask: Bool[Array, "..."] | None = None
    ) -> Output:
        """Returns the network's output. True in `action_mask` marks a legal action."""
        ...

    def value(self, observation: Observation, memory: Memory) -> Float[Array, ""]:
        """Returns the predicted return of an observation, without computing the action distribution."""
        ...


@runtime_checkable
class AgentNetwork(Protocol):
    """Protocol of an actor and a critic with different observations, for agents that share their parameters.

    The critic's additional input may exist only during training, so actor and critic are called separately.
    """

    def initial_memory(self) -> Memory:
        """Returns the memory at the start of an episode, or `()` for a network without memory."""
        ...

    def policy(
        self, observation: Observation, memory: Memory, action_mask: Bool[Array, "..."] | None = None
    ) -> tuple[Distribution, Memory]:
        """Returns one agent's action distribution and the next memory. `action_mask` is True for legal actions."""
        ...

    def value(self, observation: Observation, memory: Memory) -> Float[Array, ""]:
        """Returns one agent's predicted return from the critic's observation."""
        ...


@runtime_checkable
class RecurrentAgentNetwork(AgentNetwork, Protocol):
    """An `AgentNetwork` with a memory.

    In training, actor and critic are called together, so that both memories advance with every step.
    """

    def advance(
        self,
        observation: Observation,
        critic_observation: Observation,
        memory: Memory,
        action_mask: Bool[Array, "..."] | None = None,
    ) -> Output:
        """Returns one agent's action distribution, expected return and next memory.

        The actor reads `observation`, and the critic reads `critic_observation`.
        """
        ...
