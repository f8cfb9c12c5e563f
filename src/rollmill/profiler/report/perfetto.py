"""Converts the timelines of a profile to a trace that Perfetto and Chrome can open.

The format is Google's "Trace Event Format": metadata events name processes and lanes, and complete events
(`"ph": "X"`) have a start and a duration in microseconds.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rollmill.profiling.breakdown import lanes_of
from rollmill.profiling.results import ProcessTime, Profile, TimelineSpan
from rollmill.profiling.text import profile_title

MICROSECONDS = 1e6


def perfetto_trace(profile: Profile) -> str:
    """Returns the timelines of a profile as a trace in JSON, one event per line.

    In the trace format, the spans of a lane must be nested or disjoint. Spans that overlap otherwise are moved to
    additional lanes with the same name.
    """
    events = [event for pid, process in enumerate(profile.processes, 1) for event in _events_of(process, pid)]
    about = {
        "training": profile_title(profile),
        "command": profile.training.command,
        "device": profile.machine.device,
        "note": "One profiled window, by intervals; the profiler's own cost is part of the durations.",
    }
    lines = ",\n".join(json.dumps(event) for event in events)
    return f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n{lines}\n]}}\n'


def _events_of(process: ProcessTime, pid: int) -> Iterator[dict[str, Any]]:
    yield _metadata("process_name", pid, 0, {"name": process.name})
    yield _metadata("process_sort_index", pid, 0, {"sort_index": pid})
    stacks = [(name, stack) for name, spans in lanes_of(process).items() for stack in nested_stacks(spans)]
    for tid, (name, stack) in enumerate(stacks, 1):
        yield _metadata("thread_name", pid, tid, {"name": name})
        yield _metadata("thread_sort_index", pid, tid, {"sort_index": tid})
        for span in stack:
            yield {
                "ph": "X",
                "name": span.name,
                "cat": name,
                "pid": pid,
                "tid": tid,
                "ts": round(span.start * MICROSECONDS, 3),
                "dur": round((span.end - span.start) * MICROSECONDS, 3),
            }


def _metadata(kind: str, pid: int, tid: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": arguments}


def nested_stacks(spans: Sequence[TimelineSpan]) -> list[list[TimelineSpan]]:
    """Divides spans into as few lists as needed, such that any two spans in a list are disjoint or nested.

    In the order of their starts, each span goes to the first list in which it fits.
    """
    stacks: list[_Stack] = []
    for span in sorted(spans, key=lambda one: (one.start, -one.end)):
        stack = next((one for one in stacks if _fits(span, one)), None)
        if stack is None:
            stack = _Stack([], [])
            stacks.append(stack)
        stack.spans.append(span)
        stack.open_ends.append(span.end)
    return [stack.spans for stack in stacks]


class _Stack(NamedTuple):
    spans: list[TimelineSpan]
    open_ends: list[float]
    """Ends of the spans that may contain the next span, with the innermost last."""


def _fits(span: TimelineSpan, stack: _Stack) -> bool:
    """Closes the spans that have ended, and returns whether a span fits into the innermost open span, if any."""
    ends = stack.open_ends
    while ends and ends[-1] <= span.start:
        ends.pop()
    return not ends or span.end <= ends[-1]
