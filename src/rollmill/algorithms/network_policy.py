"""Defines the policy fragment of algorithms with an actor-critic network, for ONE environment."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from gymnasium import spaces
from jaxtyping import Array, Float, PyTree, Shaped

from rollmill.core.errors import ContractError
from rollmill.core.spaces import struct
from rollmill.core.trace_cache import are_checked
from rollmill.core.types import Action, Environment, HostEnvironment, Key, Memory, Observation
from rollmill.core.user_frame import attribute_to_user_code
from rollmill.dataflow import Decision, PolicyOutputs, Step, is_large
from rollmill.envs import RunningStatistics, denormalise, initial_statistics, normalise, normalised_struct
from rollmill.networks import ActorCritic, Distribution, Output

MakeNetwork = Callable[[Key, spaces.Space, spaces.Space], ActorCritic]
"""`(key, observation space, action space) -> network`."""


class PolicyWeights(eqx.Module):
    """Weights of the policy network, with optional running statistics of observations and values."""

    network: PyTree[Array]
    observations: RunningStatistics | None
    """Statistics of observations."""
    values: RunningStatistics | None = None
    """Statistics of the critic's targets, by which the network's values are normalised."""

    def raw_value(self, value: Float[Array, "..."]) -> Float[Array, "..."]:
        """Converts network values to the units of rewards."""
        return value if self.values is None else denormalise(self.values, value)

    def normalised_value(self, value: Float[Array, "..."]) -> Float[Array, "..."]:
        """Normalises values in the units of rewards, as the network predicts them."""
        return value if self.values is None else normalise(self.values, value, clip=math.inf)


class Extras(NamedTuple):
    """Outputs of an on-policy actor-critic that the learner needs besides the action."""

    log_prob: Float[Array, "..."]
    """Log-probability of the action."""
    value: PyTree[Float[Array, "..."]]
    """Value of the observation in the units of rewards. Recurrent policies store it, because their critic must see
    every step in order, and so do policies whose actor and critic share a torso for large observations. Otherwise
    `()`, because a few large matrix products compute all values of a trajectory faster, unless `compute_values`
    adds them."""
    final_value: PyTree[Float[Array, "..."]] = ()
    """Value after a truncated step, otherwise 0. `()` unless `compute_values` or `compact_step` added it."""


class NetworkPolicy(NamedTuple):
    """An actor-critic network as functions of its weights, created by `network_policy`."""

    make: Callable[[Key], ActorCritic]
    """Makes the network from a random key."""
    skeleton: PyTree[jax.ShapeDtypeStruct]
    """Shapes of the weights."""
    static: PyTree
    """Parts of the network that are not weights, such as functions and sizes."""
    normalised_struct: PyTree[jax.ShapeDtypeStruct] | None
    """Shapes of the observations, or None if they are not normalised."""
    is_large: bool
    """True if an observation has a large leaf (`dataflow.is_large`), such as an image."""
    normalises_values: bool = False
    """True if the network predicts values that are normalised by statistics of their targets."""

    def start_weights(self, key: Key) -> PolicyWeights:
        """Returns the initial weights of the policy."""
        shapes = self.normalised_struct
        observations = None if shapes is None else initial_statistics(shapes)
        values = initial_statistics(jax.ShapeDtypeStruct((), jnp.float32)) if self.normalises_values else None
        return PolicyWeights(eqx.filter(self.make(key), eqx.is_inexact_array), observations, values)

    def start_memory(self) -> Memory:
        """Returns the policy's memory at the start of an episode, or `()` if the network has no memory."""
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.skeleton)
        return eqx.combine(zeros, self.static).initial_memory()

    @property
    def recurrent(self) -> bool:
        """Whether the policy has a memory."""
        return bool(jax.tree.leaves(jax.eval_shape(self.start_memory)))

    def normalise(self, weights: PolicyWeights, observation: Observation) -> Observation:
        """Normalises observations if the policy uses running statistics. They may have any leading axes."""
        statistics = weights.observations
        return observation if statistics is None else normalise(statistics, observation)

    def forward(
        self, weights: PolicyWeights, memory: Memory, observation: Observation, action_mask: PyTree
    ) -> Output:
        """Returns the output for a normalised observation, with a normalised value if `normalise_values`."""
        network = eqx.combine(weights.network, self.static)
        return network(observation, memory, None if isinstance(action_mask, tuple) else action_mask)

    def value(self, weights: PolicyWeights, memory: Memory, observation: Observation) -> Float[Array, ""]:
        """Returns the value of a raw observation, in the units of rewards."""
        network = eqx.combine(weights.network, self.static)
        return weights.raw_value(network.value(self.normalise(weights, observation), memory))

    def distribution(
        self, weights: PolicyWeights, memory: Memory, observation: Observation, action_mask: PyTree
    ) -> Distribution:
        """Returns the action distribution for a raw observation."""
        return self.forward(weights, memory, self.normalise(weights, observation), action_mask).distribution

    @property
    def outputs(self) -> PolicyOutputs:
        """The policy's functions for the action distribution and the value of a raw observation."""
        return PolicyOutputs(distribution=self.distribution, value=self.value)

    @property
    def fused_values(self) -> Callable[[PolicyWeights, Step], Step] | None:
        """The function `compute_values` if actor and critic share a torso, so that values cost almost nothing.

        Otherwise None.
        """
        return self.compute_values if not self.recurrent and self._shares_torso else None

    @property
    def compaction(self) -> Callable[[PolicyWeights, Step], Step] | None:
        """The function `compact_step` if final observations are too large to keep. Otherwise None."""
        return self.compact_step if self.is_large else None

    @property
    def keeps_values(self) -> bool:
        """Whether the policy computes values while it acts.

        It does if steps are computed one by one, or if values cost almost nothing.
        """
        return self.recurrent or (self.is_large and self._shares_torso)

    @property
    def _shares_torso(self) -> bool:
        return getattr(eqx.combine(self.skeleton, self.static), "shares_torso", False)

    def compute_values(self, weights: PolicyWeights, step: Step) -> Step:
        """Adds the values to a step, and drops its final observation, which is not needed afterwards."""
        value = self.value(weights, step.final_memory, step.observation)
        final_value = self.value(weights, step.final_memory, step.final_observation)
        extras = Extras(step.extras.log_prob, value, jnp.where(step.truncated, final_value, 0.0))
        return step._replace(extras=extras, final_observation=())

    def compact_step(self, weights: PolicyWeights, step: Step) -> Step:
        """Replaces large final observations of a step of all environments, `[E, ...]`, by their values.

        Values are computed only if an episode was truncated in this step.
        """
        final_value = jax.lax.cond(
            jnp.any(step.truncated),
            lambda: jax.vmap(partial(self.value, weights))(step.final_memory, step.final_observation),
            lambda: jnp.zeros_like(step.reward),
        )
        extras = step.extras._replace(final_value=jnp.where(step.truncated, final_value, 0.0))
        return step._replace(extras=extras, final_observation=jax.tree.map(compact_leaf, step.final_observation))

    def sample(
        self, weights: PolicyWeights, key: Key, memory: Memory, observation: Observation, action_mask: PyTree
    ) -> Decision:
        """Samples an action for a raw observation."""
        output = self.forward(weights, memory, self.normalise(weights, observation), action_mask)
        action, log_prob = output.distribution.sample_and_log_prob(key)
        return self._decision(weights, output, action, log_prob)

    def greedy(
        self, weights: PolicyWeights, key: Key, memory: Memory, observation: Observation, action_mask: PyTree
    ) -> Decision:
        """Returns the most likely action for a raw observation."""
        output = self.forward(weights, memory, self.normalise(weights, observation), action_mask)
        action = output.distribution.mode()
        return self._decision(weights, output, action, output.distribution.log_prob(action))

    def _decision(
        self, weights: PolicyWeights, output: Output, action: Action, log_prob: Float[Array, ""]
    ) -> Decision:
        value = weights.raw_value(output.value) if self.keeps_values else ()
        return Decision(action, output.memory, Extras(log_prob, value))


