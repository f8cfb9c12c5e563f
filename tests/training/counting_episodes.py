"""A Gymnasium environment whose observations name the episode, the step and the process."""

import itertools
import os

import gymnasium
import numpy as np
from gymnasium import spaces

NUMBERS = itertools.count()


class Counting(gymnasium.Env):
    """Observations are (number of the episode, step, number of the process). Episodes are truncated at step 7."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.time = next(NUMBERS), 0
        return self._observation(), {}

    def step(self, action):
        self.time += 1
        return self._observation(), 1.0, False, self.time == 7, {}

    def _observation(self):
        return np.array([self.episode, self.time, os.getpid() % 2**20], np.float32)


gymnasium.register("Counting-v0", entry_point=Counting)
