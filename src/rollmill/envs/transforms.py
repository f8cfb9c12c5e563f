"""Transforms: functions from an environment to an environment, each of which adds one thing.

Legend: `E` environments. They compose from the inside out, for one

    vectorise(auto_reset(vary(time_limit(env, 500), sample)), 1024)

so that each episode, and not the whole run, has its own time limit and its own parameters.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree
from jaxtyping import Key as KeyArray

from rollmill.core.errors import UsageError
from rollmill.core.fields import fit
from rollmill.core.types import Action, Environment, HostEnvironment, Key, Observation, Params, State, Timestep

OF_THE_STEP = 0x5354_4550
"""What makes the key of a step that may be followed by a reset; no draw of a reset counts as far."""


class TimeLimitState(eqx.Module):
    """The state of a time-limited environment: that of the environment inside, and its age."""

    inner: State
    elapsed: Int[Array, ""]


class VariedState(eqx.Module):
    """The state of a varied environment: that of the environment inside, and this episode's parameters."""

    inner: State
    params: Params


def time_limit(env: Environment, max_steps: int) -> Environment:
    """Truncates every episode at its `max_steps`-th step.

    As in Gymnasium's `TimeLimit`, `truncated` is True at the limit even where `terminated` is True as
    well; `terminated` is left as it is, and it alone decides that no value follows.

    Args:
        env: the environment, unbatched.
        max_steps: the longest episode, in steps; at least 1.

    Returns:
        The environment with a `TimeLimitState` around its state.

    Raises:
        UsageError: `max_steps` is below 1.
    """
    _check_compiled("time_limit", env, 'rollmill.make("{}", max_episode_steps=N)')
    max_steps = fit("max_steps", int, max_steps)
    if max_steps < 1:
        raise UsageError(f"time_limit({env.name}, {max_steps}): max_steps must be at least 1.")

    def reset(key: Key, params: Params) -> tuple[Observation, TimeLimitState]:
        observation, inner = env.reset(key, params)
        return observation, TimeLimitState(inner=inner, elapsed=jnp.zeros((), jnp.int32))

    def step(key: Key, state: TimeLimitState, action: Action, params: Params) -> Timestep:
        timestep = env.step(key, state.inner, action, params)
        elapsed = state.elapsed + 1
        return timestep._replace(
            state=TimeLimitState(inner=timestep.state, elapsed=elapsed),
            truncated=timestep.truncated | (elapsed >= max_steps),
        )

    return wrap(env, reset, step)


def auto_reset(env: Environment) -> Environment:
    """Starts the next episode in the step that ends one.

    Where `terminated | truncated`, the returned state and observation are those of the new episode;
    reward and flags are still those of the old one. `info["final_observation"]` always holds the
    observation before any reset, which is the one to bootstrap from where `truncated`.

    Args:
        env: the environment, unbatched. The reset has the step's key, and the step one that is made from it: where
            a step draws nothing, as most do, only the reset's numbers are computed.

    Returns:
        The environment, whose `step` never returns a finished state.
    """
    _check_compiled("auto_reset", env, "use it as it is; it resets itself")

    def step(key: Key, state: State, action: Action, params: Params) -> Timestep:
        timestep = env.step(jax.random.fold_in(key, OF_THE_STEP), state, action, params)
        if "final_observation" in timestep.info:
            raise UsageError(f"{env.name} resets itself already: leave out one of the two auto_reset.")
        observation, fresh = env.reset(key, params)
        done = jnp.asarray(timestep.terminated | timestep.truncated)
        return timestep._replace(
            observation=_select(done, observation, timestep.observation),
            state=_select(done, fresh, timestep.state),
            info={**timestep.info, "final_observation": timestep.observation},
        )

    return env._replace(step=step)


