"""Bounds of numbers, in the annotations of a dataclass: `gamma: Annotated[float, Range(0, 1)] = 0.99`."""

import dataclasses
import math
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeAlias

from rollmill.core.errors import UsageError
from rollmill.core.schedules import parse_schedule


@dataclasses.dataclass(frozen=True)
class Range:
    """The valid range of a numeric field, or of each entry of a tuple. NaN is never valid."""

    least: int | float = -math.inf
    most: int | float = math.inf
    exclusive: bool = False
    """True if `least` itself is invalid."""
    finite: bool = True
    """True if infinity is invalid."""

    def holds(self, number: int | float) -> bool:
        """True if the number is valid."""
        if math.isnan(number) or (self.finite and math.isinf(number)):
            return False
        return self.least <= number <= self.most and not (self.exclusive and number == self.least)

    def __str__(self) -> str:
        if math.isfinite(self.least) and math.isfinite(self.most):
            return f"lie between {self.least} and {self.most}"
        finite = " and finite" if self.finite else ""
        if not math.isfinite(self.least):
            return "be finite" if self.finite else "be a number"
        return f"be greater than {self.least}{finite}" if self.exclusive else f"be at least {self.least}{finite}"


Count: TypeAlias = Annotated[int, Range(1, finite=False)]
Fraction: TypeAlias = Annotated[float, Range(0, 1)]
NonNegative: TypeAlias = Annotated[float, Range(0)]
Rate: TypeAlias = Annotated[float | str, Range(0)]
"""A number, or a schedule of it as text (`core.schedules`), all of whose numbers lie in the range."""
Positive: TypeAlias = Annotated[float, Range(0, exclusive=True)]


def bounds_of(config: type) -> dict[str, Range]:
    """Bounds of a dataclass's fields by name; fields without bounds are left out."""
    hints = typing.get_type_hints(config, include_extras=True)
    ranges = {field.name: _range_in(hints[field.name]) for field in dataclasses.fields(config)}
    return {name: bounds for name, bounds in ranges.items() if bounds is not None}


def check_bounds(values: Any) -> None:
    """Checks every number of a dataclass instance against the bounds of its field.

    Raises:
        UsageError: a number is out of bounds, or a text is no schedule; names the first one.
    """
    kind = type(values)
    for name, bounds in bounds_of(kind).items():
        value = getattr(values, name)
        # Text for a number that is no schedule is an error of the type, which is checked elsewhere.
        if not isinstance(value, str) or _takes_text(typing.get_type_hints(kind, include_extras=True)[name]):
            check_numbers(name, value, bounds)


def unknown_schedules(config: type, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields names and texts of a dataclass's values that have to be numbers or schedules, and are neither.

    Args:
        config: the dataclass.
        values: by the names of its fields; others are ignored.
    """
    hints = typing.get_type_hints(config, include_extras=True)
    for name in bounds_of(config):
        text = values.get(name)
        if isinstance(text, str) and _takes_text(hints[name]) and not _is_schedule(text):
            yield name, text


def check_numbers(name: str, value: Any, bounds: Range) -> None:
    """Checks a number, each one of a tuple, or those of a schedule as text.

    Raises:
        UsageError: one is out of bounds, or the text is no schedule; names the first one.
    """
    for number in _numbers(name, value):
        if not bounds.holds(number):
            raise UsageError(f"{name}={number} must {bounds}.")


def _range_in(hint: Any) -> Range | None:
    """The bounds in an annotation such as `Annotated[int, Range(1)] | None`; None without any."""
    direct = [part for part in getattr(hint, "__metadata__", ()) if isinstance(part, Range)]
    nested = [bounds for part in typing.get_args(hint) if (bounds := _range_in(part)) is not None]
    return next(iter([*direct, *nested]), None)


def _takes_text(hint: Any) -> bool:
    """Whether an annotation admits text, as `Rate` does."""
    return hint is str or any(_takes_text(part) for part in typing.get_args(hint))


def _is_schedule(text: str) -> bool:
    try:
        parse_schedule("", text)
    except UsageError:
        return False
    return True


def _numbers(name: str, value: Any) -> Iterator[int | float]:
    if isinstance(value, tuple | list):
        for part in value:
            yield from _numbers(name, part)
    elif isinstance(value, str):
        _, *numbers = parse_schedule(name, value)
        yield from numbers
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value
