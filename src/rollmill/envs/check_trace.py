"""Checks the contract of an environment by tracing its reset and step, without running them."""

import math
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from rollmill.core.contracts import outline, type_of
from rollmill.core.errors import ContractError, UsageError
from rollmill.core.spaces import space_text, struct
from rollmill.core.types import Environment, Timestep, is_key
from rollmill.core.user_frame import attribute_to_user_code, user_frame, user_frame_of
from rollmill.envs.agents import joint_spaces, possible_masks, reward_struct
from rollmill.envs.field_checks import as_timestep

HOST_PRIMITIVES = ("callback", "debug_print", "infeed", "outfeed")
"""Substrings of the names of primitives that call the host."""


class Traced(NamedTuple):
    """Abstract values that an environment's reset and step return, and the jaxprs of both functions."""

    reset_observation: Any
    reset_state: Any
    timestep: Timestep
    reset_jaxpr: jax.extend.core.ClosedJaxpr
    step_jaxpr: jax.extend.core.ClosedJaxpr


def check_types(env: Environment, *, params_vary: bool = True) -> Traced:
    """Checks that an environment's functions return what its spaces declare, by tracing them without running.

    This is the quick part of `check_environment`. It covers the structure, shapes and dtypes of the results of
    `reset`, `step` and optional functions.

    Args:
        env: the environment.
        params_vary: trace with `env.params` as an argument, so that its values are unknown. Otherwise, they are
            constants of the functions.

    Returns:
        The traces of `reset` and `step`.

    Raises:
        ContractError: a check fails. The message names the function and what was expected.
    """
    check_params(env)
    check_kinds(env)
    traced = trace_environment(env, params_vary=params_vary)
    check_same_types(env, traced)
    check_flags(env, traced)
    check_agents(env, traced)
    check_info(env, traced)
    check_observation_space(env, traced)
    check_action_mask(env, traced)
    check_players(env, traced)
    check_planning_state(env, traced)
    return traced


def trace_environment(env: Environment, *, params_vary: bool = True) -> Traced:
    """Traces an environment's reset, and its step from the state that reset returns.

    With `params_vary`, `env.params` is an argument of both, and otherwise a constant. Raises a `ContractError` if
    one of the functions cannot be traced or returns the wrong number of values.
    """
    reset, step, params = env.reset, env.step, (env.params,)
    if not params_vary:
        reset, step = (partial(_with_own_params, env, function) for function in (env.reset, env.step))
        params = ()
    reset_jaxpr, returned = _trace(env, "reset", reset, _key(), *params)
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise ContractError(
            f"{env.name}: reset returned {outline(returned)}, expected the tuple (observation, state)."
        )
    observation, state = returned
    step_jaxpr, timestep = _trace(env, "step", step, _key(), state, _action(env), *params)
    return Traced(observation, state, as_timestep(env.name, timestep), reset_jaxpr, step_jaxpr)


def _with_own_params(env: Environment, function: Callable, *args: Any) -> Any:
    return function(*args, env.params)


