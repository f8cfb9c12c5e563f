"""Imports modules whose names come from outside the program: options, files, and ids of environments.

The code that reads a name decides whether to import it. Processes of a sweep also have a list of allowed modules,
so a trial cannot import anything that the sweep was not allowed to import.
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
    """Returns the environment variable under which `import_named` imports only the given modules."""
    return {ONLY: ",".join(sorted(modules))}


def import_named(name: str) -> ModuleType:
    """Imports a module by its name, or raises `ImportRefused` if this process is not allowed to."""
    allowed = os.environ.get(ONLY)
    if allowed is not None and not any(_is_within(name, module) for module in allowed.split(",")):
        raise ImportRefused(
            f"the module {name!r} was not imported, because this sweep may not import it. hint: allow the import "
            f"when you resume the sweep: --import {name}."
        )
    return importlib.import_module(name)


def _is_within(name: str, module: str) -> bool:
    return bool(module) and (name == module or name.startswith(f"{module}."))
