"""Environments by name: `CartPole-v1` (built in), and by the prefix of an adapter, such as `gymnax:...`.

An adapter is imported at the first use of its prefix, so that the other packages need not be installed.
"""

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium

from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.types import NO_OPTIONS, Environment, HostEnvironment, HostVector, Options
from rollmill.envs import probes
from rollmill.envs.acrobot import acrobot
from rollmill.envs.cartpole import cartpole
from rollmill.envs.connect_four import connect_four
from rollmill.envs.dictionary import dict_goal
from rollmill.envs.mountain_car import mountain_car
from rollmill.envs.mountain_car_continuous import mountain_car_continuous
from rollmill.envs.options import keyword_names, takes_any, unknown_option
from rollmill.envs.pendulum import pendulum
from rollmill.envs.t_maze import t_maze
from rollmill.envs.tag_continuous import tag_continuous
from rollmill.envs.tag_gridworld import tag_gridworld
from rollmill.envs.tag_small import tag_continuous_small, tag_gridworld_small
from rollmill.envs.tic_tac_toe import tic_tac_toe

Factory = Callable[..., Environment | HostEnvironment]

_ADAPTERS = {
    "gymnax": "rollmill.envs.adapters.gymnax",
    "pgx": "rollmill.envs.adapters.pgx",
    "envpool": "rollmill.envs.adapters.envpool",
    "gymnasium": "rollmill.envs.adapters.gymnasium",
}
_ON_HOST = ("envpool", "gymnasium")
"""Adapters of host environments."""

_factories: dict[str, Factory] = {
    "Acrobot-v1": acrobot,
    "CartPole-v1": cartpole,
    "ConnectFour-v0": connect_four,
    "DictGoal-v0": dict_goal,
    "MountainCar-v0": mountain_car,
    "MountainCarContinuous-v0": mountain_car_continuous,
    "Pendulum-v1": pendulum,
    "Probe-ActionMask-v0": probes.action_mask,
    "Probe-ActionObservation-v0": probes.action_observation,
    "Probe-ActionReward-v0": probes.action_reward,
    "Probe-ConstantReward-v0": probes.constant_reward,
    "Probe-ContinuousAction-v0": probes.continuous_action,
    "Probe-DiscountedReward-v0": probes.discounted_reward,
    "Probe-MultiDiscrete-v0": probes.multi_discrete,
    "Probe-ObservationReward-v0": probes.observation_reward,
    "Probe-Truncation-v0": probes.truncation,
    "TMaze-v0": t_maze,
    "TagContinuous-Small-v0": tag_continuous_small,
    "TagContinuous-v0": tag_continuous,
    "TagGridWorld-Small-v0": tag_gridworld_small,
    "TagGridWorld-v0": tag_gridworld,
    "TicTacToe-v0": tic_tac_toe,
}


_builtin = dict(_factories)


def register(name: str, factory: Factory, *, overwrite: bool = False) -> None:
    """Registers an environment under a name.

    Args:
        name: the id, such as `Corridor-v0`; without a colon, which separates an adapter's prefix.
        factory: makes the environment from keyword options; the first line of its docstring is its description.
        overwrite: replace a factory of the same name.

    Raises:
        UsageError: the name is taken, empty, or contains a colon.
    """
    if not name or ":" in name:
        raise UsageError(f"cannot register {name!r}: an environment's name is not empty and has no colon.")
    if name in _factories and not overwrite:
        raise UsageError(
            f"an environment {name!r} is registered already; take another name or pass overwrite=True."
        )
    _factories[name] = factory


def make(name: str, **options: Any) -> Environment | HostEnvironment:
    """Makes the environment of a name.

    Args:
        name: a built-in or registered id (`registered` lists them), or `prefix:id` of an adapter.
        **options: passed on to the factory. The environment records them, so that it can be made again.

    Returns:
        The environment, with this name.

    Raises:
        UsageError: an unknown name, prefix or option, or an adapter's package is not installed.
    """
    prefix, colon, adapter_id = name.partition(":")
    if colon:
        return _named(_adapter(prefix)(adapter_id, **options), name, options)
    if name not in _factories:
        raise unknown_name("environment", name, _factories, hint=f"Others: {_prefixes()}.")
    factory = _factories[name]
    _check_options(name, factory, options)
    return _named(factory(**options), name, options)


