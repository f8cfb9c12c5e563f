"""The profiler's own cost, and durations without it."""

import pytest

from rollmill.profiling.attribution import DeviceTime
from rollmill.profiling.correction import (
    EventCosts,
    PairedWindow,
    corrected_device,
    corrected_duration,
    costs,
    held_out_ratio,
    middle_mean,
)


def pair(unprofiled: float, events: float, cost: float) -> PairedWindow:
    return PairedWindow(unprofiled + events * cost, unprofiled, events, 0.0)


def test_an_event_s_cost_is_the_difference_divided_by_the_events():
    found = costs([pair(1e6, 1000, 500.0), pair(2e6, 3000, 500.0), pair(1e6, 1000, 9000.0)])
    assert found.program == pytest.approx(500.0), "an outlier does not count"
    assert corrected_duration(pair(1e6, 1000, 500.0), found) == pytest.approx(1e6)


def test_in_one_of_several_processes_an_event_costs_about_what_it_usually_does():
    noisy = EventCosts(program=5000.0, span=900.0, usual=1000.0)  # windows that other work made longer
    device = {("learn",): DeviceTime(work=8e6, events=2000, kernels=2000, work_events=2000)}
    assert sum(corrected_device(device, noisy).values()) == 0.0
    assert sum(corrected_device(device, noisy.within_process(4)).values()) == pytest.approx(4e6)
    assert noisy.within_process(1) == noisy


def test_windows_are_compared_with_those_around_them_because_the_machine_is_not_always_equally_fast():
    pairs = [pair(unprofiled, 1000, 100.0) for unprofiled in (1e6, 1e6, 2e6, 3e6, 3e6)]
    assert held_out_ratio(pairs) == pytest.approx(1.0)
    dearer = [*pairs[:4], pair(3e6, 1000, 400.0)]
    assert held_out_ratio(dearer) == pytest.approx(1.0), "an outlier does not count"


def test_what_every_second_window_does_not_foretell_is_an_error():
    cheap, dear = pair(1e6, 1000, 100.0), pair(1e6, 1000, 300.0)
    assert held_out_ratio([cheap, dear] * 3) == pytest.approx(1.2)
    assert held_out_ratio([dear, cheap] * 3) == pytest.approx(0.8)
    assert held_out_ratio([dear]) == pytest.approx(1.0), "by its own costs"


def test_windows_faster_than_those_around_them_balance_slower_ones():
    noisy = [PairedWindow(1e6 + noise, 1e6, 10, 0) for noise in (-2e5, -1e5, 0.0, 1e5, 2e5)]
    assert costs(noisy).program == 0.0


def test_the_mean_of_the_middle_half():
    assert middle_mean([5.0]) == 5.0 and middle_mean([1.0, 2.0]) == 1.5 and middle_mean([9.0, 1.0, 2.0]) == 2.0
    assert middle_mean([100.0, 1.0, 2.0, 3.0, 4.0, 5.0, -100.0]) == 3.0


def test_a_window_that_was_faster_than_those_around_it_costs_nothing():
    assert costs([PairedWindow(0.9e6, 1e6, 1000, 0)]).program == 0.0


def test_programs_of_few_events_are_corrected_by_the_host_s_spans():
    found = costs([PairedWindow(1.2e6, 1e6, 10, 1000)])
    assert found.span == pytest.approx(200.0)
    assert corrected_duration(PairedWindow(1.2e6, 1e6, 10, 1000), found) == pytest.approx(1e6)


MANY = DeviceTime(work=600.0, events=10, kernels=10, work_events=10)
FEW = DeviceTime(work=1000.0, events=1, kernels=1, work_events=1)
LOOP = DeviceTime(between=500.0, events=1, between_events=12)


def test_operations_lose_the_cost_of_their_events_and_loops_that_between_them():
    device = {("many",): MANY, ("few",): FEW, ("loop",): LOOP}
    corrected = corrected_device(device, EventCosts(program=50.0, span=0.0, inside=0.2))
    many, few, loop = 600 - 10 * 10, 1000 - 10, 500 - 12 * 40
    assert corrected["few",] / corrected["many",] == pytest.approx(few / many)
    assert corrected["few",] / corrected["loop",] == pytest.approx(few / loop)
    assert sum(corrected.values()) == pytest.approx(600 + 1000 + 500 - 12 * 50)


def test_a_cost_far_from_the_usual_one_is_taken_from_all_in_proportion():
    found = EventCosts(program=50.0, span=0.0, inside=1.0, usual=10.0)
    assert found.dividing == 20.0 and found._replace(program=1.0).dividing == 5.0
    corrected = corrected_device({("many",): MANY, ("few",): FEW}, found)
    assert corrected["few",] / corrected["many",] == pytest.approx((1000 - 20) / (600 - 10 * 20))
    assert sum(corrected.values()) == pytest.approx(1600 - 11 * 50)


def test_on_an_accelerator_only_the_cost_inside_kernels_is_the_operations():
    device = {
        ("a",): DeviceTime(work=600.0, events=10, kernels=10),
        ("b",): DeviceTime(work=400.0, events=2, kernels=2),
    }
    corrected = corrected_device(device, EventCosts(program=50.0, span=0.0, inside=0.4, in_idle_time=True))
    assert corrected == pytest.approx({("a",): 600 - 10 * 20, ("b",): 400 - 2 * 20})


def test_nothing_is_left_of_what_was_cost_alone():
    corrected = corrected_device(
        {("a",): DeviceTime(work=10.0, events=100, kernels=100)}, EventCosts(50.0, 0.0, 1.0)
    )
    assert corrected == {("a",): 0.0}
