"""Advice: each rule applies where it should, nowhere else, and predicts what its fraction says."""

from dataclasses import replace
from itertools import product

import pytest

from profiling.by_hand import OPERATIONS, process, profile
from rollmill.profiler.advice import (
    RULES,
    add_actors,
    advise,
    distrust_utilisation,
    enlarge_batches,
    fuse_gradients,
    fuse_on_cpu,
    fuse_rollouts,
    reduce_traffic,
    wait_less,
    with_advice,
    write_less,
)
from rollmill.profiler.report.terminal import draw_profile
from rollmill.profiling.processor_time import CoreUse
from rollmill.profiling.results import THIS_PROCESS, Ceilings, DeviceActivity, HostTime, OperationTime, Overlap

BUSY = Overlap(host_only=0.0, device_only=0.04, both=0.0079, neither=0.0)
GRADIENTS = (OperationTime(("learn", "gradients"), 0.0479, 0.0, kernels=4.0, flops=1e9, bytes=1e9),)
QUIET = {"operations": GRADIENTS, "ceilings": None, "devices": ()}


def busy(**changes):
    """A profile of a device that always computes."""
    return profile(**{**QUIET, "processes": [process(overlap=BUSY)], **changes})


def host_only(seconds, *host, count=1, **changes):
    """A profile whose devices wait for their host for so many of 40 ms, in each process."""
    overlap = Overlap(host_only=seconds, device_only=0.04 - seconds, both=0.0, neither=0.0)
    one = process(overlap=overlap, host=tuple(HostTime(*activity) for activity in host))
    written = {name: min(time, seconds) * count for name, category, time in host if category == "storage"}
    rest = OperationTime(("all",), (0.04 - seconds) * count, seconds * count - sum(written.values()))
    operations = (rest, *(OperationTime((name,), 0.0, time) for name, time in written.items()))
    processes = [replace(one, name=f"worker/{index}") for index in range(count)]
    return profile(**{**QUIET, "operations": operations, "processes": processes, **changes})


def test_a_busy_device_needs_no_advice():
    made = with_advice(busy(training={"fusion": "full"}))
    assert made.advice == () and "No rule applies" in draw_profile(made)


def test_unfused_rollouts_of_many_small_kernels():
    found = fuse_rollouts(profile())
    between = 0.0031 + 0.0042 + 0.0029 * 1920 / 3206
    assert found is not None and found.options == "--fusion full"
    short = 0.0021  # of the environment, in kernels of less than 2 microseconds
    assert found.saves == pytest.approx(between / 2 + 0.8 * short)
    assert "1,920 kernels" in found.text and "23 %" in found.text
    assert fuse_rollouts(profile(training={"fusion": "rollout"})) is None
    few = tuple(replace(one, kernels=one.kernels / 200) for one in OPERATIONS)
    assert fuse_rollouts(profile(operations=few)) is None
    long = tuple(replace(one, device=one.device * 10) for one in OPERATIONS)
    assert fuse_rollouts(profile(operations=long)) is None


def test_unfused_gradients_of_many_small_kernels():
    small = tuple(replace(one, device=one.device / 10, host=one.host * 2) for one in OPERATIONS)
    found = fuse_gradients(profile(operations=small, training={"fusion": "rollout"}))
    assert found is not None and found.options == "--fusion full" and "1,220 kernels" in found.text
    assert fuse_gradients(profile(operations=small)) is None
    assert fuse_gradients(profile(operations=small, training={"fusion": "full"})) is None


def on_cpu(*operations, **training):
    machine = replace(profile().machine, device="1 x cpu")
    return replace(busy(operations=operations, training=training), machine=machine)


