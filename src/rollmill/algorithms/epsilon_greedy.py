"""Epsilon-greedy policies, which take the action with the highest value, except for a share of random actions.

Shape letter: `n` actions.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from gymnasium import spaces
from jaxtyping import Array, Float, PyTree

from rollmill.algorithms.off_policy import FunctionalNetwork
from rollmill.algorithms.value_distributions import ValueHead
from rollmill.core.types import Action, Key, Memory, Observation
from rollmill.dataflow import Decision
from rollmill.networks import MASKED_LOGIT, Categorical


class EpsilonGreedy(NamedTuple):
    """Weights of an epsilon-greedy policy: its network, and its share of random actions."""

    network: PyTree[Array]
    epsilon: Float[Array, ""]
    """Probability of a random action."""


class ValueAgent(NamedTuple):
    """An action-value network, and the discrete actions that it values."""

    outputs: FunctionalNetwork
    head: ValueHead
    first: int
    """Number of the first action of the space (`Discrete.start`)."""
    dtype: Any

    def values(self, network: PyTree[Array], observation: Observation) -> Float[Array, " n"]:
        """Returns the value of each action for an observation."""
        return self.head.means(self.outputs(network, observation))

    def distribution(self, values: Float[Array, " n"], action_mask: PyTree) -> Categorical:
        """Returns a categorical distribution whose logits are the values, with illegal actions masked."""
        logits = values if isinstance(action_mask, tuple) else jnp.where(action_mask, values, MASKED_LOGIT)
        return Categorical(logits, self.first, self.dtype)

    def of_action(self, outputs: Float[Array, "n ..."], action: Action) -> Float[Array, "..."]:
        """Returns the network's outputs for one action."""
        # XLA fuses a selection and a sum with the preceding operations. It would not fuse a gather, whose gradient
        # is a
        # scatter.
        is_chosen = jax.nn.one_hot(action - self.first, len(outputs), dtype=jnp.bool_)
        is_chosen = is_chosen.reshape(-1, *[1] * (outputs.ndim - 1))
        return jnp.sum(jnp.where(is_chosen, outputs, 0), axis=0)

    def explore(
        self, weights: EpsilonGreedy, key: Key, memory: Memory, observation: Observation, action_mask: PyTree
    ) -> Decision:
        """Returns a random action with probability epsilon, and otherwise the action with the highest value."""
        outputs, memory = self.outputs.advance(weights.network, memory, observation)
        values = self.head.means(outputs)
        choice_key, action_key = jax.random.split(key)
        random = self.distribution(jnp.zeros_like(values), action_mask).sample(action_key)
        best = self.distribution(values, action_mask).mode()
        explores = jax.random.uniform(choice_key) < weights.epsilon
        return Decision(jnp.where(explores, random, best), memory, ())

    def act(
        self, weights: EpsilonGreedy, key: Key, memory: Memory, observation: Observation, action_mask: PyTree
    ) -> Decision:
        """Returns the action with the highest value."""
        outputs, memory = self.outputs.advance(weights.network, memory, observation)
        values = self.head.means(outputs)
        return Decision(self.distribution(values, action_mask).mode(), memory, ())


def value_agent(outputs: FunctionalNetwork, head: ValueHead, actions: spaces.Discrete) -> ValueAgent:
    """Creates a `ValueAgent` from an action-value network, its head and its actions."""
    return ValueAgent(outputs, head, int(actions.start), jax.dtypes.canonicalize_dtype(actions.dtype))
