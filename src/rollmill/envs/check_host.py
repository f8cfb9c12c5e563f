"""The contract of a `HostEnvironment`, tried on a small vector of copies."""

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from rollmill.core.errors import ContractError
from rollmill.core.spaces import struct
from rollmill.core.types import HostEnvironment

NUM_COPIES = 2
"""Copies that are started: the fewest that run in processes of their own."""


def check_host(env: HostEnvironment, *, seed: int, num_steps: int) -> None:
    """Checks spaces, observations, rewards and flags of a few copies under random actions.

    Raises:
        ContractError: what was found, what was expected, and the way out.
    """
    struct(env.observation_space)
    struct(env.action_space)
    vector = env.make_vector(NUM_COPIES)
    try:
        _check_vector(env, vector)
        _check_run(env, vector, seed, num_steps)
    finally:
        vector.close()


def _check_vector(env: HostEnvironment, vector: VectorEnv) -> None:
    found = {
        "num_envs": (vector.num_envs, NUM_COPIES),
        "single_observation_space": (vector.single_observation_space, env.observation_space),
        "single_action_space": (vector.single_action_space, env.action_space),
        'metadata["autoreset_mode"]': (vector.metadata.get("autoreset_mode"), AutoresetMode.SAME_STEP),
    }
    for what, (value, expected) in found.items():
        if value != expected:
            raise ContractError(
                f"{env.name}: the {what} of make_vector({NUM_COPIES}) is {value}, expected {expected}."
            )


def _check_run(env: HostEnvironment, vector: VectorEnv, seed: int, num_steps: int) -> None:
    observation, _ = vector.reset(seed=seed)
    _check_observation(env, vector, observation, "reset")
    vector.action_space.seed(seed)
    for _ in range(num_steps):
        observation, reward, terminated, truncated, _ = vector.step(vector.action_space.sample())
        _check_observation(env, vector, observation, "step")
        _check_numbers(env, "reward", reward, np.floating)
        _check_numbers(env, "terminated", terminated, np.bool_)
        _check_numbers(env, "truncated", truncated, np.bool_)


def _check_observation(env: HostEnvironment, vector: VectorEnv, observation: Any, what: str) -> None:
    if not vector.observation_space.contains(observation):
        raise ContractError(
            f"{env.name}: {what} returned the observation {observation}, which is not in the space "
            f"{vector.observation_space}: mend one of them (structure, shape, dtype, bounds)."
        )


def _check_numbers(env: HostEnvironment, what: str, found: Any, kind: type[np.generic]) -> None:
    found = np.asarray(found)
    if found.shape != (NUM_COPIES,) or not np.issubdtype(found.dtype, kind) or not np.isfinite(found).all():
        raise ContractError(
            f"{env.name}: {what} is {found} ({found.dtype}{list(found.shape)}), expected {NUM_COPIES} finite "
            f"values of {kind.__name__}, one a copy."
        )
