"""The environment and policy fragments that on-policy algorithms share, for ONE environment."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from gymnasium import spaces
from jaxtyping import Array, Bool, Float, Int, PyTree

from rollmill.core.errors import UsageError
from rollmill.core.spaces import struct
from rollmill.core.types import Action, Environment, HostEnvironment, Key, Memory, Observation, Params, Timestep
from rollmill.dataflow import Decision
from rollmill.envs import (
    Statistics,
    auto_reset,
    initial_statistics,
    normalise,
    record_discounted_returns,
    record_episodes,
)
from rollmill.networks import ActorCritic, Output

MakeNetwork = Callable[[Key, spaces.Space, spaces.Space], ActorCritic]
"""`(key, observation space, action space) -> network`."""


KEPT_INFO = ("final_observation", "episode_return", "episode_length", "discounted_return")
"""What goes into a trajectory of all that an environment may put into `info`."""


class EnvironmentFunctions(NamedTuple):
    """What a graph needs of an environment that resets itself."""

    start: Callable[[Key, Int[Array, ""]], tuple[PyTree[Array], Observation]]
    step: Callable[[Key, PyTree[Array], Action], Timestep]
    action_mask: Callable[[PyTree[Array]], PyTree[Bool[Array, "..."]]]


def environment_functions(
    env: Environment, *, params: Params | None = None, num_envs: int, gamma: float | None = None
) -> EnvironmentFunctions:
    """Auto-reset, episode accounting and parameters around an environment.

    Args:
        env: the environment as its author wrote it.
        params: parameters instead of the environment's own; a leaf with one more axis, `[num_envs,
            ...]`, holds one value for each environment.
        num_envs: environments over all places.
        gamma: where given, the discounted return is recorded, for reward normalisation.
    """
    _check_compilable(env)
    env = record_episodes(auto_reset(env))
    env = env if gamma is None else record_discounted_returns(env, gamma)
    own = partial(_own_params, env.params, env.params if params is None else params, num_envs)

    def start(key, index):
        observation, state = env.reset(key, own(index))
        return (state, index), observation

    def step(key, state, action):
        inner, index = state
        timestep = env.step(key, inner, clip_to_space(env.action_space, action), own(index))
        info = {name: timestep.info[name] for name in KEPT_INFO if name in timestep.info}
        return timestep._replace(state=(timestep.state, index), info=info)

    def action_mask(state):
        return () if env.action_mask is None else env.action_mask(state[0], own(state[1]))

    return EnvironmentFunctions(start, step, action_mask)


def _check_compilable(env: Environment) -> None:
    if isinstance(env, HostEnvironment):
        raise UsageError(
            f"{env.name} lives on the host as Python objects and cannot be compiled into a training program; "
            "`rollmill evaluate RUN --env` runs policies on it. Train on a JAX version, such as "
            f"{env.name.removeprefix('gymnasium:')} or gymnax:{env.name.removeprefix('gymnasium:')}."
        )


def _own_params(default: Params, given: Params, num_envs: int, index: Int[Array, ""]) -> Params:
    def pick(shared, leaf):
        shape = jnp.shape(shared)
        if jnp.shape(leaf) == shape:
            return leaf
        if jnp.shape(leaf) == (num_envs, *shape):
            return jnp.asarray(leaf)[index]
        raise UsageError(
            f"a leaf of params has shape {jnp.shape(leaf)}; expected {shape} for all environments alike, or "
            f"{(num_envs, *shape)} for one value in each of num_envs={num_envs}."
        )

    return jax.tree.map(pick, default, given)


def clip_to_space(space: spaces.Space, action: Action) -> Action:
    """A Gaussian action may lie outside of a bounded `Box`; the environment receives the nearest inside."""
    if not isinstance(space, spaces.Box):
        return action
    return jnp.clip(action, jnp.asarray(space.low, action.dtype), jnp.asarray(space.high, action.dtype))


class PolicyWeights(eqx.Module):
    """What the policy needs: network weights, and the statistics that observations are normalised with."""

    network: PyTree[Array]
    observations: Statistics | None


class Extras(NamedTuple):
    """What the learner wants back beside the action."""

    log_prob: Float[Array, "..."]
    value: Float[Array, "..."]


class PolicyFunctions(NamedTuple):
    """An actor-critic network taken apart into weights and functions of them."""

    start_weights: Callable[[Key], PolicyWeights]
    start_memory: Callable[[], Memory]
    normalise: Callable[[PolicyWeights, Observation], Observation]
    forward: Callable[..., Output]
    """`(weights, memory, normalised observation, action mask) -> Output`."""
    value: Callable[[PolicyWeights, Memory, Observation], Float[Array, ""]]
    """Of a raw observation."""
    sample: Callable[[PolicyWeights, Key, Memory, Observation, PyTree], Decision]
    greedy: Callable[[PolicyWeights, Key, Memory, Observation, PyTree], Decision]
    recurrent: bool


def policy_functions(env: Environment, make_network: MakeNetwork, *, normalise_observations: bool) -> PolicyFunctions:
    """The policy of an environment, from the function that makes its network."""
    make = partial(_make_network, env, make_network)
    skeleton, static = _weights_and_rest(make)

    def start_weights(key):
        statistics = initial_statistics(struct(env.observation_space)) if normalise_observations else None
        return PolicyWeights(eqx.filter(make(key), eqx.is_inexact_array), statistics)

    def network(weights: PolicyWeights) -> ActorCritic:
        return eqx.combine(weights.network, static)

    def start_memory():
        return eqx.combine(jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), skeleton), static).initial_memory()

    def normalised(weights, observation):
        known = weights.observations
        return observation if known is None else normalise(known, observation)

    def forward(weights, memory, observation, action_mask):
        return network(weights)(observation, memory, None if action_mask == () else action_mask)

    def value(weights, memory, observation):
        return network(weights).value(normalised(weights, observation), memory)

    def sample(weights, key, memory, observation, action_mask):
        output = forward(weights, memory, normalised(weights, observation), action_mask)
        action, log_prob = output.distribution.sample_and_log_prob(key)
        return Decision(action, output.memory, Extras(log_prob, output.value))

    def greedy(weights, key, memory, observation, action_mask):
        output = forward(weights, memory, normalised(weights, observation), action_mask)
        action = output.distribution.mode()
        return Decision(action, output.memory, Extras(output.distribution.log_prob(action), output.value))

    recurrent = bool(jax.tree.leaves(jax.eval_shape(start_memory)))
    return PolicyFunctions(
        start_weights, start_memory, normalised, forward, value, sample, greedy, recurrent
    )


def _make_network(env: Environment, make_network: MakeNetwork, key: Key) -> ActorCritic:
    return make_network(key, env.observation_space, env.action_space)


def _weights_and_rest(make: Callable[[Key], ActorCritic]) -> tuple[PyTree, PyTree]:
    """The network's weights as shapes, and all else in it: functions, sizes, constant arrays."""
    key = jax.random.key(0)
    network = eqx.filter_eval_shape(make, key)
    is_struct = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    is_weight = lambda leaf: is_struct(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)
    weights, rest = eqx.partition(network, is_weight)
    if any(map(is_struct, jax.tree.leaves(rest))):
        rest = eqx.filter(make(key), eqx.is_inexact_array, inverse=True)
    return weights, rest
