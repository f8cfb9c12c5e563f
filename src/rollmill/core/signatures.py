"""Compares the parameters of a user's function with the arguments of its call.

Otherwise, the error would appear during a trace, far from the function's definition.
"""

import inspect
from typing import Any, NamedTuple

from rollmill.core.errors import ContractError


class Call(NamedTuple):
    """Arguments with which Rollmill calls a user's function."""

    positional: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()

    def __str__(self) -> str:
        named = ("*", *self.keywords) if self.keywords else ()
        return f"({', '.join((*self.positional, *named))})"


def check_signature(what: str, function: Any, call: Call) -> None:
    """Raises a `ContractError` unless `function` accepts the call. `what` is its name in messages: "Walk-v0:
    step".
    """
    if not callable(function):
        raise ContractError(f"{what} is a {type(function).__name__}, expected a function of {call}.")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables have no signature
        return
    try:
        signature.bind(*call.positional, **dict.fromkeys(call.keywords))
    except TypeError as error:
        raise ContractError(
            f"{what} takes {signature}, but is called with {call}: {error}.{_place(function)}"
        ) from None


def _place(function: Any) -> str:
    """Returns where a function is defined, as a further line."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f"\n  at {code.co_filename}:{code.co_firstlineno}"
