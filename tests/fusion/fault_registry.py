"""Where faults of the compiler, made on purpose, are registered; see `faults`."""

from collections.abc import Callable
from typing import Any

Patch = Any
"""A `pytest.MonkeyPatch`."""

FAULTS: dict[str, Callable[[Patch], None]] = {}
PRIMITIVES: dict[str, tuple[str, ...]] = {}
"""Primitives of JAX's that a fault makes wrong; those of all others where it names none."""


def fault(name: str, *primitives: str) -> Callable:
    def add(make: Callable[[Patch], None]) -> Callable:
        FAULTS[name] = make
        if primitives:
            PRIMITIVES[name] = primitives
        return make

    return add


def replaced(name: str, owner: Any, attribute: str, value: Any, *primitives: str) -> None:
    """A fault that puts something else in the place of an attribute, or of an entry of a dictionary."""
    put = "setitem" if isinstance(owner, dict) else "setattr"
    fault(name, *primitives)(lambda patch: getattr(patch, put)(owner, attribute, value))
