"""Finds names that installed packages offer through entry points, and the modules that register them.

An entry point of the group `rollmill.environments`, `rollmill.algorithms` or `rollmill.networks` consists of a
name and a module. Importing the module registers the name, as `--import MODULE` would. Nothing is imported until a
name is used (`core.registry`).
"""

import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["environment", "algorithm", "network"]
"""Kinds of parts that are registered by name."""

REGISTER = {"environment": "register", "algorithm": "register_algorithm", "network": "register_network"}
"""Maps each kind to the function that registers it."""


class Plugin(NamedTuple):
    """A name that an installed package offers through an entry point."""

    kind: Kind
    name: str
    module: str
    """Module whose import registers the name."""
    package: str
    """Name and version of the package."""


def plugins(kind: Kind) -> list[Plugin]:
    """Returns all plug-ins of a kind that installed packages offer, sorted, without importing anything."""
    installed, group = list(metadata.distributions()), f"rollmill.{kind}s"
    if not any(point.group == group for distribution in installed for point in _entry_points(distribution)):
        return []  # without parsing the metadata of every package for its name
    return sorted(
        Plugin(kind, point.name, _module(point), _package(distribution))
        for distribution in _without_duplicates(installed)
        for point in _entry_points(distribution)
        if point.group == group
    )


def plugins_named(kind: Kind, name: str) -> list[Plugin]:
    """Returns all plug-ins that offer a given name."""
    return [plugin for plugin in plugins(kind) if plugin.name == name]


def modules_being_imported() -> tuple[str, ...]:
    """Returns the modules whose import calls this function, directly or indirectly, the innermost first."""
    names, frame = [], sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            names.append(str(frame.f_globals.get("__name__")))
        frame = frame.f_back
    return tuple(names)


def registering_module(origin: Sequence[str]) -> str | None:
    """Returns a module whose import also registers a name in other processes, or None.

    `origin` lists the modules whose import registered the name (`modules_being_imported`).
    """
    module = origin[0] if origin else "__main__"
    return module if module != "__main__" and _is_importable(module) else None


def _is_importable(name: str) -> bool:
    """Returns whether an imported module can be found by name on the Python path."""
    parent = sys.modules.get(name.rpartition(".")[0])
    folders = getattr(parent, "__path__", None)
    specs = (finder.find_spec(name, folders) for finder in sys.meta_path)
    spec = next((spec for spec in specs if spec is not None), None)
    return spec is not None and spec.origin == getattr(sys.modules.get(name), "__file__", None)


def _without_duplicates(installed: Sequence[metadata.Distribution]) -> list[metadata.Distribution]:
    """Returns the packages in order. Of duplicates, only the one that Python imports is returned."""
    by_name: dict[str, metadata.Distribution] = {}
    for distribution in installed:
        name = _name(distribution).lower().replace("-", "_") or _package(distribution)
        by_name.setdefault(name, distribution)
    return list(by_name.values())


def _entry_points(distribution: metadata.Distribution) -> tuple[metadata.EntryPoint, ...]:
    try:
        return tuple(distribution.entry_points)
    except Exception:  # a file that cannot be read must not affect other packages
        return ()


def _module(point: metadata.EntryPoint) -> str:
    return point.value.partition(":")[0].partition("[")[0].strip()


def _package(distribution: metadata.Distribution) -> str:
    name = _name(distribution)
    return f"{name} {distribution.version}" if name else f"in {distribution.locate_file('')}"


def _name(distribution: metadata.Distribution) -> str:
    try:
        return distribution.metadata["Name"] or ""
    except Exception:  # unreadable metadata
        return ""
