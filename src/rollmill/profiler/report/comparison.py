"""Compares two profiles, with operations matched by path, in a terminal or as a page."""

from collections.abc import Iterator, Sequence
from math import fsum
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from rollmill.core.text import compact
from rollmill.pages.page import BarPart, bar_row, escape_html, folding_section, legend, page, table, tiles
from rollmill.profiler.report.sections import (
    MIN_SHOWN,
    Section,
    as_text,
    drawn_in_terminal,
    drawn_on_page,
    paragraph,
)
from rollmill.profiling.breakdown import (
    category_seconds,
    in_order,
    operation_tree,
    overlap_values,
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
    profile_title,
    speed_of,
    speed_text,
    times,
)

MAX_OPERATIONS = 100
"""Maximum number of operations that a page shows, the longest ones."""
MIN_SECONDS = 1e-9
"""Duration up to which a time counts as a rounding error, and has no ratio."""
STATES = ("both at work", "device only", "host only", "neither")


class ComparedTime(NamedTuple):
    """A duration in two profiles, in seconds per iteration. A duration that a profile does not contain is None."""

    path: tuple[str, ...]
    before: float | None
    after: float | None
    share_before: float
    share_after: float
    ratio: float | None
    """Time after divided by time before, for equal environment steps. None if either is missing or almost 0."""

    @property
    def longest(self) -> float:
        """The longer of the two durations."""
        return max(self.before or 0.0, self.after or 0.0)


class ProfileComparison(NamedTuple):
    """Two profiles with their matched durations."""

    before: Profile
    after: Profile
    operations: tuple[ComparedTime, ...]
    """Compared operations, each before those inside it, sorted by the longer of the two times."""
    states: tuple[ComparedTime, ...]
    """Compared times in which host and device, one of them, or neither is at work."""
    categories: tuple[ComparedTime, ...]
    """Compared times of host activities by category."""

    @property
    def speedup(self) -> float | None:
        """Ratio of the environment steps per second, `after` to `before`, or None if a profile has no timed
        iteration.
        """
        before, after = speed_of(self.before), speed_of(self.after)
        return after / before if before and after else None


Durations = dict[tuple[str, ...], float | None]
"""Seconds per iteration by path, or None for something that did not happen."""


def compare(before: Profile, after: Profile) -> ProfileComparison:
    """Compares two profiles, matching operations by path and host activities by category."""
    profiles, wholes = (before, after), (whole_time(before), whole_time(after))
    steps = after.training.env_steps / max(before.training.env_steps, 1)

    def matched(first: Durations, second: Durations) -> Iterator[ComparedTime]:
        for path in first | second:
            old, new = first.get(path), second.get(path)
            shares = wholes[0].share(old or 0.0), wholes[1].share(new or 0.0)
            yield ComparedTime(path, old, new, *shares, _ratio(old, new, steps))

    states = [_states(profile) for profile in profiles]
    timed = all(fsum(seconds or 0.0 for seconds in one.values()) > 0 for one in states)
    return ProfileComparison(
        before,
        after,
        operations=tuple(_longest_first(list(matched(*map(_operations, profiles))))),
        states=tuple(matched(*states)) if timed else (),
        categories=tuple(one for one in matched(*map(_categories, profiles)) if one.longest > 0),
    )


def _operations(profile: Profile) -> Durations:
    return {node.path: node.seconds for node in in_order(operation_tree(profile.operations))}


def _states(profile: Profile) -> Durations:
    values = overlap_values(total_overlap(working_processes(profile.processes)))
    return {(name,): seconds for name, seconds in zip(STATES, values, strict=True)}


def _categories(profile: Profile) -> Durations:
    processes = working_processes(profile.processes)
    return {(name,): fsum(category_seconds(one, name) for one in processes) or None for name in CATEGORIES}


def _ratio(before: float | None, after: float | None, steps: float) -> float | None:
    if before is None or after is None or not steps or min(before, after) <= MIN_SECONDS:
        return None
    return after / before / steps


def _longest_first(operations: Sequence[ComparedTime]) -> list[ComparedTime]:
    """Sorts operations: each before those inside it, and the longest of its siblings first."""
    lengths = {one.path: one.longest for one in operations}

    def rank(one: ComparedTime) -> list[tuple[float, str]]:
        paths = [one.path[: depth + 1] for depth in range(len(one.path))]
        return [(-lengths[path], path[-1]) for path in paths]

    return sorted(operations, key=rank)


# --- drawing --------------------------------------------------------------------------------------------


def draw_comparison(comparison: ProfileComparison, *, width: int = 80) -> str:
    """Renders a comparison of profiles as plain text, `width` columns wide."""
    return as_text(comparison_view(comparison), width=width)


