"""A registry of user-defined networks by name, so that runs can record them and other processes make them."""

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

from rollmill.core.errors import UsageError, unknown_name

NetworkFactory: TypeAlias = Callable[..., Any]
"""`(key, observation space, action space) -> ActorCritic`; for multi-agent algorithms
`(key, observation space, action space, critic space) -> AgentNetwork`."""

_factories: dict[str, NetworkFactory] = {}


def register_network(name: str, factory: NetworkFactory, *, overwrite: bool = False) -> None:
    """Registers a network under a name, for `NetworkConfig(name="my-net")` and `--network my-net`.

    Args:
        name: name of the network, such as `my-net`.
        factory: function that makes the network, as for the argument `network=` of algorithms; the first line of
            its docstring is its description.
        overwrite: replace a factory of the same name.

    Raises:
        UsageError: the name is taken or empty, or the factory is not callable.
    """
    if not name or not callable(factory):
        raise UsageError(f"cannot register {name!r}: a network needs a name, and a function that makes it.")
    if name in _factories and not overwrite:
        raise UsageError(f"a network {name!r} is registered already; take another name or pass overwrite=True.")
    _factories[name] = factory


def find_network(name: str) -> NetworkFactory:
    """The factory of that name.

    Raises:
        UsageError: there is none.
    """
    if name not in _factories:
        hint = "hint: rollmill.register_network registers networks; --import MODULE imports the module that does."
        raise unknown_name("network", name, _factories or ["none"], hint=hint)
    return _factories[name]


def registered_networks() -> list[tuple[str, str]]:
    """Sorted names of registered networks, each with its description."""
    return [(name, (inspect.getdoc(_factories[name]) or "").partition("\n")[0]) for name in sorted(_factories)]
