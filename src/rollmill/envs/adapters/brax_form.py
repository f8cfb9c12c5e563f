"""Converts environments with the interface of Brax: `reset(key) -> state`, `step(state, action) -> state`.

MuJoCo Playground has the same interface. The adapter uses environments without a time limit. Rollmill adds the
limit, so that it truncates episodes instead of terminating them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import PyTree

from rollmill.core.types import Action, Environment, Key, Observation, Params, State, Timestep
from rollmill.envs.adapters.promotion import promoting
from rollmill.envs.rare_resets import checked_ratio
from rollmill.envs.transforms import time_limit
from rollmill.gpus.jax_settings import standard_promotion

RESET_RATIO = 16
"""Default reset ratio. A reset solves for the forces of the initial state, which takes between a tenth of a step
and a whole step."""


def from_brax_form(name: str, source: Any, *, episode_length: int, reset_ratio: int) -> Environment:
    """Converts an environment with the interface of Brax, with actions in [-1, 1] and a time limit.

    Args:
        name: name of the environment in messages and runs.
        source: a single environment with `reset(key)`, `step(state, action)` and `action_size`.
        episode_length: steps after which episodes are truncated.
        reset_ratio: see `rollmill.Environment`.
    """

    def reset(key: Key, params: Params) -> tuple[Observation, State]:
        state = source.reset(key)
        return state.obs, state

    def step(key: Key, state: State, action: Action, params: Params) -> Timestep:
        # Some steps write into the dictionaries of the given state, so they get a copy.
        after = source.step(jax.tree.map(lambda leaf: leaf, state), action)
        return Timestep(after.obs, after, after.reward, after.done > 0.5, jnp.asarray(False), dict(after.metrics))

    with standard_promotion():
        env = Environment(
            name=name,
            reset=reset,
            step=step,
            observation_space=_space(jax.eval_shape(source.reset, jax.random.key(0)).obs),
            action_space=spaces.Box(-1.0, 1.0, (source.action_size,), np.float32),
            reset_ratio=checked_ratio(reset_ratio),
        )
        return time_limit(promoting(env), episode_length)


def _space(observation: PyTree[jax.ShapeDtypeStruct]) -> spaces.Space:
    if isinstance(observation, dict):
        return spaces.Dict({name: _space(part) for name, part in observation.items()})
    return spaces.Box(-np.inf, np.inf, observation.shape, np.float32)
