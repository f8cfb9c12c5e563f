"""Finds environments by name, such as `CartPole-v1`, or by the prefix of an adapter, such as `gymnax:...`.

An adapter is imported at the first use of its prefix, so that other packages need not be installed. Transforms by
name and host environments are also imported on first use.
"""

import importlib
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import VectorEnv

from rollmill.core.errors import UsageError, nearest_names
from rollmill.core.registry import Registry
from rollmill.core.types import NO_OPTIONS, Environment, GymnasiumObject, HostEnvironment, Options
from rollmill.envs.field_checks import check_declarations
from rollmill.envs.numbers import number_names, with_numbers
from rollmill.envs.options import check_flags, keyword_names, takes_any, unknown_option
from rollmill.gpus.memory_limit import limited_gpu_memory

Factory = Callable[..., Environment | HostEnvironment]

_ADAPTERS = {
    "ale": "rollmill.envs.adapters.ale",
    "brax": "rollmill.envs.adapters.brax",
    "craftax": "rollmill.envs.adapters.craftax",
    "gymnax": "rollmill.envs.adapters.gymnax",
    "jaxmarl": "rollmill.envs.adapters.jaxmarl",
    "pettingzoo": "rollmill.envs.adapters.pettingzoo",
    "pgx": "rollmill.envs.adapters.pgx",
    "playground": "rollmill.envs.adapters.playground",
    "envpool": "rollmill.envs.adapters.envpool",
    "robots": "rollmill.envs.robots",
    "xminigrid": "rollmill.envs.adapters.xminigrid",
    "gymnasium": "rollmill.envs.adapters.gymnasium",
}
_ON_HOST = ("ale", "envpool", "gymnasium", "pettingzoo")
"""Adapters of host environments."""

_BUILT_IN: dict[str, Factory | str] = {
    "Acrobot-v1": "acrobot:acrobot",
    "CartPole-v1": "cartpole:cartpole",
    "ConnectFour-v0": "connect_four:connect_four",
    "CraftaxClassic-v0": "craftax_classic.environment:craftax_classic",
    "DictGoal-v0": "dict_goal:dict_goal",
    "MountainCar-v0": "mountain_car:mountain_car",
    "MountainCarContinuous-v0": "mountain_car:mountain_car_continuous",
    "Pendulum-v1": "pendulum:pendulum",
    "Probe-ActionMask-v0": "probes:action_mask",
    "Probe-ActionObservation-v0": "probes:action_observation",
    "Probe-ActionReward-v0": "probes:action_reward",
    "Probe-ConstantReward-v0": "probes:constant_reward",
    "Probe-ContinuousAction-v0": "probes:continuous_action",
    "Probe-DiscountedReward-v0": "probes:discounted_reward",
    "Probe-MultiDiscrete-v0": "probes:multi_discrete",
    "Probe-ObservationReward-v0": "probes:observation_reward",
    "Probe-Truncation-v0": "probes:truncation",
    "TMaze-v0": "t_maze:t_maze",
    "TagContinuous-Small-v0": "tag_continuous:tag_continuous_small",
    "TagContinuous-v0": "tag_continuous:tag_continuous",
    "TagGridWorld-Small-v0": "tag_gridworld:tag_gridworld_small",
    "TagGridWorld-v0": "tag_gridworld:tag_gridworld",
    "TicTacToe-v0": "tic_tac_toe:tic_tac_toe",
    "TwoStepGame-v0": "two_step_game:two_step_game",
}
"""`module:function` of the built-in environments, which are imported at their first use."""
ENVIRONMENTS: Registry[Factory | str] = Registry("environment", _BUILT_IN)


def register(name: str, factory: Factory, *, overwrite: bool = False) -> None:
    """Registers an environment under a name.

    Args:
        name: the id, such as `Corridor-v0`. It must be one word without a colon, because a colon separates an
            adapter's prefix.
        factory: creates the environment from keyword options. The first line of its docstring is its description.
        overwrite: whether to replace an existing factory of the same name.

    Raises:
        UsageError: the name is taken or invalid, or the factory is not callable.

    Examples:
        >>> rollmill.register("Short-v0", lambda: rollmill.time_limit(rollmill.make("CartPole-v1"), 50))
    """
    ENVIRONMENTS.check(name, factory, overwrite=overwrite)
    ENVIRONMENTS.register(name, factory)


