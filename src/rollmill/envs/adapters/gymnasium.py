"""`gymnasium:ID`: Gymnasium's environments, Python objects on the host CPU."""

import copy
import functools
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator

from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.imports import import_named
from rollmill.core.types import HostEnvironment
from rollmill.envs.host import host_environment
from rollmill.envs.options import keyword_names, unknown_option


def make(name: str, **options: Any) -> HostEnvironment:
    """Makes the Gymnasium environment of an id.

    Gymnasium's wrappers that check each call are left out, because they cost time at every step and Rollmill
    calls in the right order; its time limit stays. `check_environment` checks the environment instead.

    Args:
        name: an id of Gymnasium, such as `HalfCheetah-v5`, or `module:id` to import the module that
            registers it first.
        **options: passed on to `gymnasium.make`.

    Raises:
        UsageError: the environment or an option of it does not exist, or a package that it needs is missing.
        ContractError: making or resetting it raised an exception.
    """
    spec = copy.copy(_spec(name))
    spec.order_enforce = False
    options = {"disable_env_checker": True, **options}
    return host_environment(f"gymnasium:{name}", functools.partial(_make_one, name, spec, options))


def recipe_of(env: gymnasium.Env) -> tuple[str, dict[str, Any]]:
    """The id and the options from which `make` makes the same environment.

    Raises:
        UsageError: it was not made by `gymnasium.make`, or was wrapped afterwards.
    """
    spec = env.spec
    if spec is None:
        raise UsageError(
            f"{type(env.unwrapped).__name__} has no id to make copies from. hint: gymnasium.register it and give "
            "gymnasium:MODULE:ID, or rollmill.from_gymnasium(function that makes one)."
        )
    if spec.additional_wrappers:
        wrappers = ", ".join(wrapper.name for wrapper in spec.additional_wrappers)
        raise UsageError(
            f"{spec.id} was wrapped after it was made ({wrappers}), which its id does not include. hint: "
            "rollmill.from_gymnasium(function that makes and wraps one), or one of Rollmill's own transforms; or "
            "gymnasium.register such a function and give gymnasium:MODULE:ID."
        )
    options = {name: value for name, value in spec.kwargs.items() if name != "render_mode"}
    registered = gymnasium.registry.get(spec.id)
    if registered is None or spec.max_episode_steps != registered.max_episode_steps:
        options["max_episode_steps"] = spec.max_episode_steps
    return spec.id, options


def _spec(name: str) -> EnvSpec:
    module, _, gymnasium_id = name.rpartition(":")
    if module:
        _import(name, module)
    try:
        return gymnasium.spec(gymnasium_id)
    except gymnasium.error.Error:
        hint = "If another package registers it, name that: gymnasium:MODULE:ID."
        raise unknown_name("Gymnasium environment", gymnasium_id, gymnasium.registry, hint=hint) from None


def _import(name: str, module: str) -> None:
    try:
        import_named(module)
    except ImportError as error:
        raise UsageError(f"gymnasium:{name}: the module {module!r} cannot be imported: {error}.") from None


def _make_one(name: str, spec: EnvSpec, options: dict[str, Any]) -> gymnasium.Env:
    try:
        return gymnasium.make(spec, **options)
    except TypeError as error:
        _check_options(name, spec, options, error)
        raise
    except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
        raise UsageError(f"gymnasium:{name} needs a package that is not installed: {error}") from None
    except gymnasium.error.DeprecatedEnv as error:
        raise UsageError(f"gymnasium:{name}: {error}") from None


def _check_options(name: str, spec: EnvSpec, options: dict[str, Any], error: TypeError) -> None:
    """Raises a `UsageError` if the exception was about an unknown option."""
    entry = spec.entry_point
    if entry is None or "unexpected keyword argument" not in str(error):
        return
    creator = load_env_creator(entry) if isinstance(entry, str) else entry
    make_options = [name for name in keyword_names(gymnasium.make) if name not in ("id", "disable_env_checker")]
    known = [*keyword_names(creator), *make_options]
    for option in options:
        if option not in known and option != "disable_env_checker":
            raise unknown_option(f"gymnasium:{name}", option, known) from None
