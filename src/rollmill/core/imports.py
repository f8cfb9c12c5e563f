"""Imports modules that are named outside of the program: in options, files and ids of environments.

The code that reads a name decides whether it may be imported. A process of a sweep also has a list of allowed
modules, so its trials import only modules that the sweep was allowed to import.
"""

import importlib
import os
from collections.abc import Iterable
from types import ModuleType

from rollmill.core.errors import UsageError

ONLY = "ROLLMILL_ONLY_IMPORT"
"""Environment variable that lists the modules that a process may import, separated by commas."""


class ImportRefused(UsageError):
    """Raised if this process is not allowed to import a module."""


def only_importing(modules: Iterable[str]) -> dict[str, str]:
    """Returns the environment variable that restricts a process and its children to importing the given
    modules.
    """
    return {ONLY: ",".join(sorted(modules))}


def import_named(name: str) -> ModuleType:
    """Imports a module by its name, or raises `ImportRefused` if this process is not allowed to."""
    allowed = os.environ.get(ONLY)
    if allowed is not None and not any(_is_within(name, module) for module in allowed.split(",")):
        raise ImportRefused(
            f"the module {name!r} is not imported, because the sweep was not allowed to import it. hint: name it "
            f"when you resume the sweep: --import {name}."
        )
    return importlib.import_module(name)


def _is_within(name: str, module: str) -> bool:
    return bool(module) and (name == module or name.startswith(f"{module}."))
