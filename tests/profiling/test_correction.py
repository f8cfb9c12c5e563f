"""The profiler's own cost, and durations without it."""

import pytest

from rollmill.profiling import correction
from rollmill.profiling.attribution import DeviceTime
from rollmill.profiling.correction import (
    EventCosts,
    IdleTime,
    PairedWindow,
    _measure_event_on_accelerator,
    corrected_duration,
    costs,
    held_out_ratio,
    middle_mean,
    without_cost,
)
from rollmill.profiling.device_use import DeviceUse
from rollmill.profiling.recording import TraceRecorder


def pair(unprofiled: float, events: float, cost: float) -> PairedWindow:
    return PairedWindow(unprofiled + events * cost, unprofiled, events, 0.0)


def test_an_event_s_cost_is_the_difference_divided_by_the_events():
    found = costs([pair(1e6, 1000, 500.0), pair(2e6, 3000, 500.0), pair(1e6, 1000, 9000.0)])
    assert found.program == pytest.approx(500.0), "an outlier does not count"
    assert corrected_duration(pair(1e6, 1000, 500.0), found) == pytest.approx(1e6)


def test_windows_are_compared_with_the_one_before_because_the_machine_is_not_always_equally_fast():
    pairs = [pair(unprofiled, 1000, 100.0) for unprofiled in (1e6, 1e6, 2e6, 3e6, 3e6)]
    assert held_out_ratio(pairs) == pytest.approx(1.0)
    dearer = [*pairs[:4], pair(3e6, 1000, 400.0)]
    assert held_out_ratio(dearer) == pytest.approx(1.0), "an outlier does not count"


def test_what_every_second_window_does_not_foretell_is_an_error():
    cheap, dear = pair(1e6, 1000, 100.0), pair(1e6, 1000, 300.0)
    assert held_out_ratio([cheap, dear] * 3) == pytest.approx(1.2)
    assert held_out_ratio([dear, cheap] * 3) == pytest.approx(0.8)
    assert held_out_ratio([dear]) == pytest.approx(1.0), "by its own costs"


def test_windows_faster_than_the_one_before_balance_slower_ones():
    noisy = [PairedWindow(1e6 + noise, 1e6, 10, 0) for noise in (-2e5, -1e5, 0.0, 1e5, 2e5)]
    assert costs(noisy).program == 0.0


def test_the_mean_of_the_middle_half():
    assert middle_mean([5.0]) == 5.0 and middle_mean([1.0, 2.0]) == 1.5 and middle_mean([9.0, 1.0, 2.0]) == 2.0
    assert middle_mean([100.0, 1.0, 2.0, 3.0, 4.0, 5.0, -100.0]) == 3.0


def test_a_window_that_was_faster_than_the_one_before_costs_nothing():
    assert costs([PairedWindow(0.9e6, 1e6, 1000, 0)]).program == 0.0


def test_programs_of_few_events_are_corrected_by_the_host_s_spans():
    found = costs([PairedWindow(1.2e6, 1e6, 10, 1000)])
    assert found.span == pytest.approx(200.0)
    assert corrected_duration(PairedWindow(1.2e6, 1e6, 10, 1000), found) == pytest.approx(1e6)


def beside_waiting(*, late: float, cost: float = 200.0, waits: float = 0.0) -> PairedWindow:
    """A window of 1000 kernels, in which a device waits for `waits` ns without the profiler, and `late` longer."""
    unprofiled = 1e6 + waits
    return PairedWindow(unprofiled + 1000 * cost + late, unprofiled, 1000.0, 300.0, waits + late)


ERRATIC = (0.1e6, 0.6e6, 1.9e6, 0.2e6, 0.1e6, 0.9e6)


@pytest.mark.parametrize("waits", [0.0, 0.5e6])
@pytest.mark.parametrize("calibrated", [0.0, 100.0, 200.0, 250.0])
def test_waiting_that_differs_from_recording_to_recording_is_no_error(waits, calibrated):
    pairs = [beside_waiting(late=late, waits=waits) for late in ERRATIC]
    assert held_out_ratio(pairs, calibrated=calibrated) == pytest.approx(1.0)
    unknown = [pair._replace(waiting=None) for pair in pairs]
    assert abs(held_out_ratio(unknown) - 1.0) > 0.2


