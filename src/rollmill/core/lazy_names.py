"""Imports the names of a package when they are first used."""

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any


def lazy_names(
    package: str, *, packages: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` for a package that imports its names on first use.

    The package imports these names under `TYPE_CHECKING`, in the form `name as name`. `packages`
    lists inner packages, separated by spaces, which are also imported on first use.
    """
    inner, origins = packages.split(), dict(_imports_for_type_checkers(package))
    namespace = vars(sys.modules[package])
    hidden = frozenset(name for name, module in origins.items() if module == f"{package}.{name}")
    if hidden:
        sys.modules[package].__class__ = _keeping(hidden)

    def get(name: str) -> Any:
        if name in inner:
            return import_module(f"{package}.{name}")
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = namespace[name] = getattr(import_module(origins[name]), name)
        return value

    def names() -> list[str]:
        own = {name for name in namespace if name.startswith("__")}
        return sorted({*own, *origins, *inner})

    return get, names, [*origins]


def _imports_for_type_checkers(package: str) -> Iterator[tuple[str, str]]:
    """Yields each name that a package imports under `TYPE_CHECKING`, with the module that defines it.

    Splitting the text takes microseconds. Parsing it would take milliseconds of every start.
    """
    spec: Any = sys.modules[package].__spec__
    block = spec.loader.get_source(package).partition("\nif TYPE_CHECKING:\n")[2].partition("\n\n")[0]
    for statement in block.split("    from ")[1:]:
        module, _, names = statement.partition(" import ")
        yield from ((name.split()[0], module) for name in names.strip(" ()\n").split(",") if name.strip())


def _keeping(names: frozenset[str]) -> type[ModuleType]:
    """Returns a module class for a package whose exported names its submodules cannot overwrite.

    For example, importing the module `algorithms.ppo` would replace the function `ppo` of the package.
    """

    class Package(ModuleType):
        def __setattr__(self, name: str, value: Any) -> None:
            if not (name in names and isinstance(value, ModuleType)):
                super().__setattr__(name, value)

    return Package
