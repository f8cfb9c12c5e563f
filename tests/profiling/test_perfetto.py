"""The trace: what Perfetto needs of the Trace Event Format, and the spans of the profile."""

import json

from profiling.by_hand import process, profile, timeline
from rollmill.profiler.report.perfetto import nested_stacks, perfetto_trace
from rollmill.profiling.results import TimelineSpan


def spans(*edges):
    return [TimelineSpan("host", f"{start}-{end}", float(start), float(end)) for start, end in edges]


def test_a_trace_holds_every_span_in_microseconds():
    two = profile(processes=[process('actor/"0"'), process("learner/0", timeline=timeline(spans=400))])
    trace = json.loads(perfetto_trace(two))
    assert trace["displayTimeUnit"] == "ms" and trace["otherData"]["training"] == "ppo on CartPole-v1"
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {1: 'actor/"0"', 2: "learner/0"}
    lanes = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    assert lanes == {(1, 1): "host", (1, 2): "device 0", (2, 1): "host", (2, 2): "device 0"}
    complete = [event for event in events if event["ph"] == "X"]
    assert all(set(event) == {"ph", "name", "cat", "pid", "tid", "ts", "dur"} for event in complete)
    assert len(complete) == sum(len(one.timeline) for one in two.processes)
    for index, one in enumerate(two.processes, 1):
        made = sorted((event["name"], event["ts"], event["dur"]) for event in complete if event["pid"] == index)
        expected = [
            (span.name, round(span.start * 1e6, 3), round((span.end - span.start) * 1e6, 3))
            for span in one.timeline
        ]
        assert made == sorted(expected)


def test_spans_that_cross_are_on_lanes_of_their_own():
    assert nested_stacks(spans((0, 10), (2, 4), (5, 9), (6, 7), (10, 12))) == [
        spans((0, 10), (2, 4), (5, 9), (6, 7), (10, 12))
    ]
    assert nested_stacks(spans((0, 10), (5, 15), (8, 9), (12, 20), (16, 18))) == [
        spans((0, 10), (8, 9), (12, 20), (16, 18)),
        spans((5, 15)),
    ]
    crossing = profile(processes=[process(timeline=tuple(spans((0, 10), (5, 15))))])
    events = json.loads(perfetto_trace(crossing))["traceEvents"]
    lanes = [event for event in events if event["name"] == "thread_name"]
    assert [(lane["tid"], lane["args"]["name"]) for lane in lanes] == [(1, "host"), (2, "host")]


def test_a_trace_is_json_whatever_the_spans():
    odd = (TimelineSpan("a", "\x00\ud7ff<", 0.0, 1.0), TimelineSpan("a", "endless", 0.0, float("inf")))
    events = json.loads(perfetto_trace(profile(processes=[process(timeline=odd)])), parse_constant=bool)
    assert [event["name"] for event in events["traceEvents"] if event["ph"] == "X"] == ["\x00\ud7ff<"]
    assert json.loads(perfetto_trace(profile(processes=[process(timeline=())])))["traceEvents"]
