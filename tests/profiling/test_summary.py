"""Durations of an iteration from recorded windows."""

import json
from dataclasses import astuple, replace

import pytest

from rollmill.profiling.attribution import DeviceTime, WindowTimes
from rollmill.profiling.classes import HostActivity
from rollmill.profiling.correction import EventCosts
from rollmill.profiling.recording import RecordedWindow
from rollmill.profiling.results import DeviceActivity, MemoryUse, OperationMemory, OperationTime, Overlap
from rollmill.profiling.summary import ProcessWindows, device_activities, divide, memory, operations, process_time

POLICY, UPDATE = ("collect", "policy"), ("learn", "update")
FREE = EventCosts(program=0.0, span=0.0)


def window(device, host=(), *, duration=1000, overlap=(0.0, 1000.0, 0.0, 0.0), accelerators=0, starts=0.0):
    times = WindowTimes(
        duration=duration,
        device=device,
        kernel_time=0.0,
        host=dict(host),
        host_only={("dispatch",): overlap[0] - starts} if overlap[0] else {},
        starts={POLICY: starts} if starts else {},
        starts_beside_host=starts,
        overlap=Overlap(*overlap),
        program_events=1,
        span_events=1,
        calls={"dispatch": 4},
    )
    return RecordedWindow(times, (), (MemoryUse("jit_f", 1, 2, 3),), accelerators=accelerators)


def test_windows_of_all_processes_are_summed_and_divided_by_iterations():
    acting = {POLICY: DeviceTime(work=600.0, kernels=8, flops=80)}
    actor = ProcessWindows("actor/0", [window(acting, overlap=(0.0, 600.0, 0.0, 1400.0))] * 2, 4.0)
    learning = {UPDATE: DeviceTime(work=300.0, between=100.0)}
    learner = ProcessWindows("learner/0", [window(learning, overlap=(0.0, 400.0, 0.0, 1600.0))] * 2, 4.0)
    found = {each.path: each for each in operations([actor, learner], FREE, 1e-6)}
    assert found[POLICY].device == pytest.approx(300e-9) and found[POLICY].kernels == 4
    assert found[POLICY].flops == 40
    assert found[UPDATE].device == pytest.approx(200e-9)


def test_waiting_is_shortened_by_what_the_profiler_made_longer():
    host = {HostActivity("metrics", "waiting"): 900.0, HostActivity("dispatch", "dispatch"): 100.0}
    process = ProcessWindows("training", [window({}, host)], 1.0)
    found = process_time(process, FREE, iteration=600e-9)
    times = {time.activity: time.seconds for time in found.host}
    assert times == pytest.approx({"metrics": 500e-9, "dispatch": 100e-9})
    assert found.transitions == {"host to framework": 4}


def test_the_overlap_is_that_of_an_iteration_without_the_profiler():
    device = {POLICY: DeviceTime(work=800.0, kernels=4, work_events=4)}
    process = ProcessWindows("training", [window(device, overlap=(100.0, 600.0, 200.0, 100.0))], 1.0)
    overlap = process_time(process, EventCosts(100.0, 0.0, 1.0), iteration=600e-9).overlap
    assert astuple(overlap) == pytest.approx((100e-9, 300e-9, 100e-9, 100e-9))


def test_copies_and_collectives_shrink_with_the_operation_that_they_are_parts_of():
    device = {POLICY: DeviceTime(work=800.0, kernels=4, work_events=4, copies=200.0, collectives=400.0)}
    process = ProcessWindows("training", [window(device)], 1.0)
    (found,) = operations([process], EventCosts(100.0, 0.0, 1.0), 400e-9)
    assert found.device == pytest.approx(400e-9)
    assert (found.copies, found.collectives) == pytest.approx((100e-9, 200e-9))


def test_a_kernel_is_divided_among_operations_as_an_estimate():
    kernel = OperationTime(("collect", "rollout kernel"), 10.0, 1.0, kernels=4.0)
    found = [OperationTime(POLICY, 2.0, 0.0), kernel, OperationTime(UPDATE, 5.0, 0.0)]
    divided = {each.path: each for each in divide(found, kernel.path, {POLICY: 0.75, kernel.path: 0.25})}
    assert divided[POLICY] == OperationTime(POLICY, 9.5, 0.75, kernels=3.0, mixed=7.5)
    assert divided[kernel.path].device == 2.5 and divided[UPDATE] == found[2]
    assert sum(each.seconds for each in divided.values()) == pytest.approx(18.0)
    assert divide(found[:1], kernel.path, {POLICY: 1.0}) == found[:1]


