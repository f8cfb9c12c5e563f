"""Whether two values, functions among them, are certainly the same, by their parts and without calling them."""

import dataclasses
import enum
import functools
from collections.abc import Mapping
from types import CodeType, FunctionType, MethodType, NoneType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import Space


class _Taken(NamedTuple):
    """A value taken apart."""

    label: Any
    """What it is besides its parts; compared by `==`."""
    parts: tuple[Any, ...] = ()


def certainly_same(one: Any, other: Any) -> bool:
    """True if two values hold the same, down to the code of functions and what they have closed over.

    False says nothing: values of kinds that are not known here count as different unless they are one object.
    """
    return _are_same(one, other, set())


def _are_same(one: Any, other: Any, compared: set[tuple[int, int]]) -> bool:
    if one is other or (id(one), id(other)) in compared:  # a function can close over itself
        return True
    if type(one) is not type(other):
        return False
    mine, others = _taken_apart(one), _taken_apart(other)
    if mine is None or others is None or mine.label != others.label or len(mine.parts) != len(others.parts):
        return False
    compared.add((id(one), id(other)))
    return all(_are_same(a, b, compared) for a, b in zip(mine.parts, others.parts, strict=True))


@functools.singledispatch
def _taken_apart(value: Any) -> _Taken | None:
    """A value's parts; None for a kind that is not known."""
    if not dataclasses.is_dataclass(value):  # modules of Equinox are some
        return None
    return _Taken("fields", tuple(getattr(value, field.name, None) for field in dataclasses.fields(value)))


for kind in (NoneType, bool, int, str, bytes, enum.Enum, type, CodeType, np.dtype, jax.ShapeDtypeStruct):
    _taken_apart.register(kind, _Taken)


@_taken_apart.register
def _(number: float) -> _Taken:
    return _Taken(repr(number))  # zeros have signs


@_taken_apart.register(jax.Array)
@_taken_apart.register(np.ndarray)
@_taken_apart.register(np.generic)
def _(array: Any) -> _Taken:
    kind = (array.dtype, array.shape)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return _Taken((*kind, np.asarray(array).tobytes()))


@_taken_apart.register
def _(space: Space) -> _Taken:
    """Spaces' own equality is approximate."""
    return _Taken("space", ({name: part for name, part in vars(space).items() if name != "_np_random"},))


@_taken_apart.register(tuple)
@_taken_apart.register(list)
def _(values: Any) -> _Taken:
    return _Taken("values", tuple(values))


@_taken_apart.register
def _(mapping: Mapping) -> _Taken:
    return _Taken(list(mapping), tuple(mapping.values()))


@_taken_apart.register
def _(function: functools.partial) -> _Taken:
    return _Taken("partial", (function.func, function.args, function.keywords))


@_taken_apart.register
def _(method: MethodType) -> _Taken:
    return _Taken("method", (method.__func__, method.__self__))


@_taken_apart.register
def _(function: FunctionType) -> _Taken | None:
    try:
        held = tuple(cell.cell_contents for cell in function.__closure__ or ())
    except ValueError:  # a name that is not bound yet
        return None
    # Equal code reads the same names, and finds the same under them in the same module.
    label = (function.__code__, id(function.__globals__))
    return _Taken(label, (function.__defaults__, function.__kwdefaults__, held))
