"""Compares two values, including functions, by their parts and without calling them."""

import dataclasses
import enum
import functools
from types import CodeType, FunctionType, MappingProxyType, MethodType, NoneType
from typing import Any, NamedTuple

import jax
import numpy as np
from gymnasium import Space

from rollmill.core.trace_cache import TracedOnce
from rollmill.core.types import is_key

NOT_OF_A_SPACE = {"_np_random", "low_repr", "high_repr"}
"""Attributes that a space sets when it is sampled or printed, and that do not affect its meaning."""


class _Taken(NamedTuple):
    """A value split into its parts."""

    label: Any
    """Everything except the parts, to be compared by `==`."""
    parts: tuple[Any, ...] = ()


def certainly_same(one: Any, other: Any) -> bool:
    """Returns whether two values are certainly equal, down to the code and closures of functions.

    False does not mean that they differ: two objects of an unsupported kind also give False.
    """
    return _are_same(one, other, {})


def _are_same(one: Any, other: Any, compared: dict[tuple[int, int], tuple[Any, Any]]) -> bool:
    if one is other or (id(one), id(other)) in compared:  # a function can close over itself
        return True
    if type(one) is not type(other):
        return False
    mine, others = _take_apart(one), _take_apart(other)
    if mine is None or others is None or mine.label != others.label or len(mine.parts) != len(others.parts):
        return False
    compared[id(one), id(other)] = one, other  # keeps both objects alive, so that their ids are not reused
    return all(_are_same(a, b, compared) for a, b in zip(mine.parts, others.parts, strict=True))


@functools.singledispatch
def _take_apart(value: Any) -> _Taken | None:
    """Returns a value's parts, or None for an unsupported kind."""
    if not dataclasses.is_dataclass(value):  # Equinox modules are dataclasses, too
        return None
    names = [field.name for field in dataclasses.fields(value)]
    if not getattr(value, "__dict__", {}).keys() <= set(names):  # it has attributes besides its fields
        return None
    return _Taken("fields", tuple(getattr(value, name, None) for name in names))


for kind in (NoneType, bool, int, str, bytes, enum.Enum, type, CodeType, np.dtype, jax.ShapeDtypeStruct):
    _take_apart.register(kind, _Taken)


@_take_apart.register
def _(number: float) -> _Taken:
    return _Taken(repr(number))  # `repr` distinguishes 0.0 from -0.0


@_take_apart.register(jax.Array)
@_take_apart.register(np.ndarray)
@_take_apart.register(np.generic)
def _(array: Any) -> _Taken:
    kind = (array.dtype, array.shape, getattr(array, "weak_type", False))
    if is_key(array.dtype):
        array = jax.random.key_data(array)
    return _Taken((*kind, np.asarray(array).tobytes()))


@_take_apart.register
def _(space: Space) -> _Taken:
    """Returns the attributes of a space, because Gymnasium compares bounds only approximately."""
    return _Taken("space", ({name: part for name, part in vars(space).items() if name not in NOT_OF_A_SPACE},))


@_take_apart.register(tuple)
@_take_apart.register(list)
def _(values: Any) -> _Taken | None:
    return None if _holds_more(values) else _Taken("values", tuple(values))


@_take_apart.register(dict)
@_take_apart.register(MappingProxyType)
def _(mapping: Any) -> _Taken | None:
    return _Taken(list(mapping), tuple(mapping.values())) if type(mapping) in (dict, MappingProxyType) else None


@_take_apart.register
def _(function: functools.partial) -> _Taken | None:
    return None if _holds_more(function) else _Taken("partial", (function.func, function.args, function.keywords))


@_take_apart.register
def _(method: MethodType) -> _Taken:
    return _Taken("method", (method.__func__, method.__self__))


@_take_apart.register
def _(function: FunctionType) -> _Taken | None:
    try:
        held = tuple(cell.cell_contents for cell in function.__closure__ or ())
    except ValueError:  # a captured variable has no value yet
        return None
    # Functions with the same code and the same globals look up the same objects.
    label = (function.__code__, id(function.__globals__))
    return _Taken(label, (function.__defaults__, function.__kwdefaults__, held))


@_take_apart.register
def _(function: TracedOnce) -> _Taken:
    return _Taken("traced once", (function.function,))


def _holds_more(value: Any) -> bool:
    """Returns whether attributes have been added to a value."""
    return bool(getattr(value, "__dict__", None))
