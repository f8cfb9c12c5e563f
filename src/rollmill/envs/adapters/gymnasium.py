"""`gymnasium:ID`: Gymnasium environments, Python objects on the host CPU."""

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, VectorizeMode, load_env_creator
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.types import HostEnvironment
from rollmill.envs.adapters import import_registering
from rollmill.envs.host import batch_environment, host_environment
from rollmill.envs.options import check_flags, keyword_names, unknown_option


def make(
    name: str,
    *,
    reset_options: Any = None,
    vectorization_mode: Any = None,
    autoreset_mode: Any = None,
    **options: Any,
) -> HostEnvironment:
    """Makes the Gymnasium environment called `name`.

    The environment keeps its time limit, but not the Gymnasium wrappers that check each call, because they slow
    down every step. `check_environment` checks the environment instead.

    Args:
        name: an id of Gymnasium, such as `HalfCheetah-v5`, or `module:id` to import the module that
            registers it first.
        reset_options: options of every `reset`, by name.
        vectorization_mode: `sync`, `async` or `vector_entry_point`, to step a vector environment of
            `gymnasium.make_vec` in each process. Default: single environments, or the vector entry point of an id
            that has no other.
        autoreset_mode: when a `sync` or `async` vector environment begins new episodes: `NextStep`, `SameStep` or
            `Disabled`. The mode does not change what is learned.
        **options: passed on to `gymnasium.make`, or `gymnasium.make_vec`.

    Raises:
        UsageError: the environment or an option of it does not exist, or a package that it needs is missing.
        ContractError: making or resetting it raised an exception.
    """
    spec = copy.copy(_spec(name))
    spec.order_enforce = False
    full_name = f"gymnasium:{name}"
    reset_options = checked_reset_options(full_name, reset_options)
    if spec.entry_point is None and vectorization_mode is None:
        vectorization_mode = VectorizeMode.VECTOR_ENTRY_POINT.value
    _check_flags(full_name, spec, options)
    if vectorization_mode is None:
        if autoreset_mode is not None:
            raise UsageError(
                f"{full_name}: autoreset_mode has no effect without vectorization_mode. hint: add a "
                "vectorization_mode, such as sync."
            )
        options = {"disable_env_checker": True, **options}
        single = functools.partial(_make_one, name, spec, options)
        return host_environment(full_name, single, reset_options=reset_options)
    options |= {"vectorization_mode": _one_of(name, "vectorization_mode", vectorization_mode, VectorizeMode)}
    if autoreset_mode is not None:
        mode = _one_of(name, "autoreset_mode", autoreset_mode, AutoresetMode)
        options["vector_kwargs"] = {**options.get("vector_kwargs", {}), "autoreset_mode": mode}
    return batch_environment(
        full_name, functools.partial(_make_batch, name, spec, options), reset_options=reset_options
    )


def recipe_of(env: gymnasium.Env | VectorEnv) -> tuple[str, dict[str, Any]]:
    """Returns the id and options from which `gymnasium.make` or `make_vec` created an environment.

    Raises a `UsageError` if the environment was created in another way, or was wrapped afterwards.
    """
    if isinstance(env, VectorEnv):
        return _recipe_of_batch(env)
    spec = env.spec
    if spec is None:
        raise UsageError(
            f"{type(env.unwrapped).__name__} has no id from which copies could be created. hint: call "
            "gymnasium.register and use gymnasium:MODULE:ID, or pass a function that creates the environment to "
            "rollmill.from_gymnasium."
        )
    if spec.additional_wrappers:
        wrappers = ", ".join(wrapper.name for wrapper in spec.additional_wrappers)
        raise UsageError(
            f"{spec.id} was wrapped after it was created ({wrappers}), and its id does not include these "
            "wrappers. hint: pass rollmill.from_gymnasium a function that creates and wraps the environment, or "
            "register that function with Gymnasium and use gymnasium:MODULE:ID, or use Rollmill's transforms."
        )
    options = {name: value for name, value in spec.kwargs.items() if name != "render_mode"}
    registered = gymnasium.registry.get(spec.id)
    if registered is None or spec.max_episode_steps != registered.max_episode_steps:
        options["max_episode_steps"] = spec.max_episode_steps
    return spec.id, options


