"""Time of windows, divided among operations."""

import pytest

from profiling.by_hand import process as process_by_hand
from rollmill.profiler.library_kernels import library_shares
from rollmill.profiling.attribution import attribute
from rollmill.profiling.breakdown import stepping_seconds
from rollmill.profiling.classes import Classifier, DeviceWork, HostActivity
from rollmill.profiling.hlo import Instruction
from rollmill.profiling.results import HostTime, Overlap
from rollmill.profiling.timeline import timeline
from rollmill.profiling.trace import Event, Lane, Trace

POLICY, ENVIRONMENT = ("collect", "policy"), ("collect", "environment")
PROGRAM = {
    "dot.1": Instruction("kernel", {POLICY: 1.0}, 100.0, 10.0),
    "fusion.1": Instruction("kernel", {ENVIRONMENT: 0.75, POLICY: 0.25}, 0.0, 0.0),
    "while.1": Instruction("container", {("collect",): 1.0}, 0.0, 0.0),
}
CLASSIFY = Classifier({"jit_f": PROGRAM})


def lane(*events: tuple[int, int, str], name: str = "thread 1", on_device: bool = False) -> Lane:
    return Lane(name, on_device, [Event(start, end, label, "") for start, end, label in events])


def times_of(*lanes: Lane, begin: int = 0, end: int = 100):
    return attribute(Trace(lanes, 0), CLASSIFY, begin, end)


def test_kernels_loops_and_idle_time_sum_to_the_window():
    times = times_of(lane((10, 90, "while.1"), (20, 50, "dot.1"), (60, 80, "fusion.1")))
    device = times.device
    assert device[POLICY].work == 30 + 0.25 * 20
    assert device[ENVIRONMENT].work == device[ENVIRONMENT].mixed == 15
    assert device["collect",].between == 80 - 30 - 20
    assert times.overlap == Overlap(host_only=0.0, device_only=80.0, both=0.0, neither=20.0)
    assert times.kernel_time == 50
    assert device[POLICY].flops == 100 and device[POLICY].kernels == 1.25
    assert times.program_events == 3 and times.span_events == 0


def test_copies_and_collectives_are_parts_of_the_work():
    kinds = {
        "copy.1": Instruction("copy", {POLICY: 1.0}, 0.0, 8.0),
        "all-reduce.1": Instruction("collective", {POLICY: 0.5, ENVIRONMENT: 0.5}, 0.0, 8.0),
    }
    device = lane((0, 10, "copy_1"), (10, 30, "all_reduce_1"), (30, 60, "dot_1"), name="stream", on_device=True)
    times = attribute(Trace([device], 0), Classifier({"jit_f": {**PROGRAM, **kinds}}), 0, 100)
    assert (times.device[POLICY].work, times.device[ENVIRONMENT].work) == (50, 10)
    assert (times.device[POLICY].copies, times.device[POLICY].collectives) == (10, 10)
    assert (times.device[ENVIRONMENT].copies, times.device[ENVIRONMENT].collectives) == (0, 10)


def test_threads_that_compute_at_once_share_the_time():
    times = times_of(lane((0, 40, "dot.1")), lane((20, 60, "fusion.1"), name="thread 2"))
    assert times.device[POLICY].work == 20 + 10 + 0.25 * (10 + 20)
    assert sum(each.work for each in times.device.values()) == 60
    assert times.kernel_time == 80


def test_time_between_kernels_counts_only_where_no_other_thread_computes():
    times = times_of(lane((0, 100, "while.1")), lane((0, 60, "dot.1"), name="thread 2"))
    assert times.device[POLICY].work == 60
    assert times.device["collect",].between == 40


def test_spans_make_a_thread_one_of_python_and_waiting_is_no_work():
    host = lane((0, 30, "rollmill:simulator:collect/environment"), (30, 60, "rollmill:waiting:metrics"))
    times = times_of(host, lane((20, 50, "dot.1"), name="thread 2"))
    assert times.host == {
        HostActivity("collect/environment", "simulator"): 30,
        HostActivity("metrics", "waiting"): 30,
        HostActivity("python", "python"): 40,
    }
    assert times.overlap == Overlap(host_only=60.0, device_only=20.0, both=10.0, neither=10.0)
    assert times.host_only == {ENVIRONMENT: 20, ("python",): 40}
    assert times.calls == {"simulator": 1, "waiting": 1}


