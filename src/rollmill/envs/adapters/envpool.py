"""`envpool:ID`: EnvPool environments, written in C++ with their own threads.

From Weng et al., "EnvPool: A Highly Parallel Reinforcement Learning Environment Execution Engine", NeurIPS 2022.

Shape letter: `n` environments.
"""

import functools
import importlib
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from gymnasium import spaces
from jaxtyping import PyTree

from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.installation import install_command
from rollmill.core.types import HostEnvironment, HostStep, HostVector
from rollmill.envs.host import RowVector, allocate, check_indices, copy_batch, fit_to_space, write_reset
from rollmill.envs.options import unknown_option

RESERVED = {"batch_size", "env_seed", "env_type", "max_num_players", "num_envs", "seed"}
"""Options of `envpool.make` that Rollmill sets."""


def make(name: str, *, num_threads: int = 0, **options: Any) -> HostEnvironment:
    """Makes the EnvPool environment called `name`.

    Floating-point spaces are converted to float32. If an episode terminates in the last step before its time
    limit, EnvPool reports only `truncated`.

    Args:
        name: an id of EnvPool, such as `HalfCheetah-v4`.
        num_threads: number of threads in each process that steps environments. 0 means one per core.
        **options: passed on to `envpool.make`.

    Raises:
        UsageError: EnvPool is not installed, has no such environment or option, or the environment has
            several players.
    """
    envpool = _import_envpool()
    observation_space, action_space = _spaces(envpool, name, options)
    full_name = f"envpool:{name}"
    build = functools.partial(envpool.make, name, env_type="gymnasium", num_threads=num_threads, **options)

    def start(
        indices: Sequence[int], /, *, seed: int, generation: int = 0, gamma: float | None = None
    ) -> HostVector:
        check_indices(full_name, indices)
        return PoolVector(env, build, indices, seed=seed, generation=generation, gamma=gamma)

    env = HostEnvironment(full_name, start, _space(observation_space), _space(action_space))
    return env


class PoolVector(RowVector):
    """A `core.types.HostVector` of one EnvPool pool, which resets in the step that ends an episode.

    EnvPool itself resets an environment one step later. Single environments do not raise exceptions. An error of
    EnvPool ends the process or affects the whole pool, and is left to the caller.
    """

    def __init__(
        self,
        env: HostEnvironment,
        build: Callable[..., Any],
        indices: Sequence[int],
        *,
        seed: int,
        generation: int,
        gamma: float | None,
    ) -> None:
        super().__init__(env, indices, seed=seed, generation=generation, gamma=gamma)
        with _quiet():
            self._pool = build(num_envs=self.num_envs, seed=list(self.seeds))
            # accessed now, because the first access creates the space, with warnings
            _ = self._pool.observation_space

    def reset(self, *, out: HostStep | None = None) -> HostStep:
        """Starts an episode in each environment of the pool."""
        out = allocate(self._struct) if out is None else out
        first, _ = self._pool.reset()
        write_reset(self._observation_space, first, out)
        self._check_finite(out.observation, None)
        self._sums.restart()
        return out

    def step(self, actions: PyTree[np.ndarray], *, out: HostStep | None = None) -> HostStep:
        """Applies one action to each environment of the pool, and resets those whose episode ended."""
        out = allocate(self._struct) if out is None else out
        # Also checks the batch size, because a wrong size would make EnvPool end the process.
        fitted = fit_to_space(self._action_space, actions, self.num_envs)
        observation, out.reward[:], out.terminated[:], out.truncated[:], _ = self._pool.step(fitted)
        copy_batch(self._observation_space, observation, out.info["final_observation"])
        self._check_finite(out.info["final_observation"], out.reward)
        copy_batch(self._observation_space, observation, out.observation)
        done = out.terminated | out.truncated
        if done.any():
            first, info = self._pool.reset(done.nonzero()[0].astype(np.int32))
            copy_batch(self._observation_space, first, out.observation, rows=info["env_id"])
            self._check_finite(out.observation, None)
        self._sums.add(out, done)
        return out

    def close(self) -> None:
        """Closes the pool and ends its threads."""
        self._pool.close()
        del self._pool


def _import_envpool() -> ModuleType:
    try:
        return importlib.import_module("envpool")
    except ImportError as error:
        raise UsageError(
            f"EnvPool environments need a package that is not installed ({error}): {install_command('envpool')}"
        ) from None


def _spaces(envpool: ModuleType, name: str, options: dict[str, Any]) -> tuple[spaces.Space, spaces.Space]:
    if RESERVED & set(options):
        refused = ", ".join(sorted(RESERVED & set(options)))
        raise UsageError(f"envpool:{name}: the option {refused} is set by Rollmill. hint: leave it out.")
    known = envpool.list_all_envs()
    if name not in known:
        raise unknown_name("EnvPool environment", name, known)
    if options:
        with _quiet():
            names = set(envpool.make_spec(name).config._fields) - RESERVED
        for option in sorted(options.keys() - names):
            raise unknown_option(f"envpool:{name}", option, {*names, "num_threads"})
    try:
        with _quiet():
            spec = envpool.make_spec(name, **options)
            observation_space, action_space = spec.gymnasium_observation_space, spec.gymnasium_action_space
    except (AssertionError, ImportError, RuntimeError, TypeError, ValueError) as error:
        raise UsageError(f"envpool:{name}: {error}") from None
    if spec.config.max_num_players > 1:
        raise UsageError(
            f"envpool:{name} has up to {spec.config.max_num_players} players, but only single-player "
            "environments are supported."
        )
    return observation_space, action_space


def _space(space: spaces.Space) -> spaces.Space:
    """Returns the space in 32 bits. The extreme numbers of its dtype, which mean "unbounded", become infinite."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({name: _space(part) for name, part in space.spaces.items()})
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        return space
    limits = np.finfo(np.dtype(space.dtype).name)
    # Some environments of EnvPool give the smallest positive float of C++ as their lowest value.
    low = np.where((space.low == limits.min) | (space.low == limits.tiny), -np.inf, space.low)
    high = np.where(space.high == limits.max, np.inf, space.high)
    return spaces.Box(low.astype(np.float32), high.astype(np.float32), space.shape, np.float32)


def _quiet() -> warnings.catch_warnings:
    """Suppresses Gymnasium warnings of lost precision in the bounds of spaces."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
