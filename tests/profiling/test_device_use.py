"""How long accelerators are at work in a window, by streams made by hand."""

from types import SimpleNamespace

from rollmill.profiling.attribution import MAX_START_GAP
from rollmill.profiling.device_use import DeviceUse, device_use

CLOCK_AHEAD = 1_000_000
"""Nanoseconds by which the host's clock is ahead of the trace's."""


def trace_of(*streams):
    """A trace whose GPU has these streams, each a list of beginnings and ends of kernels."""
    host = [event(0, 10, f"rollmill:clock:{CLOCK_AHEAD}"), event(0, 5000, "PjitFunction")]
    lines = [line(f"Stream #{number}", map(kernel, stream)) for number, stream in enumerate(streams)]
    derived = line("XLA Ops", [event(0, 10**9, "fusion")])
    return SimpleNamespace(
        planes=[
            SimpleNamespace(name="/device:GPU:0", lines=[*lines, derived]),
            SimpleNamespace(name="/host:CPU", lines=[line("python3", host)]),
        ]
    )


def line(name, events):
    return SimpleNamespace(name=name, events=list(events))


def kernel(times):
    return event(*times, "kernel")


def event(begin, end, name):
    return SimpleNamespace(start_ns=float(begin), duration_ns=float(end - begin), name=name)


def use_of(*streams, begin=0, end=10 * MAX_START_GAP):
    return device_use(trace_of(*streams), begin + CLOCK_AHEAD, end + CLOCK_AHEAD)


def test_short_times_between_kernels_of_a_stream_are_starts_and_long_ones_waiting():
    second = 300 + MAX_START_GAP
    found = use_of([(100, 300), (second, second + 50), (second + 51 + MAX_START_GAP, second + 61 + MAX_START_GAP)])
    assert found == DeviceUse(computing=200 + 50 + 10, starting=MAX_START_GAP, kernels=3, waits=3, devices=1)
    assert found.working == found.computing + found.starting


def test_instants_in_which_several_streams_compute_count_once():
    assert use_of([(100, 300)], [(200, 500)]) == DeviceUse(400.0, 0.0, 2, 2, 1)
    assert use_of([(100, 200), (400, 500)], [(100, 500)]) == DeviceUse(400.0, 0.0, 3, 2, 1)
    assert use_of([(100, 200), (400, 500)], [(250, 260)]) == DeviceUse(210.0, 190.0, 3, 2, 1), (
        "the first stream's start"
    )


def test_kernels_that_overlap_are_joined():
    assert use_of([(100, 300), (290, 400), (120, 200)]) == DeviceUse(300.0, 0.0, 3, 2, 1)


def test_only_what_lies_in_the_window_counts():
    found = use_of([(0, 100), (150, 250), (300, 500)], begin=200, end=400)
    assert found == DeviceUse(computing=50 + 100, starting=50, kernels=1, waits=0, devices=1)


def test_an_idle_device():
    assert use_of([]) == use_of() == DeviceUse(0.0, 0.0, 0, 1, 0)
    assert use_of([(900, 950)], begin=0, end=100) == DeviceUse(0.0, 0.0, 0, 1, 0)


def test_accelerators_are_counted():
    first, second = (f"/device:GPU:{number}" for number in range(2))
    trace = trace_of([(100, 200)])
    trace.planes.append(SimpleNamespace(name=second, lines=[line("Stream #1", [kernel((150, 300))])]))
    found = device_use(trace, CLOCK_AHEAD, CLOCK_AHEAD + 1000)
    assert first == trace.planes[0].name and found == DeviceUse(200.0, 0.0, 2, 2, 2)


def test_a_clock_that_runs_since_months_is_exact():
    trace, months = trace_of([(0, 499_999)]), 2**53 + 1
    trace.planes[1].lines[0].events[0].name = f"rollmill:clock:{months}"
    assert device_use(trace, months, months + 499_999).working == 499_999.0
