"""Defines the environment fragment of every algorithm, for ONE environment in JAX or on the host."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from gymnasium import spaces
from jaxtyping import Array, Int, PyTree

from rollmill.algorithms.hyperparameters import as_data
from rollmill.core.errors import UsageError
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
    Observation,
    Params,
    State,
    Timestep,
)
from rollmill.core.user_frame import attribute_to_user_code
from rollmill.dataflow import ActionMask, Hyperparameters, StepReply, remote_environment
from rollmill.envs import (
    auto_reset,
    check_types,
    record_discounted_returns,
    record_episodes,
    record_final_mask,
    strongly_typed,
)
from rollmill.envs.agents import legal_actions
from rollmill.envs.numbers import UNIFORM, drawing, held_numbers, now_of, replace_params, with_ends

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
