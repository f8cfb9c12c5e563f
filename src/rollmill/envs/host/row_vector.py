"""Base class of host environments that one simulator steps together, as rows of its arrays.

Shape letter: `n` environments.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from jaxtyping import PyTree

from rollmill.core.types import HostEnvironment, HostFailure, HostStep
from rollmill.envs.host.copies import environment_seed
from rollmill.envs.host.episode_sums import RunningSums
from rollmill.envs.host.layout import step_struct
from rollmill.envs.host.numbers import find_non_finite, non_finite_error


class RowVector(ABC):
    """A `core.types.HostVector` whose environments are the rows of one simulator, with their global indices."""

    def __init__(
        self, env: HostEnvironment, indices: Sequence[int], *, seed: int, generation: int, gamma: float | None
    ) -> None:
        self._name, self._indices = env.name, tuple(indices)
        self._observation_space, self._action_space = env.observation_space, env.action_space
        self._struct = step_struct(env, len(indices), discounted=gamma is not None)
        self._sums = RunningSums(len(indices), gamma)
        self._seeds = tuple(environment_seed(seed, index, generation=generation) for index in indices)

    @property
    def num_envs(self) -> int:
        """Number of environments, `n`."""
        return len(self._seeds)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of the environments. A Gymnasium vector environment receives only the first seed."""
        return self._seeds

    @abstractmethod
    def reset(self, *, out: HostStep | None = None) -> HostStep:
        """Starts an episode in each environment."""

    @abstractmethod
    def step(self, actions: PyTree[np.ndarray], *, out: HostStep | None = None) -> HostStep:
        """Applies one action to each environment, and resets those whose episode ended."""

    @abstractmethod
    def close(self) -> None:
        """Closes the simulator."""

    def drain_failures(self) -> list[HostFailure]:
        """Returns an empty list, because an error in one row of the simulator ends the whole run."""
        return []

    def _check_finite(self, observation: PyTree[np.ndarray], reward: np.ndarray | None) -> None:
        """Raises NonFiniteError if an environment returned NaN or infinity in this step, or in a reset."""
        number = find_non_finite(self._observation_space, observation, reward)
        if number is not None:
            i, step = number.row, 0 if reward is None else self._sums.step_of(number.row) + 1
            raise non_finite_error(self._name, number, index=self._indices[i], step=step, seed=self._seeds[i])
