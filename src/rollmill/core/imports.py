"""Imports all modules with names from outside of the program: from options, files and ids of environments.

The code that reads a name decides whether it may be imported. A process of a sweep also has a list of modules: its
trials import only modules that the sweep was allowed to import.
"""

import importlib
import os
from collections.abc import Iterable
from types import ModuleType

from rollmill.core.errors import UsageError

ONLY = "ROLLMILL_ONLY_IMPORT"
"""Variable of a process that may import some modules only, those with commas between them, by their names."""


class ImportRefused(UsageError):
    """A module that this process may not import."""


def only_importing(modules: Iterable[str]) -> dict[str, str]:
    """Returns the variable by which a process and its children may import only these modules."""
    return {ONLY: ",".join(sorted(modules))}


def import_named(name: str) -> ModuleType:
    """Imports a module by its name. Raises `ImportRefused` if this process may not."""
    allowed = os.environ.get(ONLY)
    if allowed is not None and not any(_is_within(name, module) for module in allowed.split(",")):
        raise ImportRefused(
            f"the module {name!r} is not imported, because the sweep was not allowed to import it. hint: name it "
            f"when you resume the sweep: --import {name}."
        )
    return importlib.import_module(name)


def _is_within(name: str, module: str) -> bool:
    return bool(module) and (name == module or name.startswith(f"{module}."))