def make(name: str, *, transforms: Sequence[str] = (), **options: Any) -> Environment | HostEnvironment:
    """Creates an environment from its name.

    Args:
        name: an id that is built in, registered, or offered by an installed package (`registered` lists them), or
            `prefix:id` of an adapter.
        transforms: changes of the environment's observations, actions or rewards, with the innermost first, such
            as `["frame-stack:4", "reward-scale:0.1"]`. The page on environments lists them.
        **options: passed on to the factory. The environment records its options and transforms, so that it can be
            created again.

    Returns:
        The environment, with this name.

    Raises:
        UsageError: the name, its prefix, an option or a transform is unknown, the package of an adapter is not
            installed, or the environment does not support a transform.

    Examples:
        >>> env = rollmill.make("CartPole-v1", transforms=["frame-stack:3"])
    """
    names = _parse_names(transforms)
    options = {option: bool(value) if isinstance(value, np.bool_) else value for option, value in options.items()}
    with limited_gpu_memory():  # an adapter may start the backend of JAX
        return _transform(_make_named(name, options), names)


def check_name(name: str) -> None:
    """Raises a `UsageError` if `name` is not the name of an environment. Ids of adapters are not checked here."""
    prefix, colon, _ = name.partition(":")
    if colon:
        _adapter(prefix)
    else:
        _find(name)


def _make_named(name: str, options: dict[str, Any]) -> Environment | HostEnvironment:
    """Creates the environment with a name, without further transforms."""
    prefix, colon, adapter_id = name.partition(":")
    if colon:
        adapter = _adapter(prefix)
        check_flags(name, adapter, options)
        return _set_name(adapter(adapter_id, **options), name, options)
    factory = _find(name)
    known = options.keys() if takes_any(factory) else options.keys() & set(keyword_names(factory))
    own = {option: value for option, value in options.items() if option in known}
    _check_arguments(name, factory, own)
    check_flags(name, factory, own)
    env = _set_name(factory(**own), name, options)
    others = {option: value for option, value in options.items() if option not in known}
    _check_options(name, factory, env, others)
    return with_numbers(env, others) if isinstance(env, Environment) else env


def _find(name: str) -> Factory:
    hint = f"Others: {_prefixes()}. For one of your own: --import FILE.py, or import it in Python."
    return _import_factory(ENVIRONMENTS.find(name, hint=hint, meant=_named_by_gymnasium(name)))


def _named_by_gymnasium(name: str) -> str | None:
    """Returns `gymnasium:ID` if Gymnasium has an environment of this name and Rollmill has no version of it."""
    same = next((known for known in gymnasium.registry if known.lower() == name.lower()), None)
    kinds = {known.rpartition("-v")[0].lower() for known in ENVIRONMENTS}
    return None if same is None or same.rpartition("-v")[0].lower() in kinds else f"gymnasium:{same}"


def _import_factory(factory: Factory | str) -> Factory:
    if isinstance(factory, str):
        module, _, function = factory.partition(":")
        return getattr(importlib.import_module(f"rollmill.envs.{module}"), function)
    return factory


