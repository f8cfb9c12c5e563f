"""Draws the report section with the roofline of a machine and the operations below it, on logarithmic axes.

The model follows Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model for Multicore
Architectures", CACM 2009.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rollmill.core.text import compact, number
from rollmill.pages.page import escape_html, table
from rollmill.profiler.report.sections import Section
from rollmill.profiling.breakdown import WholeTime, whole_time
from rollmill.profiling.results import Ceilings, OperationTime, Profile
from rollmill.profiling.text import path_text, percent

HEIGHT, TOP, BOTTOM = 340.0, 14.0, 290.0
LEFT, RIGHT = 11.0, 98.5
"""Positions of the sides of the plot, in percent of the figure's width."""
MAX_POINTS = 20
MIN_NUMBER, MAX_NUMBER = 1e-9, 1e21
"""Smallest and largest number that the axes can show."""


class RooflinePoint(NamedTuple):
    """An operation in the roofline figure."""

    name: str
    intensity: float
    """Floating-point operations per byte of memory traffic."""
    speed: float
    """Floating-point operations per second of device time."""
    share: float
    """Share of the whole time, from 0 to 1."""


class LogScale(NamedTuple):
    """A logarithmic scale, which maps positive values to positions on an axis."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Returns the position of a number."""
        part = (math.log10(value) - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))
        return self.start + part * (self.end - self.start)

    def decades(self) -> Iterator[float]:
        """Yields the powers of ten in the range of the scale."""
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        return (10.0**power for power in range(first, last + 1))


def points_of(operations: Sequence[OperationTime], whole: WholeTime) -> list[RooflinePoint]:
    """Returns a roofline point for each operation with known arithmetic, traffic and device time, the longest
    first.
    """
    known = [one for one in operations if one.flops > 0 and one.bytes > 0 and one.device > 0]
    points = [
        RooflinePoint(path_text(one.path), one.flops / one.bytes, one.flops / one.device, whole.share(one.device))
        for one in sorted(known, key=lambda one: -one.device)[:MAX_POINTS]
    ]
    return [point for point in points if _is_shown(point.intensity) and _is_shown(point.speed)]


def _is_shown(value: float) -> bool:
    return MIN_NUMBER <= value <= MAX_NUMBER


def attainable(ceilings: Ceilings, intensity: float) -> float:
    """Returns the floating-point operations per second that memory bandwidth and arithmetic peak allow at an
    `intensity`.
    """
    return min(ceilings.flops_per_second, intensity * ceilings.bytes_per_second)


def roofline_section(profile: Profile) -> Section:
    """Returns the report section with the roofline figure and table, if the machine's peaks and the operations'
    counts are known.
    """
    ceilings, points = profile.ceilings, points_of(profile.operations, whole_time(profile))
    if ceilings is None or not points or not _can_be_drawn(ceilings):
        return Section("", "", ())
    rows = [_row(index, point, ceilings) for index, point in enumerate(points, 1)]
    columns = ("operation", "share of time", "FLOP a byte", "FLOP/s", "of the roof", "limited by")
    return Section(
        "Roofline: how near each operation is to the machine's limits",
        "The orange line is the most that this machine was measured to do: below its slope memory is the limit, "
        "below its flat part arithmetic. A number is an operation, listed below; its area is its share of the "
        "time. One on the line is as fast as can be. One far below it waits for something else, such as kernels "
        "being started. One above it reads from caches: bytes are the compiler's count, which does not know them. "
        "Each step on an axis is a factor of ten.",
        [_drawing(points, ceilings), table(columns, rows, left=(5,))],
    )


def _can_be_drawn(ceilings: Ceilings) -> bool:
    limits = (ceilings.flops_per_second, ceilings.bytes_per_second)
    return all(map(_is_shown, limits)) and _is_shown(limits[0] / limits[1])


def _row(index: int, point: RooflinePoint, ceilings: Ceilings) -> tuple[str, ...]:
    roof = attainable(ceilings, point.intensity)
    limit = "memory" if roof < ceilings.flops_per_second else "arithmetic"
    part = point.speed / roof
    limited = (
        f"neither: far below the limit of {limit}" if part < 0.3 else limit if part <= 1.2 else "unknown (caches)"
    )
    return (
        f"{index}  {point.name}",
        percent(point.share),
        number(point.intensity),
        compact(point.speed),
        percent(part),
        limited,
    )


