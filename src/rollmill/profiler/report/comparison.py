"""Two profiles side by side: their operations matched by path, in a terminal and as a page."""

from collections.abc import Sequence
from math import fsum
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from rollmill.core.text import compact
from rollmill.pages.page import BarPart, bar_row, escaped, folded, legend, page, section, table, tiles
from rollmill.pages.text import printable
from rollmill.profiler.report.terminal import as_text, heading, paragraph, table_of
from rollmill.profiling.breakdown import (
    LEAST_SHOWN,
    OperationNode,
    WholeTime,
    category_seconds,
    duration_of,
    in_order,
    operation_tree,
    total_overlap,
    whole_time,
    working_processes,
)
from rollmill.profiling.results import CATEGORIES, Profile
from rollmill.profiling.text import (
    correction_text,
    duration,
    error_text,
    machine_text,
    milliseconds,
    path_text,
    percent,
    speed_of,
    speed_text,
    times,
    titled,
)

MOST_OPERATIONS = 100
"""Operations that a page shows, the longest ones."""
LEAST_SECONDS = 1e-9
"""Durations up to this are what rounding leaves, and have no ratio."""


class ComparedTime(NamedTuple):
    """A duration in two profiles; None where it is not in one of them."""

    path: tuple[str, ...]
    before: float | None
    after: float | None
    """Seconds of an iteration."""
    share_before: float
    share_after: float
    ratio: float | None
    """After by before, for as many environment steps; None if either is missing or hardly longer than 0."""

    @property
    def longest(self) -> float:
        """The longer of both."""
        return max(self.before or 0.0, self.after or 0.0)


class ProfileComparison(NamedTuple):
    """Two profiles and their durations side by side."""

    before: Profile
    after: Profile
    operations: tuple[ComparedTime, ...]
    """Each before those inside, in the order of the longer of both."""
    states: tuple[ComparedTime, ...]
    """Durations by which of host and device were at work."""
    categories: tuple[ComparedTime, ...]
    """Durations of the hosts' activities by category."""

    @property
    def speedup(self) -> float | None:
        """Environment steps a second of `after` by those of `before`; None if one was not timed."""
        before, after = speed_of(self.before), speed_of(self.after)
        return after / before if before and after else None


def compare(before: Profile, after: Profile) -> ProfileComparison:
    """Matches operations by their path, activities by category."""
    steps = after.training.env_steps / max(before.training.env_steps, 1)
    wholes = whole_time(before), whole_time(after)
    nodes = [{node.path: node for node in in_order(operation_tree(one.operations))} for one in (before, after)]
    operations = [
        _compared(path, _seconds(nodes[0].get(path)), _seconds(nodes[1].get(path)), wholes, steps)
        for path in dict.fromkeys([*nodes[0], *nodes[1]])
    ]
    return ProfileComparison(
        before,
        after,
        operations=tuple(_longest_first(operations)),
        states=_states(before, after, wholes, steps),
        categories=_categories(before, after, wholes, steps),
    )


def _seconds(node: OperationNode | None) -> float | None:
    return None if node is None else node.seconds


def _compared(
    path: tuple[str, ...],
    before: float | None,
    after: float | None,
    wholes: tuple[WholeTime, WholeTime],
    steps: float,
) -> ComparedTime:
    ratio = None
    if before is not None and after is not None and steps and min(before, after) > LEAST_SECONDS:
        ratio = after / before / steps
    return ComparedTime(path, before, after, wholes[0].share(before or 0.0), wholes[1].share(after or 0.0), ratio)


def _longest_first(operations: Sequence[ComparedTime]) -> list[ComparedTime]:
    """Each operation before those inside it, and the longest of its siblings first."""
    lengths = {one.path: one.longest for one in operations}

    def rank(one: ComparedTime) -> list[tuple[float, str]]:
        paths = [one.path[: depth + 1] for depth in range(len(one.path))]
        return [(-lengths[path], path[-1]) for path in paths]

    return sorted(operations, key=rank)


def _states(
    before: Profile, after: Profile, wholes: tuple[WholeTime, WholeTime], steps: float
) -> tuple[ComparedTime, ...]:
    first, second = (total_overlap(working_processes(one.processes)) for one in (before, after))
    pairs = {
        "both at work": (first.both, second.both),
        "device only": (first.device_only, second.device_only),
        "host only": (first.host_only, second.host_only),
        "neither": (first.neither, second.neither),
    }
    known = duration_of(first) > 0 and duration_of(second) > 0
    return tuple(_compared((name,), *pair, wholes, steps) for name, pair in pairs.items()) if known else ()


def _categories(
    before: Profile, after: Profile, wholes: tuple[WholeTime, WholeTime], steps: float
) -> tuple[ComparedTime, ...]:
    def total(profile: Profile, name: str) -> float | None:
        return fsum(category_seconds(process, name) for process in working_processes(profile.processes)) or None

    compared = [_compared((name,), total(before, name), total(after, name), wholes, steps) for name in CATEGORIES]
    return tuple(one for one in compared if one.longest > 0)


def summary_text(comparison: ProfileComparison) -> str:
    """The change of throughput and of an iteration, and what ratios are of, in sentences."""
    before, after = comparison.before, comparison.after
    speed = comparison.speedup
    sentences = [
        f"{speed_text(before)} before, {speed_text(after)} after{f': {times(speed)}' if speed else ''}.",
        f"An iteration took {duration(before.iteration.unprofiled)}, and takes "
        f"{duration(after.iteration.unprofiled)}, without the profiler.",
    ]
    if before.training.env_steps != after.training.env_steps:
        sentences.append(
            f"An iteration had {before.training.env_steps:,} environment steps, and has "
            f"{after.training.env_steps:,}; ratios are for as many steps."
        )
    return " ".join(sentences)


