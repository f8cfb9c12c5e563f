"""Networks by name, so that runs can record them and other processes make them."""

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

from rollmill.core.errors import unknown_name
from rollmill.core.plugins import (
    Plugin,
    check_function,
    check_registration,
    is_of_plugin,
    load_plugin,
    load_plugins,
    modules_being_imported,
    plugins,
    plugins_named,
)

NetworkFactory: TypeAlias = Callable[..., Any]
"""`(key, observation space, action space) -> ActorCritic`; for multi-agent algorithms
`(key, observation space, action space, critic space) -> AgentNetwork`; of a torso `(key, observation space) ->
module`, which maps one observation to a vector of features."""

_factories: dict[str, NetworkFactory] = {}
_torsos: set[str] = set()
_origins: dict[str, tuple[str, ...]] = {}
"""Modules whose import registered a name."""


def register_network(name: str, factory: NetworkFactory, *, torso: bool = False, overwrite: bool = False) -> None:
    """Registers a network under a name, for `NetworkConfig(name="my-net")` and `--network my-net`.

    A whole network is an actor-critic. A torso serves every algorithm: it comes before the layers of
    `hidden_sizes` in actors, and in critics of states and of actions.

    Args:
        name: name of the network, such as `my-net`: one word without a colon.
        factory: function that makes the network, as for the argument `network=` of algorithms; the first line of
            its docstring is its description.
        torso: whether it makes a torso, `(key, observation space) -> module`; the module maps one observation to a
            vector of features.
        overwrite: replace a factory of the same name.

    Raises:
        UsageError: the name is taken or cannot be one, or the factory is not callable.
    """
    check_registration("network", name, _factories, overwrite=overwrite)
    check_function("network", name, factory)
    _factories[name], _origins[name] = factory, modules_being_imported()
    (_torsos.add if torso else _torsos.discard)(name)


def find_network(name: str) -> NetworkFactory:
    """The factory of a name that is registered or offered by an installed package.

    Raises:
        UsageError: there is none, or its package cannot be used.
    """
    if name not in _factories and not load_plugin("network", name, _factories):
        known = {*_factories, *(plugin.name for plugin in plugins("network"))}
        hint = "hint: rollmill.register_network registers networks; --import MODULE imports the module that does."
        raise unknown_name("network", name, known or ["none"], hint=hint)
    return _factories[name]


def is_torso(name: str) -> bool:
    """True if the name is registered as a torso."""
    return name in _torsos


def is_network(name: str) -> bool:
    """True if a network has that name; nothing is imported to find out."""
    return name in _factories or bool(plugins_named("network", name))


def is_own_network(name: str) -> bool:
    """True if a user registered the name in this process, so that other processes may not know it."""
    return not is_of_plugin("network", name, origin_of_network(name))


def origin_of_network(name: str) -> tuple[str, ...]:
    """Modules whose import registered a name, the innermost first."""
    return _origins.get(name, ())


def plugins_of_networks() -> list[tuple[Plugin, str]]:
    """Networks of installed packages, imported; each with the reason why it is unusable, or an empty text."""
    return load_plugins("network", _factories, _origins)


def registered_networks() -> list[tuple[str, str]]:
    """Sorted names of networks, each with its description; of those of installed packages too."""
    plugins_of_networks()
    return [(name, (inspect.getdoc(_factories[name]) or "").partition("\n")[0]) for name in sorted(_factories)]
