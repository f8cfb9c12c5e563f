"""`gymnasium:ID`: environments that live on the host CPU, through Gymnasium's own vector environments."""

import functools
import importlib
import multiprocessing
from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.types import HostEnvironment


def make(name: str, **options: Any) -> HostEnvironment:
    """The Gymnasium environment of an id.

    `make_vector(n)` starts n copies: one in this process, several in a process each. The processes come
    from a fork server (or are spawned, where there is none) and never are forks of this one, because JAX
    has threads; so a script that makes them needs Python's `if __name__ == "__main__":`. Their autoreset
    mode is `SAME_STEP`: a step that ends an episode returns the next one's first observation, and the
    final observation is in `infos["final_obs"]`, as with `envs.auto_reset`.

    Args:
        name: an id of Gymnasium, for one `HalfCheetah-v5`, or `module:id` to import the module that
            registers it first.
        **options: passed on to `gymnasium.make`.

    Raises:
        UsageError: no such environment, or a package that it needs is not installed.
    """
    start = functools.partial(gymnasium.make, _spec(name), **options)
    single = _start_once(name, start)
    single.close()
    return HostEnvironment(
        name=f"gymnasium:{name}",
        make_vector=functools.partial(_make_vector, name, start),
        observation_space=single.observation_space,
        action_space=single.action_space,
    )


def _spec(name: str) -> EnvSpec:
    module, _, plain = name.rpartition(":")
    if module:
        _import(name, module)
    try:
        return gymnasium.spec(plain)
    except gymnasium.error.Error:
        hint = "Where another package registers it, name that: gymnasium:MODULE:ID."
        raise unknown_name("Gymnasium environment", plain, gymnasium.registry, hint=hint) from None


def _import(name: str, module: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"gymnasium:{name}: the module {module!r} cannot be imported: {error}.") from None


def _start_once(name: str, start: Callable[[], gymnasium.Env]) -> gymnasium.Env:
    try:
        return start()
    except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
        raise UsageError(f"gymnasium:{name} needs a package that is not installed: {error}") from None
    except gymnasium.error.DeprecatedEnv as error:
        raise UsageError(f"gymnasium:{name}: {error}") from None


def _make_vector(name: str, start: Callable[[], gymnasium.Env], num_envs: int) -> VectorEnv:
    if num_envs < 1:
        raise UsageError(f"gymnasium:{name}: {num_envs} copies asked for; the least is 1.")
    if num_envs == 1:
        return SyncVectorEnv([start], autoreset_mode=AutoresetMode.SAME_STEP)
    return AsyncVectorEnv([start] * num_envs, context=_process_context(), autoreset_mode=AutoresetMode.SAME_STEP)


def _process_context() -> str:
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
