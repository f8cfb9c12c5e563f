"""Uses dataclasses as schemas: converts values from Python, JSON and strings to the annotated types of fields.

A single pass over the annotation converts types, checks bounds (`core.bounds`), and reports the first part that
does not match.
"""

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np

from rollmill.core.bounds import OrFunction, Range
from rollmill.core.errors import DataError, UsageError, suggestion, unknown_name
from rollmill.core.json_data import INFINITIES, INTEGERS, short_json, short_repr, shorten
from rollmill.core.local_paths import local_path
from rollmill.core.schedules import EXPECTED_SCHEDULE, parse_schedule
from rollmill.core.setting_names import unknown_setting
from rollmill.core.stored_paths import OfRun, run_folder

Instance = TypeVar("Instance")

UNIONS = (typing.Union, types.UnionType)
SEQUENCES = (tuple, list, Sequence)

_JSON = {int: "an integer", float: "a number", bool: "true or false", str: "a string", Path: "a path"}
_JSON |= {types.NoneType: "null", tuple: "a list", list: "a list", dict: "an object"}
_PYTHON = {**_JSON, bool: "True or False", types.NoneType: "None", tuple: "a tuple", dict: "a dictionary"}
"""Names of types in messages."""


class Mismatch(UsageError):
    """Raised if a value does not match its annotation. The message names the value, and the types or bounds that
    it must have.

    `is_final` is True if the type of the value itself matches, but a bound or a part of the value does not.
    """

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


def coerce(name: str, hint: Any, value: Any) -> Any:
    """Converts a value from Python to its annotated type, and checks its bounds.

    The value may be a NumPy or JAX scalar, a list for a tuple, a float such as 1e6 for an integer, a mapping for a
    dataclass, or the string "inf" for a number. If there is no conversion for a type, any value is accepted.
    Raises a `UsageError` that begins with the value's name if a part of the value has another type or is out of
    bounds, or if a field is unknown or missing.
    """
    return _Walk(from_json=False).convert(name, hint, value)


def read_as(kind: Any, value: Any, *, where: str, field: str = "", error: type[Exception] = DataError) -> Any:
    """Converts a parsed JSON value to a dataclass, or to any type that msgspec supports, such as `list[Entry]`.

    Types are checked strictly. For example, 8.0 is not an integer. Fields with a default may be missing. The
    dataclass's own checks run last. Raises `error` if a field is unknown, missing, out of bounds or of another
    type. Messages begin with `where`, the source of the document. `field` is the path of the value in the
    document, such as `graph.config`.
    """
    try:
        return _Walk(from_json=True).convert(field, kind, value)
    except Mismatch as mismatch:
        raise error(f"{where}: {mismatch}") from None


def coerce_fields(instance: Instance) -> Instance:
    """Returns a copy of a dataclass instance with each field converted by `coerce`."""
    changed = _changes(instance)
    return dataclasses.replace(instance, **changed) if changed else instance  # pyright: ignore[reportArgumentType]


def check_fields(instance: Any) -> None:
    """Converts the fields of a new dataclass instance to their annotated types, in place.

    Call it in `__post_init__`. The dataclass may be frozen. Raises a `UsageError` for a field whose value cannot
    be converted.
    """
    for name, value in _changes(instance).items():
        object.__setattr__(instance, name, value)


def check_names(kind: type, values: Mapping[str, Any], *, what: str, hint: str = "") -> None:
    """Checks that every key of a mapping is the name of a field of a dataclass.

    Raises a `UsageError` for an unknown name, which suggests the nearest ones, or the equivalent of another
    library's name.
    """
    known = [field.name for field in dataclasses.fields(kind)]
    for name in values:
        if name not in known:
            raise unknown_setting(what, name, known, hint=hint)


def members(hint: Any) -> Iterator[Any]:
    """Yields the types that a value may have. For a sequence, it yields the types of its elements."""
    if typing.get_origin(hint) not in (*UNIONS, *SEQUENCES):
        yield hint
        return
    for part in typing.get_args(hint):
        if part is not Ellipsis:
            yield from members(part)


