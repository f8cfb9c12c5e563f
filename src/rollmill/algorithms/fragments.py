"""Defines the environment and policy fragments that on-policy algorithms share, for ONE environment."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from gymnasium import spaces
from jaxtyping import Array, Float, Int, PyTree, Shaped

from rollmill.algorithms.hyperparameters import as_data
from rollmill.core.errors import ContractError, UsageError
from rollmill.core.schedules import NumberSchedule
from rollmill.core.spaces import box_bounds, struct
from rollmill.core.trace_cache import TracedOnce, are_checked
from rollmill.core.types import (
    FINAL_MASK,
    OVERFLOW,
    UNSTABLE,
    Action,
    Environment,
    HostEnvironment,
    HostStep,
    Key,
    Memory,
    Observation,
    Params,
    State,
    Timestep,
)
from rollmill.core.user_frame import attribute_to_user_code
from rollmill.dataflow import (
    ActionMask,
    Decision,
    Hyperparameters,
    PolicyOutputs,
    Step,
    StepReply,
    is_large,
    remote_environment,
)
from rollmill.envs import (
    RunningStatistics,
    auto_reset,
    check_types,
    denormalise,
    initial_statistics,
    normalise,
    normalised_struct,
    record_discounted_returns,
    record_episodes,
    record_final_mask,
    strongly_typed,
)
from rollmill.envs.agents import legal_actions
from rollmill.envs.numbers import UNIFORM, drawing, held_numbers, now_of, replace_params, with_ends
from rollmill.networks import ActorCritic, Distribution, Output

MakeNetwork = Callable[[Key, spaces.Space, spaces.Space], ActorCritic]
"""`(key, observation space, action space) -> network`."""


PLANNED_STEPS, STEPS_DONE = "planned_steps", "steps_done"
"""Step counts of an environment, on which schedules of its parameters depend."""

KEPT_INFO = (
    *("final_observation", "episode_return", "episode_length", "discounted_return", "agent_returns"),
    *(FINAL_MASK, UNSTABLE, OVERFLOW),
)
"""Entries of an environment's `info` that are stored in the trajectory."""


class EnvironmentFunctions(NamedTuple):
    """Functions of an auto-resetting environment that a graph needs."""

    start: Callable[..., tuple[PyTree[Array], Observation]]
    """`(key, global index, parameters=None) -> (state, observation)`."""
    step: Callable[[Key, PyTree[Array], Action], Timestep]
    action_mask: Callable[[PyTree[Array]], ActionMask]
    parameters: Mapping[str, float] = MappingProxyType({})
    """Parameters held in the state instead of the compiled program. See `Graph.parameters`."""


