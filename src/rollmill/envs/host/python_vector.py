"""Host environments made of Python objects, stepped one after the other; one that raises is replaced.

Shape letter: `n` environments.
"""

import contextlib
from collections.abc import Callable, Sequence

import gymnasium
import numpy as np
from jaxtyping import PyTree

from rollmill.core.errors import ContractError, UsageError
from rollmill.core.own_line import own_line
from rollmill.core.types import HostEnvironment, HostFailure, HostStep
from rollmill.envs.host.actions import element_splitter, fit_to_space
from rollmill.envs.host.finite import find_non_finite, non_finite_error
from rollmill.envs.host.layout import allocate, begin, copy_batch, step_struct
from rollmill.envs.host.observations import writer
from rollmill.envs.host.running_sums import RunningSums
from rollmill.envs.host.seeds import environment_seed

MAX_FAILURES = 5
"""Number of failures in a row, without a complete step in between, that raise a `ContractError`."""


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
        self._name, self._make = env.name, make
        self._observation_space, self._action_space = env.observation_space, env.action_space
        self._indices, self._root, self._generation = tuple(indices), seed, generation
        self._attempts = [0] * len(self._indices)
        self._envs: list[gymnasium.Env | None] = [None] * len(self._indices)
        self._struct = step_struct(env, len(self._indices), discounted=gamma is not None)
        self._current = allocate(self._struct.observation)
        """The last valid observation of each environment."""
        self._mask = allocate(self._struct.info["action_mask"]) if env.has_action_mask else None
        self._write = writer(env.observation_space)
        self._elements = element_splitter(env.action_space)
        self._sums = RunningSums(len(self._indices), gamma)
        self._failures: list[HostFailure] = []
        self._is_reset, self._clock = False, 0
        self._strikes = [(0, 0)] * len(self._indices)
        """For each environment, the step of its last failure, and the number of failures in a row."""

    @property
    def num_envs(self) -> int:
        """Number of environments, `n`."""
        return len(self._indices)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seed of each current environment."""
        return tuple(self._seed(i) for i in range(self.num_envs))

    def reset(self, *, out: HostStep | None = None) -> HostStep:
        """See `HostVector.reset`; a second reset continues each environment's own random generator."""
        out = allocate(self._struct) if out is None else out
        for i in range(self.num_envs):
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
        self._clock += 1
        self._step_each(fit_to_space(self._action_space, actions, self.num_envs), out)
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
        drained, self._failures = self._failures, []
        return drained

    def close(self) -> None:
        """Closes all environments."""
        for i in range(self.num_envs):
            self._close(i)

    def _step_each(self, actions: PyTree[np.ndarray], out: HostStep) -> None:
        write, current, mask = self._write, self._current, self._mask
        reward, terminated, truncated = out.reward, out.terminated, out.truncated
        for i, (env, action) in enumerate(zip(self._envs, self._elements(actions), strict=True)):
            try:
                observation, reward[i], terminated[i], truncated[i], info = env.step(action)  # pyright: ignore
                if mask is not None:
                    mask[i] = info["action_mask"]
                write(current, i, observation)
            except Exception as error:
                self._fail(i, "step", error)
                reward[i], terminated[i], truncated[i] = 0.0, False, True

    def _begin_episode(self, i: int) -> None:
        """Resets environment `i`, making it first if there is none, until that succeeds."""
        while True:
            doing = "reset"
            try:
                env, seed = self._envs[i], None
                if env is None:
                    doing, seed = "make", self._seed(i)
                    env = self._envs[i] = self._make()
                doing = "reset"
                observation, info = env.reset(seed=seed)
                if self._mask is not None:
                    self._mask[i] = info["action_mask"]
                return self._write(self._current, i, observation)
            except Exception as error:
                self._fail(i, doing, error)

    def _fail(self, i: int, doing: str, error: Exception) -> None:
        """Records the failure and drops environment `i`."""
        text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        failure = HostFailure(self._indices[i], doing, text, own_line(error), self._seed(i))
        self._failures.append(failure)
        self._close(i)
        self._attempts[i] += 1
        last_step, count = self._strikes[i]
        count = count + 1 if last_step >= self._clock - 1 else 1
        self._strikes[i] = (self._clock, count)
        if count >= MAX_FAILURES:
            raise _given_up(self._name, failure, count) from error

    def _check_finite(self, step: HostStep | None) -> None:
        """Raises NonFiniteError if an environment gave NaN or infinity in this step, or in a reset."""
        number = find_non_finite(self._observation_space, self._current, None if step is None else step.reward)
        if number is not None:
            i, episode_step = number.row, 0 if step is None else self._sums.step_of(number.row) + 1
            index, seed = self._indices[i], self._seed(i)
            raise non_finite_error(self._name, number, index=index, step=episode_step, seed=seed)

    def _close(self, i: int) -> None:
        env, self._envs[i] = self._envs[i], None
        if env is not None:
            close_quietly(env)

    def _seed(self, i: int) -> int:
        return environment_seed(
            self._root, self._indices[i], generation=self._generation, attempt=self._attempts[i]
        )

    def _copy_mask(self, out: HostStep) -> None:
        if self._mask is not None:
            out.info["action_mask"][:] = self._mask


def close_quietly(env: gymnasium.Env) -> None:
    """Closes an environment and ignores its exceptions."""
    with contextlib.suppress(Exception):
        env.close()


def _given_up(name: str, failure: HostFailure, count: int) -> ContractError:
    return ContractError(
        f"{name}: environment {failure.index} failed {count} times in a row, the last time in its "
        f"{failure.doing}: {failure.error}\n  at {failure.line}"
    )
