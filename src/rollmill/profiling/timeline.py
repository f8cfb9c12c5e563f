"""Reduces a window to a small timeline, which shows the longest activity of each lane in each of 600 intervals."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from rollmill.profiling.attribution import StateSegment, segments
from rollmill.profiling.classes import RUNNING, Classifier, DeviceWork, KernelStart, LaneState
from rollmill.profiling.results import UNNAMED, TimelineSpan
from rollmill.profiling.trace import Lane, Trace

INTERVALS = 600
"""Number of intervals of a lane."""
MAX_LANES = 12
"""Maximum number of lanes, the busiest ones."""


def timeline(trace: Trace, classify: Classifier, begin: int, end: int) -> tuple[TimelineSpan, ...]:
    """Returns the timeline spans of all lanes in a process. See `rollmill.profiling.attribution.attribute`."""
    lanes = [(lane, list(segments(lane, classify, begin, end))) for lane in trace.lanes]
    busy = lambda found: sum(each.end - each.start for each in found[1] if _label(each.state))
    lanes = sorted((lane for lane in lanes if busy(lane)), key=busy, reverse=True)[:MAX_LANES]
    spans: list[TimelineSpan] = []
    for lane, states in sorted(lanes, key=lambda found: (found[0].on_device, found[0].name)):
        spans += _spans(lane, _labels(states, begin, end), (end - begin) * 1e-9 / INTERVALS)
    return tuple(spans)


def _spans(lane: Lane, labels: Sequence[str], seconds: float) -> Iterator[TimelineSpan]:
    first = 0
    for label, run in groupby(labels):
        last = first + sum(1 for _ in run)
        if label:
            yield TimelineSpan(lane.name, label, first * seconds, last * seconds)
        first = last


def _labels(states: Sequence[StateSegment], begin: int, end: int) -> list[str]:
    """Returns each interval's label: the activity with the longest time in it, or empty if idle."""
    width = (end - begin) / INTERVALS
    totals: list[dict[str, float]] = [{} for _ in range(INTERVALS)]
    for start, stop, state in states:
        label = _label(state)
        first, last = int((start - begin) / width), min(int((stop - begin) / width), INTERVALS - 1)
        for interval in range(first, last + 1):
            low, high = begin + interval * width, begin + (interval + 1) * width
            part = min(stop, high) - max(start, low)
            totals[interval][label] = totals[interval].get(label, 0.0) + part
    return [max(total, key=lambda label: total[label]) if total else "" for total in totals]


def _label(state: LaneState) -> str:
    if state is None or isinstance(state, KernelStart):
        return ""
    if isinstance(state, DeviceWork):
        if state.instruction is RUNNING:
            return ""
        shares = state.instruction.shares
        return "/".join(max(shares, key=lambda path: shares[path])) or UNNAMED
    return state.name if state.category != "waiting" else f"waiting: {state.name}"