def environment_functions(
    env: Environment | HostEnvironment,
    *,
    params: Params | None = None,
    num_envs: int,
    gamma: float | None = None,
    final_mask: bool = False,
    view: Callable[[Environment], Environment] = lambda env: env,
    mask: Callable[[Environment, State, Params], ActionMask] = legal_actions,
    planned_steps: int = 1,
) -> EnvironmentFunctions:
    """Adds auto-reset, episode accounting and parameters to an environment.

    Args:
        env: the environment as its author wrote it.
        params: parameters that replace the environment's. A leaf with an additional leading axis `[num_envs, ...]`
            holds one value for each environment.
        num_envs: number of environments.
        gamma: if given, discounted returns are recorded, for reward normalisation.
        final_mask: whether the legal actions of final states are recorded, if the environment has action masks.
        view: transform of the environment inside auto-reset, for algorithms that extend the observation.
        mask: function of the environment with all transforms, its state and its parameters. It returns what a
            policy must know besides the observation (`dataflow.ActionMask`). Default: the legal actions.
        planned_steps: number of steps of each environment in the whole run, over which schedules of parameters
            extend.

    Raises a `UsageError` for a host environment, which JAX cannot trace.
    """
    if isinstance(env, HostEnvironment):
        raise UsageError(
            f"{env.name} is a host environment, but this algorithm calls environment_functions, which needs an "
            "environment in JAX. hint: train on an environment in JAX, or build the algorithm with "
            "prepare_off_policy, which also supports host environments."
        )
    own, inputs = env.params, _inputs(env, params)
    env = strongly_typed(env)
    env = env._replace(reset=TracedOnce(env.reset), step=TracedOnce(env.step))
    if are_checked():
        check_types(env, params_vary=False)
    env = view(drawing(env._replace(inputs=inputs)))
    env = record_final_mask(env) if final_mask and env.action_mask is not None else env
    env = record_episodes(auto_reset(env))
    env = env if gamma is None else record_discounted_returns(env, gamma)
    given_of = partial(_params_of, own, own if params is None else params, num_envs)
    jax.eval_shape(given_of, jax.ShapeDtypeStruct((), jnp.int32))  # raises for params of a wrong shape
    name, held = env.name, _Held.of(inputs, planned_steps)

    def params_of(index, *kept):
        return held.params(given_of(index), *kept) if kept else given_of(index)

    def start(key, index, parameters=None):
        kept = held.begin(parameters)
        with attribute_to_user_code(f"{name}: reset"):
            observation, state = env.reset(key, params_of(index, *kept))
        return (state, index, *kept), observation

    def step(key, state, action):
        inner, index, *kept = state
        action = clip_to_space(env.action_space, action)
        with attribute_to_user_code(f"{name}: step"):
            timestep = env.step(key, inner, action, params_of(index, *kept))
        info = {name: timestep.info[name] for name in KEPT_INFO if name in timestep.info}
        return timestep._replace(state=(timestep.state, index, *held.after(*kept)), info=info)

    def action_mask(state):
        return mask(env, state[0], params_of(*state[1:]))

    return EnvironmentFunctions(start, step, action_mask, held.parameters)


class _Held(NamedTuple):
    """Parameters held in an environment's state: values, and the step counts of their schedules."""

    inputs: Mapping[str, NumberSchedule]
    parameters: dict[str, float]
    """Values of the inputs at the beginning of a run, by name."""
    follows_steps: bool

    @classmethod
    def of(cls, inputs: Mapping[str, NumberSchedule], planned_steps: int) -> "_Held":
        """Returns the held values of parameters that are program inputs."""
        follows = any(course.shape not in ("constant", UNIFORM) for course in inputs.values())
        steps = {PLANNED_STEPS: float(planned_steps), STEPS_DONE: 0.0} if follows else {}
        return cls(inputs, {**held_numbers(inputs), **steps}, follows)

    def begin(self, numbers: Hyperparameters | None) -> tuple[Any, ...]:
        """Returns the initial values, and the number of steps so far if a value follows a schedule."""
        if not self.inputs:
            return ()
        held = as_data(self.parameters) | dict(numbers or {})
        if not self.follows_steps:
            return (held,)
        del held[STEPS_DONE]
        done = (numbers or {}).get(STEPS_DONE, held[PLANNED_STEPS])
        return held, jnp.asarray(done).astype(jnp.int32)

    def after(self, *kept: Any) -> tuple[Any, ...]:
        """Returns the parts of the state after a step."""
        return (kept[0], kept[1] + 1) if self.follows_steps else kept

    def params(self, own: Params, held: Hyperparameters, *steps: Int[Array, ""]) -> Params:
        """Returns the current parameters."""
        done = steps[0].astype(jnp.float32) / held[PLANNED_STEPS] if steps else 1.0
        return now_of(own, with_ends(self.inputs, held), done)


