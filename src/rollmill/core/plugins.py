"""Names that installed packages offer by entry points, and the modules that register them.

An entry point of the group `rollmill.environments`, `rollmill.algorithms` or `rollmill.networks` gives a name and
a module; importing the module registers the name, as `--import MODULE` would. Nothing is imported before the name
is looked up.
"""

import sys
from collections.abc import Container, Mapping, Sequence
from importlib import import_module, metadata
from typing import Any, Literal, NamedTuple, TypeAlias

from rollmill.core.errors import UsageError
from rollmill.core.own_line import own_line

Kind: TypeAlias = Literal["environment", "algorithm", "network"]
"""A kind of part that has names."""

REGISTER = {"environment": "register", "algorithm": "register_algorithm", "network": "register_network"}
"""The function that registers names of a kind."""
_A = {"environment": "an environment", "algorithm": "an algorithm", "network": "a network"}


class Plugin(NamedTuple):
    """A name that an installed package offers."""

    kind: Kind
    name: str
    module: str
    """Module whose import registers the name."""
    package: str
    """Name and version of the package."""


def plugins(kind: Kind) -> list[Plugin]:
    """Names of a kind that installed packages offer, sorted; nothing is imported."""
    return sorted(
        Plugin(kind, point.name, _module(point), _package(distribution))
        for distribution in _distributions()
        for point in _entry_points(distribution)
        if point.group == f"rollmill.{kind}s"
    )


def plugins_named(kind: Kind, name: str) -> list[Plugin]:
    """The plug-ins that offer a name; several if several packages do."""
    return [plugin for plugin in plugins(kind) if plugin.name == name]


def load_plugin(kind: Kind, name: str, registered: Container[str]) -> bool:
    """Imports the module of the package that offers a name.

    Args:
        kind: kind of the name.
        name: the name.
        registered: the names that are registered; the import adds to them.

    Returns:
        False if no package offers the name.

    Raises:
        UsageError: several packages offer it, its module cannot be imported, or the module does not register it.
    """
    offered = plugins_named(kind, name)
    if len(offered) > 1:
        packages = " and ".join(f"{plugin.package} ({plugin.module})" for plugin in offered)
        raise UsageError(
            f"the {kind} {name!r} is offered by several packages: {packages}. hint: --import MODULE chooses one "
            "(import it in Python), or uninstall the other."
        )
    for plugin in offered:
        _import(plugin, registered)
    return bool(offered)


def load_plugins(
    kind: Kind, registered: Container[str], origins: Mapping[str, Container[str]]
) -> list[tuple[Plugin, str]]:
    """Imports the modules of all plug-ins of a kind; those that cannot be used harm nothing else.

    Args:
        kind: the kind.
        registered: the names that are registered; the imports add to them.
        origins: modules whose import registered a name (`modules_being_imported`).

    Returns:
        Each plug-in with the reason why its name is not its own; empty if it is.
    """
    return [(plugin, _problem(plugin, registered, origins)) for plugin in plugins(kind)]


def _problem(plugin: Plugin, registered: Container[str], origins: Mapping[str, Container[str]]) -> str:
    try:
        if plugin.name not in registered:
            load_plugin(plugin.kind, plugin.name, registered)
    except UsageError as error:
        return str(error)
    if plugin.module in origins.get(plugin.name, ()):
        return ""
    return f"the name {plugin.name!r} of the package {plugin.package} is taken: it is not used."


def _import(plugin: Plugin, registered: Container[str]) -> None:
    what = f"the package {plugin.package}, which offers the {plugin.kind} {plugin.name!r}, cannot be used"
    try:
        import_module(plugin.module)
    except (Exception, SystemExit) as error:  # whatever the package does
        raise UsageError(f"{what}: {type(error).__name__}: {error}, at {own_line(error)}.") from error
    if plugin.name not in registered:
        raise UsageError(
            f"{what}: importing {plugin.module} does not register the name. hint: in that module, "
            f"rollmill.{REGISTER[plugin.kind]}({plugin.name!r}, ...)."
        )


def modules_being_imported() -> tuple[str, ...]:
    """Names of the modules whose import calls this function, directly or through others; the innermost first."""
    names, frame = [], sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            names.append(str(frame.f_globals.get("__name__")))
        frame = frame.f_back
    return tuple(names)


def registering_module(origin: Sequence[str]) -> str | None:
    """The module whose import registers a name in another process too; None if there is none.

    Args:
        origin: modules whose import registered the name (`modules_being_imported`).
    """
    module = origin[0] if origin else "__main__"
    return module if module != "__main__" and _is_found(module) else None


def _is_found(name: str) -> bool:
    """True if Python's path leads to an imported module by its name."""
    parent = sys.modules.get(name.rpartition(".")[0])
    folders = getattr(parent, "__path__", None)
    specs = (finder.find_spec(name, folders) for finder in sys.meta_path)
    spec = next((spec for spec in specs if spec is not None), None)
    return spec is not None and spec.origin == getattr(sys.modules.get(name), "__file__", None)


def is_of_plugin(kind: Kind, name: str, origin: Container[str]) -> bool:
    """True if looking up a name in another process finds the plug-in that registered it in this one.

    Args:
        kind: kind of the name.
        name: a registered name.
        origin: modules whose import registered it (`modules_being_imported`).
    """
    offered = plugins_named(kind, name)
    return len(offered) == 1 and offered[0].module in origin


def check_registration(kind: Kind, name: Any, registered: Container[str], *, overwrite: bool) -> None:
    """Checks a name that is to be registered.

    Raises:
        UsageError: it is taken, or cannot be a name.
    """
    if not isinstance(name, str):
        raise UsageError(f"cannot register {name!r:.60}: the name of {_A[kind]} is text, not a {_type(name)}.")
    if not name or name.startswith("-") or ":" in name or not name.isprintable() or " " in name:
        raise UsageError(
            f"cannot register {name!r}: the name of {_A[kind]} is one word, without a colon and without a dash in "
            "front."
        )
    if name in registered and not overwrite:
        raise UsageError(f"{_A[kind]} {name!r} is registered already; take another name or pass overwrite=True.")


def check_function(kind: Kind, name: str, function: Any) -> None:
    """Checks the function that makes what is to be registered.

    Raises:
        UsageError: it cannot be called.
    """
    if not callable(function):
        raise UsageError(
            f"cannot register {name!r}: {_A[kind]} needs a function that makes it, not a {_type(function)}."
        )


def _type(value: Any) -> str:
    return type(value).__name__


def _distributions() -> list[metadata.Distribution]:
    """Installed packages; of those with one name the one that Python's path reaches first, as for imports."""
    found: dict[str, metadata.Distribution] = {}
    for distribution in metadata.distributions():
        name = _name(distribution).lower().replace("-", "_") or _package(distribution)
        found.setdefault(name, distribution)
    return list(found.values())


def _entry_points(distribution: metadata.Distribution) -> tuple[metadata.EntryPoint, ...]:
    """The entry points of a package; none if its file cannot be read, which is no concern of other packages."""
    try:
        return tuple(distribution.entry_points)
    except Exception:
        return ()


def _module(point: metadata.EntryPoint) -> str:
    return point.value.partition(":")[0].partition("[")[0].strip()


def _package(distribution: metadata.Distribution) -> str:
    name = _name(distribution)
    return f"{name} {distribution.version}" if name else f"in {distribution.locate_file('')}"


def _name(distribution: metadata.Distribution) -> str:
    """The name of a package; empty where its metadata cannot be read."""
    try:
        return distribution.metadata["Name"] or ""
    except Exception:
        return ""
