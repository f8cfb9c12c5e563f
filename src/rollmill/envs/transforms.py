"""Transforms: functions from an environment to an environment, each of which adds one feature.

Legend: `E` environments. They compose from the inside out, for example

    vectorise(auto_reset(vary(time_limit(env, 500), sample)), 1024)

so that each episode, not the whole run, has its own time limit and its own parameters.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key as KeyArray, PyTree

from rollmill.core.errors import UsageError
from rollmill.core.operations import operation_scope
from rollmill.core.schema import coerce
from rollmill.core.types import (
    FINAL_MASK,
    Action,
    Environment,
    HostEnvironment,
    Key,
    Observation,
    Params,
    State,
    Timestep,
)
from rollmill.envs.field_checks import as_timestep
from rollmill.envs.rare_resets import Restart, rare_reset

STEP_FOLD = 0x5354_4550
"""Folded into the key for the step. The reset uses the key itself, and derives far fewer keys than this number."""


class TimeLimitState(eqx.Module):
    """The state of a time-limited environment: the inner state, and the number of steps so far."""

    inner: State
    elapsed: Int[Array, ""]


class VariedState(eqx.Module):
    """The state of a varied environment: the inner state, and this episode's parameters."""

    inner: State
    params: Params


def time_limit(env: Environment, max_steps: int) -> Environment:
    """Truncates every episode at its `max_steps`-th step.

    As in the Gymnasium wrapper `TimeLimit`, `truncated` is True at the limit even if `terminated` is. `terminated`
    is unchanged, and only it prevents bootstrapping.

    Args:
        env: the environment, unbatched.
        max_steps: length of the longest episode in steps, at least 1.

    Returns:
        The environment with a `TimeLimitState` around its state.

    Raises:
        UsageError: `max_steps` is below 1.

    Examples:
        >>> env = rollmill.time_limit(rollmill.make("Pendulum-v1"), 100)
    """
    _check_compiled("time_limit", env, 'rollmill.make("{}", max_episode_steps=N)')
    max_steps = coerce("max_steps", int, max_steps)
    if max_steps < 1:
        raise UsageError(f"time_limit({env.name}, {max_steps}): max_steps must be at least 1.")

    def reset(key: Key, params: Params) -> tuple[Observation, TimeLimitState]:
        observation, inner = env.reset(key, params)
        return observation, TimeLimitState(inner=inner, elapsed=jnp.zeros((), jnp.int32))

    def step(key: Key, state: TimeLimitState, action: Action, params: Params) -> Timestep:
        timestep = as_timestep(env.name, env.step(key, state.inner, action, params))
        elapsed = state.elapsed + 1
        return timestep._replace(
            state=TimeLimitState(inner=timestep.state, elapsed=elapsed),
            truncated=timestep.truncated | (elapsed >= max_steps),
        )

    return wrap(env, reset, step)


def auto_reset(env: Environment) -> Environment:
    """Starts the next episode in the step that ends one.

    If `terminated | truncated`, the returned state and observation belong to the new episode, while reward and
    flags still belong to the old episode. `info["final_observation"]` always holds the observation before any
    reset, which is needed to bootstrap truncated episodes. Environments with an expensive reset set `reset_ratio`.

    Args:
        env: the environment, unbatched. Its reset receives the key of the step, and its step receives a key
            derived from that key. The derived key is only computed if the step uses it.

    Returns:
        An environment with a `step` that never returns the state of a finished episode.

    Examples:
        >>> env = rollmill.auto_reset(rollmill.make("CartPole-v1"))
    """
    _check_compiled("auto_reset", env, "use it unchanged, because it resets itself")
    restart = _reset_always(env) if env.reset_ratio == 1 else rare_reset(env, env.reset_ratio)

    def step(key: Key, state: State, action: Action, params: Params) -> Timestep:
        timestep = as_timestep(env.name, env.step(jax.random.fold_in(key, STEP_FOLD), state, action, params))
        if "final_observation" in timestep.info:
            raise UsageError(
                f"{env.name} already resets itself, so auto_reset must not be applied twice. hint: leave one "
                "auto_reset out."
            )
        done = jnp.asarray(timestep.terminated | timestep.truncated)
        with operation_scope("reset"):
            observation, state = restart(done, key, params, (timestep.observation, timestep.state))
        info = {**timestep.info, "final_observation": timestep.observation}
        return timestep._replace(observation=observation, state=state, info=info)

    return env._replace(step=step)


