"""Checks an environment's contract by a rollout of random actions.

Legend: `T` steps, `R` resets.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key as KeyArray, PyTree

from rollmill.core.errors import ContractError
from rollmill.core.spaces import contains, space_text
from rollmill.core.types import Action, Environment, Key, Observation, Params, State, Timestep, is_key
from rollmill.core.user_frame import attribute_to_user_code
from rollmill.envs.agents import legal_actions, possible_masks, random_action
from rollmill.envs.transforms import TimeLimitState
from rollmill.lowerings.threefry import small_programs

NUM_RESETS = 128
"""Number of resets that sample the distribution of first states."""


class CheckedSteps(NamedTuple):
    """Arrays of `T` consecutive steps of one environment, with leaves `[T, ...]`, which the checks examine."""

    keys: KeyArray[Array, " T"]
    state: State
    """State before the step."""
    action: Action
    mask: PyTree[Bool[Array, "T ..."]]
    timestep: Timestep
    """Result of the step, before any reset."""
    inside: Bool[Array, " T"]
    """True if the observation is in the observation space."""


class Resets(NamedTuple):
    """Results of `R` resets of one environment, with leaves `[R, ...]`."""

    observation: Observation
    state: State
    inside: Bool[Array, " R"]
    """True if the observation is in the observation space."""


class PlayedSteps(NamedTuple):
    """Steps of one environment under random actions, and many first states to compare them with."""

    resets: Resets
    """Results of 128 resets, and of the resets during the steps."""
    steps: CheckedSteps
    first_step: int = 0
    """Number of the first of the steps, for messages."""


def rollout(env: Environment, seed: int, num_steps: int) -> PlayedSteps:
    """Runs an environment for `num_steps` random legal actions, and resets it after each episode.

    Raises a `ContractError` if the environment raised an exception.
    """
    key = jax.random.key(seed)
    with attribute_to_user_code(f"{env.name}: a rollout"):
        # The check compiles a program for itself, which is not part of a run.
        play = jax.jit(lambda key, params: _rollout(env, key, params, num_steps))  # noqa: TID251
        with small_programs():
            return PlayedSteps(*play(key, env.params))


def first_end(env: Environment, record: PlayedSteps, seed: int, max_steps: int) -> tuple[PlayedSteps, int]:
    """Continues a rollout's unfinished episode to its end, with random legal actions.

    It stops early at a step that violates the contract, so that later checks find the violation, and after
    `max_steps` steps without an end. Returns a rollout with only the last step, and the number of further steps.
    """
    key = jax.random.fold_in(jax.random.key(seed), max_steps)
    last = jax.tree.map(lambda leaf: leaf[-1], record.steps)
    play = jax.jit(lambda key, params: _until_end(env, key, params, last, max_steps))  # noqa: TID251, as above
    with small_programs():
        taken, number = play(key, env.params)
    more, played = int(number), record.first_step + len(record.steps.inside)
    steps = jax.tree.map(lambda leaf: leaf[None], taken)
    return record._replace(steps=steps, first_step=played + more - 1), more


def check_finite(env: Environment, record: PlayedSteps) -> None:
    """Checks that observations, rewards and the results of `central` contain neither NaN nor infinity."""
    name, steps = env.name, record.steps
    _check_numbers(name, "observation", record.resets.observation, "after reset number", 0)
    _check_numbers(name, "observation", steps.timestep.observation, "after step number", record.first_step)
    for path, leaf in jax.tree_util.tree_leaves_with_path(steps.timestep.reward):
        finite = _rows_finite(leaf)
        if not finite.all():
            first = int(np.argmin(finite))
            where, number = jax.tree_util.keystr(path), record.first_step + first
            raise ContractError(f"{name}: the reward{where} is {leaf[first]} in step {number}, expected a number.")
    if env.central is not None:
        central = jax.vmap(env.central, in_axes=(0, None))(steps.state, env.params)
        _check_numbers(name, "the result of central", central, "before step number", record.first_step)


def check_bounds(env: Environment, record: PlayedSteps) -> None:
    """Checks that every observation is in the observation space."""
    parts: tuple[tuple[str, int, Any, Any], ...] = (
        ("after reset number", 0, record.resets.inside, record.resets.observation),
        ("after step number", record.first_step, record.steps.inside, record.steps.timestep.observation),
    )
    for when, start, inside, observations in parts:
        if not np.all(inside):
            first = int(np.argmin(inside))
            observation = jax.tree.map(lambda leaf, first=first: np.asarray(leaf[first]).tolist(), observations)
            raise ContractError(
                f"{env.name}: the observation {when} {start + first} is {observation}, outside of "
                f"observation_space {space_text(env.observation_space)}. hint: widen the bounds of the space, "
                "or clip the observation."
            )


def check_legal_actions(env: Environment, record: PlayedSteps) -> None:
    """Checks that an action mask always allows at least one choice for each action component."""
    if env.action_mask is None:
        return
    possible = possible_masks(env)
    for path, mask in jax.tree_util.tree_leaves_with_path(record.steps.mask):
        legal = np.asarray(mask) & (possible[path[0].key] if path else possible)
        has_legal = legal.any(axis=-1).reshape(len(legal), -1).all(axis=1)
        if not has_legal.all():
            number = record.first_step + int(np.argmin(has_legal))
            raise ContractError(
                f"{env.name}: action_mask{jax.tree_util.keystr(path)} allows no action before step {number}, "
                "expected at least one. hint: end the episode if no action is left."
            )


def check_to_move(env: Environment, record: PlayedSteps) -> None:
    """Checks that `to_move`, if any, is player 0 or player 1 before every step."""
    if env.to_move is None:
        return
    players = np.asarray(jax.vmap(env.to_move, in_axes=(0, None))(record.steps.state, env.params))
    known = (players == 0) | (players == 1)
    if not known.all():
        first = int(np.argmin(known))
        number = record.first_step + first
        raise ContractError(f"{env.name}: to_move is {players[first]} before step {number}, expected 0 or 1.")


def check_no_auto_reset(env: Environment, record: PlayedSteps) -> None:
    """Checks that the last step of an episode returns its final state, not the next episode's first state.

    Auto-reset is reported only if all three hold at every episode end, or at every termination not caused by a
    time limit: the state before the step differs from all first states, the state after it resembles a first
    state, and the observation after it resembles a first observation.
    """
    terminated = np.asarray(record.steps.timestep.terminated)
    done = terminated | np.asarray(record.steps.timestep.truncated)
    if _return_first_ones(record, done) or _return_first_ones(_without_clock(record), terminated):
        raise ContractError(
            f"{env.name}: every step that ended an episode returned a state and an observation like those of "
            "reset, expected the final ones of the episode. hint: leave resets to rollmill.envs.auto_reset."
        )


def _return_first_ones(record: PlayedSteps, ending: np.ndarray) -> bool:
    """Returns True if the steps that end an episode return states like those after a reset.

    At least one of these steps must have begun in a state that differs from a first state.
    """
    steps, resets = record.steps, record.resets
    advanced = ending & ~_resembles(steps.state, resets.state, len(ending))
    is_first = _resembles(steps.timestep.state, resets.state, len(ending))
    is_first &= _resembles(steps.timestep.observation, resets.observation, len(ending))
    return bool(advanced.any() and is_first[ending].all())


def _without_clock(record: PlayedSteps) -> PlayedSteps:
    """Returns the record without the step counter of a time limit.

    An environment that resets itself does not reset this counter, which would hide the auto-reset.
    """

    def without(state: State) -> State:
        inner = state
        while isinstance(inner, TimeLimitState):
            inner = inner.inner
        return inner

    steps, resets = record.steps, record.resets
    timestep = steps.timestep._replace(state=without(steps.timestep.state))
    return PlayedSteps(
        resets._replace(state=without(resets.state)), steps._replace(state=without(steps.state), timestep=timestep)
    )


def check_vmapped(env: Environment, record: PlayedSteps) -> None:
    """Checks that steps of an environment under `jax.vmap` return the same results as single steps."""
    steps = record.steps
    with attribute_to_user_code(f"{env.name}: step under jax.vmap"):
        batched = _step_all(env, steps.keys, steps.state, steps.action)
    different = _first_difference(batched, steps.timestep)
    if different is not None:
        raise ContractError(
            f"{env.name}: Timestep{different} differs between a single step and a step under jax.vmap, expected "
            "the same values. hint: look for operations that mix environments, or for custom_vmap."
        )


def check_planning(env: Environment, record: PlayedSteps) -> None:
    """Checks that a step from the planning state, with another key, returns the same results as the original step.

    Environments with transforms are skipped, because their planning state is only a part of their state.
    """
    steps = record.steps
    if env.planning_state is None:
        return
    states = jax.vmap(env.planning_state, in_axes=(0, None))(steps.state, env.params)
    if jax.tree.structure(states) != jax.tree.structure(steps.state):
        return
    keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(steps.keys, 1)
    with attribute_to_user_code(f"{env.name}: step from planning_state"):
        planned = _step_all(env, keys, states, steps.action)
    different = _first_difference(planned, steps.timestep)
    if different is not None:
        raise ContractError(
            f"{env.name}: Timestep{different} differs between a step and the same step from planning_state with "
            "another key, expected no difference. hint: leave planning_state out if steps are random or depend "
            "on what a player does not know."
        )


def _rollout(env: Environment, key: Key, params: Params, num_steps: int) -> tuple[Resets, CheckedSteps]:
    first_key, resets_key, steps_key = jax.random.split(key, 3)

    def one_reset(key: Key) -> Resets:
        observation, state = env.reset(key, params)
        return Resets(observation, state, contains(env.observation_space, observation))

    def one_step(state: State, key: Key) -> tuple[State, tuple[Resets, CheckedSteps]]:
        step_key, reset_key = jax.random.split(key)
        taken, reset = _random_step(env, params, state, step_key), one_reset(reset_key)
        ends = _ends(taken.timestep)
        next_state = jax.tree.map(lambda new, old: jnp.where(ends, new, old), reset.state, taken.timestep.state)
        return next_state, (reset, taken)

    first = one_reset(first_key)
    _, (between, steps) = jax.lax.scan(one_step, first.state, jax.random.split(steps_key, num_steps))
    many = jax.vmap(one_reset)(jax.random.split(resets_key, NUM_RESETS))
    first = jax.tree.map(lambda leaf: leaf[None], first)
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), many, first, between), steps


def _until_end(
    env: Environment, key: Key, params: Params, last: CheckedSteps, max_steps: int
) -> tuple[CheckedSteps, Int[Array, ""]]:
    """Returns the step that ends an episode, or the last of `max_steps` steps, and the number of steps taken."""

    def goes_on(so_far: tuple[CheckedSteps, Int[Array, ""]]) -> Bool[Array, ""]:
        taken, number = so_far
        return ~_ends(taken.timestep) & (number < max_steps) & _is_sound(env, params, taken)

    def one_more(so_far: tuple[CheckedSteps, Int[Array, ""]]) -> tuple[CheckedSteps, Int[Array, ""]]:
        taken, number = so_far
        step_key = jax.random.fold_in(key, number)
        return _random_step(env, params, taken.timestep.state, step_key), number + 1

    return jax.lax.while_loop(goes_on, one_more, (last, jnp.int32(0)))


def _random_step(env: Environment, params: Params, state: State, key: Key) -> CheckedSteps:
    """Takes one step with a random legal action."""
    action_key, step_key = jax.random.split(key)
    mask = legal_actions(env, state, params)
    action = random_action(action_key, env, mask)
    timestep = env.step(step_key, state, action, params)
    return CheckedSteps(
        step_key, state, action, mask, timestep, contains(env.observation_space, timestep.observation)
    )


def _is_sound(env: Environment, params: Params, taken: CheckedSteps) -> Bool[Array, ""]:
    """Returns False if a check of single steps would fail for this step."""
    central = () if env.central is None else env.central(taken.state, params)
    numbers = jax.tree.leaves((taken.timestep.observation, taken.timestep.reward, central))
    sound = [taken.inside, *(jnp.all(jnp.isfinite(leaf)) for leaf in numbers)]
    if env.action_mask is not None:
        possible = possible_masks(env)
        masks = taken.mask.items() if isinstance(taken.mask, dict) else [(None, taken.mask)]
        sound += [jnp.all(jnp.any(mask & _possible(possible, name), axis=-1)) for name, mask in masks]
    if env.to_move is not None:
        player = env.to_move(taken.state, params)
        sound.append((player == 0) | (player == 1))
    return jnp.all(jnp.stack(sound))


def _possible(masks: PyTree[np.ndarray], kind: str | None) -> np.ndarray:
    """Returns the mask of all choices of a kind of agents, or of the single agent for None."""
    return masks if kind is None else masks[kind]


def _ends(timestep: Timestep) -> Bool[Array, ""]:
    return timestep.terminated | timestep.truncated


def _step_all(env: Environment, keys: KeyArray[Array, " T"], states: State, actions: Action) -> Timestep:
    """Takes one step from each of T states at once."""
    lifted = jax.vmap(env.step, in_axes=(0, 0, 0, None))
    return jax.jit(lifted)(keys, states, actions, env.params)  # noqa: TID251, as above


def _first_difference(results: Timestep, expected: Timestep) -> str | None:
    """Returns the path of the first leaf that differs by more than rounding, or None if all are equal."""
    for (path, right), result in zip(
        jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(results), strict=True
    ):
        if not _is_close(_data(result), _data(right)):
            return jax.tree_util.keystr(path)
    return None


def _check_numbers(name: str, what: str, values: Any, when: str, start: int) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(values):
        finite = _rows_finite(leaf)
        if not finite.all():
            first = int(np.argmin(finite))
            value = "NaN" if np.isnan(np.asarray(leaf[first], np.float64)).any() else "infinite"
            where = f"{what}{jax.tree_util.keystr(path)}"
            raise ContractError(
                f"{name}: {where} is {value} {when} {start + first}, expected a finite number. hint: look for a "
                "division by zero, the root of a negative number, or a missing clip."
            )


def _rows_finite(leaf: Array) -> np.ndarray:
    """Returns for each row whether all of its elements are finite."""
    return np.all(np.isfinite(np.asarray(leaf, np.float64)).reshape(len(leaf), -1), axis=1)


def _resembles(values: Any, firsts: Any, num_values: int) -> np.ndarray:
    """Returns for each of T values whether all its elements are in the range of the R first values."""
    resembles = np.ones(num_values, bool)
    for value, first in zip(jax.tree.leaves(values), jax.tree.leaves(firsts), strict=True):
        if is_key(value.dtype):
            continue
        value, first = np.asarray(value, np.float64), np.asarray(first, np.float64)
        low, high = first.min(axis=0), first.max(axis=0)
        margin = 0.05 * (high - low)
        inside = (value >= low - margin) & (value <= high + margin)
        resembles &= inside.reshape(len(value), -1).all(axis=1)
    return resembles


def _is_close(result: np.ndarray, expected: np.ndarray) -> bool:
    """Returns whether both are equal up to rounding, relative to the largest number of a floating-point leaf."""
    if not np.issubdtype(expected.dtype, np.floating):
        return np.array_equal(result, expected)
    finite = np.abs(expected[np.isfinite(expected)])
    scale = float(finite.max()) if finite.size else 0.0
    return np.allclose(result, expected, rtol=1e-4, atol=1e-5 * scale, equal_nan=True)


def _data(leaf: Array) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf.dtype) else leaf)
