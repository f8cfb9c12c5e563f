"""Imports the names of a package when they are first used."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, str], *, packages: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` for a package that imports its names on first use.

    `modules` maps each module to the names that it defines, separated by spaces. `packages` lists inner packages,
    which are also imported on first use. For type checkers, the package must import the same names under
    `TYPE_CHECKING`, in the form `name as name`.
    """
    inner = packages.split()
    origins = {name: module for module, names in modules.items() for name in names.split()}
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


def _keeping(names: frozenset[str]) -> type[ModuleType]:
    """Returns a module class for a package whose exported names its submodules cannot overwrite.

    For example, importing the module `algorithms.ppo` would replace the function `ppo` of the package.
    """

    class Package(ModuleType):
        def __setattr__(self, name: str, value: Any) -> None:
            if not (name in names and isinstance(value, ModuleType)):
                super().__setattr__(name, value)

    return Package
