"""Base class of host environments that consist of Python objects, stepped one after the other.

Shape letter: `n` environments.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from rollmill.core.errors import UsageError
from rollmill.core.types import HostEnvironment, HostFailure, HostStep
from rollmill.envs.host.actions import fit_to_space
from rollmill.envs.host.copies import Copies
from rollmill.envs.host.episode_sums import AgentSums, RunningSums
from rollmill.envs.host.layout import allocate, copy_batch, write_reset
from rollmill.envs.host.numbers import find_non_finite, non_finite_error


class OneByOne(ABC):
    """Base class of environment batches that step one Python object after another (a `core.types.HostVector`).

    Subclasses define how an object is reset and stepped. An object that raises an exception is replaced.

    `make` returns a new object at each call, and is first called at the first reset. With `in_place`, each
    observation is written directly to the arrays of a step, because every row is written in every step. Otherwise,
    observations are kept in separate arrays and copied to the arrays of a step.
    """

    def __init__(
        self,
        env: HostEnvironment,
        make: Callable[[], Any],
        indices: Sequence[int],
        *,
        seed: int,
        generation: int,
        struct: HostStep,
        sums: RunningSums | AgentSums,
        in_place: bool = False,
    ) -> None:
        self._name, self._count = env.name, len(indices)
        self._observation_space, self._action_space = env.observation_space, env.action_space
        self._copies: Copies[Any] = Copies(env.name, make, indices, seed=seed, generation=generation)
        self._struct, self._sums = struct, sums
        self._in_place = in_place
        self._current = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), struct.observation)
        """The last valid observation of each environment, or of each of its agents."""
        self._previous = self._current
        """The observations that were acted on, where observations are written in place."""
        self._is_reset = False

    @abstractmethod
    def _begin_episode(self, i: int) -> None:
        """Resets environment `i` until that succeeds, and stores its observation as the current one."""

    @abstractmethod
    def _step_each(self, actions: PyTree[np.ndarray], out: HostStep) -> None:
        """Steps all environments: stores observations as current ones, writes rewards and ends to `out`."""

    @abstractmethod
    def _copy_final(self, out: HostStep) -> None:
        """Writes the other values of the final observation."""

    @abstractmethod
    def _copy_next(self, out: HostStep) -> None:
        """Writes the other values of the observation to act on."""

    @property
    def num_envs(self) -> int:
        """Number of environments, `n`."""
        return self._count

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of the current environments, in order."""
        return tuple(self._copies.seed(i) for i in range(self._count))

    def reset(self, *, out: HostStep | None = None) -> HostStep:
        """Starts an episode in each environment. If it is called again, each random generator continues."""
        out = allocate(self._struct) if out is None else out
        if self._in_place:
            self._current = out.observation
        for i in range(self._count):
            self._begin_episode(i)
        self._check_finite(None)
        self._is_reset = True
        write_reset(self._observation_space, self._current, out)
        self._copy_final(out)
        self._copy_next(out)
        self._sums.restart()
        return out

    def step(self, actions: PyTree[np.ndarray], *, out: HostStep | None = None) -> HostStep:
        """Applies one action to each environment, and resets each environment whose episode ends.

        The observations of the previous step must not have been changed.
        """
        if not self._is_reset:
            raise UsageError(f"{self._name}: step was called before reset.")
        out = allocate(self._struct) if out is None else out
        self._copies.tick()
        if self._in_place:
            self._previous, self._current = self._current, out.info["final_observation"]
        self._step_each(fit_to_space(self._action_space, actions, self._count), out)
        self._check_finite(out)
        other = out.observation if self._in_place else out.info["final_observation"]
        copy_batch(self._observation_space, self._current, other)
        if self._in_place:
            self._current = other  # the next episodes begin in the other set of arrays
        self._copy_final(out)
        done = out.terminated | out.truncated
        for i in done.nonzero()[0]:
            self._begin_episode(int(i))
        if done.any():
            self._check_finite(None)
        if not self._in_place:
            copy_batch(self._observation_space, self._current, out.observation)
        self._copy_next(out)
        self._sums.add(out, done)
        return out

    def drain_failures(self) -> list[HostFailure]:
        """Returns the failures of environments since the last call, in order."""
        return self._copies.drain_failures()

    def close(self) -> None:
        """Closes all environments."""
        self._copies.close()

    def _check_finite(self, step: HostStep | None) -> None:
        """Raises NonFiniteError if an environment returned NaN or infinity in this step, or in a reset."""
        number = find_non_finite(self._observation_space, self._current, None if step is None else step.reward)
        if number is not None:
            i, episode_step = number.row, 0 if step is None else self._sums.step_of(number.row) + 1
            index, seed = self._copies.index(i), self._copies.seed(i)
            raise non_finite_error(self._name, number, index=index, step=episode_step, seed=seed)