def describe_expected(hint: Any, names: Mapping[Any, str] = _JSON, *, quote: Callable[[Any], str] = repr) -> str:
    """Describes the values that an annotation allows, such as `a number or null`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return describe_expected(arguments[0], names, quote=quote)
    if origin in UNIONS:
        return " or ".join(dict.fromkeys(describe_expected(part, names, quote=quote) for part in arguments))
    if origin is Literal:
        return " or ".join(map(quote, arguments))
    if dataclasses.is_dataclass(hint):
        return names[dict]
    return names.get(origin or hint) or getattr(hint, "__name__", str(hint))


def _changes(instance: Any) -> dict[str, Any]:
    hints = _hints(type(instance))
    old = {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance) if field.init}
    new = {name: coerce(name, hints[name], value) for name, value in old.items()}
    return {name: value for name, value in new.items() if type(value) is not type(old[name]) or value != old[name]}


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


class _Walk(NamedTuple):
    """Walks a value along its annotation."""

    from_json: bool
    bounds: tuple[Range, ...] = ()
    """Bounds of each number below this point."""
    takes_functions: bool = False
    """Whether a function may stand for a number."""
    takes_urls: bool = False
    """Whether the URL of a run may stand for its directory."""

    def convert(self, name: str, hint: Any, value: Any) -> Any:
        origin = typing.get_origin(hint)
        if origin is Annotated:
            ranges = (part for part in hint.__metadata__ if isinstance(part, Range))
            functions = any(isinstance(part, OrFunction) for part in hint.__metadata__)
            urls = any(isinstance(part, OfRun) for part in hint.__metadata__)
            inner = self._replace(bounds=(*self.bounds, *ranges), takes_functions=functions, takes_urls=urls)
            return inner.convert(name, hint.__origin__, value)
        if origin in UNIONS:
            return self._alternative(name, hint, value)
        if origin is Literal:
            return self._choice(name, hint, value)
        if (origin or hint) in SEQUENCES:
            return self._sequence(name, hint, value)
        if (origin or hint) in (dict, Mapping):
            return self._mapping(name, hint, value)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            return self._dataclass(name, hint, value)
        return self._leaf(name, hint, value) if hint in _READERS else self._other(name, hint, value)

    def _alternative(self, name: str, hint: Any, value: Any) -> Any:
        kinds, final = typing.get_args(hint), None
        if value is None and types.NoneType in kinds:
            return None
        for kind in (each for each in kinds if each is not types.NoneType):
            try:
                return self.convert(name, kind, value)
            except Mismatch as mismatch:
                final = mismatch if mismatch.is_final else final
        raise final or self._mismatch(name, hint, value)

    def _choice(self, name: str, hint: Any, value: Any) -> Any:
        choices = typing.get_args(hint)
        if any(value == choice and type(value) is type(choice) for choice in choices):
            return value
        if self.from_json:
            raise self._mismatch(name, hint, value)
        raise Mismatch(str(unknown_name(name, str(value), map(str, choices))))

    def _sequence(self, name: str, hint: Any, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise self._mismatch(name, hint, value)
        kind = list if list in (hint, typing.get_origin(hint)) else tuple
        hints = typing.get_args(hint) or (Any, ...)
        if typing.get_origin(hint) is not tuple or Ellipsis in hints:
            hints = hints[:1] * len(value)
        elif len(hints) != len(value):
            raise self._mismatch(name, kind, value, suffix=f" of length {len(hints)}", is_final=True)
        parts = enumerate(zip(hints, value, strict=True))
        return kind([self._part(f"{name}[{index}]", inner, part) for index, (inner, part) in parts])

    def _mapping(self, name: str, hint: Any, value: Any) -> dict[Any, Any]:
        if not isinstance(value, Mapping):
            raise self._mismatch(name, dict, value)
        inner = (typing.get_args(hint) or (Any, Any))[1]
        return {key: self._part(_join_path(name, key), inner, part) for key, part in value.items()}

    def _dataclass(self, name: str, kind: type, value: Any) -> Any:
        if isinstance(value, kind):
            return coerce_fields(value)
        if not isinstance(value, Mapping):
            raise self._mismatch(name, kind, value)
        fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
        for key in value.keys() - fields.keys():
            unknown = f"{_join_path(name, key)} is unknown. {suggestion(key, fields)}"
            in_python = str(unknown_setting(f"setting of {name}", key, fields))
            raise Mismatch(unknown if self.from_json else in_python, is_final=True)
        hints = _hints(kind)
        parts = {key: self._part(_join_path(name, key), hints[key], part) for key, part in value.items()}
        for key, field in fields.items():
            if key not in parts and field.default is field.default_factory is dataclasses.MISSING:
                raise Mismatch(f"{_join_path(name, key)} is missing.", is_final=True)
        return kind(**parts)

    def _part(self, name: str, hint: Any, value: Any) -> Any:
        """Converts a part of a value. A mismatch is final, as it is clearer than a mismatch of the whole value."""
        try:
            return self.convert(name, hint, value)
        except Mismatch as mismatch:
            mismatch.is_final = True
            raise

    def _leaf(self, name: str, hint: Any, value: Any) -> Any:
        if hint is str and self.takes_functions and callable(value):
            return value  # for example, an Optax schedule
        if self.from_json and hint is int and isinstance(value, float):
            raise self._mismatch(name, hint, value)
        try:
            read = _READERS[hint](_python_scalar(value))
        except TypeError:
            raise self._mismatch(name, hint, value) from None
        except OverflowError as limit:
            raise self._mismatch(name, hint, value, suffix=f" {limit}", is_final=True) from None
        if hint in (int, float, str) and self.bounds:
            self._check_bounds(name, read)
        if hint is Path:
            return run_folder(name, read) if self.takes_urls else local_path(name, read)
        return read

    def _check_bounds(self, name: str, value: int | float | str) -> None:
        if isinstance(value, str):
            self._check_schedule(name, value)
            return
        for exceeded in (each for each in self.bounds if not each.holds(value)):
            raise Mismatch(f"{name}={short_repr(value)} must {exceeded}.", is_final=True)

    def _check_schedule(self, name: str, text: str) -> None:
        """Checks both ends of a schedule. All other values lie between them."""
        try:
            _, *ends = parse_schedule(name, text)
        except UsageError as error:
            if EXPECTED_SCHEDULE not in str(error):
                raise Mismatch(str(error), is_final=True) from None
            raise Mismatch(f"{self._show(name, text)} must be {EXPECTED_SCHEDULE}.", is_final=True) from None
        for number in ends:
            for exceeded in (each for each in self.bounds if not each.holds(number)):
                raise Mismatch(f"{self._show(name, text)}: {number} must {exceeded}.", is_final=True)

    def _other(self, name: str, hint: Any, value: Any) -> Any:
        """Converts a value to a type that has no reader, such as an enumeration."""
        if not self.from_json:
            return value
        try:
            return msgspec.convert(value, hint)
        except msgspec.ValidationError as problem:
            raise Mismatch(f"{self._show(name, value)} does not match its type: {problem}.") from None

    def _mismatch(self, name: str, hint: Any, value: Any, *, suffix: str = "", is_final: bool = False) -> Mismatch:
        names = _JSON if self.from_json else _PYTHON
        names = {**names, str: "a schedule"} if self.bounds else names
        return Mismatch(
            f"{self._show(name, value)} must be {describe_expected(hint, names)}{suffix}.", is_final=is_final
        )

    def _show(self, name: str, value: Any) -> str:
        text = short_json(value) if self.from_json else short_repr(value)
        return f"{name}={text}" if name else text


def _integer(value: Any) -> int:
    if not isinstance(value, int | float) or isinstance(value, bool) or value != value // 1:
        raise TypeError
    if int(value) not in INTEGERS:
        raise OverflowError("of at most 64 bits")
    return int(value)


def _number(value: Any) -> float:
    if isinstance(value, str) and value in INFINITIES:
        return float(value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError
    try:
        return float(value)
    except OverflowError:
        raise OverflowError("up to 1.8e308") from None


def _is(*kinds: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, kinds):
            raise TypeError
        return value

    return read


_READERS: dict[Any, Callable[[Any], Any]] = {
    int: _integer,
    float: _number,
    bool: _is(bool),
    str: _is(str),
    Path: _is(str, PathLike),
}
"""Readers of types without parts. A reader raises a TypeError, or an OverflowError that names the limit."""


def _python_scalar(value: Any) -> Any:
    """Returns a NumPy or JAX scalar as a Python number, and any other value as it is."""
    dtype = getattr(value, "dtype", None)
    if dtype is None or getattr(value, "shape", None) != ():
        return value
    is_real = np.issubdtype(dtype, np.number) and not np.issubdtype(dtype, np.complexfloating)
    return value.item() if is_real or np.issubdtype(dtype, np.bool_) else value


def _join_path(path: str, key: Any) -> str:
    name = key if isinstance(key, str) and key.isidentifier() and key.isascii() else json.dumps(str(key))
    return f"{path}.{shorten(name)}" if path else shorten(name)