def record_final_mask(env: Environment) -> Environment:
    """Adds `info["final_action_mask"]`, the legal actions after the step and before any auto-reset.

    Args:
        env: the environment, unbatched, without auto-reset, with an action mask.
    """
    mask = env.action_mask
    assert mask is not None

    def step(key: Key, state: State, action: Action, params: Params) -> Timestep:
        timestep = as_timestep(env.name, env.step(key, state, action, params))
        return timestep._replace(info={**timestep.info, FINAL_MASK: mask(timestep.state, params)})

    return env._replace(step=step)


def _reset_always(env: Environment) -> Restart:
    """Computes the reset in every step, because a cheap reset costs less than finding out which copies need it."""

    def restart(done: Bool[Array, ""], key: Key, params: Params, now: tuple[Observation, State]) -> Any:
        first_observation, first_state = env.reset(key, params)
        return _select(done, first_observation, now[0]), _select(done, first_state, now[1])

    return restart


def vary(env: Environment, sample: Callable[[Key, Params], Params]) -> Environment:
    """Draws new parameters for each episode (domain randomisation, Tobin et al. 2017, arXiv:1703.06907).

    Args:
        env: the environment, unbatched, without auto-reset.
        sample: maps a key and the environment's parameters to the parameters of an episode, with the same
            structure, shapes and dtypes.

    Returns:
        The environment with a `VariedState`. `step` uses the parameters that `reset` drew.

    Examples:
        >>> def sample(key, params):
        ...     return replace(params, gravity=jax.random.uniform(key, (), minval=8.0, maxval=12.0))
        >>> env = rollmill.vary(rollmill.make("Pendulum-v1"), sample)
    """
    _check_compiled("vary", env, "draw the parameters in the environment's own reset")

    def reset(key: Key, params: Params) -> tuple[Observation, VariedState]:
        sample_key, reset_key = jax.random.split(key)
        episode_params = jax.tree.map(_strongly_typed, sample(sample_key, params))
        observation, inner = env.reset(reset_key, episode_params)
        return observation, VariedState(inner=inner, params=episode_params)

    def step(key: Key, state: VariedState, action: Action, params: Params) -> Timestep:
        timestep = as_timestep(env.name, env.step(key, state.inner, action, state.params))
        return timestep._replace(state=VariedState(inner=timestep.state, params=state.params))

    return wrap(env, reset, step, unwrap=lambda state, params: (state.inner, state.params))


