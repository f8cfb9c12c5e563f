"""Distribution policies: functions from counts to a partition, one module each.

The policy `single-learner-coarse` is the function `partition` of `single_learner_coarse.py` in this folder, and
`my_module:my_policy` a function of your own with the same signature. The first line of a module's docstring is its
description in `rollmill plan`.
"""

import importlib
import pkgutil
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.imports import ImportRefused, import_named
from rollmill.core.user_frame import failed_import, user_frame
from rollmill.dataflow import Group, Partition
from rollmill.planning.placement import Counts

DistributionPolicy: TypeAlias = Callable[[Counts], Partition]


def list_distributions() -> dict[str, str]:
    """Name of each policy, and its description: the first line of its module's docstring."""
    modules = {module.name: importlib.import_module(f"{__name__}.{module.name}") for module in _modules()}
    return {name.replace("_", "-"): _summary(module.__doc__) for name, module in sorted(modules.items())}


def find_distribution(name: str) -> DistributionPolicy:
    """Returns the policy of that name.

    Raises:
        UsageError: if there is none.
    """
    if ":" in name:
        return _own(name)
    if name not in {module.name.replace("_", "-") for module in _modules()}:
        raise unknown_name(
            "distribution policy", name, list_distributions(), hint="One of your own: module:function."
        )
    return importlib.import_module(f"{__name__}.{name.replace('-', '_')}").partition


def _modules() -> list[pkgutil.ModuleInfo]:
    return list(pkgutil.iter_modules(__path__))


def _summary(text: str | None) -> str:
    return (text or "").strip().splitlines()[0]


def _own(name: str) -> DistributionPolicy:
    module, _, function = name.partition(":")
    try:
        found: Any = getattr(import_named(module), function, None)
    except ImportRefused:
        raise
    except Exception as error:  # whatever the user's module does
        raise UsageError(f"distribution {name!r}: {failed_import(module, error)}") from error
    if not callable(found):
        raise UsageError(f"distribution {name!r}: {module} has no function {function!r}.")
    return partial(_checked, name, found)


def _checked(name: str, policy: Callable[[Counts], Any], counts: Counts) -> Partition:
    try:
        found = policy(counts)
    except ImportRefused:
        raise
    except Exception as error:  # whatever the user's function does
        raise UsageError(
            f"distribution {name!r} raised {type(error).__name__}: {error}, at {user_frame(error)}. It is called "
            "with the counts that were asked for, and returns a Partition."
        ) from error
    if not isinstance(found, Partition):
        raise UsageError(f"distribution {name!r} returned {type(found).__name__}; it has to return a Partition.")
    if not _has_groups(found):
        raise UsageError(
            f"distribution {name!r} returned a Partition whose groups are {found.groups!r}; they have to be a "
            "tuple of Groups."
        )
    return found


def _has_groups(partition: Partition) -> bool:
    groups: Any = partition.groups
    return isinstance(groups, tuple) and bool(groups) and all(isinstance(group, Group) for group in groups)
