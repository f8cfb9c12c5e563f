"""Values of options as they are given on the command line, checked before they are parsed.

Each error is a sentence that names the option, the value, and the values that it takes.
"""

import types
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from rollmill.core.errors import UsageError, unknown_name

UNITS = {"k": 10**3, "m": 10**6, "b": 10**9}
"""Letters that are sometimes written for thousands, millions and billions."""
MOST_DIGITS = 30
"""Digits of an integer that is written as 1e6 is, beyond which it is a mistake."""


class Option(NamedTuple):
    """An option that takes values."""

    hint: Any
    """Its type, without annotations."""
    count: int | None = 1
    """Number of words that follow it; None: any number."""


class Checked(NamedTuple):
    """The arguments of a command."""

    words: list[str]
    """All of them."""
    positional: list[str]
    """Those that belong to no option."""


def check_values(arguments: Sequence[str], options: Mapping[str, Option]) -> Checked:
    """Checks the values of options, and writes integers out: `1e6` is 1000000.

    Args:
        arguments: of a command.
        options: all of its options that take values, by their names with the dashes in front.

    Raises:
        UsageError: a value is missing, no number, or none of the names that its option takes.
    """
    checked: list[str] = []
    positional: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        option = options.get(name.replace("_", "-")) if word.startswith("-") else None
        if option is None:
            checked.append(word)
            positional += [] if word.startswith("-") else [word]
        elif equals:
            checked.append(f"{name}={_checked(name, value, option.hint)}")
        else:
            count = _count(words, option.count)
            if count < (option.count or 0):
                raise _without_value(name, option.hint)
            checked += [word, *(_checked(name, value, option.hint) for value in words[:count])]
            del words[:count]
    return Checked(checked, positional)


def integer(text: str) -> int:
    """The integer that a text stands for: digits, or a number such as 1e6 that is one.

    Raises:
        ValueError: it stands for none.
    """
    try:
        return int(text)
    except ValueError:
        return _whole(text)


def _whole(text: str, factor: int = 1) -> int:
    try:
        number = Decimal(text) * factor
        if number.is_finite() and number.adjusted() < MOST_DIGITS and number == number.to_integral_value():
            return int(number)
    except InvalidOperation:
        pass
    raise ValueError(f"{text} is no integer")


def _count(words: Sequence[str], most: int | None) -> int:
    """The number of words that are an option's values."""
    ends = (index for index, word in enumerate(words) if word.startswith("--"))
    return min(next(ends, len(words)), len(words) if most is None else most)


def _checked(name: str, value: str, hint: Any) -> str:
    accepted = _accepted_by(hint)
    if not value:
        raise _without_value(name, hint)
    if accepted.others or value in accepted.names or (value == "None" and accepted.none):
        return value
    if accepted.number is None:
        raise unknown_name(name, value, accepted.names)
    try:
        if accepted.number is int:
            return str(integer(value))
        float(value)
    except ValueError:
        raise UsageError(f"{name} {value} has to be {accepted}.{_written_out(value)}") from None
    return value


def _without_value(name: str, hint: Any) -> UsageError:
    kind = str(_accepted_by(hint))
    return UsageError(f"{name} needs a value{f': {kind}' if kind else ''}.")


def _written_out(value: str) -> str:
    """A hint for a number with a unit, such as 500k."""
    try:
        return f" hint: {_whole(value[:-1], UNITS[value[-1:].lower()])}."
    except (KeyError, ValueError):
        return ""


class _Accepted(NamedTuple):
    """The values that an option takes."""

    number: type | None
    """`int`, or `float` for any number."""
    names: list[str]
    none: bool
    """Whether it takes None."""
    others: bool
    """Whether it takes others, such as a path, of which only the parser knows what they are."""

    def __str__(self) -> str:
        """Numbers and names in words; empty if there are other values, too."""
        numbers = [] if self.number is None else ["an integer" if self.number is int else "a number"]
        return "" if self.others else " or ".join([*numbers, *([", ".join(self.names)] if self.names else [])])


def _accepted_by(hint: Any) -> _Accepted:
    members = list(_members(hint))
    literals = [member for member in members if _is_literal(member)]
    known = {int, float, type(None), *literals}
    return _Accepted(
        number=next((kind for kind in (float, int) if kind in members), None),
        names=[str(choice) for literal in literals for choice in get_args(literal)],
        none=type(None) in members,
        others=any(member not in known for member in members),
    )


def _is_literal(member: Any) -> bool:
    """Whether a type is one of names and numbers that are given as they are."""
    return get_origin(member) is Literal and all(type(choice) in (str, int) for choice in get_args(member))


def _members(hint: Any) -> Iterable[Any]:
    """The types that a hint allows; of a list, those of its elements."""
    if get_origin(hint) in (Union, types.UnionType, tuple, list, set, frozenset, Sequence):
        return [member for part in get_args(hint) if part is not Ellipsis for member in _members(part)]
    return [hint]
