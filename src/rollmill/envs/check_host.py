"""Checks the contract of a `HostEnvironment` by stepping a few of its environments.

Shape letter: `n` environments.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.vector.utils import batch_space
from jaxtyping import PyTree

from rollmill.core.errors import ContractError, EnvironmentFailed, NonFiniteError
from rollmill.core.spaces import contains, space_text, struct
from rollmill.core.types import HostEnvironment, HostVector
from rollmill.envs.agents import possible_masks
from rollmill.envs.host import replace_illegal_actions, step_struct
from rollmill.envs.host.numbers import find_non_finite

NUM_COPIES = 2
"""Number of copies to check, which is the smallest number that can reveal a wrong order."""


def check_host(env: HostEnvironment, *, seed: int, num_steps: int) -> int:
    """Checks spaces, observations, rewards, flags and counts of a host environment under random actions.

    Returns the number of episodes that ended. Raises a `ContractError` if the contract is violated, with the
    expected value and a hint, or if the environment raises an exception, with the line.
    """
    struct(env.observation_space)
    struct(env.action_space)
    vector = env.start(range(NUM_COPIES), seed=seed)
    try:
        return _check_run(env, vector, seed, num_steps)
    except (EnvironmentFailed, NonFiniteError) as error:
        raise ContractError(str(error)) from error
    finally:
        vector.close()


def _check_run(env: HostEnvironment, vector: HostVector, seed: int, num_steps: int) -> int:
    """Checks the results of reset and random steps, and returns the number of finished episodes."""
    expected = step_struct(env, NUM_COPIES)
    step = vector.reset()
    _check_failures(env, vector)
    _check_types(env, "reset", step, expected)
    _check_observation(env, "reset", step.observation)
    _check_finite(env, "reset", step.observation)
    actions, rng = batch_space(env.action_space, NUM_COPIES), np.random.default_rng(seed)
    actions.seed(seed)
    ended = 0
    for number in range(num_steps):
        mask = step.info.get("action_mask")
        _check_legal_actions(env, mask, number)
        step = vector.step(replace_illegal_actions(env.action_space, actions.sample(), mask, rng))
        _check_failures(env, vector)
        _check_types(env, "step", step, expected)
        _check_observation(env, "step", step.observation)
        _check_observation(env, "step", step.info["final_observation"])
        _check_finite(env, "step", step.observation, step.reward)
        _check_finite(env, "step", step.info["final_observation"])
        ended += int(np.sum(step.terminated | step.truncated))
    return ended


def _check_failures(env: HostEnvironment, vector: HostVector) -> None:
    for failure in vector.drain_failures():
        raise ContractError(f"{env.name}: {failure.doing} raised {failure.error}\n  at {failure.line}")


def _check_types(env: HostEnvironment, what: str, step: PyTree, expected: PyTree) -> None:
    types = jax.tree.map(lambda leaf: f"{np.asarray(leaf).dtype}{list(np.shape(leaf))}", step)
    expected_types = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", expected)
    if types != expected_types:
        raise ContractError(
            f"{env.name}: {what} of {NUM_COPIES} copies returned {types}, expected {expected_types}."
        )


def _check_legal_actions(env: HostEnvironment, mask: PyTree[np.ndarray] | None, number: int) -> None:
    if mask is None:
        return
    possible = possible_masks(env)
    for path, legal in jax.tree_util.tree_leaves_with_path(mask):
        if not (legal & (possible[path[0].key] if path else possible)).any(axis=-1).all():
            raise ContractError(
                f"{env.name}: action_mask{jax.tree_util.keystr(path)} allows no action before step {number}, "
                "expected at least one. hint: end the episode if no action is left."
            )


def _check_finite(env: HostEnvironment, what: str, observation: PyTree, reward: PyTree | None = None) -> None:
    number = find_non_finite(env.observation_space, observation, reward)
    if number is not None:
        raise ContractError(
            f"{env.name}: {what} returned {number.field} = {number.value} in copy {number.row}, expected a finite "
            "number."
        )


def _check_observation(env: HostEnvironment, what: str, observation: PyTree[np.ndarray]) -> None:
    for i in range(NUM_COPIES):
        row: Any = jax.tree.map(lambda leaf, i=i: jnp.asarray(leaf[i]), observation)
        if not contains(env.observation_space, row):
            raise ContractError(
                f"{env.name}: {what} returned the observation {row}, which is not in the space "
                f"{space_text(env.observation_space)}. hint: fix the observation (NaN, bounds) or the space."
            )