def vectorise(env: Environment, num_envs: int) -> Environment:
    """Batches an environment to `num_envs` copies: keys `[E]`, states, actions and all results `[E, ...]`.

    Parameters may differ between copies. Each leaf of the `params` given to reset and step has
    either the shape of the same leaf in `env.params` (shared by all copies) or that shape with
    a leading axis `E` (one value for each copy), independently of other leaves.

    Args:
        env: the environment, unbatched.
        num_envs: `E`, at least 1.

    Returns:
        The environment with batched functions. Its spaces still describe one copy.

    Raises:
        UsageError: `num_envs` is below 1; or, from the batched functions, a leaf of `params` has
            neither shape, or `params` has another structure than `env.params`.

    Examples:
        >>> env = rollmill.vectorise(rollmill.auto_reset(rollmill.make("CartPole-v1")), 8)
    """
    _check_compiled("vectorise", env, "start(range(n), seed=0) of the environment starts n copies")
    if num_envs < 1:
        raise UsageError(f"vectorise({env.name}, {num_envs}): num_envs must be at least 1.")

    def batched(function: Callable[..., Any], *args: Any, params: Params) -> Any:
        leaves, structure = jax.tree.flatten(params)
        axes = _params_axes(env, params, num_envs)

        def single(args: tuple[Any, ...], leaves: list[Any]) -> Any:
            return function(*args, jax.tree.unflatten(structure, leaves))

        return jax.vmap(single, in_axes=(0, axes), axis_size=num_envs)(args, leaves)

    def reset(keys: KeyArray[Array, " E"], params: Params) -> tuple[Observation, State]:
        return batched(env.reset, keys, params=params)

    def step(keys: KeyArray[Array, " E"], state: State, action: Action, params: Params) -> Timestep:
        return batched(env.step, keys, state, action, params=params)

    def over_copies(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda state, params: batched(function, state, params=params)

    return env._replace(reset=reset, step=step, render=None, draw=None, **_functions_of_state(env, over_copies))


def plannable(env: Environment) -> Environment:
    """Declares that a planner can step an environment from any of its states.

    Its step should depend only on state and action, not on the key, and its state should contain nothing hidden
    from the player. Otherwise a planner would know random outcomes, or the opponent's cards, in advance.

    Args:
        env: the environment as its author wrote it, before transforms that are added around it.

    Returns:
        The environment whose `planning_state` is the state itself. Later transforms remove their own parts from
        the state.
    """
    _check_compiled("plannable", env, "plan in an environment written in JAX")
    return env._replace(
        planning_state=lambda state, params: state,
        planning_params=lambda state, params: params,
        planning_env=env,
    )


def _check_compiled(transform: str, env: Any, alternative: str) -> None:
    """Checks that an environment is made of JAX functions.

    Raises a `UsageError` with the hint `alternative`, in which `{}` is replaced by the environment's name.
    """
    if isinstance(env, HostEnvironment):
        raise UsageError(
            f"{transform} needs an environment written in JAX, but {env.name} is stepped by Python on the host. "
            f"hint: {alternative.format(env.name)}."
        )
    if not isinstance(env, Environment):
        raise UsageError(
            f"{transform} needs an environment, got a {type(env).__name__}. hint: rollmill.make creates an "
            "environment from an id."
        )


def _inner(state: Any, params: Params) -> tuple[State, Params]:
    return state.inner, params


def wrap(
    env: Environment,
    reset: Callable[..., tuple[Observation, Any]],
    step: Callable[..., Timestep],
    *,
    unwrap: Callable[[Any, Params], tuple[State, Params]] = _inner,
) -> Environment:
    """Replaces reset and step of an environment by functions whose state contains the environment's own state.

    All other functions of the environment, such as its action mask, receive the inner state.

    Args:
        env: the inner environment.
        reset: returns the outer state.
        step: receives and returns the outer state.
        unwrap: maps `(state, params)` of the result to the state and the parameters of `env`. Default: takes the
            field `inner` of the state.
    """

    def of_inner(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda state, params: function(*unwrap(state, params))

    shown = {"render": env.render and of_inner(env.render), "draw": env.draw and of_inner(env.draw)}
    return env._replace(reset=reset, step=step, **shown, **_functions_of_state(env, of_inner))


def _functions_of_state(
    env: Environment, lift: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> dict[str, Callable[..., Any] | None]:
    """Returns the optional functions of an environment's state, lifted, or None for missing ones."""
    functions = {
        "action_mask": env.action_mask,
        "active": env.active,
        "central": env.central,
        "to_move": env.to_move,
        "planning_state": env.planning_state,
        "planning_params": env.planning_params,
    }
    return {name: function and lift(function) for name, function in functions.items()}


def _params_axes(env: Environment, params: Params, num_envs: int) -> list[int | None]:
    """Returns the axis of each leaf for `vmap`: 0 for one value for each copy, None for a shared value."""
    expected, structure = jax.tree_util.tree_flatten_with_path(env.params)
    if jax.tree.structure(params) != structure:
        raise UsageError(
            f"{env.name}: params has the structure {jax.tree.structure(params)}, expected the structure of the "
            f"environment's default params, {structure}."
        )
    return [
        _leaf_axis(env.name, jax.tree_util.keystr(path), jnp.shape(shared), jnp.shape(given), num_envs)
        for (path, shared), given in zip(expected, jax.tree.leaves(params), strict=True)
    ]


def _leaf_axis(name: str, path: str, shared: tuple[int, ...], given: tuple[int, ...], num_envs: int) -> int | None:
    if given == shared:
        return None
    if given == (num_envs, *shared):
        return 0
    raise UsageError(
        f"{name}: params{path} has shape {given}, expected {shared} (shared by all copies) or "
        f"{(num_envs, *shared)} (one value for each of the {num_envs} copies)."
    )


def _select(condition: Bool[Array, ""], chosen: PyTree, other: PyTree) -> PyTree:
    return jax.tree.map(lambda c, o: jnp.where(condition, c, o), chosen, other)


def _strongly_typed(leaf: Any) -> Array:
    """Returns an array whose dtype is not weak, even if the leaf was a Python number."""
    return jnp.asarray(leaf, jnp.result_type(leaf))
