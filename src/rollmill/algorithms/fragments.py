"""The environment and policy fragments that on-policy algorithms share, for ONE environment."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from gymnasium import spaces
from jaxtyping import Array, Bool, Float, Int, PyTree

from rollmill.core.errors import ContractError, UsageError
from rollmill.core.own_line import blaming
from rollmill.core.spaces import struct
from rollmill.core.types import (
    Action,
    Environment,
    HostEnvironment,
    Key,
    Memory,
    Observation,
    Params,
    Timestep,
)
from rollmill.dataflow import Decision, Step, StepReply, remote_environment
from rollmill.envs import (
    RunningStatistics,
    auto_reset,
    check_types,
    initial_statistics,
    normalise,
    record_discounted_returns,
    record_episodes,
    step_struct,
    strongly_typed,
)
from rollmill.networks import ActorCritic, Output

MakeNetwork = Callable[[Key, spaces.Space, spaces.Space], ActorCritic]
"""`(key, observation space, action space) -> network`."""


KEPT_INFO = ("final_observation", "episode_return", "episode_length", "discounted_return", "agent_returns")
"""What goes into a trajectory of all that an environment may put into `info`."""


class EnvironmentFunctions(NamedTuple):
    """What a graph needs of an environment that resets itself."""

    start: Callable[[Key, Int[Array, ""]], tuple[PyTree[Array], Observation]]
    step: Callable[[Key, PyTree[Array], Action], Timestep]
    action_mask: Callable[[PyTree[Array]], PyTree[Bool[Array, "..."]]]


def environment_functions(
    env: Environment,
    *,
    params: Params | None = None,
    num_envs: int,
    gamma: float | None = None,
    view: Callable[[Environment], Environment] = lambda env: env,
) -> EnvironmentFunctions:
    """Auto-reset, episode accounting and parameters around an environment.

    Args:
        env: the environment as its author wrote it.
        params: parameters instead of the environment's own; a leaf with one more axis, `[num_envs,
            ...]`, holds one value for each environment.
        num_envs: environments over all places.
        gamma: where given, the discounted return is recorded, for reward normalisation.
        view: a transform around the environment, inside of auto-reset: what the algorithm sees of it.
    """
    env = strongly_typed(env)
    check_types(env)
    env = record_episodes(auto_reset(view(env)))
    env = env if gamma is None else record_discounted_returns(env, gamma)
    own = partial(_own_params, env.params, env.params if params is None else params, num_envs)
    jax.eval_shape(own, jnp.int32(0))  # refuses params that do not fit
    name = env.name

    def start(key, index):
        with blaming(f"{name}: reset"):
            observation, state = env.reset(key, own(index))
        return (state, index), observation

    def step(key, state, action):
        inner, index = state
        action = clip_to_space(env.action_space, action)
        with blaming(f"{name}: step"):
            timestep = env.step(key, inner, action, own(index))
        info = {name: timestep.info[name] for name in KEPT_INFO if name in timestep.info}
        return timestep._replace(state=(timestep.state, index), info=info)

    def action_mask(state):
        return () if env.action_mask is None else env.action_mask(state[0], own(state[1]))

    return EnvironmentFunctions(start, step, action_mask)


def host_functions(env: HostEnvironment, *, gamma: float | None = None) -> EnvironmentFunctions:
    """Of an environment that lives on the host: a crossing to wherever it is stepped.

    Args:
        env: accounts and resets itself (`HostVector`).
        gamma: where given, the discounted return is recorded, for reward normalisation.
    """
    step = step_struct(env, 1, discounted=gamma is not None)
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), step)
    info = dict(one.info)
    mask = info.pop("action_mask", ())
    turn = StepReply(one.observation, mask, one.reward, one.terminated, one.truncated, info)
    remote = remote_environment(turn)
    return EnvironmentFunctions(remote.start, remote.step, remote.action_mask)


def compilable(env: Environment | HostEnvironment) -> Environment:
    """The environment itself; a `UsageError` where it lives on the host."""
    if isinstance(env, HostEnvironment):
        raise UsageError(
            f"{env.name} lives on the host as Python objects, of which this algorithm takes none; ppo, a3c and "
            "impala do."
        )
    return env


def _own_params(default: Params, given: Params, num_envs: int, index: Int[Array, ""]) -> Params:
    if jax.tree.structure(given) != jax.tree.structure(default):
        raise UsageError(
            f"params has the structure {jax.tree.structure(given)}; expected that of the environment's own "
            f"params, {jax.tree.structure(default)}."
        )

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
    if isinstance(space, spaces.Dict):
        return {name: clip_to_space(part, action[name]) for name, part in space.spaces.items()}
    if not isinstance(space, spaces.Box):
        return action
    return jnp.clip(action, jnp.asarray(space.low, action.dtype), jnp.asarray(space.high, action.dtype))


class PolicyWeights(eqx.Module):
    """What the policy needs: network weights, and the statistics that observations are normalised with."""

    network: PyTree[Array]
    observations: RunningStatistics | None


class Extras(NamedTuple):
    """What the learner wants back beside the action."""

    log_prob: Float[Array, "..."]
    value: PyTree[Float[Array, "..."]]
    """Only of a recurrent policy, whose critic must see every step in turn; otherwise `()`: the values of a
    whole trajectory take fewer and larger matrix products when they are computed at once, unless `appraise` adds
    them in a kernel."""
    final_value: PyTree[Float[Array, "..."]] = ()
    """The value after a truncated step, zero elsewhere; only where `appraise` has added it."""


class NetworkPolicy(NamedTuple):
    """An actor-critic network as functions of its weights; made by `network_policy`."""

    make: Callable[[Key], ActorCritic]
    skeleton: PyTree[jax.ShapeDtypeStruct]
    static: PyTree
    """All of the network that is no weight."""
    normalised_struct: PyTree[jax.ShapeDtypeStruct] | None
    """Shapes of the observations, where they are normalised."""

    def start_weights(self, key: Key) -> PolicyWeights:
        """Weights before training."""
        known = self.normalised_struct
        statistics = None if known is None else initial_statistics(known)
        return PolicyWeights(eqx.filter(self.make(key), eqx.is_inexact_array), statistics)

    def start_memory(self) -> Memory:
        """The memory at the start of an episode; `()` for a network that remembers nothing."""
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.skeleton)
        return eqx.combine(zeros, self.static).initial_memory()

    @property
    def recurrent(self) -> bool:
        """Whether the policy remembers anything."""
        return bool(jax.tree.leaves(jax.eval_shape(self.start_memory)))

    def normalise(self, weights: PolicyWeights, observation: Observation) -> Observation:
        """The observation as the network sees it; any leading axes."""
        statistics = weights.observations
        return observation if statistics is None else normalise(statistics, observation)

    def forward(
        self, weights: PolicyWeights, memory: Memory, observation: Observation, action_mask: PyTree
    ) -> Output:
        """What the network says about a normalised observation."""
        network = eqx.combine(weights.network, self.static)
        return network(observation, memory, None if isinstance(action_mask, tuple) else action_mask)

    def value(self, weights: PolicyWeights, memory: Memory, observation: Observation) -> Float[Array, ""]:
        """The value of a raw observation."""
        network = eqx.combine(weights.network, self.static)
        return network.value(self.normalise(weights, observation), memory)

    @property
    def appraisal(self) -> Callable[[PolicyWeights, Step], Step] | None:
        """`appraise`, where acting computes most of what a value needs."""
        network = eqx.combine(self.skeleton, self.static)
        is_cheap = not self.recurrent and getattr(network, "shares_torso", False)
        return self.appraise if is_cheap else None

    def appraise(self, weights: PolicyWeights, step: Step) -> Step:
        """The step with its values, without the final observation that nobody needs then."""
        value = self.value(weights, step.final_memory, step.observation)
        final_value = self.value(weights, step.final_memory, step.final_observation)
        extras = Extras(step.extras.log_prob, value, jnp.where(step.truncated, final_value, 0.0))
        return step._replace(extras=extras, final_observation=())

    def sample(
        self, weights: PolicyWeights, key: Key, memory: Memory, observation: Observation, action_mask: PyTree
    ) -> Decision:
        """An action drawn from the policy, for a raw observation."""
        output = self.forward(weights, memory, self.normalise(weights, observation), action_mask)
        action, log_prob = output.distribution.sample_and_log_prob(key)
        return self._decision(output, action, log_prob)

    def greedy(
        self, weights: PolicyWeights, key: Key, memory: Memory, observation: Observation, action_mask: PyTree
    ) -> Decision:
        """The most likely action, for a raw observation."""
        output = self.forward(weights, memory, self.normalise(weights, observation), action_mask)
        action = output.distribution.mode()
        return self._decision(output, action, output.distribution.log_prob(action))

    def _decision(self, output: Output, action: Action, log_prob: Float[Array, ""]) -> Decision:
        return Decision(action, output.memory, Extras(log_prob, output.value if self.recurrent else ()))


def network_policy(
    env: Environment | HostEnvironment, make_network: MakeNetwork, *, normalise_observations: bool
) -> NetworkPolicy:
    """The policy of an environment, from the function that makes its network."""

    def make(key):
        return make_network(key, env.observation_space, env.action_space)

    skeleton, static = weights_and_rest(make)
    known = struct(env.observation_space) if normalise_observations else None
    policy = NetworkPolicy(make, skeleton, static, known)
    _check_types(policy, struct(env.observation_space))
    return policy


def _check_types(policy: NetworkPolicy, observation: PyTree[jax.ShapeDtypeStruct]) -> None:
    """What the network returns, by type alone: its author's line, rather than an error of a loop around it."""
    with blaming("the network"):
        weights = jax.eval_shape(policy.start_weights, jax.random.key(0))
        memory = jax.eval_shape(policy.start_memory)
        output = jax.eval_shape(lambda w, m, o: policy.forward(w, m, o, ()), weights, memory, observation)
        value = jax.eval_shape(policy.value, weights, memory, observation)
    for what, found in (("its value", output.value), ("value(...)", value)):
        if (found.shape, found.dtype) != ((), jnp.float32):
            raise ContractError(
                f"the network: {what} is {found.dtype}{list(found.shape)}, expected one float32 []."
            )
    if jax.tree.map(lambda leaf: leaf.shape, output.memory) != jax.tree.map(lambda leaf: leaf.shape, memory):
        raise ContractError(
            f"the network: it returns the memory {output.memory}, expected that of initial_memory, {memory}."
        )


def weights_and_rest(make: Callable[[Key], PyTree]) -> tuple[PyTree, PyTree]:
    """The network's weights as shapes, and all else in it: functions, sizes, constant arrays."""
    key = jax.random.key(0)
    with blaming("making the network"):
        network = eqx.filter_eval_shape(make, key)
    is_struct = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    is_weight = lambda leaf: is_struct(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)
    weights, rest = eqx.partition(network, is_weight)
    if any(map(is_struct, jax.tree.leaves(rest))):
        rest = eqx.filter(make(key), eqx.is_inexact_array, inverse=True)
    return weights, rest
