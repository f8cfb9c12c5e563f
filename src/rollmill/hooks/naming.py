"""Names of hooks, for messages and summaries."""

from functools import partial
from typing import Any

from rollmill.hooks.events import Hook


def named(name: str, hook: Hook) -> Hook:
    """Returns the hook, under this name in messages."""
    hook.__name__ = hook.__qualname__ = name  # pyright: ignore[reportFunctionMemberAccess]
    return hook


def name_of(hook: Any) -> str:
    """The name of a function, with the functions and classes that it was defined in, or of a callable's class."""
    name = getattr(hook, "__qualname__", None)
    if name is None and isinstance(hook, partial):
        return name_of(hook.func)
    return (name or type(hook).__qualname__).replace(".<locals>", "")
