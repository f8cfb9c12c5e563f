"""Episode accounting for host environments: as `envs.accounting`, for a batch of NumPy arrays."""

import numpy as np
from jaxtyping import Bool

from rollmill.core.types import HostStep


class RunningSums:
    """Returns, lengths and discounted returns of the current episodes, `[n]` each."""

    def __init__(self, num_envs: int, gamma: float | None) -> None:
        self._returns = np.zeros(num_envs, np.float32)
        self._lengths = np.zeros(num_envs, np.int32)
        self._discounted = np.zeros(num_envs, np.float32)
        self._gamma = None if gamma is None else np.float32(gamma)

    def step_of(self, i: int) -> int:
        """Number of steps so far in the episode of environment `i`."""
        return int(self._lengths[i])

    def restart(self) -> None:
        """Resets all sums, as all episodes begin."""
        for sums in (self._returns, self._lengths, self._discounted):
            sums[:] = 0

    def add(self, step: HostStep, done: Bool[np.ndarray, " n"]) -> None:
        """Adds a step, writes the sums including it to `step.info`, and resets those of ended episodes."""
        self._returns += step.reward
        self._lengths += 1
        step.info["episode_return"][:] = self._returns
        step.info["episode_length"][:] = self._lengths
        self._returns[done] = 0
        self._lengths[done] = 0
        if self._gamma is not None:
            self._discounted *= self._gamma
            self._discounted += step.reward
            step.info["discounted_return"][:] = self._discounted
            self._discounted[done] = 0
