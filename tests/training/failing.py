"""Environments of Gymnasium that fail in ways of their own, each of them in every episode."""

import os
import sys
import time

import gymnasium
import numpy as np
from gymnasium import spaces


class Walk(gymnasium.Env):
    """Ten steps to the end."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == 5:
            self.fail()
        return np.full(2, 0.1, np.float32), 1.0, self.steps == 10, False, {}

    def fail(self):
        """Does nothing here."""


class Raising(Walk):
    def fail(self):
        raise RuntimeError("the arm fell off")


class Exiting(Walk):
    def fail(self):
        os._exit(0)


class Leaving(Walk):
    """Exits the program in its ninth episode. Earlier ones are slow enough for checkpoints to be written."""

    episodes = 0

    def reset(self, *, seed=None, options=None):
        self.episodes += 1
        return super().reset(seed=seed)

    def fail(self):
        if self.episodes == 9:
            sys.exit(7)
        time.sleep(0.1)


class Hanging(Walk):
    def fail(self):
        time.sleep(10**6)  # it hangs here


class Dividing(Walk):
    def step(self, action):
        observation, *rest = super().step(action)
        return observation * (np.nan if self.steps == 3 else 1.0), *rest


for kind in (Walk, Raising, Exiting, Leaving, Hanging, Dividing):
    gymnasium.register(f"Failing-{kind.__name__}-v0", kind)