def check_params(env: Environment) -> None:
    """Checks that every leaf of an environment's `params` is an array or a number, so that it can be traced."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(env.params):
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float)):
            raise ContractError(
                f"{env.name}: params{jax.tree_util.keystr(path)} is a {type(leaf).__name__}, expected an array "
                "or a number. hint: make it a static field, or an argument of the function that creates the "
                "environment."
            )


def check_same_types(env: Environment, traced: Traced) -> None:
    """Checks that reset and step return states and observations of the same structure and types."""
    pairs = {
        "state": (traced.reset_state, traced.timestep.state),
        "observation": (traced.reset_observation, traced.timestep.observation),
    }
    _check_declared_shapes(env, traced)
    for what, (reset, step) in pairs.items():
        if jax.tree.structure(reset) != jax.tree.structure(step):
            raise ContractError(
                f"{env.name}: reset and step return different structures of the {what}: reset returns "
                f"{outline(reset)}, and step returns {outline(step)}."
            )
        for path, reset_leaf, step_leaf in _pair_leaves(reset, step):
            _check_same_leaf(env.name, f"{what}{path}", reset_leaf, step_leaf)


def _check_declared_shapes(env: Environment, traced: Traced) -> None:
    """Checks the shapes of observations against the space, if only reset or only step returns others.

    If the shapes of both differ from the space, `check_observation_space` says so.
    """
    declared = _struct_of(env, "observation_space", env.observation_space)
    returned = {"reset": traced.reset_observation, "step": traced.timestep.observation}
    if len({jax.tree.structure(tree) for tree in (declared, *returned.values())}) > 1:
        return
    for (path, space_leaf, reset_leaf), step_leaf in zip(
        _pair_leaves(declared, returned["reset"]), jax.tree.leaves(returned["step"]), strict=True
    ):
        leaves = {"reset": reset_leaf, "step": step_leaf}
        wrong = [what for what, leaf in leaves.items() if leaf.shape != space_leaf.shape]
        if len(wrong) == 1:
            leaf = leaves[wrong[0]]
            raise ContractError(
                f"{env.name}: observation{path} is {type_of(leaf)} after {wrong[0]}, but the observation space "
                f"declares {type_of(space_leaf)}. hint: {reshaping(leaf, space_leaf)} in {wrong[0]}."
            )


def reshaping(actual: Any, expected: Any) -> str:
    """Returns advice on converting an array with a wrong shape or dtype."""
    if actual.shape == expected.shape:
        return f"cast it with .astype(jnp.{expected.dtype})"
    if math.prod(actual.shape) == math.prod(expected.shape):
        verb = "add" if len(actual.shape) < len(expected.shape) else "change"
        what = "the missing axis" if verb == "add" else "the shape"
        return f"{verb} {what} with .reshape({expected.shape})"
    if len(actual.shape) < len(expected.shape):
        return f"return one value for each place, for example jnp.full({expected.shape}, value)"
    return f"reduce it to the shape {expected.shape}"


def check_flags(env: Environment, traced: Traced) -> None:
    """Checks that the reward is a float32 scalar, or one for each agent, and that both flags are booleans."""
    flag = jax.ShapeDtypeStruct((), jnp.bool_)
    expected_types = {"reward": reward_struct(env), "terminated": flag, "truncated": flag}
    for field, expected in expected_types.items():
        actual = getattr(traced.timestep, field)
        if not _same_types(actual, expected):
            if field == "reward" and isinstance(actual, dict) and not env.agents:
                raise ContractError(
                    f"{env.name}: reward is {outline(actual)}, expected {outline(expected)}. hint: a multi-agent "
                    "environment lists its kinds of agents: agents=(rollmill.AgentKind(name, count, "
                    "observation_space, action_space), ...)."
                )
            raise ContractError(
                f"{env.name}: {field} is {outline(actual)}, expected {outline(expected)}. hint: "
                f"{_advice_on_flag(actual, expected)}."
            )


def _advice_on_flag(actual: Any, expected: Any) -> str:
    """Returns advice on a reward or a flag that has another structure, shape or dtype than it should."""
    if isinstance(expected, dict):
        if not isinstance(actual, dict) or actual.keys() != expected.keys():
            return "return a dictionary with an array for each kind of agents, one reward for each agent"
        return next(
            f"[{name!r}]: {reshaping(actual[name], kind)}"
            for name, kind in expected.items()
            if not _same_types(actual[name], kind)
        )
    return reshaping(actual, expected) if isinstance(actual, jax.ShapeDtypeStruct) else "return one array"


def check_info(env: Environment, traced: Traced) -> None:
    """Checks that the `info` of a step is a dictionary, because transforms add entries to it."""
    if not isinstance(traced.timestep.info, dict):
        raise ContractError(
            f"{env.name}: info is a {type(traced.timestep.info).__name__}, expected a dict. hint: return {{}}."
        )


def check_observation_space(env: Environment, traced: Traced) -> None:
    """Checks that observations have the structure, shapes and dtypes of the observation space."""
    expected = _struct_of(env, "observation_space", env.observation_space)
    observation = traced.reset_observation
    if jax.tree.structure(observation) != jax.tree.structure(expected):
        raise ContractError(
            f"{env.name}: the observation is {outline(observation)}, but observation_space "
            f"{space_text(env.observation_space)} declares {outline(expected)}. hint: change the observation or "
            "the space."
        )
    for path, leaf, space_leaf in _pair_leaves(observation, expected):
        if (leaf.shape, leaf.dtype) != (space_leaf.shape, space_leaf.dtype):
            raise ContractError(
                f"{env.name}: observation{path} is {type_of(leaf)}, but the observation space declares "
                f"{type_of(space_leaf)}. hint: {reshaping(leaf, space_leaf)}, or change the space."
            )


def check_action_mask(env: Environment, traced: Traced) -> None:
    """Checks that the action mask, if any, has one boolean for each logit of the policy.

    In a multi-agent environment, the mask is a dictionary, which need not contain every kind of agents.
    """
    if env.action_mask is None:
        return
    _, mask = _trace(env, "action_mask", env.action_mask, traced.timestep.state, env.params)
    possible = possible_masks(env)
    if possible is None:
        raise ContractError(
            f"{env.name} has an action_mask, but its action space is {space_text(env.action_space)}, expected a "
            "Discrete or MultiDiscrete space. hint: leave action_mask out."
        )
    expected = jax.tree.map(lambda choices: jax.ShapeDtypeStruct(choices.shape, jnp.bool_), possible)
    if env.agents and isinstance(mask, dict):
        expected = {name: kind_mask for name, kind_mask in expected.items() if name in mask} or expected
    if not _same_types(mask, expected):
        raise ContractError(
            f"{env.name}: action_mask returned {outline(mask)}, expected {outline(expected)}, "
            f"one boolean for each choice of {space_text(env.action_space)}."
        )


def check_kinds(env: Environment) -> None:
    """Checks that kinds have distinct names and at least one agent, and that the spaces match the kinds."""
    if not env.agents:
        if env.active is not None or env.central is not None:
            raise ContractError(
                f"{env.name}: active and central have no effect without agents. hint: list the agents as well."
            )
        return
    names = [kind.name for kind in env.agents]
    if len(set(names)) < len(names) or any(kind.count < 1 for kind in env.agents):
        counts = ", ".join(f"{kind.name}: {kind.count}" for kind in env.agents)
        raise ContractError(
            f"{env.name}: agents are {counts}, expected kinds with different names and at least one agent each."
        )
    expected = dict(zip(("observation_space", "action_space"), joint_spaces(env.agents), strict=True))
    for what, space in expected.items():
        types = _struct_of(env, what, getattr(env, what))
        if not _same_types(types, struct(space)):
            raise ContractError(
                f"{env.name}: the elements of {what} are {outline(types)}, expected {outline(struct(space))}, as "
                "in the agents' spaces. hint: use rollmill.envs.joint_spaces(agents)."
            )


def check_agents(env: Environment, traced: Traced) -> None:
    """Checks that `active` returns a boolean for each agent, and `central` one vector, if they exist."""
    for what, function, check in (
        ("active", env.active, _check_active),
        ("central", env.central, _check_central),
    ):
        if function is not None:
            _, types = _trace(env, what, function, traced.timestep.state, env.params)
            check(env, types)


def check_players(env: Environment, traced: Traced) -> None:
    """Checks that an environment has one or two players, and that `to_move` returns one int32 if there are two."""
    if env.num_players not in (1, 2):
        raise ContractError(
            f"{env.name}: num_players is {env.num_players}, expected 1 or 2. hint: for agents that act at the "
            "same time, use agents instead."
        )
    if env.num_players == 2 and env.agents:
        raise ContractError(
            f"{env.name} has agents and num_players=2, expected one of them. Players take turns, and agents act "
            "at the same time."
        )
    if (env.to_move is None) != (env.num_players == 1):
        given = "no to_move" if env.to_move is None else "to_move"
        raise ContractError(
            f"{env.name} has num_players={env.num_players} and {given}. A two-player environment needs to_move, "
            "a function from state and params to the player who moves next, and other environments must not "
            "have it."
        )
    if env.to_move is None:
        return
    _, types = _trace(env, "to_move", env.to_move, traced.timestep.state, env.params)
    if not _same_types(types, jax.ShapeDtypeStruct((), jnp.int32)):
        raise ContractError(f"{env.name}: to_move returned {outline(types)}, expected int32[].")


def check_planning_state(env: Environment, traced: Traced) -> None:
    """Checks that the function `planning_state` of an environment, if any, can be traced."""
    if env.planning_state is not None:
        _trace(env, "planning_state", env.planning_state, traced.timestep.state, env.params)


def _check_active(env: Environment, types: Any) -> None:
    flags = {kind.name: jax.ShapeDtypeStruct((kind.count,), jnp.bool_) for kind in env.agents}
    expected = {name: flag for name, flag in flags.items() if name in types} if isinstance(types, dict) else {}
    if not expected or not _same_types(types, expected):
        raise ContractError(
            f"{env.name}: active returned {outline(types)}, expected one or more of {outline(flags)}."
        )


def _check_central(env: Environment, types: Any) -> None:
    if not isinstance(types, jax.ShapeDtypeStruct) or len(types.shape) != 1 or types.dtype != jnp.float32:
        raise ContractError(f"{env.name}: central returned {outline(types)}, expected one float32[features].")


def check_no_callbacks(env: Environment, traced: Traced) -> None:
    """Checks that neither reset nor step calls back to the host, which would stall the device at every step."""
    for what, program in (("reset", traced.reset_jaxpr), ("step", traced.step_jaxpr)):
        for equation in _equations(program.jaxpr):
            name = equation.primitive.name
            if any(part in name for part in HOST_PRIMITIVES):
                raise ContractError(
                    f"{env.name}: {what} calls the host ({name}), expected a function that depends only on its "
                    "arguments. hint: remove the call, or make the environment a HostEnvironment. At "
                    f"{user_frame_of(equation)}"
                )


def check_purity(env: Environment, traced: Traced) -> None:
    """Checks that tracing reset and step a second time gives the same jaxprs.

    Otherwise, a Python value changes from call to call.
    """
    state = traced.reset_state
    again = {
        "reset": (traced.reset_jaxpr, _trace(env, "reset", env.reset, _key(), env.params)[0]),
        "step": (
            traced.step_jaxpr,
            _trace(env, "step", env.step, _key(), state, _action(env), env.params)[0],
        ),
    }
    for what, (first, second) in again.items():
        if not _same_program(first, second):
            raise ContractError(
                f"{env.name}: {what} is not a pure function: two calls with the same arguments returned "
                "different results. It may read a Python attribute that changes, random numbers of NumPy or "
                "Python, or the time. hint: keep such values in the state, and draw random numbers from the key."
            )


def warn_of_promotion(env: Environment, traced: Traced) -> None:
    """Warns if reset or step of an environment relies on implicit dtype promotion in JAX."""
    calls: dict[str, tuple[Callable, tuple]] = {
        "reset": (env.reset, (_key(), env.params)),
        "step": (env.step, (_key(), traced.reset_state, _action(env), env.params)),
    }
    for what, (function, args) in calls.items():
        try:
            with jax.numpy_dtype_promotion("strict"):
                jax.eval_shape(lambda *args, function=function: function(*args), *args)
        except jax.dtypes.TypePromotionError as error:
            line = user_frame(error)
            warnings.warn(f"{env.name}: {what} mixes dtypes, which JAX promotes silently: {line}", stacklevel=4)


def warn_of_weak_types(env: Environment) -> None:
    """Warns if reset or step returns weakly typed values, which training casts to fixed dtypes."""
    traced = trace_environment(env)
    parts = {
        "the state after reset": traced.reset_state,
        "the observation after reset": traced.reset_observation,
        "the state after step": traced.timestep.state,
        "the observation after step": traced.timestep.observation,
        "the reward": traced.timestep.reward,
    }
    weak = [
        f"{what}{jax.tree_util.keystr(path)}"
        for what, tree in parts.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if leaf.weak_type
    ]
    if weak:
        warnings.warn(
            f"{env.name}: these parts are weakly typed, because they come from Python numbers: "
            f"{', '.join(weak)}. Training works, and casts them to fixed dtypes. hint: to choose the dtype "
            "yourself, write jnp.asarray(value, jnp.float32), or use another dtype.",
            stacklevel=3,
        )


def _trace(env: Environment, what: str, function: Callable, *args: Any) -> tuple[Any, Any]:
    """Returns a function's jaxpr and the types of its results. It is traced again in every call."""
    with attribute_to_user_code(f"{env.name}: {what}"):
        program, shapes = jax.make_jaxpr(lambda *args: function(*args), return_shape=True)(*args)
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in program.out_avals]
    return program, jax.tree.unflatten(jax.tree.structure(shapes), types)


