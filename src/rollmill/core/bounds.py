"""Bounds on numeric fields of a dataclass, as annotations: `gamma: Annotated[float, Range(0, 1)] = 0.99`.

`core.schema` checks the bounds whenever it converts a value.
"""

import dataclasses
import functools
import math
import typing
from typing import Annotated, Any, TypeAlias


@dataclasses.dataclass(frozen=True)
class Range:
    """Valid range of a numeric field, or of each number in a tuple or schedule. NaN is never valid.

    An annotation with two ranges, `Annotated[Count, Range(high=9)]`, names the violated range in its error.
    """

    low: int | float = -math.inf
    high: int | float = math.inf
    exclusive: bool = False
    """True if `low` itself is invalid."""
    finite: bool = True
    """True if infinity is invalid."""

    def holds(self, number: int | float) -> bool:
        """Returns whether a number lies within the range."""
        if math.isnan(number) or (self.finite and math.isinf(number)):
            return False
        return self.low <= number <= self.high and not (self.exclusive and number == self.low)

    def __repr__(self) -> str:
        given = [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)]
        changed = [f"{name}={value}" for name, value in given if value != getattr(type(self), name)]
        return f"Range({', '.join(changed)})"

    def __str__(self) -> str:
        if math.isfinite(self.low) and math.isfinite(self.high):
            return f"lie between {self.low} and {self.high}"
        finite = " and finite" if self.finite else ""
        if math.isfinite(self.high):
            return f"be at most {self.high}"
        if not math.isfinite(self.low):
            return "be finite" if self.finite else "be a number"
        return f"be greater than {self.low}{finite}" if self.exclusive else f"be at least {self.low}{finite}"


Count: TypeAlias = Annotated[int, Range(1, finite=False)]
Fraction: TypeAlias = Annotated[float, Range(0, 1)]
NonNegative: TypeAlias = Annotated[float, Range(0)]
Positive: TypeAlias = Annotated[float, Range(0, exclusive=True)]


@dataclasses.dataclass(frozen=True)
class OrFunction:
    """Marks a numeric field that also accepts a Python function, such as an Optax schedule."""


Scheduled: TypeAlias = float | str
"""A number, or a schedule in string form (`core.schedules`): `ent_coef: Annotated[Scheduled, Range(0)] = 0.01`.

The range applies to both ends of a schedule. Without a range, any string is valid."""
ScheduledFraction: TypeAlias = Annotated[Scheduled, Range(0, 1)]
ScheduledNonNegative: TypeAlias = Annotated[Scheduled, Range(0)]
ScheduledPositive: TypeAlias = Annotated[Scheduled, Range(0, exclusive=True)]
Rate: TypeAlias = Annotated[Scheduled, Range(0), OrFunction()]
"""Annotation of a learning rate: a number, a schedule, or a function of the number of updates."""


def bounds_of(config: type) -> dict[str, Range]:
    """Maps the names of a dataclass's bounded fields to their bounds."""
    hints = typing.get_type_hints(config, include_extras=True)
    ranges = {field.name: _range_in(hints[field.name]) for field in dataclasses.fields(config)}
    return {name: bounds for name, bounds in ranges.items() if bounds is not None}


@functools.cache
def scheduled_fields(config: type) -> frozenset[str]:
    """Returns the names of a dataclass's fields that accept a schedule."""
    hints = typing.get_type_hints(config, include_extras=True)
    names = (field.name for field in dataclasses.fields(config))
    return frozenset(name for name in names if _range_in(hints[name]) and _takes_schedules(hints[name]))


def _takes_schedules(hint: Any) -> bool:
    parts = typing.get_args(hint)
    return {float, str} <= set(parts) or any(_takes_schedules(part) for part in parts if typing.get_args(part))


def _range_in(hint: Any) -> Range | None:
    """Returns the bounds in an annotation such as `Annotated[int, Range(1)] | None`."""
    direct = [part for part in getattr(hint, "__metadata__", ()) if isinstance(part, Range)]
    nested = [bounds for part in typing.get_args(hint) if (bounds := _range_in(part)) is not None]
    return next(iter([*direct, *nested]), None)
