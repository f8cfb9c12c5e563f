"""Values of options as they are given on the command line, checked before they are parsed.

Each error is a sentence that names the option, the value, and the values that it takes.
"""

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from rollmill.core.errors import UsageError, unknown_name

UNITS = {"k": 10**3, "m": 10**6, "b": 10**9}
"""Letters that are sometimes written for thousands, millions and billions."""


class Option(NamedTuple):
    """An option that takes values."""

    hint: Any
    """Its type, without annotations."""
    takes_many: bool
    """True if any number of words follow it."""


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
        options: all of its options that take values, by their names without dashes in front.

    Raises:
        UsageError: a value is missing, no number, or none of the names that its option takes.
    """
    checked: list[str] = []
    positional: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        name, equals, value = word[2:].partition("=")
        option = options.get(name.replace("_", "-")) if word.startswith("--") else None
        if option is None:
            checked.append(word)
            positional += [] if word.startswith("--") else [word]
        elif equals:
            checked.append(f"--{name}={_checked(name, value, option.hint)}")
        else:
            count = _count(words, takes_many=option.takes_many)
            if not count and not option.takes_many:
                raise UsageError(f"--{name} needs a value{_kind(option.hint)}.")
            checked += [word, *(_checked(name, value, option.hint) for value in words[:count])]
            del words[:count]
    return Checked(checked, positional)


def _count(words: Sequence[str], *, takes_many: bool) -> int:
    """The number of words that are an option's values."""
    ends = (index for index, word in enumerate(words) if word.startswith("--"))
    return min(next(ends, len(words)), len(words) if takes_many else 1)


def _checked(name: str, value: str, hint: Any) -> str:
    kinds = set(_members(hint))
    if value == "None" and type(None) in kinds:
        return value
    kinds.discard(type(None))
    names = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    if names and all(get_origin(kind) is Literal for kind in kinds):
        if value not in map(str, names):
            raise unknown_name(f"--{name}", value, map(str, names))
    elif kinds == {int}:
        return str(_number(name, value, integer, "an integer"))
    elif kinds <= {int, float} and kinds:
        _number(name, value, float, "a number")
    return value


def integer(text: str) -> int:
    """The integer that a text stands for: digits, or a number such as 1e6 that is one.

    Raises:
        ValueError: it stands for none.
    """
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise ValueError from None
        return int(number)


def _number(name: str, value: str, read: Callable[[str], Any], kind: str) -> Any:
    try:
        return read(value)
    except (ValueError, OverflowError):
        raise UsageError(f"--{name} {value} has to be {kind}.{_written_out(value)}") from None


def _written_out(value: str) -> str:
    """A hint for a number with a unit, such as 500k."""
    factor = UNITS.get(value[-1:].lower())
    try:
        return f" hint: {round(float(value[:-1]) * factor)}." if factor else ""
    except (ValueError, OverflowError):
        return ""


def _kind(hint: Any) -> str:
    """The values that an option takes, where they have names."""
    names = [str(choice) for kind in _members(hint) if get_origin(kind) is Literal for choice in get_args(kind)]
    return f": {', '.join(names)}" if names else ""


def _members(hint: Any) -> Iterable[Any]:
    """The types that a hint allows; of a list, those of its elements."""
    if get_origin(hint) in (Union, types.UnionType):
        return [member for part in get_args(hint) for member in _members(part)]
    if get_origin(hint) is tuple:
        return [member for part in get_args(hint) if part is not Ellipsis for member in _members(part)]
    return [hint]
