"""Environments whose observations name the episode, the step and, if Python steps them, the process."""

import contextlib
import itertools
import os
from pathlib import Path

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

import rollmill

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


def counting_jax():
    """Observations are (random number of the episode, step). Episodes are truncated at step 7."""

    def reset(key, params):
        state = jnp.stack([jax.random.uniform(key), jnp.float32(0)])
        return state, state

    def step(key, state, action, params):
        state = state.at[1].add(1)
        no = jnp.zeros((), bool)
        return rollmill.Timestep(state, state, jnp.float32(1), no, state[1] == 7, {})

    space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    return rollmill.Environment(
        "CountingJax-v0", reset, step, observation_space=space, action_space=spaces.Discrete(2)
    )


rollmill.register("CountingJax-v0", counting_jax)