def from_gymnasium(
    source: str | gymnasium.Env | VectorEnv | Callable[..., gymnasium.Env | VectorEnv],
    *,
    name: str | None = None,
    transforms: Sequence[str] = (),
    reset_options: Mapping[str, Any] | None = None,
) -> HostEnvironment:
    """Converts a Gymnasium environment: an id, the result of `gymnasium.make`, or a function that creates one.

    A function or class with one argument, the number of environments, must create a `gymnasium.vector.VectorEnv`,
    a simulator of a whole batch. Each process creates one, for the environments that it steps.

    Algorithms also accept `gymnasium.make(...)` and `gymnasium:ID` directly. This function is for other cases,
    such as a function that wraps the environment that it creates. Such an environment has no name, so other
    processes cannot create it. To give it a name, register it in a module:
    `rollmill.register("Mine-v0", lambda: rollmill.from_gymnasium(make_mine))`.

    Args:
        source: an id, with or without `gymnasium:`; an environment, which is copied by its spec and not stepped
            itself; or a function that returns a new environment, or vector environment, at each call.
        name: name in messages and in the run. Default: the name of the function.
        transforms: as for `make`, except for vector environments.
        reset_options: options of every `reset`, by name.

    Raises:
        UsageError: the source is none of these, an environment cannot be created again from its spec, or the
            function does not return a new `gymnasium.Env`.
        ContractError: the function raised an exception.

    Examples:
        >>> env = rollmill.from_gymnasium(lambda: gymnasium.make("CartPole-v1"), name="mine")
        >>> rollmill.train(rollmill.ppo(env, total_timesteps=100_000))
    """
    given: dict[str, Any] = {} if reset_options is None else {"reset_options": reset_options}
    if isinstance(source, str):
        source = source.removeprefix("gymnasium:")
        env = make(f"gymnasium:{source}", **given)
    elif isinstance(source, gymnasium.Env | VectorEnv):
        env = _of_spec(source, given)
    elif not callable(source):
        env = as_environment(source)
    else:
        from rollmill.envs.host import batch_environment, host_environment

        named = name or getattr(source, "__name__", type(source).__name__)
        options = importlib.import_module(_ADAPTERS["gymnasium"]).checked_reset_options(named, reset_options)
        if (keyword := _size_argument(source)) is not None:
            env = batch_environment(named, partial(_call_with_size, source, keyword), reset_options=options)
        else:
            env = host_environment(named, partial(_one_more, named, source, []), reset_options=options)
    if not isinstance(env, HostEnvironment):
        raise UsageError(f"from_gymnasium needs a Gymnasium environment, but {env.name} is written in JAX.")
    transformed: Any = _transform(env, _parse_names(transforms))
    return transformed if name is None else transformed._replace(name=name)


def _parse_names(transforms: Sequence[str]) -> list[str]:
    """Returns the names of transforms in the form that runs record."""
    if isinstance(transforms, list | tuple) and not transforms:
        return []
    from rollmill.envs.named_transforms import parse_transforms

    return [str(parsed) for parsed in parse_transforms(transforms)]


def _transform(env: Environment | HostEnvironment, names: Sequence[str]) -> Environment | HostEnvironment:
    if not names:
        return env
    from rollmill.envs.named_transforms import transform

    return transform(env, *names)


def _of_spec(env: gymnasium.Env | VectorEnv, options: Options) -> Environment | HostEnvironment:
    """Creates an environment from the id and the options of a Gymnasium environment."""
    name, own_options = importlib.import_module(_ADAPTERS["gymnasium"]).recipe_of(env)
    return make(f"gymnasium:{name}", **own_options, **options)