def test_waiting_that_is_there_without_the_profiler_is_kept():
    pairs = [beside_waiting(late=late, waits=0.8e6) for late in ERRATIC]
    found = costs(pairs, calibrated=200.0)
    assert (found.program, found.waiting_kept, found.span) == pytest.approx((200.0, 0.8e6, 0.0))
    unknown = costs(pairs)
    assert (unknown.program, unknown.waiting_kept) == pytest.approx((0.0, 0.6e6)), "as if kernels cost nothing"
    assert corrected_duration(pairs[0], unknown) == corrected_duration(pairs[0], found) == pytest.approx(1.8e6)


def test_a_device_that_does_not_wait_without_the_profiler():
    found = costs([beside_waiting(late=late) for late in ERRATIC], calibrated=150.0)
    assert (found.program, found.waiting_kept) == pytest.approx((200.0, 0.0))


def test_no_more_waiting_is_kept_than_there_is():
    found = costs([beside_waiting(late=0.0, cost=50.0, waits=1e5)] * 3, calibrated=200.0)
    assert (found.program, found.waiting_kept) == pytest.approx((50.0, 1e5))
    never = costs([beside_waiting(late=0.0)] * 3)
    assert (never.program, never.waiting_kept, never.span) == pytest.approx((200.0, 0.0, 0.0))


def test_a_device_that_hardly_waits_in_one_window_hardly_waits_without_the_profiler():
    pairs = [beside_waiting(late=late, cost=100.0) for late in (1e3, 0.2e6, 0.1e6)]
    found = costs(pairs, calibrated=200.0)
    assert (found.program, found.waiting_kept) == pytest.approx((101.0, 1e3))
    assert corrected_duration(pairs[0], found) == pytest.approx(1e6)


def test_waiting_does_not_count_where_it_is_not_known_in_all_windows():
    known = [beside_waiting(late=late) for late in ERRATIC]
    mixed = [*known[:-1], known[-1]._replace(waiting=None)]
    unknown = [pair._replace(waiting=None) for pair in known]
    assert costs(mixed) == costs(unknown) != costs(known)
    assert held_out_ratio(mixed) == held_out_ratio(unknown)


def test_kernels_that_cost_more_in_some_windows_than_in_others_are_an_error():
    cheap, dear = beside_waiting(late=1e5, cost=100.0), beside_waiting(late=9e5, cost=300.0)
    assert held_out_ratio([cheap, dear] * 3) == pytest.approx(1.2)
    assert held_out_ratio([dear, cheap] * 3) == pytest.approx(0.8)


MANY = DeviceTime(work=600.0, kernels=10, work_events=10)
FEW = DeviceTime(work=1000.0, kernels=1, work_events=1)
LOOP = DeviceTime(between=500.0, between_events=12)


def of_device(device, found, *, target, host_only=0.0, neither=0.0):
    return without_cost(device, found, idle=IdleTime(host_only, neither), target=float(target))


def test_operations_lose_the_cost_of_their_events_and_loops_that_between_them():
    device = {("many",): MANY, ("few",): FEW, ("loop",): LOOP}
    many, few, loop = 600 - 10 * 10, 1000 - 10, 500 - 12 * 40
    costs_known = EventCosts(program=50.0, span=0.0, inside=0.2)
    found = of_device(device, costs_known, target=many + few + loop)
    assert found.device == pytest.approx({("many",): many, ("few",): few, ("loop",): loop}) and found.host == 1.0


def test_windows_in_which_the_machine_was_slower_or_faster_are_divided_in_proportion():
    device = {("many",): MANY, ("few",): FEW}
    free = EventCosts(program=0.0, span=0.0)
    for target in (800.0, 2400.0):
        found = of_device(device, free, host_only=800.0, target=target)
        assert found.device == pytest.approx({("many",): target / 4, ("few",): target / 2.4})
        assert found.host == pytest.approx(target / 2400)