def _key() -> jax.ShapeDtypeStruct:
    return jax.eval_shape(jax.random.key, 0)


def _action(env: Environment) -> Any:
    return _struct_of(env, "action_space", env.action_space)


def _struct_of(env: Environment, what: str, space: spaces.Space) -> Any:
    try:
        return struct(space)
    except UsageError as error:
        raise ContractError(f"{env.name}: {what}: {error}") from None


def _check_same_leaf(name: str, where: str, reset: Any, step: Any) -> None:
    if (reset.shape, reset.dtype) != (step.shape, step.dtype):
        raise ContractError(
            f"{name}: {where} is {type_of(reset)} after reset and {type_of(step)} after step, expected the same. "
            f"hint: {_advice(reset, step)}."
        )


def _advice(reset: Any, step: Any) -> str:
    if reset.shape == step.shape:
        return f"return jnp.asarray(value, jnp.{step.dtype}) from reset, or cast with .astype in step"
    return "make step keep the shape"


def _pair_leaves(first: Any, second: Any) -> Iterator[tuple[str, Any, Any]]:
    paths = jax.tree_util.tree_leaves_with_path(first)
    for (path, leaf), other in zip(paths, jax.tree.leaves(second), strict=True):
        yield jax.tree_util.keystr(path), leaf, other


