"""A Gymnasium environment whose observations name the episode, the step and the process."""

import contextlib
import itertools
import os
from pathlib import Path

import gymnasium
import numpy as np
from gymnasium import spaces

NUMBERS = itertools.count()


class Counting(gymnasium.Env):
    """Observations are (number of the episode, step, number of the process). Episodes are truncated at step 7.

    If `marker` is given, one process ends itself in the third episode of an environment, and creates this file.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, marker=None):
        self.marker, self.episodes = None if marker is None else Path(marker), 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.time = next(NUMBERS), 0
        self.episodes += 1
        return self._observation(), {}

    def step(self, action):
        self.time += 1
        if self.marker is not None and (self.episodes, self.time) == (3, 5):
            with contextlib.suppress(FileExistsError):
                self.marker.touch(exist_ok=False)  # only one of two processes at the same step
                os._exit(1)
        return self._observation(), 1.0, False, self.time == 7, {}

    def _observation(self):
        return np.array([self.episode, self.time, os.getpid() % 2**20], np.float32)


gymnasium.register("Counting-v0", entry_point=Counting)