def test_the_user_s_operations_are_parts_of_what_they_lie_in():
    """Also in what a simulator does; names of calls are theirs."""
    stepping = "collect/environment"
    host = lane(
        (0, 40, f"rollmill:python:{stepping}"),
        (5, 35, "rollmill:operation:physics"),
        (10, 20, f"rollmill:simulator:{stepping}"),
        (20, 25, "rollmill:operation:compile"),
        (30, 35, "TransferToDevice"),
        (50, 70, "rollmill:operation:outer"),
        (60, 65, "rollmill:operation:inner"),
    )
    times = times_of(host)
    assert times.host == {
        HostActivity(stepping, "python"): 10,
        HostActivity(f"{stepping}/physics", "python"): 10,
        HostActivity(f"{stepping}/physics", "simulator"): 10,
        HostActivity(f"{stepping}/physics/compile", "python"): 5,
        HostActivity("transfer", "transfer"): 5,
        HostActivity("outer", "python"): 15,
        HostActivity("outer/inner", "python"): 5,
        HostActivity("python", "python"): 40,
    }
    assert times.calls == {"python": 1, "simulator": 1, "transfer": 1}
    shown = [HostTime(activity.name, activity.category, float(time)) for activity, time in times.host.items()]
    assert stepping_seconds(process_by_hand(host=tuple(shown))) == 35.0


def test_a_transition_is_an_activity_that_begins_in_another_category():
    """Calls inside of calls of their category are none, and neither is what begins where nothing else was done."""
    host = lane(
        (0, 40, "rollmill:dispatch:dispatch"),
        (5, 35, "PjitFunction(step)"),
        (10, 30, "PjRtCpuExecutable::Execute"),
        (15, 20, "TransferToDevice"),
        (22, 24, "Compile"),
        (26, 28, "TransferToDevice"),
        (50, 60, "PjitFunction(step)"),
        (70, 80, "rollmill:waiting:metrics"),
    )
    assert times_of(host).calls == {"dispatch": 2, "transfer": 2, "compile": 1, "waiting": 1}


def test_an_event_counts_by_the_part_of_it_that_was_read():
    parts = [Event(0, 10, "dot.1", part=0.25), Event(10, 20, "dot.1", part=0.5), Event(20, 30, "dot.1")]
    times = times_of(Lane("thread 1", False, parts))
    assert times.device[POLICY].kernels == times.program_events == 1.75
    assert times.device[POLICY].flops == 175


def test_calls_into_the_framework_lie_inside_spans():
    host = lane((0, 80, "rollmill:python:collect"), (10, 40, "PjitFunction(f)"), (20, 30, "TransferToDevice"))
    assert times_of(host).host == {
        HostActivity("collect", "python"): 50,
        HostActivity("dispatch", "dispatch"): 20,
        HostActivity("transfer", "transfer"): 10,
        HostActivity("python", "python"): 20,
    }


ON_GPU = Classifier({"jit_f": PROGRAM}, accelerated=True)


def test_threads_start_instructions_that_a_gpu_runs():
    host = lane((0, 60, "PjitFunction(f)"), (10, 50, "dot.1"), (20, 30, "cuLaunchKernel"), (52, 56, "cuMemAlloc"))
    gpu = lane((30, 90, "dot_1"), name="GPU 0 stream 7", on_device=True)
    times = attribute(Trace([host, gpu], 0), ON_GPU, 0, 100)
    assert times.device[POLICY].work == 60 and times.program_events == 1
    assert times.host == {
        HostActivity("dispatch", "dispatch"): 16,
        HostActivity("collect/policy", "dispatch"): 30,
        HostActivity("collect/policy", "cuda"): 10,
        HostActivity("CUDA", "cuda"): 4,
    }
    assert times.host_only == {("dispatch",): 10, POLICY: 20}


