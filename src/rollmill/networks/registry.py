"""Registers networks by name. A run records the name, so that other processes can create the network."""

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

from rollmill.core.registry import Registry

NetworkFactory: TypeAlias = Callable[..., Any]
"""Function that makes a network: `(key, observation space, action space) -> ActorCritic`, or for multi-agent
algorithms `(key, observation space, action space, critic space) -> AgentNetwork`. The factory of a torso is `(key,
observation space) -> module`, where the module maps one observation to a feature vector."""

NETWORKS: Registry[NetworkFactory] = Registry("network", {})
_torsos: set[str] = set()


def register_network(name: str, factory: NetworkFactory, *, torso: bool = False, overwrite: bool = False) -> None:
    """Registers a network under a name, for `NetworkConfig(name="my-net")` and `--network my-net`.

    A registered network is a whole actor-critic, or a torso. A torso can be used by every algorithm: it precedes
    the layers of `hidden_sizes` in actors and in critics.

    Args:
        name: name of the network, such as `my-net`: one word without a colon.
        factory: function that makes the network, as for the argument `network=` of algorithms. The first line of
            its docstring is its description.
        torso: whether it makes a torso, `(key, observation space) -> module`. The module maps one observation to a
            feature vector.
        overwrite: replace a factory of the same name.

    Raises:
        UsageError: the name is taken or not valid, or the factory is not callable.
    """
    NETWORKS.check(name, factory, overwrite=overwrite)
    NETWORKS.register(name, factory)
    (_torsos.add if torso else _torsos.discard)(name)


def find_network(name: str) -> NetworkFactory:
    """Returns the factory of a network that was registered, or that an installed package provides.

    Raises:
        UsageError: no network is called `name`, or its package cannot be imported.
    """
    hint = "hint: rollmill.register_network registers a network; --import MODULE imports the module that calls it."
    return NETWORKS.find(name, hint=hint)


def is_network(name: str) -> bool:
    """Returns whether a network called `name` exists, without importing anything."""
    return NETWORKS.has(name)


def is_torso(name: str) -> bool:
    """Returns whether a torso called `name` is registered."""
    return name in _torsos


def registered_networks() -> list[tuple[str, str]]:
    """Returns the names of all networks, also of installed packages, sorted, with their descriptions."""
    NETWORKS.load_plugins()
    return [(name, (inspect.getdoc(NETWORKS[name]) or "").partition("\n")[0]) for name in sorted(NETWORKS)]
