"""Environments of Gymnasium whose steps compute, wait, or draw pictures, for benchmarks/advice.py."""

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

EPISODE = 200


class Counting(gymnasium.Env):
    """Counts its steps, and does something in each of them.

    Args:
        waits: seconds that a step sleeps.
        sums: numbers that a step adds in Python.
        pictures: whether it shows pictures, and not numbers.
    """

    action_space = Discrete(2)

    def __init__(self, waits: float = 0.0, sums: int = 0, pictures: bool = False) -> None:
        self._waits, self._sums = waits, sums
        self._time = 0
        shape, dtype = ((84, 84, 4), np.uint8) if pictures else ((4,), np.float32)
        self.observation_space = Box(0, 255 if pictures else 1, shape, dtype)
        self._pictures = np.random.default_rng(0).integers(0, 255, (8, *shape)).astype(dtype)
        if not pictures:
            self._pictures /= 255

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Begins an episode."""
        super().reset(seed=seed)
        self._time = 0
        return self._pictures[0], {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Counts on; the action is the reward."""
        if self._waits:
            time.sleep(self._waits)
        sum(number * number for number in range(self._sums))
        self._time += 1
        return self._pictures[self._time % 8], float(action), self._time >= EPISODE, False, {}


gymnasium.register("Waiting-v0", lambda: Counting(waits=0.001))
gymnasium.register("Reckoning-v0", lambda: Counting(sums=4_000))
gymnasium.register("Pictures-v0", lambda: Counting(pictures=True))
