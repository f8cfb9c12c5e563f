"""Adapters of other packages' environments, one file each, imported on demand."""

import contextlib
import importlib
import sys
from types import ModuleType

from rollmill.core.errors import UsageError
from rollmill.core.installation import install_command
from rollmill.gpus.jax_settings import standard_promotion


def import_extra(module: str, extra: str) -> ModuleType:
    """Imports a module of an optional package, under standard JAX promotion. What it prints goes to stderr.

    `extra` is the extra of Rollmill that installs the package, and the prefix of its environments. Raises a
    `UsageError` if the module, or a package that it needs, is missing or does not fit the others.
    """
    try:
        with standard_promotion(), contextlib.redirect_stdout(sys.stderr):
            return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"{extra}:ID environments need a package that is not installed ({error}): {install_command(extra)}"
        ) from None
