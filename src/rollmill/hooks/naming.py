"""Names of hooks, for messages and summaries."""

from functools import partial
from typing import Any

from rollmill.hooks.events import Hook


def named(name: str, hook: Hook) -> Hook:
    """The hook, under this name in messages."""
    hook.__name__ = name  # pyright: ignore[reportFunctionMemberAccess]
    return hook


def name_of(hook: Any) -> str:
    """The name of a function, or of the class of any other callable."""
    name = getattr(hook, "__name__", None)
    if name is None and isinstance(hook, partial):
        return name_of(hook.func)
    return name or type(hook).__name__