def test_on_an_accelerator_the_host_alone_has_the_time_in_which_the_device_would_be_idle():
    device = {POLICY: DeviceTime(work=400.0, kernels=4)}
    processes = [
        ProcessWindows("training", [window(device, overlap=(500.0, 300.0, 100.0, 100.0), accelerators=1)], 1.0)
    ]
    costs = EventCosts(100.0, 0.0, 0.25, in_idle_time=True)
    overlap = process_time(processes[0], costs, iteration=600e-9).overlap
    assert astuple(overlap) == pytest.approx((250e-9, 225e-9, 75e-9, 50e-9))
    found = {each.path: each for each in operations(processes, costs, 600e-9)}
    assert found[POLICY].device == pytest.approx(300e-9) and found["dispatch",].host == pytest.approx(250e-9)
    hidden = {each.path: each for each in operations(processes, costs, 200e-9)}
    assert hidden[POLICY].device == pytest.approx(200e-9), "no longer than the training would have taken"


@pytest.mark.parametrize("late", [0.0, 2000.0])
def test_an_accelerator_s_operations_are_the_same_however_late_the_host_was(late):
    device = {POLICY: DeviceTime(work=400.0, kernels=4)}
    windows = [window(device, overlap=(200.0 + late, 400.0, 0.0, 100.0), accelerators=1, starts=150.0)]
    process = ProcessWindows("training", windows, 1.0)
    costs = EventCosts(25.0, 0.0, 0.0, in_idle_time=True)
    found = {each.path: each for each in operations([process], costs, 500e-9)}
    assert found[POLICY].device == pytest.approx(400e-9)
    assert found[POLICY].host == pytest.approx(50e-9), "starts without the cost of four kernels"
    overlap = process_time(process, costs, iteration=500e-9).overlap
    assert overlap.host_only == pytest.approx(sum(each.host for each in found.values()))
    assert sum(astuple(overlap)) == pytest.approx(500e-9)
    without_room = {each.path: each for each in operations([process], costs, 420e-9)}
    assert without_room[POLICY].host == pytest.approx(20e-9) and without_room["dispatch",].host == 0.0


def test_figures_of_gpus_stand_beside_the_time_in_which_kernels_ran():
    recorded = window({}, overlap=(0.0, 300.0, 0.0, 700.0), accelerators=1)
    process = process_time(ProcessWindows("training", [recorded], 1.0), FREE, 1e-6)
    process = replace(process, overlap=Overlap(0.0, 3e-7, 0.0, 7e-7))
    first = {"gpu": 2, "utilisation": 0.9, "sm_activity": 0.1}
    second = {"gpu": 2, "utilisation": None, "sm_activity": 0.3}
    found = device_activities([[first], [second]], [process, process])
    assert found == (DeviceActivity("GPU 2", utilisation=0.9, sm_activity=0.2, occupied=0.6),)
    assert device_activities([], [process]) == ()


def test_only_gpus_that_a_training_uses_are_occupied_by_it():
    busy = Overlap(0.0, 3e-7, 0.0, 7e-7)
    gpu = process_time(ProcessWindows("learner/0", [window({}, accelerators=1)], 1.0), FREE, 1e-6)
    cpu = process_time(ProcessWindows("actor/0", [window({})], 1.0), FREE, 1e-6)
    figures = [{"gpu": n, "utilisation": 0.5 * (n == 1), "sm_activity": None} for n in range(4)]
    found = device_activities([figures], [replace(gpu, overlap=busy), replace(cpu, overlap=busy)])
    assert [each.occupied for each in found] == pytest.approx([0.0, 0.3, 0.0, 0.0])


def test_a_process_on_a_cpu_is_not_corrected_as_one_on_a_gpu():
    costs = EventCosts(100.0, 0.0, 0.25, in_idle_time=True, calibrated=10.0)
    assert costs.on(accelerated=True) is costs and costs.bounded == 20
    on_cpu = costs.on(accelerated=False)
    assert (on_cpu.bounded, on_cpu.inside, on_cpu.in_idle_time) == (100.0, 0.0, False)


def test_a_program_of_several_processes_is_listed_once():
    process = ProcessWindows("actor/0", [window({})], 1.0)
    assert memory([process, process._replace(name="actor/1")]) == (MemoryUse("jit_f", 1, 2, 3),)


def test_only_programs_that_need_much_memory_have_its_course():
    uses = tuple(
        MemoryUse(f"jit_{index}", 100 - index, 0, index, (OperationMemory(("learn",), index, (index,)),))
        for index in range(1, 8)
    )
    found = memory([ProcessWindows("training", [window({})._replace(memory=uses)], 1.0)])
    assert [use.program for use in found] == [use.program for use in uses]
    assert [use.program for use in found if use.operations[0].course] == ["jit_4", "jit_5", "jit_6", "jit_7"]
    assert [use.operations[0].bytes for use in found] == [*range(1, 8)]


def test_a_recorded_window_survives_json():

    device = {POLICY: DeviceTime(1.5, 2.5, 3.0)}
    recorded = window(device, {HostActivity("a/b", "python"): 7.0}, overlap=(9.0, 1.0, 0.0, 0.0), starts=4.0)
    assert RecordedWindow.from_json(json.loads(json.dumps(recorded.to_json()))) == recorded
