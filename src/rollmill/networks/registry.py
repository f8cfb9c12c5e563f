"""Networks of one's own by name, so that a run can record them and other processes can make them."""

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

from rollmill.core.errors import UsageError, unknown_name

NetworkFactory: TypeAlias = Callable[..., Any]
"""`(key, observation space, action space) -> ActorCritic`, or, for several agents, with the critic's space as a
fourth argument, an `AgentNetwork`."""

_factories: dict[str, NetworkFactory] = {}


def register_network(name: str, factory: NetworkFactory, *, overwrite: bool = False) -> None:
    """Makes a network known by a name, as `NetworkConfig(name="my-net")` and `--network my-net` select it.

    Args:
        name: the name, for one `my-net`.
        factory: makes the network, as the function does that algorithms take as `network=`; the first line of its
            docstring describes it.
        overwrite: replace a factory that has the same name.

    Raises:
        UsageError: the name is taken or empty, or the factory cannot be called.
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
        hint = "hint: rollmill.register_network gives names; --import MODULE imports the module that does."
        raise unknown_name("network", name, _factories or ["none"], hint=hint)
    return _factories[name]


def registered_networks() -> list[tuple[str, str]]:
    """The names of registered networks, sorted, each with a line that describes it."""
    return [(name, (inspect.getdoc(_factories[name]) or "").partition("\n")[0]) for name in sorted(_factories)]
