"""When a branch of growing candidates is not worth growing further.

The rule of Algorithm 1 of GMI-DRL (USENIX ATC 2025): a step to the next width is judged by the throughput that it
gains for the memory that it adds, and a branch ends at the first step that gains too little.
"""

from typing import NamedTuple

THRESHOLD = 0.1
"""Relative gain of throughput for the same relative growth of memory, below which a branch is saturated."""

MIN_GAIN = 0.02
"""Relative gain of throughput below which a branch is saturated, even if it costs no memory."""


class Point(NamedTuple):
    """A measured candidate of a branch."""

    width: int
    steps_per_second: float
    memory: float | None
    """Bytes; None where they are not known, and then only the gain counts."""


def saturation(narrow: Point, wide: Point, *, threshold: float = THRESHOLD) -> str | None:
    """Why it does not pay to go beyond the wider of two points; None if it may."""
    gain = wide.steps_per_second / narrow.steps_per_second - 1
    growth = _growth(narrow, wide)
    if gain > max(MIN_GAIN, threshold * growth):
        return None
    step = f"from {narrow.width:,} to {wide.width:,} throughput changed by {gain:+.0%}"
    return f"{step} for {growth:+.0%} memory" if growth else step


def _growth(narrow: Point, wide: Point) -> float:
    """Relative growth of memory; 0 where it is not known."""
    return wide.memory / narrow.memory - 1 if wide.memory and narrow.memory else 0.0
