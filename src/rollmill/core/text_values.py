"""Parses typed values from strings: arguments of a command, values of a sweep's axes, and changes of a run.

Every error is one sentence that names the setting, the string, and the valid values.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin

from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.schema import SEQUENCES, UNIONS, Mismatch, coerce, describe_expected, members

UNITS = {"k": 10**3, "m": 10**6, "b": 10**9}
"""Letters that people write for thousands, millions and billions."""
MAX_DIGITS = 30
"""Maximum number of digits of an integer in the form 1e6. A longer integer is probably a mistake."""
TRUTHS = {"true": True, "True": True, "false": False, "False": False}
NOTHING = ("none", "null")
"""Strings for None, in any case."""


def read_value(name: str, hint: Any, texts: Sequence[str]) -> Any:
    """Parses a value of a type from one string, or from one string per element for a tuple or list.

    Raises a `UsageError` with the setting as the user wrote it, such as `--num-envs`, if a string is invalid or
    missing.
    """
    part = sequence_in(hint)
    if part is None:
        if len(texts) != 1 or not texts[0]:
            raise _missing(name, hint)
        return _read_one(name, hint, texts[0])
    if len(texts) == 1 and texts[0].lower() in NOTHING and NoneType in get_args(hint):
        return None
    if part.kind is dict and len(texts) == 1 and texts[0].startswith("{"):
        return _read_one(name, hint, texts[0])
    values = [_read_one(name, inner, text) for inner, text in _with_types(name, part, texts)]
    return part.collect(values)


def count_of(hint: Any) -> int | None:
    """Returns how many strings a value of a type consists of, or None for any number."""
    part = sequence_in(hint)
    return 1 if part is None else part.length


class SequenceType(NamedTuple):
    """Type of a setting that takes several values: a tuple, a list, or a dictionary of names and values."""

    members: tuple[Any, ...]
    """Types of the values in one group."""
    length: int | None
    """Number of values, or None for any number of groups."""
    is_nested: bool
    """True if each group is a tuple of its own."""
    kind: type

    def collect(self, values: Sequence[Any]) -> Any:
        """Combines parsed values into a tuple, list or dictionary, in groups if the type has them."""
        if not self.is_nested:
            return self.kind(values)
        width = len(self.members)
        return self.kind(tuple(values[at : at + width]) for at in range(0, len(values), width))


def sequence_in(hint: Any) -> SequenceType | None:
    """Returns the tuple, list or dictionary type in a type or union of types, or None."""
    if get_origin(hint) in UNIONS:
        return next((part for each in get_args(hint) if (part := sequence_in(each)) is not None), None)
    if get_origin(hint) is dict:
        return SequenceType(get_args(hint), None, is_nested=True, kind=dict)
    if get_origin(hint) not in SEQUENCES:
        return None
    kinds = get_args(hint)
    if get_origin(hint) is tuple and Ellipsis not in kinds:
        return SequenceType(kinds, len(kinds), is_nested=False, kind=tuple)
    kind = list if get_origin(hint) is list else tuple
    inner = sequence_in(kinds[0])
    if inner is None or inner.length is None:
        return SequenceType((kinds[0],), None, is_nested=False, kind=kind)
    return SequenceType(inner.members, None, is_nested=True, kind=kind)


def integer(text: str) -> int:
    """Parses an integer from digits, or from another form such as 1e6.

    Raises a `ValueError` for other strings.
    """
    try:
        return int(text)
    except ValueError:
        return _whole(text)


def _with_types(name: str, part: SequenceType, texts: Sequence[str]) -> Iterable[tuple[Any, str]]:
    width = len(part.members)
    if part.length is not None and len(texts) != part.length:
        raise _missing(name, part.members[0])
    if len(texts) % width:
        raise UsageError(f"{name} takes {width} values, got {len(texts)}.")
    return ((part.members[index % width], text) for index, text in enumerate(texts))


def _read_one(name: str, hint: Any, text: str) -> Any:
    kinds = set(members(hint))
    for candidate in _candidates(text, kinds):
        try:
            return coerce(name, hint, candidate)
        except Mismatch:
            continue
    if all(get_origin(kind) is Literal for kind in kinds - {NoneType}):
        raise unknown_name(name, text, [str(choice) for kind in kinds for choice in get_args(kind)])
    raise UsageError(f"{name} {text} must be {_describe_hint(hint)}.{_suggest_number(text)}")


def _candidates(text: str, kinds: set[Any]) -> Iterator[Any]:
    """Yields the possible values of a string, the most specific first."""
    if Any not in kinds:
        for read in (integer, float, TRUTHS.__getitem__):
            try:
                yield read(text)
                break
            except (KeyError, ValueError):
                continue
        if text == "None" or (text.lower() in NOTHING and str not in kinds):
            yield None
        if text[:1] in ("{", "["):
            with contextlib.suppress(ValueError):
                yield json.loads(text)
    yield text


def _whole(text: str, factor: int = 1) -> int:
    try:
        number = Decimal(text) * factor
        if number.is_finite() and number.adjusted() < MAX_DIGITS and number == number.to_integral_value():
            return int(number)
    except InvalidOperation:
        pass
    raise ValueError(f"{text} is not an integer")


def _missing(name: str, hint: Any) -> UsageError:
    takes_any = {str, Path, Any} & set(members(hint))
    return UsageError(f"{name} needs a value{'' if takes_any else f': {_describe_hint(hint)}'}.")


def _describe_hint(hint: Any) -> str:
    kinds = dict.fromkeys(kind for kind in members(hint) if kind is not NoneType)
    return " or ".join(describe_expected(kind, quote=str) for kind in kinds)


def _suggest_number(text: str) -> str:
    """Returns a hint for a number with a unit, such as 500k."""
    try:
        return f" hint: {_whole(text[:-1], UNITS[text[-1:].lower()])}."
    except (KeyError, ValueError):
        return ""
