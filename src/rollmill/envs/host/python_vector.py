"""Host environments made of Python objects, stepped one after the other; one that raises is replaced.

Shape letter: `n` environments.
"""

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from jaxtyping import PyTree

from rollmill.core.errors import UsageError
from rollmill.core.types import HostEnvironment, HostFailure, HostStep
from rollmill.envs.host.actions import element_splitter, fit_to_space
from rollmill.envs.host.copies import Copies
from rollmill.envs.host.finite import find_non_finite, non_finite_error
from rollmill.envs.host.layout import allocate, begin, copy_batch, step_struct
from rollmill.envs.host.observations import writer
from rollmill.envs.host.running_sums import RunningSums


class PythonVector:
    """A `core.types.HostVector` of objects with Gymnasium's `reset` and `step`, made at the first reset."""

    def __init__(
        self,
        env: HostEnvironment,
        make: Callable[[], gymnasium.Env],
        indices: Sequence[int],
        *,
        seed: int,
        generation: int,
        gamma: float | None,
    ) -> None:
        self._name, self._count = env.name, len(indices)
        self._observation_space, self._action_space = env.observation_space, env.action_space
        self._copies: Copies[Any] = Copies(env.name, make, indices, seed=seed, generation=generation)
        self._struct = step_struct(env, self._count, discounted=gamma is not None)
        self._current = allocate(self._struct.observation)
        """The last valid observation of each environment."""
        self._mask = allocate(self._struct.info["action_mask"]) if env.has_action_mask else None
        self._write = writer(env.observation_space)
        self._elements = element_splitter(env.action_space)
        self._sums = RunningSums(self._count, gamma)
        self._is_reset = False

    @property
    def num_envs(self) -> int:
        """Number of environments, `n`."""
        return self._count

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seed of each current environment."""
        return tuple(self._copies.seed(i) for i in range(self._count))

    def reset(self, *, out: HostStep | None = None) -> HostStep:
        """See `HostVector.reset`; a second reset continues each environment's own random generator."""
        out = allocate(self._struct) if out is None else out
        for i in range(self._count):
            self._begin_episode(i)
        self._check_finite(None)
        self._is_reset = True
        begin(self._observation_space, self._current, out)
        self._copy_mask(out)
        self._sums.restart()
        return out

    def step(self, actions: PyTree[np.ndarray], *, out: HostStep | None = None) -> HostStep:
        """See `HostVector.step`."""
        if not self._is_reset:
            raise UsageError(f"{self._name}: step was called before reset.")
        out = allocate(self._struct) if out is None else out
        self._copies.tick()
        self._step_each(fit_to_space(self._action_space, actions, self._count), out)
        self._check_finite(out)
        copy_batch(self._observation_space, self._current, out.info["final_observation"])
        done = out.terminated | out.truncated
        for i in done.nonzero()[0]:
            self._begin_episode(int(i))
        if done.any():
            self._check_finite(None)
        copy_batch(self._observation_space, self._current, out.observation)
        self._copy_mask(out)
        self._sums.add(out, done)
        return out

    def drain_failures(self) -> list[HostFailure]:
        """See `HostVector.drain_failures`."""
        return self._copies.drain_failures()

    def close(self) -> None:
        """Closes all environments."""
        self._copies.close()

    def _step_each(self, actions: PyTree[np.ndarray], out: HostStep) -> None:
        write, current, mask = self._write, self._current, self._mask
        reward, terminated, truncated = out.reward, out.terminated, out.truncated
        envs: list[Any] = self._copies.objects
        for i, (env, action) in enumerate(zip(envs, self._elements(actions), strict=True)):
            try:
                observation, reward[i], terminated[i], truncated[i], info = env.step(action)
                if mask is not None:
                    mask[i] = info["action_mask"]
                write(current, i, observation)
            except Exception as error:
                self._copies.fail(i, "step", error)
                reward[i], terminated[i], truncated[i] = 0.0, False, True

    def _begin_episode(self, i: int) -> None:
        def reset(env: gymnasium.Env, seed: int | None) -> None:
            observation, info = env.reset(seed=seed)
            if self._mask is not None:
                self._mask[i] = info["action_mask"]
            self._write(self._current, i, observation)

        self._copies.begin_episode(i, reset)

    def _check_finite(self, step: HostStep | None) -> None:
        """Raises NonFiniteError if an environment gave NaN or infinity in this step, or in a reset."""
        number = find_non_finite(self._observation_space, self._current, None if step is None else step.reward)
        if number is not None:
            i, episode_step = number.row, 0 if step is None else self._sums.step_of(number.row) + 1
            index, seed = self._copies.index(i), self._copies.seed(i)
            raise non_finite_error(self._name, number, index=index, step=episode_step, seed=seed)

    def _copy_mask(self, out: HostStep) -> None:
        if self._mask is not None:
            out.info["action_mask"][:] = self._mask
