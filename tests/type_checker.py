"""Runtime type checks that cost nothing for functions that no test of a process calls."""

import threading
from collections.abc import Callable
from typing import Any

from beartype import beartype

_thread = threading.local()


def check_when_called(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that `beartype` makes at its first call. Making one takes a millisecond.

    The profiler intercepts calls, also those within `beartype`, which holds a lock meanwhile. A function that is
    called from there is not checked.
    """
    checked: Callable[..., Any] | None = None

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal checked
        if checked is None:
            if getattr(_thread, "is_making", False):
                return function(*args, **kwargs)
            _thread.is_making = True
            try:
                checked = beartype(function)
            finally:
                _thread.is_making = False
        return checked(*args, **kwargs)

    return call