def comparison_view(comparison: ProfileComparison) -> RenderableType:
    """Returns a comparison of profiles for `rich.console.Console.print`. It fits into 80 columns."""
    parts: list[RenderableType] = []
    for name, profile in (("before", comparison.before), ("after", comparison.after)):
        parts.append(Text.assemble((f"{name}: ", "dim"), (profile_title(profile), "bold")))
        parts.append(paragraph(machine_text(profile)))
    before, after = error_text(comparison.before), error_text(comparison.after)
    parts += [Text(""), Text(_summary(comparison)), *drawn_in_terminal(_sections(comparison)), Text("")]
    return Group(*parts, Text(f"Error of an iteration's whole time: before {before}, after {after}."))


def comparison_page(comparison: ProfileComparison) -> str:
    """Renders a comparison of profiles as a self-contained HTML page of less than 300 kB."""
    before, after, speed = comparison.before, comparison.after, comparison.speedup
    title = f"{profile_title(before)}: before and after"
    figures = [
        (compact(speed_of(before)), "environment steps a second before"),
        (compact(speed_of(after)), "environment steps a second after"),
        (times(speed) if speed else "unknown", "throughput after by before; above 1 it became faster"),
    ]
    trust = Section(
        "How far the figures can be trusted",
        "The error of an iteration's whole time in each profile, once the profiler's own cost is taken out. "
        "Smaller differences mean nothing; those of single operations can be rougher.",
        [
            f"<p>Before: {escape_html(correction_text(before))}</p>"
            f"<p>After: {escape_html(correction_text(after))}</p>"
        ],
    )
    body = [
        f"<h1>{escape_html(title)}</h1>",
        *(
            f"<p><b>{name}:</b> {escape_html(profile_title(one))} "
            f'<span class="dim">{escape_html(machine_text(one))}</span></p>'
            for name, one in (("Before", before), ("After", after))
        ),
        tiles(figures),
        f"<p>{escape_html(_summary(comparison))}</p>",
        *drawn_on_page([*_sections(comparison), trust]),
    ]
    return page(title, body)


def _summary(comparison: ProfileComparison) -> str:
    """Returns sentences about throughput, duration and size of an iteration."""
    before, after, speed = comparison.before, comparison.after, comparison.speedup
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


def _sections(comparison: ProfileComparison) -> list[Section]:
    operations = _section(
        "Where the time of an iteration went, and goes",
        "Two bars for each operation, with those inside it indented: grey before, blue after. The figure "
        "beside them is the ratio: 0.50× is half of the time for as many environment steps.",
        ("Operations", "ms an iteration", "operation"),
        comparison.operations,
    )
    states = _section(
        "Do host and device work at the same time?",
        "The parts of an iteration, summed over processes. What should shrink is the host alone, and neither.",
        ("Host and device at work", "ms", "state"),
        comparison.states,
    )
    categories = _section(
        "What the hosts do",
        "Durations of the hosts' activities by category, summed over threads and processes.",
        ("Host by category", "ms", "category"),
        comparison.categories,
    )
    return [operations, *([states] if comparison.states else []), *([categories] if comparison.categories else [])]


def _section(title: str, how: str, terminal: tuple[str, str, str], compared: Sequence[ComparedTime]) -> Section:
    """Returns a section of durations.

    `how` explains its chart, `terminal` has title, unit and first column there.
    """
    heading, unit, first = terminal
    large = [one for one in compared if max(one.share_before, one.share_after) >= MIN_SHOWN]
    columns = (first, "before", "after", "share before", "share after", "ratio")
    return Section(title, how, _chart(compared), heading, unit, columns, [_cells(one) for one in large])


def _cells(one: ComparedTime) -> tuple[str, ...]:
    return (
        "  " * (len(one.path) - 1) + one.path[-1],
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


def _chart(compared: Sequence[ComparedTime]) -> list[str]:
    limit = min(sorted((one.longest for one in compared), reverse=True)[:MAX_OPERATIONS], default=0.0)
    shown = [one for one in compared if one.longest >= limit][:MAX_OPERATIONS]
    if not shown:
        return []
    most = max(one.longest for one in shown)
    columns = ("name", "ms before", "ms after", "share before", "share after", "ratio")
    return [
        legend({"before": "idle", "after": "device"}),
        f'<div class="pairs">{"".join(_bars(one, most) for one in shown)}</div>',
        folding_section("the same as a table", [table(columns, [_cells(one) for one in shown])]),
    ]


def _bars(one: ComparedTime, most: float) -> str:
    depth, whole, name = len(one.path) - 1, most or 1.0, path_text(one.path)
    before, after = one.before or 0.0, one.after or 0.0
    above = [BarPart(before / whole, "idle", f"{name}, before: {duration(before)}")]
    below = [BarPart(after / whole, "device", f"{name}, after: {duration(after)}")]
    cells = _cells(one)
    value = f"{cells[1]} → {cells[2]} ms · {cells[-1]}"
    return bar_row(one.path[-1], above, value, depth=depth, is_outer=not depth, below=below)