def test_unfused_programs_of_a_cpu():
    rollouts, gradients = OperationTime(("collect", "policy"), 0.008, 0.0), GRADIENTS[0]
    found = fuse_on_cpu(on_cpu(rollouts, gradients))
    assert found is not None and found.options == "--fusion full"
    assert found.saves == pytest.approx(0.5 * 0.008 + 0.3 * 0.0479)
    alone = fuse_on_cpu(on_cpu(rollouts, gradients, possible_fusion="rollout"))
    assert alone is not None and alone.options == "--fusion rollout" and alone.saves == pytest.approx(0.004)
    assert "gradients" not in alone.text
    products = replace(rollouts, flops=6e9)  # which take 6 of its 8 ms at the machine's peak
    bound = replace(on_cpu(products, possible_fusion="rollout"), ceilings=Ceilings(1e12, 1e10))
    assert (found := fuse_on_cpu(bound)) is not None and found.saves == pytest.approx(0.5 * 0.002)
    few = fuse_on_cpu(on_cpu(rollouts, gradients, num_envs=16))
    assert few is not None and few.saves == 0.0 and "Predicted" not in few.text
    assert fuse_on_cpu(on_cpu(rollouts, gradients, fusion="full")) is None
    assert fuse_on_cpu(busy(operations=(rollouts, gradients))) is None, "on a GPU"


def test_what_has_no_kernels_is_not_to_be_fused():
    small = tuple(replace(one, path=("learn", "gradients")) for one in OPERATIONS)
    assert fuse_rollouts(profile(training={"possible_fusion": "off"})) is None
    for possible in ("off", "rollout"):
        training = {"fusion": "rollout", "possible_fusion": possible}
        assert fuse_gradients(profile(operations=small, training=training)) is None
    assert fuse_on_cpu(on_cpu(*GRADIENTS, possible_fusion="off")) is None
    rollouts = fuse_rollouts(profile(training={"possible_fusion": "rollout"}))
    assert rollouts is not None and rollouts.options == "--fusion rollout"


STEPPING = ("environment step", "simulator", 0.018)


def stepped_on_host(*, busy, idle, count=1, actors=(2, 4, 8), **changes):
    """A profile of 40 ms on CPU cores, of which a process steps environments for 18."""
    made = host_only(0.02, STEPPING, count=count, training={"possible_actors": actors}, **changes)
    made = replace(made, iteration=replace(made.iteration, unprofiled=0.04), cores=CoreUse(busy, idle))
    return replace(made, machine=replace(made.machine, device="1 x cpu", cores=2))


def test_environments_that_wait_get_actors_beyond_the_cores():
    """A quarter of a core computes: 18 of the 30 ms in which none does belong to steps. Of 2 cores, 22 ms of
    computing take 22, 44 and 88 ms in 2, 4 and 8 actors, and 18 of waiting 9, 4.5 and 2.25."""
    found = add_actors(stepped_on_host(busy=0.25, idle=1.75))
    assert found is not None and found.options == "--distribution single-learner-coarse --actors 2"
    assert found.saves == pytest.approx((0.040 - 0.031) / 2) and "45 % of the time" in found.text
    roomy = add_actors(stepped_on_host(busy=0.25, idle=15.75))
    assert roomy is not None and roomy.options.endswith("--actors 8")
    assert roomy.saves == pytest.approx((0.040 - 0.022 - 0.018 / 8) / 2)
    assert (uneven := add_actors(stepped_on_host(busy=0.25, idle=15.75, actors=(2, 6)))) is not None
    assert uneven.options.endswith("--actors 6")
    assert add_actors(stepped_on_host(busy=0.25, idle=1.75, actors=())) is None


def test_environments_that_compute_are_promised_nothing():
    """A core more is not had by a process more: the other core of two computes for XLA and for the learner."""
    assert add_actors(stepped_on_host(busy=1.15, idle=0.85)) is None
    roomy = add_actors(stepped_on_host(busy=1.15, idle=14.85))
    assert roomy is not None and (roomy.options, roomy.saves) == ("", 0.0) and "--search-plan" in roomy.text


def test_what_is_not_known_of_cores_gives_no_advice():
    alone = stepped_on_host(busy=0.25, idle=15.75)
    assert add_actors(replace(alone, cores=None)) is None
    assert add_actors(stepped_on_host(busy=0.25, idle=15.75, count=2)) is None
    assert add_actors(stepped_on_host(busy=0.25, idle=0.05)) is None, "other programs compute, not the steps wait"
    little = replace(alone, processes=(replace(alone.processes[0], host=(HostTime(*STEPPING[:2], 0.003),)),))
    assert add_actors(little) is None