def draw_comparison(comparison: ProfileComparison, *, width: int = 80) -> str:
    """The comparison as plain text of so many columns."""
    return as_text(comparison_view(comparison), width=width)


def comparison_view(comparison: ProfileComparison) -> RenderableType:
    """The comparison for `rich.console.Console.print`; fits 80 columns."""
    before, after = comparison.before, comparison.after
    parts: list[RenderableType] = [
        *_named("before", before),
        *_named("after", after),
        Text(""),
        Text(summary_text(comparison)),
        Text(""),
        _terminal_table("Operations", "ms an iteration", "operation", comparison.operations),
    ]
    if comparison.states:
        parts += [Text(""), _terminal_table("Host and device at work", "ms", "state", comparison.states)]
    if comparison.categories:
        parts += [Text(""), _terminal_table("Host by category", "ms", "category", comparison.categories)]
    errors = f"Error of an iteration's whole time: before {error_text(before)}, after {error_text(after)}."
    return Group(*parts, Text(""), Text(errors))


def _named(name: str, profile: Profile) -> list[RenderableType]:
    return [Text.assemble((f"{name}: ", "dim"), (titled(profile), "bold")), paragraph(machine_text(profile))]


def _terminal_table(title: str, unit: str, first: str, compared: Sequence[ComparedTime]) -> RenderableType:
    rows = [_cells(one) for one in compared if max(one.share_before, one.share_after) >= LEAST_SHOWN]
    return Group(heading(title, unit), table_of((first, *COLUMNS), rows))


COLUMNS = ("before", "after", "share before", "share after", "ratio")


def _cells(one: ComparedTime) -> tuple[str, ...]:
    return (
        "  " * (len(one.path) - 1) + printable(one.path[-1]),
        "-" if one.before is None else milliseconds(one.before),
        "-" if one.after is None else milliseconds(one.after),
        "-" if one.before is None else percent(one.share_before),
        "-" if one.after is None else percent(one.share_after),
        _ratio_text(one),
    )


def _ratio_text(one: ComparedTime) -> str:
    if one.before is None:
        return "new"
    if one.after is None:
        return "gone"
    return "-" if one.ratio is None else times(one.ratio)


def comparison_page(comparison: ProfileComparison) -> str:
    """The comparison as one page that loads nothing, below 300 kB."""
    before, after = comparison.before, comparison.after
    title = f"{titled(before)}: before and after"
    speed = comparison.speedup
    figures = [
        (compact(speed_of(before)), "environment steps a second before"),
        (compact(speed_of(after)), "environment steps a second after"),
        (times(speed) if speed else "unknown", "throughput after by before; above 1 it became faster"),
    ]
    body = [
        f"<h1>{escaped(title)}</h1>",
        *(
            f'<p><b>{name}:</b> {escaped(titled(one))} <span class="dim">{escaped(machine_text(one))}</span></p>'
            for name, one in (("Before", before), ("After", after))
        ),
        tiles(figures),
        f"<p>{escaped(summary_text(comparison))}</p>",
        _chart(
            "Where the time of an iteration went, and goes",
            "Two bars for each operation, with those inside it indented: grey before, blue after. The figure "
            "beside "
            "them is the ratio: 0.50× is half of the time for as many environment steps.",
            comparison.operations,
        ),
        _chart(
            "Do host and device work at the same time?",
            "The parts of an iteration, summed over processes. What should shrink is the host alone, and neither.",
            comparison.states,
        ),
        _chart(
            "What the hosts do",
            "Durations of the hosts' activities by category, summed over threads and processes.",
            comparison.categories,
        ),
        section(
            "How far the figures can be trusted",
            "The error of an iteration's whole time in each profile, once the profiler's own cost is taken out. "
            "Smaller differences mean nothing; those of single operations can be rougher.",
            [f"<p>Before: {escaped(correction_text(before))}</p><p>After: {escaped(correction_text(after))}</p>"],
        ),
    ]
    return page(title, [part for part in body if part])


def _chart(title: str, how: str, compared: Sequence[ComparedTime]) -> str:
    limit = sorted((one.longest for one in compared), reverse=True)[:MOST_OPERATIONS][-1:]
    shown = [one for one in compared if one.longest >= limit[0]][:MOST_OPERATIONS] if limit else []
    if not shown:
        return ""
    most = max(one.longest for one in shown)
    rows = [_bars(one, most) for one in shown]
    cells = [_cells(one) for one in shown]
    columns = ("name", "ms before", "ms after", "share before", "share after", "ratio")
    return section(
        title,
        how,
        [
            legend({"before": "idle", "after": "device"}),
            f'<div class="pairs">{"".join(rows)}</div>',
            folded("the same as a table", [table(columns, cells)]),
        ],
    )


def _bars(one: ComparedTime, most: float) -> str:
    depth, whole, name = len(one.path) - 1, most or 1.0, path_text(one.path)
    before, after = one.before or 0.0, one.after or 0.0
    above = [BarPart(before / whole, "idle", f"{name}, before: {duration(before)}")]
    below = [BarPart(after / whole, "device", f"{name}, after: {duration(after)}")]
    value = f"{_value(one)} · {_ratio_text(one)}"
    return bar_row(one.path[-1], above, value, depth=depth, is_outer=not depth, below=below)


def _value(one: ComparedTime) -> str:
    texts = ["-" if seconds is None else milliseconds(seconds) for seconds in (one.before, one.after)]
    return f"{texts[0]} → {texts[1]} ms"
