"""An image environment that costs next to nothing, and notes when its steps happen."""

import time

import gymnasium
import numpy as np

SHAPE = (84, 84, 4)
"""Rows, columns and channels: four gray frames, as Atari's usual wrappers stack them."""

ACTIONS = 6
EPISODE_STEPS = 200


class Images(gymnasium.Env):
    """Shows sixteen random images in turn; the reward is 1 for the action that the image's number asks for."""

    observation_space = gymnasium.spaces.Box(0, 255, SHAPE, np.uint8)
    action_space = gymnasium.spaces.Discrete(ACTIONS)
    metadata = {"render_modes": []}

    def __init__(self, times: list[float] | None = None):
        self._frames = np.random.default_rng(0).integers(0, 256, (16, *SHAPE), np.uint8)
        self._times = times
        self._steps = 0

    def reset(self, *, seed=None, options=None):
        """Begins an episode with any of the images."""
        super().reset(seed=seed)
        self._episode_steps = 0
        self._frame = int(self.np_random.integers(len(self._frames)))
        return self._frames[self._frame], {}

    def step(self, action):
        """Shows the next image."""
        if self._times is not None:
            self._times.append(time.perf_counter())
        reward = float(action == self._frame % ACTIONS)
        self._episode_steps += 1
        self._frame = (self._frame + 1) % len(self._frames)
        ended = self._episode_steps == EPISODE_STEPS
        return self._frames[self._frame], reward, ended, False, {}
