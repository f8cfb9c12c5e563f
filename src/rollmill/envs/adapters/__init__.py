"""Adapters for environments of other packages. Each adapter is one file, imported at its first use."""

import contextlib
import importlib
import sys
from types import ModuleType

from rollmill.core.errors import UsageError
from rollmill.core.imports import import_named
from rollmill.core.installation import install_command
from rollmill.core.user_frame import failed_import
from rollmill.gpus.jax_settings import standard_promotion


def import_extra(module: str, extra: str) -> ModuleType:
    """Imports a module of an optional package under standard JAX promotion, and redirects its output to stderr.

    `extra` is the extra of Rollmill that installs the package, and also the prefix of its environments. Raises a
    `UsageError` if the module or one of its dependencies is missing or incompatible.
    """
    try:
        with standard_promotion(), contextlib.redirect_stdout(sys.stderr):
            return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"{extra}:ID environments need a package that is not installed ({error}): {install_command(extra)}"
        ) from None


def import_registering(module: str, environment: str) -> None:
    """Imports a module that registers an environment. Raises a `UsageError` if it cannot be imported."""
    try:
        import_named(module)
    except ImportError as error:
        raise UsageError(f"{environment}: {failed_import(module, error)}") from None