def _recipe_of_batch(batch: VectorEnv) -> tuple[str, dict[str, Any]]:
    """Does the same as `recipe_of` for a vector environment. The run sets the number of environments."""
    spec = batch.spec
    if spec is None or isinstance(batch, VectorWrapper):
        raise UsageError(
            f"{type(batch).__name__} cannot be created again, as workers and evaluations require. hint: pass "
            "rollmill.from_gymnasium a function of num_envs that creates and wraps a VectorEnv. The class "
            "itself is such a function."
        )
    options = {name: value for name, value in spec.kwargs.items() if name not in ("num_envs", "render_mode")}
    if options.get("wrappers"):
        raise UsageError(
            f"{spec.id}: its single environments were wrapped, and its id does not include these wrappers. "
            "hint: pass rollmill.from_gymnasium a function that creates and wraps a single environment."
        )
    chosen = dict(options.pop("vector_kwargs", {}))
    mode = chosen.pop("autoreset_mode", None)
    if mode is not None:
        options["autoreset_mode"] = AutoresetMode(mode).value
    if chosen:
        options["vector_kwargs"] = chosen
    return spec.id, options


def checked_reset_options(name: str, options: Any) -> dict[str, Any] | None:
    """Returns `reset_options`, or raises a `UsageError` if they are not a mapping with string keys."""
    if options is None:
        return None
    if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
        raise UsageError(
            f'{name}: reset_options={options!r} must be a mapping from names to values, such as {{"low": '
            "-0.1}. hint: on the command line, --env-option 'reset_options={\"low\": -0.1}'."
        )
    if "reset_mask" in options:
        raise UsageError(f"{name}: reset_options must not contain reset_mask, which Rollmill sets.")
    return dict(options)


def _one_of(name: str, option: str, value: Any, kind: type[Enum]) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise unknown_name(f"{option} of gymnasium:{name}", str(value), [mode.value for mode in kind]) from None


def _spec(name: str) -> EnvSpec:
    module, _, gymnasium_id = name.rpartition(":")
    if module:
        import_registering(module, f"gymnasium:{name}")
    try:
        return gymnasium.spec(gymnasium_id)
    except gymnasium.error.Error:
        hint = "If another package registers it, name that package: gymnasium:MODULE:ID."
        raise unknown_name("Gymnasium environment", gymnasium_id, gymnasium.registry, hint=hint) from None


def _make_batch(name: str, spec: EnvSpec, options: dict[str, Any], num_envs: int) -> VectorEnv:
    try:
        return gymnasium.make_vec(spec, num_envs=num_envs, **options)
    except gymnasium.error.Error as error:
        raise UsageError(f"gymnasium:{name}: {error}") from None
    except TypeError as error:
        raise UsageError(f"gymnasium:{name}: {error}.") from None


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


def _check_flags(name: str, spec: EnvSpec, options: dict[str, Any]) -> None:
    """Raises a `UsageError` for a string as the value of an option that is a `bool`."""
    texts = {option: value for option, value in options.items() if isinstance(value, str)}
    if texts and spec.entry_point is not None:
        with contextlib.suppress(ImportError, AttributeError):  # creating the environment raises them again
            check_flags(name, _creator(spec.entry_point), texts)


def _creator(entry: str | Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function or class that creates an environment."""
    return load_env_creator(entry) if isinstance(entry, str) else entry


def _check_options(name: str, spec: EnvSpec, options: dict[str, Any], error: TypeError) -> None:
    """Raises a `UsageError` if the exception was about an unknown option."""
    entry = spec.entry_point
    if entry is None or "unexpected keyword argument" not in str(error):
        return
    creator = _creator(entry)
    make_options = [name for name in keyword_names(gymnasium.make) if name not in ("id", "disable_env_checker")]
    known = [*keyword_names(creator), *make_options]
    for option in options:
        if option not in known and option != "disable_env_checker":
            raise unknown_option(f"gymnasium:{name}", option, known) from None
