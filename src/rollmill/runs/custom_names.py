"""Names that the user registered, and the modules that other processes import to register them as well."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from rollmill.core.errors import UsageError
from rollmill.core.plugins import REGISTER, Kind, registering_module
from rollmill.core.registry import Registry
from rollmill.envs.registry import ENVIRONMENTS
from rollmill.networks.registry import NETWORKS
from rollmill.runs.algorithms import ALGORITHMS


class OwnName(NamedTuple):
    """A name of an environment, network or algorithm that the user registered in this process."""

    kind: Kind
    name: str
    origin: tuple[str, ...]
    """Modules whose import registered the name, the innermost first."""

    @property
    def module(self) -> str | None:
        """The module that other processes import to register the name, or None if there is none."""
        return registering_module(self.origin)

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


_REGISTRIES: dict[Kind, Registry] = {
    "algorithm": ALGORITHMS,
    "environment": ENVIRONMENTS,
    "network": NETWORKS,
}


def own_names(described: dict[str, Any]) -> list[OwnName]:
    """Returns the names registered by the user that occur in the description of a graph."""
    config = described["config"]
    networks = [config.get("network"), *(config.get("networks") or {}).values()]
    of_networks = {network["name"] for network in networks if isinstance(network, dict) and network.get("name")}
    names: list[tuple[Kind, str]] = [
        ("algorithm", described["algorithm"]),
        ("environment", described["environment"]),
        *(("network", name) for name in sorted(of_networks)),
    ]
    return _find_own(names)


def modules_of_names(imports: Sequence[str], names: Sequence[tuple[Kind, str]]) -> tuple[str, ...]:
    """Returns the modules that another process must import to resolve some names: the user's `imports`, and the
    modules that registered the names.

    Names that are built in or provided by a plug-in need no module. Raises a `UsageError` if a name was registered
    by the main program, and no module is listed.
    """
    own = _find_own(names)
    here = [each for each in own if each.module is None]
    if here and not imports:
        functions = " and ".join(dict.fromkeys(f"rollmill.{REGISTER[each.kind]}" for each in here))
        raise UsageError(
            f"trials are separate processes and cannot create {' and '.join(map(str, here))}, because only the "
            f"running program registers these names. hint: call {functions} in a separate module, such as "
            "my_parts.py, and import my_parts in the program."
        )
    return _with_modules(imports, own)


def _find_own(names: Sequence[tuple[Kind, str]]) -> list[OwnName]:
    return [
        OwnName(kind, name, _REGISTRIES[kind].origin(name))
        for kind, name in names
        if _REGISTRIES[kind].is_users(name)
    ]


def with_own_modules(imports: Sequence[str], described: dict[str, Any]) -> tuple[str, ...]:
    """Returns the modules that another process must import to build a described graph.

    The modules named by the user come first, and the modules that registered the user's names come last.
    """
    return _with_modules(imports, own_names(described))


def _with_modules(imports: Sequence[str], names: Sequence[OwnName]) -> tuple[str, ...]:
    missing = [own.module for own in names if not set(own.origin) & set(imports)]
    return tuple(dict.fromkeys([*imports, *(module for module in missing if module is not None)]))


def only_here(described: dict[str, Any], imports: Sequence[str]) -> list[str]:
    """Returns the parts of a described graph that other processes cannot build, even after these imports.

    These are parts without a name, and names that only this process has registered.
    """
    return [*described["custom"], *map(str, _unknown_elsewhere(described, imports))]


def note_of_unknown(described: dict[str, Any], imports: Sequence[str]) -> str | None:
    """Returns a sentence for the user about names that other processes cannot resolve after these imports, or
    None.
    """
    unknown = _unknown_elsewhere(described, imports)
    if not unknown:
        return None
    functions = " and ".join(dict.fromkeys(f"rollmill.{REGISTER[own.kind]}" for own in unknown))
    return (
        "note: other processes, and commands such as rollmill evaluate, cannot create "
        f"{' and '.join(map(str, unknown))}, because only the running program registers these names. hint: call "
        f"{functions} in a separate module, such as my_parts.py, and import my_parts in the program"
    )


def _unknown_elsewhere(described: dict[str, Any], imports: Sequence[str]) -> list[OwnName]:
    if imports:  # some of these modules may register the names
        return []
    return [own for own in own_names(described) if own.module is None]