def _drawing(points: Sequence[RooflinePoint], ceilings: Ceilings) -> str:
    ridge = ceilings.flops_per_second / ceilings.bytes_per_second
    across = _scale([ridge, *(point.intensity for point in points)], LEFT, RIGHT)
    speeds = [ceilings.flops_per_second, *(point.speed for point in points)]
    upwards = _scale(speeds, BOTTOM, TOP)
    parts = [*_grid(across, upwards), *_roof(ceilings, ridge, across, upwards)]
    parts += [_dot(index, point, across, upwards) for index, point in enumerate(points, 1)]
    parts.append(_limits(ceilings))  # drawn over the dots
    label = 'role="img" aria-label="roofline"'
    return f'<svg height="{HEIGHT}" {label}>{"".join(parts)}</svg>'


def _scale(values: Sequence[float], start: float, end: float) -> LogScale:
    """Returns a scale over whole decades with some room at both ends."""
    low = 10.0 ** math.floor(math.log10(min(values) / 2))
    return LogScale(low, 10.0 ** math.ceil(math.log10(max(values) * 2)), start, end)


def _grid(across: LogScale, upwards: LogScale) -> list[str]:
    every = max(1, math.ceil(len(list(across.decades())) / 7))
    upright = [
        f'<line class="grid" x1="{across(tick):.2f}%" x2="{across(tick):.2f}%" y1="{TOP}" y2="{BOTTOM}"/>'
        f'<text x="{across(tick):.2f}%" y="{BOTTOM + 16}" text-anchor="middle" class="dim">{_power(tick)}</text>'
        for tick in list(across.decades())[::every]
    ]
    level = [
        f'<line class="grid" x1="{LEFT}%" x2="{RIGHT}%" y1="{upwards(tick):.1f}" y2="{upwards(tick):.1f}"/>'
        f'<text x="{LEFT - 1}%" y="{upwards(tick) + 4:.1f}" text-anchor="end" class="dim">{_power(tick)}</text>'
        for tick in upwards.decades()
    ]
    middle = (LEFT + RIGHT) / 2
    return [
        *upright,
        *level,
        f'<text x="{middle}%" y="{HEIGHT - 12}" text-anchor="middle">arithmetic intensity, FLOP a byte</text>',
        f'<text x="{LEFT + 1}%" y="{TOP + 12}">FLOP/s</text>',
    ]


def _power(value: float) -> str:
    """Returns a power of ten in few characters."""
    return compact(value).replace(" ", "") if value >= 1e3 else f"{value:g}"


def _roof(ceilings: Ceilings, ridge: float, across: LogScale, upwards: LogScale) -> list[str]:
    low = max(across.low, upwards.low / ceilings.bytes_per_second)
    slope_end = upwards(low * ceilings.bytes_per_second)
    corner = f'x1="{across(ridge):.2f}%" y1="{upwards(ceilings.flops_per_second):.1f}"'
    return [
        f'<line class="roof" {corner} x2="{across(low):.2f}%" y2="{slope_end:.1f}"/>',
        f'<line class="roof" {corner} x2="{RIGHT}%" y2="{upwards(ceilings.flops_per_second):.1f}"/>',
    ]


def _limits(ceilings: Ceilings) -> str:
    """Labels the two limits in the upper right corner, in which no dot can cover them."""
    text = f"{compact(ceilings.flops_per_second)}FLOP/s, {compact(ceilings.bytes_per_second)}B/s"
    return f'<text x="{RIGHT}%" y="{TOP + 12}" text-anchor="end" class="above">{text}</text>'


def _dot(index: int, point: RooflinePoint, across: LogScale, upwards: LogScale) -> str:
    radius = max(9.0, min(20.0, 30.0 * math.sqrt(point.share)))
    x, y = f"{across(point.intensity):.2f}%", upwards(point.speed)
    title = f"{point.name}: {compact(point.speed)}FLOP/s at {number(point.intensity)} FLOP a byte"
    return (
        f'<circle class="dot" cx="{x}" cy="{y:.1f}" r="{radius:.1f}"><title>{escape_html(title)}</title></circle>'
        f'<text x="{x}" y="{y + 4:.1f}" text-anchor="middle" class="inside" pointer-events="none">{index}</text>'
    )