def test_the_time_in_which_a_kernel_is_started_is_its_operation_s():
    host = lane((0, 300_000, "PjitFunction(f)"))
    gpu = lane((0, 9_000, "dot_1"), (11_000, 20_000, "fusion_1"), (90_000, 100_000, "dot_1"), on_device=True)
    times = attribute(Trace([host, gpu], 0), ON_GPU, 0, 100_000)
    assert times.device[POLICY].work == 19_000 + 0.25 * 9_000
    assert times.starts == {POLICY: 500, ENVIRONMENT: 1_500} and times.starts_beside_host == 2_000
    assert times.host_only == {("dispatch",): 70_000}, "the host was late"
    assert times.overlap == Overlap(host_only=72_000.0, device_only=0.0, both=28_000.0, neither=0.0)
    assert times.kernel_time == 28_000
    busy = lane((0, 40_000, "dot_1"), name="GPU 0 stream 8", on_device=True)
    beside = attribute(Trace([gpu, busy], 0), ON_GPU, 0, 40_000)
    assert beside.starts == beside.host_only == {}, "another stream computes"
    alone = attribute(Trace([gpu], 0), ON_GPU, 0, 20_000)
    assert sum(alone.starts.values()) == 2_000 and alone.starts_beside_host == 0.0
    twice = alone.longer(2.0)
    assert sum(twice.starts.values()) == 4_000 == twice.overlap.neither


def test_kernels_of_libraries_belong_to_the_instruction_that_the_device_names():
    gemm = "void cutlass::Kernel2<cutlass_80_simt::Op<float>>(Params)"
    events = [
        Event(0, 10, gemm, "jit_f", "dot.1"),
        Event(10, 40, gemm, "jit_f", "command_buffer_1"),
        Event(40, 45, "MemcpyD2D", "jit_f", "command_buffer_1"),
    ]
    times = attribute(Trace([Lane("GPU 0 stream 7", True, events)], 0), ON_GPU, 0, 100)
    assert {path: each.work for path, each in times.device.items()} == {
        POLICY: 10,
        ("other", "Kernel2"): 30,
        ("other", "copies"): 5,
    }


def test_a_kernel_that_equal_instructions_share_belongs_to_the_one_that_the_device_names():
    events = [
        Event(0, 10, "fusion_1", "jit_f", "dot.1"),
        Event(10, 14, "dot_1", "jit_f", "command_buffer_1"),
        Event(14, 16, "dot_1", "jit_f", "while.1"),
    ]
    times = attribute(Trace([Lane("GPU 0 stream 7", True, events)], 0), ON_GPU, 0, 100)
    assert {path: each.work for path, each in times.device.items()} == {POLICY: 16}


def test_shares_of_libraries_kernels_are_those_of_the_program_that_names_them():
    events = [
        Event(0, 10, "gemm<1>", "jit_f", "dot.1"),
        Event(10, 40, "gemm<2>", "jit_f", "fusion.1"),
        Event(40, 80, "dot_1", "jit_f", ""),
        Event(80, 90, "MemcpyD2H", "", ""),
    ]
    host = Lane("thread 1", False, [Event(0, 50, "gemm<1>", "", "dot.1")])
    shares = library_shares(Trace([Lane("GPU 0 stream 7", True, events), host], 0), ON_GPU)
    assert shares == {("other", "gemm"): {POLICY: (10 + 0.25 * 30) / 40, ENVIRONMENT: 0.75 * 30 / 40}}


def test_the_framework_s_own_threads_do_not_wait():
    times = times_of(lane((0, 100, "ThunkExecutor::Execute (wait for completion)")))
    assert times.host == {} and times.overlap.neither == 100


def test_tasks_of_a_kernel_that_no_event_tells_of_are_its_own():
    waiting = lane((0, 100, "ThunkExecutor::Execute (wait for completion)"))
    computing = lane((0, 40, "dot.1"), (40, 42, "fusion.1"), (60, 70, "fusion.1"), name="thread 2")
    times = times_of(waiting, computing)
    assert times.device[POLICY].work == 40 + 18 + 0.25 * (12 + 30)
    assert times.device[ENVIRONMENT].work == 0.75 * (12 + 30), "it is the longest kernel since such a time before"
    assert times.overlap == Overlap(host_only=0.0, device_only=100.0, both=0.0, neither=0.0)