def test_waiting_for_an_accelerator_is_no_waiting_of_environments():
    """Half of the iteration the host waits for a GPU, and half of it one core steps environments."""
    alone = stepped_on_host(busy=0.5, idle=15.5)
    gpu = replace(alone.processes[0], accelerators=1)
    found = add_actors(replace(alone, processes=(gpu,)))
    assert found is not None and found.saves == 0.0


def test_the_process_that_waits_for_workers_does_not_count():
    one = stepped_on_host(busy=0.25, idle=1.75)
    (worker,) = one.processes
    coordinator = replace(worker, name=THIS_PROCESS, host=(HostTime("wait", "waiting", 0.04),))
    both = replace(one, processes=(coordinator, replace(worker, name="actor/0")))
    assert advise(both) == advise(one)
    assert add_actors(one) in advise(one)


def test_workers_that_wait_for_each_other():
    waiting = (("receive", "channel", 0.004), ("wait for weights", "waiting", 0.006))
    in_step = {"replicas": 4, "can_be_asynchronous": True}
    room = {"cores": CoreUse(8.0, 8.0)}
    found = wait_less(host_only(0.012, *waiting, count=4, training=in_step, **room))
    assert found is not None and found.options == "--asynchronous" and "25 % of the time" in found.text
    assert found.saves == 0.0 and "nothing is predicted" in found.text
    assert wait_less(host_only(0.012, *waiting, count=1, training=in_step, **room)) is None
    assert wait_less(host_only(0.003, *waiting, count=4, training=in_step, **room)) is None
    assert wait_less(host_only(0.012, *waiting, count=4, **room)) is None, "a simulator's process and its program"
    already = wait_less(host_only(0.012, *waiting, count=4, training={"replicas": 4}, **room))
    assert already is not None and already.options == "" and "Fewer workers" in already.text
    for cores in (CoreUse(1.9, 0.1), None):
        full = wait_less(host_only(0.012, *waiting, count=4, training=in_step, cores=cores))
        assert full is not None and full.options == "" and "Fewer workers" in full.text


@pytest.mark.parametrize(
    ("activity", "training", "options"),
    [
        ("metrics.jsonl", {}, "--log-every 10"),
        ("metrics.jsonl", {"log_every": 5}, "--log-every 50"),
        ("write checkpoint", {}, "--checkpoint-seconds 300"),
        ("write checkpoint", {"checkpoint_seconds": 60.0}, "--checkpoint-seconds 600"),
        ("write checkpoint", {"checkpoint_seconds": 0.0}, "--checkpoint-seconds 10"),
        ("write checkpoint", {"checkpoint_iterations": 3}, "--checkpoint-iterations 30"),
    ],
)
def test_files_that_are_written_often(activity, training, options):
    found = write_less(host_only(0.01, (activity, "storage", 0.008), training=training))
    assert found is not None and found.options == options
    assert found.saves == pytest.approx(0.008 / 2) and "20 %" in found.text
    assert write_less(host_only(0.003, (activity, "storage", 0.008))) is None
    assert write_less(host_only(0.01, (activity, "storage", 0.008), count=2, training=training)) is None


def test_files_that_are_written_beside_other_work_cost_nothing():
    """A thread writes for 8 of the 10 ms in which another one steps environments, as long without the files."""
    made = host_only(0.01, ("metrics.jsonl", "storage", 0.008), ("environment step", "simulator", 0.01))
    beside = replace(made, operations=(OperationTime(("collect", "environment"), 0.03, 0.01),))
    assert write_less(made) is not None and write_less(beside) is None


def test_batches_smaller_than_their_dispatch():
    found = enlarge_batches(host_only(0.03, ("dispatch", "dispatch", 0.028)))
    assert found is not None and found.options == "--num-envs 2048"
    assert found.saves == pytest.approx(0.014) and "changes how the algorithm learns" in found.text
    assert enlarge_batches(host_only(0.008, ("dispatch", "dispatch", 0.008))) is None
    assert enlarge_batches(host_only(0.03, ("dispatch", "dispatch", 0.002))) is None
    assert enlarge_batches(host_only(0.03, ("dispatch", "dispatch", 0.028), count=2)) is None


