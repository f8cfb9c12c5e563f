"""Makes something from arrays of which no number is known, without computing anything."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

T = TypeVar("T")


def trace_abstractly(make: Callable[..., T], *arguments: Any) -> T:
    """The value that `make` returns for these arrays or shapes while it is traced."""
    made: list[T] = []

    def trace(*arguments: Any) -> tuple[()]:
        made.append(make(*arguments))
        return ()

    jax.eval_shape(trace, *arguments)
    return made[0]
