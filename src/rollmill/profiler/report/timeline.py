"""Draws the report section with the timelines of processes, as lanes of limited size that are readable without a
script.
"""

from collections.abc import Container, Sequence
from dataclasses import replace
from itertools import groupby
from statistics import fmean
from typing import NamedTuple

import numpy as np

from rollmill.pages.page import escaped_name, legend
from rollmill.profiler.report.sections import Section
from rollmill.profiling.breakdown import first_of_each_kind, lanes_of
from rollmill.profiling.results import ProcessTime, TimelineSpan
from rollmill.profiling.text import duration

UNITS = 20_000
"""Width of a lane in the units of its drawing."""
MIN_WIDTH = 8
"""Minimum width of a span in these units, so that it is visible."""
MAX_SPANS = 5_000
"""Maximum number of spans in all lanes together."""
MAX_PROCESSES = 8
MAX_LANES = 24
"""Maximum number of lanes, for all processes together."""
MAX_NAMES = 16
"""Maximum number of names, those with the longest spans. All other spans share one name."""
COLOURS = 8
"""Number of names that have their own colour."""
TICKS = 5
OTHERS = "others"


class TimelineLane(NamedTuple):
    """The spans of one lane in a timeline, and the number of spans before they were merged."""

    process: str
    name: str
    spans: tuple[TimelineSpan, ...]