def as_environment(env: object, options: Options = NO_OPTIONS) -> Environment | HostEnvironment:
    """Converts an id, the result of `gymnasium.make`, or an environment to an environment.

    Args:
        env: any of these.
        options: options for the factory of an id.

    Raises:
        UsageError: it is none of these, or a `gymnasium.Env` that cannot be made again from its id; or options are
            given without an id.
    """
    if isinstance(env, str):
        return make(env, **options)
    if options:
        raise UsageError(
            f"the options {', '.join(options)} are for an environment given by its id, not for a "
            f"{type(env).__name__}."
        )
    match env:
        case Environment() | HostEnvironment():
            return env
        case gymnasium.Env():
            name, env_options = importlib.import_module(_ADAPTERS["gymnasium"]).recipe_of(env)
            return make(f"gymnasium:{name}", **env_options)
    raise UsageError(
        f"expected an environment, got {_described(env)}. hint: give an id (rollmill.registered() lists them; "
        f"{_prefixes()}), what rollmill.make returns, a rollmill.Environment or a gymnasium.Env."
    )


def _described(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, gymnasium.vector.VectorEnv):
        return "a gymnasium VectorEnv (copies are made by num_envs: give the id of one)"
    return f"a {type(value).__name__}"


def registered() -> list[tuple[str, str]]:
    """Sorted ids without a prefix that `make` knows, each with its description."""
    return [(name, _first_line(_factories[name])) for name in sorted(_factories)]


def is_own_name(name: str) -> bool:
    """True if a user registered the name in this process, so that other processes may not know it."""
    return _factories.get(name) is not _builtin.get(name)


def is_on_host(name: str) -> bool:
    """True if the name's prefix is that of host environments."""
    prefix, colon, _ = name.partition(":")
    return bool(colon) and prefix in _ON_HOST


@dataclass(frozen=True)
class StartByName:
    """A `StartHost` for environments that `make` can make from the same name and options in any process."""

    name: str
    options: Options
    start: Callable[..., HostVector] = field(repr=False, compare=False)

    def __call__(
        self, indices: Sequence[int], /, *, seed: int, generation: int = 0, gamma: float | None = None
    ) -> HostVector:
        """Starts the environments; see `StartHost`."""
        return self.start(indices, seed=seed, generation=generation, gamma=gamma)


def _named(env: Any, name: str, options: dict[str, Any]) -> Environment | HostEnvironment:
    if isinstance(env, HostEnvironment):
        return env._replace(name=name, options=options, start=StartByName(name, options, env.start))
    if isinstance(env, Environment):
        return env._replace(name=name, options=options)
    raise UsageError(
        f"{name}: its factory returned {type(env).__name__}; it has to return a rollmill.Environment or "
        "rollmill.HostEnvironment."
    )


def _adapter(prefix: str) -> Factory:
    if prefix not in _ADAPTERS:
        raise UsageError(f"unknown environment prefix {prefix + ':'!r}. Known: {_prefixes()}.")
    return importlib.import_module(_ADAPTERS[prefix]).make


def _prefixes() -> str:
    return ", ".join(f"{prefix}:ID" for prefix in sorted(_ADAPTERS))


def _check_options(name: str, factory: Factory, options: dict[str, Any]) -> None:
    known = keyword_names(factory)
    for option in options:
        if option not in known and not takes_any(factory):
            raise unknown_option(name, option, known)
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        raise UsageError(f"{name}: {error}; its options: {', '.join(known) or 'none'}.") from None


def _first_line(factory: Factory) -> str:
    return (inspect.getdoc(factory) or "").partition("\n")[0]
