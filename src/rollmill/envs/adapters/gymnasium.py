"""`gymnasium:ID`: environments that live on the host CPU as Python objects."""

import copy
import functools
import importlib
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.types import HostEnvironment
from rollmill.envs.host import host_environment


def make(name: str, **options: Any) -> HostEnvironment:
    """The Gymnasium environment of an id.

    Gymnasium's wrappers that check each call are left out, because they cost time at every step and the order
    of calls is known here; its time limit stays. `check_environment` checks.

    Args:
        name: an id of Gymnasium, for one `HalfCheetah-v5`, or `module:id` to import the module that
            registers it first.
        **options: passed on to `gymnasium.make`.

    Raises:
        UsageError: no such environment, or a package that it needs is not installed.
        ContractError: making or resetting it raised.
    """
    spec = copy.copy(_spec(name))
    spec.order_enforce = False
    options = {"disable_env_checker": True, **options}
    return host_environment(f"gymnasium:{name}", functools.partial(_make_one, name, spec, options))


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


def _make_one(name: str, spec: EnvSpec, options: dict[str, Any]) -> gymnasium.Env:
    try:
        return gymnasium.make(spec, **options)
    except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
        raise UsageError(f"gymnasium:{name} needs a package that is not installed: {error}") from None
    except gymnasium.error.DeprecatedEnv as error:
        raise UsageError(f"gymnasium:{name}: {error}") from None