def test_gradients_limited_by_memory():
    moved = (replace(GRADIENTS[0], flops=1e9, bytes=3e8),)
    ceilings = Ceilings(flops_per_second=1e12, bytes_per_second=1e10)
    found = reduce_traffic(busy(operations=moved, ceilings=ceilings))
    assert found is not None and found.options == "--fusion full"
    assert found.saves == pytest.approx(0.03 / 4) and "63 % of the time" in found.text
    full = reduce_traffic(busy(operations=moved, ceilings=ceilings, training={"fusion": "full"}))
    assert full is not None and (full.options, full.saves) == ("", 0.0)
    apart = busy(operations=moved, ceilings=ceilings, training={"possible_fusion": "off"})
    assert (found := reduce_traffic(apart)) is not None and found.options == ""
    assert reduce_traffic(busy(operations=moved)) is None
    arithmetic = (replace(moved[0], flops=4e10),)
    assert reduce_traffic(busy(operations=arithmetic, ceilings=ceilings)) is None
    cached = Ceilings(flops_per_second=1e12, bytes_per_second=5e9)
    assert reduce_traffic(busy(operations=moved, ceilings=cached)) is None
    for fusion, command in (("off", "--fusion full"), ("auto", "")):  # auto has timed the kernels already
        assert (found := reduce_traffic(busy(operations=moved, ceilings=ceilings, training={"fusion": fusion})))
        assert found.options == command
    far = Ceilings(flops_per_second=1e12, bytes_per_second=2e10)
    assert reduce_traffic(busy(operations=moved, ceilings=far)) is None


def test_utilisation_that_promises_too_much():
    found = distrust_utilisation(profile())
    assert found is not None and (found.options, found.saves) == ("", 0.0)
    assert all(share in found.text for share in ("97 %", "63 %", "21 %"))
    assert distrust_utilisation(profile(devices=(DeviceActivity("GPU 0", 0.7, None, 0.63),))) is None
    assert distrust_utilisation(profile(devices=())) is None


def test_the_largest_saving_is_first():
    found = advise(host_only(0.03, ("dispatch", "dispatch", 0.015), ("metrics", "storage", 0.016)))
    assert [one.options for one in found] == ["--log-every 10", "--num-envs 2048"]
    assert [one.saves for one in found] == sorted((one.saves for one in found), reverse=True)


def of_each_kind(share):
    """Profiles in which all that a rule could be about takes this share of the time, category by category."""
    lost = 0.1 * share
    overlap = Overlap(host_only=lost, device_only=0.1 - lost, both=0.0, neither=0.0)
    for category in ("simulator", "storage", "dispatch", "channel", "waiting"):
        written = OperationTime(("all",), 0.0, lost if category == "storage" else 0.0)
        one = replace(process(overlap=overlap, host=(HostTime("all", category, 0.1),)), name="actor/0")
        for launching, fusion, count in product(("policy", "gradients"), ("off", "rollout", "full"), (1, 2)):
            learn = OperationTime(
                ("learn", "gradients"), 0.015 * count, 0.0, kernels=1.0, flops=1.0, bytes=100.0 * share * count
            )
            yield profile(
                processes=[one, replace(one, name="other")][:count],
                operations=(OperationTime((launching,), 0.0, lost * count, kernels=5000.0), learn, written),
                ceilings=Ceilings(flops_per_second=1e9, bytes_per_second=1e3),
                devices=(DeviceActivity("GPU 0", share + 0.5, 0.5, 0.5),),
                training={"fusion": fusion, "replicas": 2, "possible_actors": (2,)},
                cores=CoreUse(1.0, 15.0),
            )
    yield on_cpu(OperationTime(("gradients",), lost, 0.0), OperationTime(("other",), 0.1 - lost, 0.0))


@pytest.mark.parametrize("rule", RULES)
def test_no_rule_applies_to_less_than_a_tenth(rule):
    assert all(rule(made) is None for made in of_each_kind(0.09))
    assert any(rule(made) is not None for made in of_each_kind(0.12))
