"""Runtime type checks that cost nothing for functions that no test of a process calls."""

from collections.abc import Callable
from typing import Any

from beartype import beartype


def check_when_called(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that `beartype` makes at its first call. Making one takes a millisecond."""
    checked: Callable[..., Any] | None = None

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal checked
        if checked is None:
            checked = beartype(function)
        return checked(*args, **kwargs)

    return call