def test_waiting_takes_up_what_is_left():
    device, free = {("few",): FEW}, EventCosts(program=0.0, span=0.0)
    for neither, target, kept in ((500.0, 1200.0, 1.0), (500.0, 900.0, 0.9), (100.0, 2200.0, 2.0)):
        found = of_device(device, free, neither=neither, target=target)
        assert (found.device["few",], found.host) == pytest.approx((1000.0 * kept, kept))


def test_a_cost_far_from_the_usual_one_is_taken_from_all_in_proportion():
    found = EventCosts(program=50.0, span=0.0, inside=1.0, calibrated=10.0)
    assert found.bounded == 20.0 and found._replace(program=1.0).bounded == 5.0
    corrected = of_device({("many",): MANY, ("few",): FEW}, found, target=1050.0).device
    assert corrected["few",] / corrected["many",] == pytest.approx((1000 - 20) / (600 - 10 * 20))
    assert sum(corrected.values()) == pytest.approx(1050.0)


ON_ACCELERATOR = EventCosts(program=50.0, span=0.0, inside=0.4, in_idle_time=True)


def test_on_an_accelerator_only_the_cost_inside_kernels_is_the_operations():
    device = {("a",): DeviceTime(work=600.0, kernels=10), ("b",): DeviceTime(work=400.0, kernels=2)}
    found = of_device(device, ON_ACCELERATOR, host_only=300.0, neither=200.0, target=1010.0)
    assert found.device == pytest.approx({("a",): 600 - 10 * 20, ("b",): 400 - 2 * 20})
    assert found.host == pytest.approx((1010 - 760) / 500)
    shorter = of_device(device, ON_ACCELERATOR, host_only=300.0, target=380.0)
    assert shorter.device == pytest.approx({("a",): 200, ("b",): 180}) and shorter.host == 0.0


@pytest.mark.parametrize("accelerators", [1, 4])
def test_starts_beside_other_accelerators_lose_the_cost_of_one_only(accelerators):
    device = {("a",): DeviceTime(work=1000.0, kernels=10 * accelerators)}
    idle = IdleTime(host_only=800.0, neither=0.0, starts=700.0)
    found = without_cost(
        device, ON_ACCELERATOR._replace(inside=0.0), idle=idle, target=1300.0, accelerators=accelerators
    )
    assert (found.starts * 700, found.host * 100) == pytest.approx((200, 100))


def test_copies_that_a_loop_of_an_accelerator_needs_stay_the_loop_s():
    loop = {("collect",): DeviceTime(between=300.0, kernels=3)}
    assert of_device(loop, ON_ACCELERATOR, host_only=100.0, target=350.0).device == {("collect",): 300.0}


def test_nothing_is_left_of_what_was_cost_alone():
    found = of_device({("a",): DeviceTime(work=10.0, work_events=100)}, EventCosts(50.0, 0.0, 1.0), target=100.0)
    assert found.device == {("a",): 0.0}


class UsedDevice(TraceRecorder):
    """Stands for an accelerator whose 100 kernels take 20 ms in all when recorded, and their starts another 10."""

    def __init__(self, milliseconds):
        self._milliseconds = milliseconds
        self.now = self.runs = 0

    def monotonic_ns(self):
        return self.now

    def run(self):
        self.now += 1_000_000 * self._milliseconds
        self.runs += 1

    def start(self):
        self.runs = 0

    def stop_with_use(self, begin, end, *, read):
        assert not read and end - begin == 1_000_000 * self._milliseconds
        assert self.runs == 2, "a whole run, after the one in which CUDA graphs are made anew"
        return None, DeviceUse(computing=20e6, starting=10e6, kernels=100, waits=0, devices=1)


@pytest.mark.parametrize(
    ("milliseconds", "cost"),
    [
        (10, (20e6 / 100, 0.5)),
        (25, (5e6 / 100, 0.0)),
        (50, (0.0, 0.0)),  # the host, not the device, bounds the program: nothing is known
    ],
)
def test_a_kernel_s_cost_is_what_it_and_its_start_take_longer(milliseconds, cost, monkeypatch):
    device = UsedDevice(milliseconds)
    monkeypatch.setattr(correction, "time", device)
    assert _measure_event_on_accelerator(device, device.run) == pytest.approx(cost)