def timeline_section(processes: Sequence[ProcessTime]) -> Section:
    """Returns the report section with a lane for each thread and device, if a timeline was recorded."""
    lanes = shown_lanes(processes)
    end = max((span.end for lane in lanes for span in lane.spans), default=0.0)
    if not lanes or end <= 0:
        return Section("", "", ())
    names = _names(lanes)
    kept = [_with_names(lane, frozenset(names[:MAX_NAMES])) for lane in lanes]
    merged = [lane._replace(spans=merge_spans(lane.spans, end, MAX_SPANS // len(lanes))) for lane in kept]
    active = [name for name in names if not name.startswith("wait")]
    colours = {name: f"c{index}" for index, name in enumerate(active[:COLOURS])}
    parts = [
        '<div class="tools"></div>',
        legend({**colours, "waiting, and others": "idle"} if len(names) > len(colours) else colours),
        f'<div class="lanes" data-units="{UNITS}" data-seconds="{end!r}">{_axis(end)}',
    ]
    for process, group in groupby(merged, key=lambda lane: lane.process):
        parts.append(f'<div class="process">{escaped_name(process)}</div>')
        parts += [_lane(lane, end, colours) for lane in group]
    parts.append(f"{_axis(end)}</div>")
    hidden = sum(len(_lanes_of(one)) for one in processes) - len(lanes)
    if hidden:
        parts.append(f'<p class="dim">{hidden} more lanes are in the trace for Perfetto.</p>')
    return Section(
        f"The first {duration(end)} of a profiled window",
        "Time runs from left to right; each lane is a thread of the host or a device, each colour an operation or "
        "activity, and gaps are idle. Where spans are too short to be drawn, the longest one stands for its "
        "neighbours. Drag over a lane to zoom, double-click to see all; the profiler's own cost is not taken "
        "out here.",
        parts,
    )


def shown_lanes(processes: Sequence[ProcessTime]) -> list[TimelineLane]:
    """Returns the lanes that a page has room for: some lanes of some processes, with one process of each kind
    first.
    """
    recorded = [process for process in processes if process.timeline]
    shown = first_of_each_kind(recorded, MAX_PROCESSES)
    return [lane for process in shown for lane in _lanes_of(process)[: MAX_LANES // len(shown)]]


def _lanes_of(process: ProcessTime) -> list[TimelineLane]:
    return [TimelineLane(process.name, name, tuple(spans)) for name, spans in lanes_of(process).items()]


def merge_spans(spans: Sequence[TimelineSpan], end: float, most: int) -> tuple[TimelineSpan, ...]:
    """Reduces the spans of one lane to at most `most` spans that give a similar picture.

    If there are more, the time until `end`, in seconds, is divided into `most` bins. A bin that is busy for at
    least half of its time gets the name that takes most of it. Neighbouring bins with the same name become one
    span.
    """
    if len(spans) <= most or not spans:
        return tuple(spans)
    names = list(dict.fromkeys(span.name for span in spans))
    width = end / most
    busy: dict[str, np.ndarray] = {}
    for name in names:
        edges = np.asarray([(span.start, span.end) for span in spans if span.name == name]) / width
        busy[name] = _busy_in_bins(edges, most)
    best, owner = np.zeros(most), np.full(most, -1)
    for index, amount in enumerate(busy.values()):
        is_more = amount > best
        best, owner = np.where(is_more, amount, best), np.where(is_more, index, owner)
    owner[np.sum(list(busy.values()), axis=0) < 0.5] = -1
    cuts = np.flatnonzero(np.diff(owner)) + 1
    bounds = [0, *cuts.tolist(), most]
    return tuple(
        TimelineSpan(spans[0].lane, names[owner[start]], start * width, stop * width)
        for start, stop in zip(bounds[:-1], bounds[1:], strict=True)
        if owner[start] >= 0
    )


def _busy_in_bins(edges: np.ndarray, bins: int) -> np.ndarray:
    """Returns the part of each bin that spans `[n, 2]` cover: differences of their integral at the bins' edges."""
    marks = np.arange(bins + 1, dtype=np.float64)
    covered = np.zeros(bins + 1)
    starts, stops = np.sort(edges[:, 0]), np.sort(edges[:, 1])
    for ends, sign in ((starts, 1.0), (stops, -1.0)):
        before = np.searchsorted(ends, marks)
        sums = np.concatenate([[0.0], np.cumsum(ends)])
        covered += sign * (before * marks - sums[before])
    return np.diff(covered)


def _names(lanes: Sequence[TimelineLane]) -> list[str]:
    """Returns all names, those with the longest spans first."""
    seconds: dict[str, float] = {}
    for lane in lanes:
        for span in lane.spans:
            seconds[span.name] = seconds.get(span.name, 0.0) + span.end - span.start
    return sorted(seconds, key=lambda name: -seconds[name])


def _with_names(lane: TimelineLane, names: Container[str]) -> TimelineLane:
    """Returns the lane with one name for all spans whose own is not among these."""
    spans = (span if span.name in names else replace(span, name=OTHERS) for span in lane.spans)
    return lane._replace(spans=tuple(spans))


def _lane(lane: TimelineLane, end: float, colours: dict[str, str]) -> str:
    """Draws one lane, with one path for all spans of a name. Names with longer spans are drawn first."""
    of_name: dict[str, list[TimelineSpan]] = {}
    for span in lane.spans:
        of_name.setdefault(span.name, []).append(span)
    ordered = sorted(of_name.items(), key=lambda item: -fmean(span.end - span.start for span in item[1]))
    paths = "".join(_path(name, spans, end, colours.get(name, "idle")) for name, spans in ordered)
    return (
        f'<div class="lane"><div class="name">{escaped_name(lane.name)}</div>'
        f'<svg viewBox="0 0 {UNITS} 10" preserveAspectRatio="none" role="img" '
        f'aria-label="{escaped_name(f"{lane.process}, {lane.name}")}">{paths}</svg></div>'
    )


def _path(name: str, spans: Sequence[TimelineSpan], end: float, colour: str) -> str:
    scale = UNITS / end
    lines = "".join(
        f"M{round(span.start * scale)} 5h{max(MIN_WIDTH, round(span.end * scale) - round(span.start * scale))}"
        for span in spans
    )
    return f'<path d="{lines}" style="stroke:var(--{colour})"><title>{escaped_name(name)}</title></path>'


def _axis(end: float) -> str:
    last = TICKS - 1
    marks = "".join(
        f'<span{" class=" + repr("last") if index == last else ""} style="left:{index * 100 / last:g}%">'
        f"{duration(end * index / last)}</span>"
        for index in range(TICKS)
    )
    return f'<div class="lane axis-row"><div class="name"></div><div class="axis">{marks}</div></div>'
