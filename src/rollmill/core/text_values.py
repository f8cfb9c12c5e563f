"""Reads typed values from text: words of a command, values of a sweep's axes, and changes of a run.

Every error is one sentence that names the setting, the text, and the values that it takes.
"""

import json
import types
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import msgspec

from rollmill.core.errors import UsageError, unknown_name

UNITS = {"k": 10**3, "m": 10**6, "b": 10**9}
"""Letters that people write for thousands, millions and billions."""
MAX_DIGITS = 30
"""Digits of an integer in the form 1e6. A longer one is a slip."""
TRUTHS = {"true": True, "True": True, "false": False, "False": False}
NOTHING = ("none", "null")
"""Texts for None, in any case."""

_SEQUENCES = (tuple, list, Sequence)
_UNIONS = (Union, types.UnionType)


def read_value(name: str, hint: Any, texts: Sequence[str]) -> Any:
    """Reads a value of a type from text.

    Args:
        name: the setting as the user wrote it, such as `--num-envs`, for messages.
        hint: the setting's type.
        texts: one text, or for a tuple or list one for each number or name in it.

    Raises:
        UsageError: a text is no value of the type, or there are too few.
    """
    part = sequence_in(hint)
    if part is None:
        if len(texts) != 1 or not texts[0]:
            raise _missing(name, hint)
        return _read_one(name, hint, texts[0])
    if len(texts) == 1 and texts[0].lower() in NOTHING and type(None) in get_args(hint):
        return None
    values = [_read_one(name, inner, text) for inner, text in _with_types(name, part, texts)]
    return part.collect(values)


def count_of(hint: Any) -> int | None:
    """The number of texts that a value of a type takes; None for any number."""
    part = sequence_in(hint)
    return 1 if part is None else part.length


class SequenceType(NamedTuple):
    """A tuple or a list of values, or of groups of values."""

    members: tuple[Any, ...]
    """Types of the values of one group."""
    length: int | None
    """Number of values; None for any number of groups."""
    is_nested: bool
    """True if each group is a tuple of its own."""
    kind: type

    def collect(self, values: Sequence[Any]) -> Any:
        """The values as a tuple or list, in groups if the type has them."""
        if not self.is_nested:
            return self.kind(values)
        width = len(self.members)
        return self.kind(tuple(values[at : at + width]) for at in range(0, len(values), width))


def sequence_in(hint: Any) -> SequenceType | None:
    """The tuple or list that a type is, or that it is beside None; None for other types."""
    if get_origin(hint) in _UNIONS:
        return next((part for each in get_args(hint) if (part := sequence_in(each)) is not None), None)
    if get_origin(hint) not in _SEQUENCES:
        return None
    members = get_args(hint)
    if get_origin(hint) is tuple and Ellipsis not in members:
        return SequenceType(members, len(members), is_nested=False, kind=tuple)
    kind = list if get_origin(hint) is list else tuple
    inner = sequence_in(members[0])
    if inner is None or inner.length is None:
        return SequenceType((members[0],), None, is_nested=False, kind=kind)
    return SequenceType(inner.members, None, is_nested=True, kind=kind)


def integer(text: str) -> int:
    """The integer that a text stands for: digits, or another form of a whole number such as 1e6.

    Raises:
        ValueError: it stands for none.
    """
    try:
        return int(text)
    except ValueError:
        return _whole(text)


def _with_types(name: str, part: SequenceType, texts: Sequence[str]) -> Iterable[tuple[Any, str]]:
    """Each text with the type of its value."""
    width = len(part.members)
    if part.length is not None and len(texts) != part.length:
        raise _missing(name, part.members[0])
    if len(texts) % width:
        raise UsageError(f"{name} takes {width} values at a time, and {len(texts)} were given.")
    return ((part.members[index % width], text) for index, text in enumerate(texts))


def _read_one(name: str, hint: Any, text: str) -> Any:
    accepted = Accepted.by(hint)
    if text in accepted.names:
        return accepted.names[text]
    if accepted.none and (text == "None" or (text.lower() in NOTHING and str not in accepted.kinds)):
        return None
    for kind in (each for each in _READERS if each in accepted.kinds):
        try:
            return _READERS[kind](text)
        except (KeyError, ValueError):
            continue
    if accepted.kinds & {str, Path, Any}:
        return Path(text) if Path in accepted.kinds else text
    if accepted.others:
        return _from_json(name, hint, text)
    raise _refused(name, accepted, text)


_READERS: dict[Any, Callable[[str], Any]] = {int: integer, bool: TRUTHS.__getitem__, float: float}
"""Readers of the types whose values not every text is."""


def _refused(name: str, accepted: "Accepted", text: str) -> UsageError:
    if not accepted.kinds:
        return unknown_name(name, text, accepted.names)
    return UsageError(f"{name} {text} has to be {accepted}.{_written_out(text)}")


def _from_json(name: str, hint: Any, text: str) -> Any:
    try:
        return msgspec.convert(json.loads(text), hint)
    except (ValueError, msgspec.ValidationError) as error:
        raise UsageError(f"{name} {text} has to be {hint} in JSON: {error}.") from None


def _whole(text: str, factor: int = 1) -> int:
    try:
        number = Decimal(text) * factor
        if number.is_finite() and number.adjusted() < MAX_DIGITS and number == number.to_integral_value():
            return int(number)
    except InvalidOperation:
        pass
    raise ValueError(f"{text} is no integer")


def _missing(name: str, hint: Any) -> UsageError:
    kind = str(Accepted.by(hint))
    return UsageError(f"{name} needs a value{f': {kind}' if kind else ''}.")


def _written_out(text: str) -> str:
    """A hint for a number with a unit, such as 500k."""
    try:
        return f" hint: {_whole(text[:-1], UNITS[text[-1:].lower()])}."
    except (KeyError, ValueError):
        return ""


class Accepted(NamedTuple):
    """The values that one text may stand for."""

    kinds: frozenset[Any]
    names: dict[str, Any]
    """Values of `Literal` types, by their text."""
    none: bool
    others: bool
    """True for types that are read as JSON."""

    @classmethod
    def by(cls, hint: Any) -> "Accepted":
        """The values of a type; of a tuple or list, those of its elements."""
        members = list(_members(hint))
        literals = [member for member in members if get_origin(member) is Literal]
        kinds = frozenset(member for member in members if member in (int, float, bool, str, Path, Any))
        known = {*kinds, type(None)}
        return cls(
            kinds=kinds,
            names={str(choice): choice for literal in literals for choice in get_args(literal)},
            none=type(None) in members,
            others=any(member not in known and member not in literals for member in members),
        )

    def __str__(self) -> str:
        """Numbers and names in words; empty if text of any form is a value."""
        if self.others or self.kinds & {str, Path, Any}:
            return ""
        numbers = "a number" if float in self.kinds else "an integer" if int in self.kinds else ""
        truths = "true or false" if bool in self.kinds else ""
        return " or ".join(text for text in (numbers, truths, ", ".join(self.names)) if text)


def _members(hint: Any) -> Iterable[Any]:
    if get_origin(hint) in (*_UNIONS, *_SEQUENCES):
        return [member for part in get_args(hint) if part is not Ellipsis for member in _members(part)]
    return [hint]