def _same_types(actual: Any, expected: Any) -> bool:
    if jax.tree.structure(actual) != jax.tree.structure(expected):
        return False
    return all((a.shape, a.dtype) == (b.shape, b.dtype) for _, a, b in _pair_leaves(actual, expected))


def _equations(jaxpr: jax.extend.core.Jaxpr) -> Iterator[jax.extend.core.JaxprEqn]:
    """Yields all equations of a jaxpr and of its inner jaxprs (branches, loop bodies, calls)."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program):
            if isinstance(inner, jax.extend.core.ClosedJaxpr):
                yield from _equations(inner.jaxpr)
            elif isinstance(inner, jax.extend.core.Jaxpr):
                yield from _equations(inner)


def _is_program(node: Any) -> bool:
    return isinstance(node, (jax.extend.core.Jaxpr, jax.extend.core.ClosedJaxpr))


def _same_program(first: jax.extend.core.ClosedJaxpr, second: jax.extend.core.ClosedJaxpr) -> bool:
    texts = [re.sub(r"0x[0-9a-fA-F]+", "", str(program.jaxpr)) for program in (first, second)]
    if texts[0] != texts[1] or len(first.consts) != len(second.consts):
        return False
    return all(_same_constant(a, b) for a, b in zip(first.consts, second.consts, strict=True))


def _same_constant(first: Any, second: Any) -> bool:
    if is_key(jnp.result_type(first)):
        first, second = jax.random.key_data(first), jax.random.key_data(second)
    return np.array_equal(np.asarray(first), np.asarray(second), equal_nan=False)
