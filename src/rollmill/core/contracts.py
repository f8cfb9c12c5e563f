"""Checks the signatures of users' functions, and describes the values that they return.

A wrong signature would otherwise cause an error during a trace, far from the function's definition.
"""

import inspect
from typing import Any, NamedTuple

import jax

from rollmill.core.errors import ContractError


class Call(NamedTuple):
    """Arguments with which Rollmill calls a user's function."""

    positional: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()

    def __str__(self) -> str:
        named = ("*", *self.keywords) if self.keywords else ()
        return f"({', '.join((*self.positional, *named))})"


def check_signature(what: str, function: Any, call: Call) -> None:
    """Raises a `ContractError` unless `function` accepts the call. `what` names it in messages."""
    if not callable(function):
        raise ContractError(
            f"{what} is a {type(function).__name__}, expected a function that can be called as {call}."
        )
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


def outline(value: Any) -> str:
    """Returns a value's structure in one line, with types as leaves."""
    if type(value) is tuple:
        return f"a tuple of {len(value)} values ({', '.join(outline(part) for part in value)})"
    leaves = jax.tree_util.tree_leaves_with_path(value)
    if len(leaves) == 1 and not leaves[0][0]:
        return type_of(leaves[0][1])
    parts = [f"{jax.tree_util.keystr(path)}: {type_of(leaf)}" for path, leaf in leaves]
    return f"{type(value).__name__}({', '.join(parts)})"


def type_of(leaf: Any) -> str:
    """Returns an array's dtype and shape, or the type of anything else."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return type(leaf).__name__
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