def network_policy(
    env: Environment | HostEnvironment,
    make_network: MakeNetwork,
    *,
    normalise_observations: bool,
    normalise_values: bool = False,
) -> NetworkPolicy:
    """Creates the policy of an environment, given a function that creates its network."""

    def make(key):
        return make_network(key, env.observation_space, env.action_space)

    skeleton, static = weights_and_rest(make)
    normalised = normalised_struct(env.observation_space) if normalise_observations else None
    large = any(map(is_large, jax.tree.leaves(struct(env.observation_space))))
    policy = NetworkPolicy(make, skeleton, static, normalised, large, normalise_values)
    if are_checked():
        _check_types(policy, struct(env.observation_space))
    return policy


def compact_leaf(leaf: Shaped[Array, "E ..."]) -> PyTree[Array]:
    """Returns a placeholder for a large leaf: floats `[E]` that are 0 if the leaf is finite and NaN otherwise."""
    if not is_large(jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)):
        return leaf
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return ()
    finite = jnp.isfinite(leaf).reshape(len(leaf), -1).all(axis=1)
    return jnp.where(finite, 0, jnp.nan).astype(leaf.dtype)


def _check_types(policy: NetworkPolicy, observation: PyTree[jax.ShapeDtypeStruct]) -> None:
    """Checks the network's output types here, where errors can name its author's line."""
    with attribute_to_user_code("the network"):
        shapes = policy.normalised_struct
        statistics = None if shapes is None else jax.eval_shape(partial(initial_statistics, shapes))
        weights = jax.eval_shape(PolicyWeights, policy.skeleton, statistics)
        memory = jax.eval_shape(policy.start_memory)
        output = jax.eval_shape(lambda w, m, o: policy.forward(w, m, o, ()), weights, memory, observation)
        value = jax.eval_shape(policy.value, weights, memory, observation)
    for what, result in (("its value", output.value), ("value(...)", value)):
        if (result.shape, result.dtype) != ((), jnp.float32):
            raise ContractError(
                f"the network: {what} must return one float32 [], got {result.dtype}{list(result.shape)}."
            )
    if jax.tree.map(lambda leaf: leaf.shape, output.memory) != jax.tree.map(lambda leaf: leaf.shape, memory):
        raise ContractError(
            f"the network returns the memory {output.memory}, but initial_memory returns {memory}. Both must "
            "have the same structure, shapes and dtypes."
        )


def weights_and_rest(make: Callable[[Key], PyTree]) -> tuple[PyTree, PyTree]:
    """Splits a network into its weights, as shapes, and everything else: functions, sizes and constant arrays."""
    with attribute_to_user_code("creating the network"):
        network = eqx.filter_eval_shape(make, jax.eval_shape(jax.random.key, 0))
    is_struct = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    is_weight = lambda leaf: is_struct(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)
    weights, rest = eqx.partition(network, is_weight)
    if any(map(is_struct, jax.tree.leaves(rest))):  # constant arrays, whose values are needed
        rest = eqx.filter(make(jax.random.key(0)), eqx.is_inexact_array, inverse=True)
    return weights, rest