def _inputs(env: Environment, params: Params | None) -> dict[str, NumberSchedule]:
    """Returns an environment's inputs, except inputs that determine shapes or code.

    Warns of these. Raises a `UsageError` if one of them has a schedule or a distribution, or if `params` is given
    as well.
    """
    if params is not None and env.inputs:
        given = ", ".join(env.inputs)
        raise UsageError(
            f"{env.name} was created with {given}, so params cannot be set as well. hint: set {given} in params "
            "only."
        )
    names = list(env.inputs)
    if names and not _can_be_inputs(env, names):
        names = [name for name in names if _can_be_inputs(env, (name,))]
    for name in env.inputs.keys() - set(names):
        if env.inputs[name].shape != "constant":
            why = f"its value determines shapes or code in {env.name}"
            raise UsageError(f"{name}={':'.join(map(str, env.inputs[name]))} cannot change: {why}.")
        told = f"{name} determines shapes or code in {env.name}, so another value needs a new compilation."
        warnings.warn(told, stacklevel=2)
    return {name: env.inputs[name] for name in names}


def _can_be_inputs(env: Environment, names: Sequence[str]) -> bool:
    """Returns whether the environment can be traced with these parameters abstract."""

    def once(numbers: Mapping[str, Array], key: Key, action: Action) -> Timestep:
        params = replace_params(env.params, numbers)
        return env.step(key, env.reset(key, params)[1], action, params)

    numbers = dict.fromkeys(names, jax.ShapeDtypeStruct((), jnp.float32))
    try:
        jax.eval_shape(once, numbers, jax.eval_shape(jax.random.key, 0), struct(env.action_space))
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError, TypeError):
        return False
    return True


def host_functions(
    env: HostEnvironment,
    *,
    gamma: float | None = None,
    final_mask: bool = False,
    view: Callable[[HostStep], HostStep] = lambda step: step,
) -> EnvironmentFunctions:
    """Returns the functions of a host environment, which call the replica that steps it.

    The host environment itself resets and sums up episodes (`HostVector`). With `gamma`, discounted returns are
    recorded, for reward normalisation. `final_mask` keeps the legal actions of final states, if the environment
    has action masks. `view` rearranges the arrays of a step, for algorithms that extend the observation.
    """
    from rollmill.envs import step_struct

    batched = view(step_struct(env, 1, discounted=gamma is not None))
    step = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), batched)
    info = dict(step.info)
    mask = info.pop("action_mask", ())
    reply = StepReply(step.observation, mask, step.reward, step.terminated, step.truncated, info)
    remote = remote_environment(reply)

    def kept(key, state, action):
        timestep = remote.step(key, state, action)
        info = {name: value for name, value in timestep.info.items() if final_mask or name != FINAL_MASK}
        return timestep._replace(info=info)

    return EnvironmentFunctions(remote.start, kept, remote.action_mask)


def _params_of(default: Params, given: Params, num_envs: int, index: Int[Array, ""]) -> Params:
    """Returns the parameters of the environment with this index."""
    if jax.tree.structure(given) != jax.tree.structure(default):
        raise UsageError(
            f"params has the structure {jax.tree.structure(given)}, expected the structure of the environment's "
            f"default params, {jax.tree.structure(default)}."
        )

    def pick(shared, leaf):
        shape = jnp.shape(shared)
        if jnp.shape(leaf) == shape:
            return leaf
        if jnp.shape(leaf) == (num_envs, *shape):
            return jnp.asarray(leaf)[index]
        raise UsageError(
            f"a leaf of params has shape {jnp.shape(leaf)}, expected {shape} for one value in all environments, "
            f"or {(num_envs, *shape)} for one value in each of num_envs={num_envs}."
        )

    return jax.tree.map(pick, default, given)


def clip_to_space(space: spaces.Space, action: Action) -> Action:
    """Clips the actions of a `Box` to its bounds, which a Gaussian policy may exceed.

    Actions of other spaces are not changed.
    """
    if isinstance(space, spaces.Dict):
        return {name: clip_to_space(part, action[name]) for name, part in space.spaces.items()}
    if not isinstance(space, spaces.Box):
        return action
    low, high = map(jnp.asarray, box_bounds(space, action.dtype))
    return jnp.clip(action, low, high)


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
