"""Options of environments: the ones that a factory accepts, and the error for unknown ones."""

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from rollmill.core.errors import UsageError

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def keyword_names(function: Callable[..., Any]) -> list[str]:
    """Names of the keyword arguments that a function, or a class, accepts.

    If the `__init__` of a class passes keyword arguments on to its bases, those of the bases with defaults are
    included.
    """
    if not inspect.isclass(function):
        return _named(function)
    names: list[str] = []
    for number, owner in enumerate(c for c in function.__mro__ if "__init__" in vars(c) and c is not object):
        names += _named(owner.__init__, only_defaults=number > 0)
        if not takes_any(owner.__init__):
            break
    return [name for name in dict.fromkeys(names) if name != "self"]


def takes_any(function: Callable[..., Any]) -> bool:
    """True if a function accepts keyword arguments of any name."""
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds


def _named(function: Callable[..., Any], *, only_defaults: bool = False) -> list[str]:
    return [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind not in _VARIADIC and not (only_defaults and parameter.default is parameter.empty)
    ]


def unknown_option(environment: str, option: str, known: Iterable[str]) -> UsageError:
    """A `UsageError` that lists the options of an environment, and suggests the nearest one."""
    names = sorted(known)
    if not names:
        return UsageError(f"{environment} has no options; {option!r} was given.")
    near = difflib.get_close_matches(option, names, n=1)
    suggestion = f"did you mean {near[0]}? " if near else ""
    return UsageError(f"{environment} has no option {option!r}; {suggestion}its options: {', '.join(names)}.")