def _size_argument(function: Callable[..., Any]) -> str | None:
    """Returns how a function takes the number of environments.

    The result is the keyword `num_envs`, "" for a positional argument, or None if there is no such argument.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # functions in C have no signature
        return None
    if any(parameter.name == "num_envs" for parameter in parameters):
        return "num_envs"
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.default is p.empty and p.kind in positional]
    return "" if len(required) == 1 else None


def _call_with_size(function: Callable[..., Any], keyword: str, num_envs: int) -> Any:
    return function(**{keyword: num_envs}) if keyword else function(num_envs)


def _one_more(name: str, factory: Callable[[], Any], last: list[Any]) -> gymnasium.Env:
    """Calls a function that creates an environment. `last` holds a weak reference to the previous environment."""
    made = factory()
    if not isinstance(made, gymnasium.Env):
        raise UsageError(f"{name} returned {_describe(made)}, expected a gymnasium.Env.")
    if last and last[0]() is made:
        raise UsageError(f"{name} returned the same environment twice, expected a new one at each call.")
    last[:] = [weakref.ref(made)]
    return made


def as_environment(env: object, options: Options = NO_OPTIONS) -> Environment | HostEnvironment:
    """Returns the environment for an id, a result of `gymnasium.make`, or an environment.

    Args:
        env: an id, a result of `gymnasium.make`, or an environment.
        options: options for the factory of an id.

    Raises:
        UsageError: `env` has another type, or is a `gymnasium.Env` that cannot be created again from its id, or
            options are given without an id.
        ContractError: a function of the environment takes wrong parameters.
    """
    if isinstance(env, str):
        return as_environment(make(env, **options))
    if options:
        raise UsageError(
            f"the options {', '.join(options)} apply only to an environment selected by its id, got a "
            f"{type(env).__name__}."
        )
    match env:
        case Environment():
            check_declarations(env)
            return env
        case HostEnvironment():
            return env
        case gymnasium.Env() | VectorEnv():
            return _of_spec(env, NO_OPTIONS)
    raise UsageError(
        f"expected an environment, got {_describe(env)}. hint: give an id (rollmill.registered() lists them; "
        f"{_prefixes()}), the result of rollmill.make, a rollmill.Environment or a gymnasium.Env."
    )


def single_agent(env: Environment | HostEnvironment | GymnasiumObject | str) -> Environment | HostEnvironment:
    """Converts `env` with `as_environment`. Raises a `UsageError` if it is a multi-agent environment."""
    env = as_environment(env)
    if env.agents:
        kinds = ", ".join(kind.name for kind in env.agents)
        raise UsageError(
            f"{env.name} is a multi-agent environment ({kinds}), which this algorithm does not support. hint: "
            "train it with mappo or ippo, or, if its agents are one team, with vdn or qmix."
        )
    return env


def _describe(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, VectorEnv):
        return "a gymnasium VectorEnv (pass a function of num_envs that creates one)"
    return f"a {type(value).__name__}"


def registered() -> list[tuple[str, str]]:
    """Returns the sorted ids without a prefix that `make` knows, each with its description.

    They include the ids that installed packages offer, if these packages can be imported.

    Examples:
        >>> names = [name for name, _ in rollmill.registered()]
    """
    ENVIRONMENTS.load_plugins()
    return [(name, _first_line(_import_factory(ENVIRONMENTS[name]))) for name in sorted(ENVIRONMENTS)]


def is_on_host(name: str) -> bool:
    """Returns whether a name has the prefix of an adapter of host environments."""
    prefix, colon, _ = name.partition(":")
    return bool(colon) and prefix in _ON_HOST


def _set_name(env: Any, name: str, options: dict[str, Any]) -> Environment | HostEnvironment:
    if isinstance(env, HostEnvironment):
        from rollmill.envs.host import StartByName

        return env._replace(name=name, options=options, start=StartByName(name, options, env.start))
    if isinstance(env, Environment):
        return env._replace(name=name, options={**env.options, **options})
    raise UsageError(
        f"{name}: its factory returned {type(env).__name__}, expected a rollmill.Environment or "
        "rollmill.HostEnvironment."
    )


def _adapter(prefix: str) -> Factory:
    if prefix not in _ADAPTERS:
        near = [f"{known}:ID" for known in nearest_names(prefix, _ADAPTERS)]
        advice = f"Did you mean {near[0]}?" if near else f"Known: {_prefixes()}."
        raise UsageError(
            f"unknown environment prefix {prefix + ':'!r}. {advice} hint: for an environment that the module "
            f"{prefix!r} registers with Gymnasium, write gymnasium:{prefix}:ID."
        )
    return importlib.import_module(_ADAPTERS[prefix]).make


def _prefixes() -> str:
    return ", ".join(f"{prefix}:ID" for prefix in sorted(_ADAPTERS))


def _check_options(name: str, factory: Factory, env: Environment | HostEnvironment, others: Iterable[str]) -> None:
    """Checks that options which a factory does not accept are numeric parameters of the environment."""
    numbers = number_names(env.params) if isinstance(env, Environment) else []
    for option in others:
        if option not in numbers:
            raise unknown_option(name, option, [*keyword_names(factory), *numbers])


def _check_arguments(name: str, factory: Factory, options: dict[str, Any]) -> None:
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        known = keyword_names(factory)
        raise UsageError(f"{name}: {error}; its options: {', '.join(known) or 'none'}.") from None


def _first_line(factory: Factory) -> str:
    return (inspect.getdoc(factory) or "").partition("\n")[0]