def test_recording_costs_time_inside_kernels_and_in_the_loop_around_them():
    looping = lane((0, 100, "while.1"), (10, 30, "dot.1"), (40, 60, "fusion.1"))
    device = times_of(looping).device
    assert device[POLICY].work_events == 1.25 and device[ENVIRONMENT].work_events == 0.75
    assert device["collect",].between_events == 3, "before, between and after the kernels"
    beside = times_of(looping, lane((0, 100, "dot.1"), name="thread 2")).device
    assert beside[POLICY].work_events == 1 + 0.5 * 1.25 and beside["collect",].between_events == 1


def test_the_whole_of_a_program_belongs_to_the_loop_or_kernel_before():
    inside = times_of(lane((0, 100, "while.1"), (10, 90, "ThunkExecutor::Execute"), (20, 30, "dot.1")))
    assert inside.device["collect",].between == 90
    after = times_of(lane((0, 10, "dot.1"), (10, 50, "ThunkExecutor::Execute")))
    assert after.device[POLICY].between == 40
    alone = times_of(lane((10, 50, "ThunkExecutor::Execute")))
    assert alone.device[()].between == 40


def test_events_are_cut_at_the_window():
    times = times_of(lane((0, 200, "while.1"), (50, 150, "dot.1")), begin=100, end=180)
    assert times.device[POLICY].work == 50 and times.device["collect",].between == 30
    assert times.duration == 80
    assert times.program_events == 1, "events that end in the window"


def test_on_a_device_everything_is_work_and_kernels_are_named_as_c_allows():
    classify = Classifier({"jit_f": {"loop_add-fusion.3": Instruction("kernel", {POLICY: 1.0}, 0.0, 0.0)}})
    stream = lane(
        (0, 10, "loop_add_fusion_3"), (10, 20, "MemcpyD2D"), (20, 50, "ncclDevKernel_AllReduce"), on_device=True
    )
    times = attribute(Trace([stream], 0), classify, 0, 60)
    assert times.device[POLICY].work == 10
    assert times.device["other", "copies"].work == 10
    assert times.device["other", "ncclDevKernel_AllReduce"].work == 30


def test_the_start_of_an_instruction_is_told_apart_from_its_work():
    classify = Classifier({"jit_f": {"fusion": Instruction("kernel", {POLICY: 1.0}, 0.0, 0.0)}}, accelerated=True)
    event = Event(0, 10, "fusion")
    assert isinstance(classify(event), HostActivity)
    assert isinstance(classify(event, on_device=True), DeviceWork)


def test_programs_with_equal_names_are_told_apart():
    other = {"dot.1": Instruction("kernel", {("learn",): 1.0}, 0.0, 0.0)}
    classify = Classifier({"jit_f": PROGRAM, "jit_g": other})
    assert classify.is_ambiguous("dot.1") and not classify.is_ambiguous("fusion.1")
    events = [Event(0, 10, "dot.1", "jit_f"), Event(10, 40, "dot.1", "jit_g")]
    times = attribute(Trace([Lane("thread 1", False, events)], 0), classify, 0, 40)
    assert times.device[POLICY].work == 10 and times.device["learn",].work == 30


def test_programs_with_the_same_name_are_told_apart_by_their_numbers():
    other = {"dot.1": Instruction("kernel", {("learn",): 1.0}, 0.0, 0.0)}
    classify = Classifier({"jit_g/2": {}, "jit_f/4": PROGRAM, "jit_f/8": other})
    modules = ["jit_f/4", "jit_f/8", "jit_f"]
    events = [Event(10 * place, 10 * place + 10, "dot.1", module) for place, module in enumerate(modules)]
    times = attribute(Trace([Lane("thread 1", False, events)], 0), classify, 0, 40)
    assert times.device[POLICY].work == 20 and times.device["learn",].work == 10


def test_a_timeline_shows_what_was_done_most_of_each_interval():
    spans = timeline(Trace([lane((0, 600, "dot.1"), (600, 1200, "rollmill:python:learn"))], 0), CLASSIFY, 0, 1200)
    assert [(span.lane, span.name) for span in spans] == [("thread 1", "collect/policy"), ("thread 1", "learn")]
    assert spans[0].start == 0 and spans[1].end == pytest.approx(1200e-9)
    assert spans[0].end == pytest.approx(600e-9)
