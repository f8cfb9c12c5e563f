"""The values that a sweep tries: axes of options, grids, and random draws."""

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rollmill.core.errors import UsageError

MAX_TRIALS = 100_000
"""Maximum number of trials in a sweep. A larger number is probably a mistake, since people read the table."""

MAX_NUMBERED = 2**62
"""Number of combinations above which random draws are independent, since repetition is improbable."""


class Axis(NamedTuple):
    """The values that a sweep tries for one option."""

    option: str
    """Name of the option without leading dashes."""
    values: tuple[Any, ...] = ()
    """Values to try, in order, in a form that JSON can hold. Empty for a range."""
    low: float = 0.0
    high: float = 0.0
    logarithmic: bool = False
    """True if the logarithm of a value is drawn uniformly from the range."""

    @property
    def integers(self) -> tuple[int, int] | None:
        """The first and the last value, if the values are consecutive integers."""
        if not self.values or not all(type(value) is int for value in self.values):
            return None
        first, last = self.values[0], self.values[-1]
        return (first, last) if self.values == tuple(range(first, last + 1)) else None

    @property
    def choices(self) -> tuple[Any, ...]:
        """Values of the axis, with tuples in place of lists."""
        return tuple(map(_hashable, self.values))


def parse_axis(text: str) -> Axis:
    """Parses `OPTION=V1,V2,...`, `OPTION=1..8` (integers), `OPTION=0.1..0.9` or `OPTION=log:1e-5..1e-2`.

    Values of a list remain strings, because the option determines their types. Raises a `UsageError` for other
    forms.
    """
    option, equals, values = text.partition("=")
    option = option_name(option)
    if not (equals and option and values.strip()):
        raise UsageError(f"--over {text!r} must be OPTION=V1,V2,... or OPTION=LOW..HIGH, such as seed=0..4.")
    logarithmic = values.startswith("log:")
    low, dots, high = values.removeprefix("log:").partition("..")
    if not dots:
        if logarithmic:
            raise UsageError(f"--over {text!r}: log: needs a range, such as log:1e-5..1e-2.")
        listed = tuple(value.strip() for value in values.split(","))
        if not all(listed) or len(set(listed)) < len(listed):
            raise UsageError(f"--over {text!r} contains an empty or a repeated value.")
        return Axis(option, listed)
    if not logarithmic and _is_integer(low) and _is_integer(high):
        return Axis(option, _integers(text, int(low), int(high)))
    return _range(text, option, low, high, logarithmic=logarithmic)


def option_name(text: str) -> str:
    """Normalises the name of an option: `learning_rate` and `--learning-rate` become `learning-rate`."""
    words = text.strip().lstrip("-")
    holder, dot, name = words.partition(".")
    holder = holder.replace("_", "-")
    # Underscores in an option of the environment are kept.
    return f"{holder}{dot}{name if holder == 'env-option' else name.replace('_', '-')}"


def listed_axis(option: str, values: Sequence[Any]) -> Axis:
    """Returns an axis with a list of values for an option.

    Raises a `UsageError` if there are no values, if a value occurs twice, or if one contains a dictionary.
    """
    axis = Axis(option, tuple(values))
    if any(map(_has_object, values)):
        raise UsageError(
            f"--over {option}: an object cannot be varied, because tables of trials show single values. hint: "
            "register an environment that makes the object from a number or a string, and vary that option."
        )
    if not values or len(set(axis.choices)) < len(values):
        listed = ", ".join(map(str, values)) or "nothing"
        raise UsageError(f"--over {option}: {listed} is empty or contains a repeated value.")
    return axis


def _has_object(value: Any) -> bool:
    """Returns whether a value is a dictionary, or a list that contains one."""
    return any(map(_has_object, value)) if isinstance(value, list | tuple) else isinstance(value, Mapping)


def _is_integer(text: str) -> bool:
    return text.strip().removeprefix("-").isdecimal()


def _integers(text: str, low: int, high: int) -> tuple[int, ...]:
    if not low <= high < low + MAX_TRIALS:
        raise UsageError(
            f"--over {text!r} must be LOW..HIGH, with at most {MAX_TRIALS:,} integers and LOW at most HIGH."
        )
    return tuple(range(low, high + 1))


def _range(text: str, option: str, low: str, high: str, *, logarithmic: bool) -> Axis:
    try:
        axis = Axis(option, (), float(low), float(high), logarithmic)
    except ValueError:
        raise UsageError(f"--over {text!r}: {low} and {high} must be numbers.") from None
    if not (math.isfinite(axis.low) and math.isfinite(axis.high) and axis.low < axis.high):
        raise UsageError(f"--over {text!r}: the range must go from a lower to a higher number.")
    if logarithmic and axis.low <= 0:
        raise UsageError(f"--over {text!r}: a logarithmic range must begin above 0.")
    return axis


def points(axes: Sequence[Axis], *, draws: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Returns the points that a sweep tries. A point has a value for every axis.

    By default, these are all combinations. With `draws`, they are this many random combinations. If all axes are
    lists, random combinations are distinct, so there may be fewer. Raises a `UsageError` if an option has two
    axes, if a continuous range would have to be listed in full, or if there are too many combinations.
    """
    names = [axis.option for axis in axes]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"--over {twice[0]} was given twice. hint: list all of its values in one --over.")
    if draws is not None:
        return _random_points(axes, draws, random.Random(seed))
    if continuous := [axis.option for axis in axes if not axis.values]:
        raise UsageError(
            f"--over {continuous[0]} is a continuous range, which a grid cannot list. hint: use --random N to "
            "draw N combinations."
        )
    number = math.prod(len(axis.values) for axis in axes)
    if number > MAX_TRIALS:
        raise UsageError(
            f"these axes have {number:,} combinations, more than the limit of {MAX_TRIALS:,}. hint: use "
            "--random N to draw N combinations."
        )
    return [
        dict(zip(names, values, strict=True)) for values in itertools.product(*(axis.choices for axis in axes))
    ]


def combinations(axes: Sequence[Axis]) -> int | None:
    """Returns the number of combinations of values, or None if an axis is a continuous range."""
    return math.prod(len(axis.values) for axis in axes) if all(axis.values for axis in axes) else None


def _random_points(axes: Sequence[Axis], draws: int, source: random.Random) -> list[dict[str, Any]]:
    number = combinations(axes)
    if number is None or number > MAX_NUMBERED:
        return [{axis.option: _draw(axis, source) for axis in axes} for _ in range(draws)]
    drawn = []
    for index in source.sample(range(number), min(draws, number)):
        point = {}
        for axis in axes:
            index, which = divmod(index, len(axis.values))
            point[axis.option] = axis.choices[which]
        drawn.append(point)
    return drawn


def _draw(axis: Axis, source: random.Random) -> Any:
    if axis.values:
        return source.choice(axis.choices)
    if axis.logarithmic:
        drawn = math.exp(source.uniform(math.log(axis.low), math.log(axis.high)))
    else:
        drawn = source.uniform(axis.low, axis.high)
    return round_within_range(axis, drawn)


def round_within_range(axis: Axis, number: float) -> float:
    """Rounds a value of a range to six digits, unless the rounded value would be outside the range."""
    short = float(f"{number:.6g}")
    return short if axis.low <= short <= axis.high else min(max(number, axis.low), axis.high)


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value
