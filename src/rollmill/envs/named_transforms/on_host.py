"""Applies named transforms to Python objects with the Gymnasium interface, in NumPy."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rollmill.core.spaces import map_space, struct
from rollmill.envs.host.layout import leaves
from rollmill.envs.host.numbers import cast_exactly
from rollmill.envs.named_transforms.definition import Transform


class TransformedObject(gymnasium.Wrapper):
    """A Gymnasium environment to which a named transform is applied.

    `number` is the index of the transform. It makes two transforms of one environment use different random keys.
    """

    def __init__(self, env: gymnasium.Env, transform: Transform, number: int) -> None:
        gymnasium.Wrapper.__init__(self, env)
        self._transform, self._number = transform, number
        self._inner_observations, self._inner_actions = env.observation_space, env.action_space
        self._kinds = list(leaves(env.observation_space, struct(env.observation_space)))
        self._generator = np.random.default_rng()
        self._memory: Any = ()
        self.observation_space, self.action_space = transform.observation_space, transform.action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        """Starts an episode, with a new memory of the transform."""
        if seed is not None:
            self._generator = np.random.default_rng((seed, self._number))
        observation, info = self.env.reset(seed=seed, options=options)
        observed, self._memory = self._transform.begin(np, self._arrays(observation))
        return observed, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        """Takes an action, and repeats it as often as the transform requires."""
        transform = self._transform
        draw = np.float32(self._generator.random(dtype=np.float32)) if transform.draws else None
        taken, memory = transform.act(np, self._memory, action, draw)
        observation, reward, terminated, truncated, info = self._steps(
            map_space(_native, self._inner_actions, taken)
        )
        observed, self._memory = transform.observe(np, memory, self._arrays(observation))
        return observed, transform.reward(np, reward), terminated, truncated, info

    def _steps(self, action: Any) -> tuple[Any, np.float32, bool, bool, dict]:
        total = np.float32(0)
        for _ in range(self._transform.repeats):
            observation, reward, terminated, truncated, info = self.env.step(action)
            total += np.float32(reward)  # pyright: ignore[reportArgumentType]
            if terminated or truncated:
                break
        return observation, total, terminated, truncated, info  # pyright: ignore[reportPossiblyUnbound]

    def _arrays(self, observation: Any) -> Any:
        """Returns the observation as arrays of the space's 32-bit dtypes."""
        parts = leaves(self._inner_observations, observation)
        arrays = [cast_exactly(part, like.dtype) for part, like in zip(parts, self._kinds, strict=True)]
        for array, like in zip(arrays, self._kinds, strict=True):
            if array.shape != like.shape:
                raise ValueError(
                    f"an observation has the shape {array.shape}, but the observation space declares {like.shape}."
                )
        in_order = iter(arrays)
        return map_space(lambda leaf: next(in_order), self._inner_observations)


def _native(space: spaces.Space, action: Any) -> Any:
    """Converts an action to a Python integer for `Discrete`, otherwise to the space's dtype."""
    return int(action) if isinstance(space, spaces.Discrete) else np.asarray(action, space.dtype)