def vary(env: Environment, sample: Callable[[Key, Params], Params]) -> Environment:
    """Draws each episode's parameters anew (domain randomisation; Tobin et al. 2017, arXiv:1703.06907).

    Args:
        env: the environment, unbatched, without auto-reset.
        sample: maps a key and the environment's parameters to this episode's, of the same structure,
            shapes and dtypes.

    Returns:
        The environment with a `VariedState`; `step` uses the parameters that `reset` drew.
    """
    _check_compiled("vary", env, "draw what varies in the environment's own reset")

    def reset(key: Key, params: Params) -> tuple[Observation, VariedState]:
        sample_key, reset_key = jax.random.split(key)
        drawn = jax.tree.map(_strongly_typed, sample(sample_key, params))
        observation, inner = env.reset(reset_key, drawn)
        return observation, VariedState(inner=inner, params=drawn)

    def step(key: Key, state: VariedState, action: Action, params: Params) -> Timestep:
        timestep = env.step(key, state.inner, action, state.params)
        return timestep._replace(state=VariedState(inner=timestep.state, params=state.params))

    return wrap(env, reset, step, unwrap=lambda state, params: (state.inner, state.params))


def vectorise(env: Environment, num_envs: int) -> Environment:
    """Runs `num_envs` copies at once: keys `[E]`, states, actions and all results `[E, ...]`.

    Parameters may differ from copy to copy. Each leaf of the `params` that reset and step are given
    has either the shape of the same leaf in `env.params` (all copies share it) or that shape with
    a leading axis `E` (one value a copy); this is decided leaf by leaf.

    Args:
        env: the environment, unbatched.
        num_envs: `E`, at least 1.

    Returns:
        The environment with batched functions. Its spaces stay those of one copy.

    Raises:
        UsageError: `num_envs` is below 1; or, from the batched functions, a leaf of `params` has
            neither shape, or `params` has another structure than `env.params`.
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

    return env._replace(reset=reset, step=step, **_functions_of_state(env, over_copies))


def _check_compiled(transform: str, env: Any, otherwise: str) -> None:
    """Refuses environments that are not made of JAX functions.

    Raises:
        UsageError: with what to do `otherwise`, in which the environment's name takes the place of braces.
    """
    if isinstance(env, HostEnvironment):
        raise UsageError(
            f"{transform} takes an environment of JAX functions; {env.name} is stepped by Python on the host. "
            f"hint: {otherwise.format(env.name)}."
        )
    if not isinstance(env, Environment):
        raise UsageError(
            f"{transform} takes an environment, got a {type(env).__name__}. "
            "hint: rollmill.make makes one from an id."
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
    """An environment with another reset and step, whose state holds that of `env`.

    Its action mask, its active agents and its central features are those of the state inside.

    Args:
        env: the environment inside.
        reset: returns the state around that of `env`.
        step: receives and returns the state around that of `env`.
        unwrap: maps `(state, params)` to the state and the parameters of `env`; the default is for states
            that hold it as `inner`.
    """

    def of_inner(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda state, params: function(*unwrap(state, params))

    return env._replace(reset=reset, step=step, **_functions_of_state(env, of_inner))


def _functions_of_state(
    env: Environment, lift: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> dict[str, Callable[..., Any] | None]:
    """What an environment tells of its state besides observations, lifted; None where it tells nothing."""
    found = {"action_mask": env.action_mask, "active": env.active, "central": env.central}
    return {name: function and lift(function) for name, function in found.items()}


def _params_axes(env: Environment, params: Params, num_envs: int) -> list[int | None]:
    """The axis of each leaf to map over: 0 where every copy has its own value, None where they share it."""
    expected, structure = jax.tree_util.tree_flatten_with_path(env.params)
    if jax.tree.structure(params) != structure:
        raise UsageError(
            f"{env.name}: params has the structure {jax.tree.structure(params)}, "
            f"expected {structure}, that of the environment's own params."
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
        f"{name}: params{path} has shape {given}, expected {shared} (shared by all copies) "
        f"or {(num_envs, *shared)} (one value for each of the {num_envs} copies)."
    )


def _select(condition: Bool[Array, ""], chosen: PyTree, other: PyTree) -> PyTree:
    return jax.tree.map(lambda c, o: jnp.where(condition, c, o), chosen, other)


def _strongly_typed(leaf: Any) -> Array:
    """An array that keeps its dtype in arithmetic, also where the leaf was a Python number."""
    return jnp.asarray(leaf, jnp.result_type(leaf))
