"""The cost model: fitted to measured figures, checked against others; and a machine of 1,024 GPUs by it."""

import json
from pathlib import Path

import numpy as np
import pytest
from cost_model import Collective, IterationModel, fit_collectives, fit_iteration

from rollmill.plan_search.search.candidate import Candidate, StageTimes, placed_seconds
from rollmill.plan_search.search.enumeration import candidates
from rollmill.plan_search.search.machine import Machine, Workload
from rollmill.plan_search.search.result_table import Measurement, MemoryEstimate
from rollmill.plan_search.search.searching import Trials, search

MICROSECONDS = 1e-6
SIZE = 400_000

MEASURED = [
    Collective(SIZE, gpus, instances, 1, microseconds * MICROSECONDS)
    for gpus, instances, microseconds in [(2, 1, 18), (1, 2, 30), (1, 4, 41), (1, 8, 67), (2, 2, 37), (2, 4, 51)]
]
"""All-reduces inside a compiled program on one or two H200, one process for each rank."""

ASSUMED = [
    Collective(num_bytes, 8 * hosts, 1, hosts, 60e-6 + 20e-6 * np.log2(hosts) + 2 * num_bytes / 50e9)
    for hosts in (2, 16, 128)
    for num_bytes in (40_000, 400_000, 40_000_000)
]
"""Between hosts nothing was measured; a network of 20 microseconds and 50 GB/s is assumed."""

HOST = Machine(64, gpus_per_host=4, gpu_memory=140 * 10**9)
NETWORK = 4 * (4 * 64 + 64 + 64 * 64 + 64 + 64 * 2 + 2 + 4 * 64 + 64 + 64 * 64 + 64 + 64 + 1)
"""Bytes of the weights of CartPole-v1's two networks of two layers of 64."""


def work(num_envs, num_steps):
    return Workload(num_envs, num_steps, updates=16, gradient_bytes=NETWORK)


def test_collectives_are_fitted_within_six_percent():
    model = fit_collectives(MEASURED)
    for each in MEASURED:
        found = model.seconds(each.bytes, gpus=each.gpus, instances=each.instances)
        assert found == pytest.approx(each.seconds, rel=0.06)
    assert min(model) >= 0
    assert model.seconds(SIZE, gpus=1) == 0.0


def test_collectives_that_follow_the_model_are_found_again():
    hidden = fit_collectives([*MEASURED, *ASSUMED])
    shapes = [
        (b, g, i, h) for b in (10**4, 10**7) for g, h in ((1, 1), (2, 1), (8, 1), (16, 2), (64, 8)) for i in (1, 4)
    ]
    shapes = [shape for shape in shapes if shape[1] * shape[2] > 1]
    exact = [Collective(b, g, i, h, hidden.seconds(b, gpus=g, instances=i, hosts=h)) for b, g, i, h in shapes]
    again = fit_collectives(exact)
    for each in exact:
        found = again.seconds(each.bytes, gpus=each.gpus, instances=each.instances, hosts=each.hosts)
        assert found == pytest.approx(each.seconds, rel=1e-3)


def test_without_measurements_there_is_no_model():
    with pytest.raises(ValueError, match="at least one"):
        fit_collectives([])


def test_an_iteration_is_a_constant_and_a_time_for_each_environment():
    start, each = fit_iteration([(1_000, 0.012), (4_000, 0.018), (8_000, 0.026)])
    assert (start, each) == (pytest.approx(0.010), pytest.approx(2e-6))


def weak_scaling():
    file = Path(__file__).parents[2] / "benchmarks/results/scaling-gpu.json"
    return json.loads(file.read_text())["result"]["weak_scaling"]


def test_two_gpus_are_predicted_from_one():
    rows = weak_scaling()
    each = {
        row["envs_per_gpu"]: {kind: run["median"] for kind, run in row["steps_per_second"].items()} for row in rows
    }
    alone = [(envs, envs * 128 / speeds["one GPU"]) for envs, speeds in each.items()]
    model = IterationModel(*fit_iteration(alone), fit_collectives(MEASURED))
    for envs, speeds in each.items():
        predicted = model.steps_per_second(Candidate(place="mesh", learners=2, gpus=2), HOST, work(2 * envs, 128))
        assert predicted == pytest.approx(speeds["two GPUs, two processes"], rel=0.05)
    # The host's dispatch to a second device, from the larger size, predicts the smaller one.
    large, small = max(each), min(each)
    in_one = Candidate(devices=2, gpus=2)
    missing = 2 * large * 128 / each[large]["two GPUs, one process"] - model.seconds(
        in_one, HOST, work(2 * large, 128)
    )
    predicted = model._replace(dispatch=missing).steps_per_second(in_one, HOST, work(2 * small, 128))
    assert predicted == pytest.approx(each[small]["two GPUs, one process"], rel=0.05)


@pytest.mark.parametrize(
    ("num_envs", "num_steps", "measured"),
    [(65_536, 64, {1: 586e6, 2: 1_101e6, 4: 2_172e6}), (4_096, 128, {1: 353e6, 2: 544e6, 4: 933e6})],
)
def test_four_gpus_are_predicted_from_one_and_two(num_envs, num_steps, measured):
    """Fused PPO on CartPole-v1 in one process, as it was measured on one, two and four H200."""
    model = IterationModel(
        num_envs * num_steps / measured[1] / 2, num_steps / measured[1] / 2, fit_collectives(MEASURED)
    )
    two = Candidate(devices=2, gpus=2)
    missing = 2 * num_envs * num_steps / measured[2] - model.seconds(two, HOST, work(2 * num_envs, num_steps))
    model = model._replace(dispatch=max(missing, 0.0))
    predicted = model.steps_per_second(Candidate(devices=4, gpus=4), HOST, work(4 * num_envs, num_steps))
    assert predicted == pytest.approx(measured[4], rel=0.1)


CLUSTER = Machine(64, gpus_per_host=8, gpu_memory=140 * 10**9, hosts=128)
MODEL = IterationModel(1.5e-3, 0.22e-6, fit_collectives([*MEASURED, *ASSUMED]), dispatch=0.1e-3)
"""An iteration of 128 steps on one H200, fused."""


def simulated(workload, *, noise=0.0):
    """Trials on the simulated cluster; the environments of one GPU take 100 kB each."""
    source, measured = np.random.default_rng(0), []

    def measure(candidate, bound, seconds):
        measured.append(candidate)
        speed = MODEL.steps_per_second(candidate, CLUSTER, workload) * (1 + noise * source.standard_normal())
        return Measurement(speed, memory(candidate), bound is not None and 1.2 * speed < bound)

    def memory(candidate):
        return 10**9 + 100_000 * (candidate.num_envs or workload.num_envs) / candidate.ranks

    def check(candidate):
        return "one program cannot divide fewer environments" if candidate.ranks > workload.num_envs else None

    unknown = lambda _: None
    return Trials(check, unknown, lambda c: MemoryEstimate(memory(c)), unknown, measure), measured


def together(workload, objective="keep-batch"):
    """Candidates that the model tells apart; of fusion it knows one depth."""
    found = candidates(CLUSTER, workload, objective)
    return [
        each
        for each in found
        if each.place == "mesh" or (each.distribution == "gpu-only" and each.fusion == "full")
    ]


@pytest.mark.parametrize("num_envs", [4_096, 65_536, 1_048_576, 67_108_864])
def test_on_a_thousand_gpus_the_choice_is_as_good_as_an_exhaustive_sweep(num_envs):
    workload = work(num_envs, 128)
    trials, measured = simulated(workload, noise=0.01)
    found = together(workload)
    assert max(each.gpus for each in found) == 1_024
    table = search(found, trials, budget_seconds=1e6, memory_limit=CLUSTER.memory_limit)
    fits = [each for each in found if 10**9 + 100_000 * num_envs / each.ranks <= CLUSTER.memory_limit]
    best = max(MODEL.steps_per_second(each, CLUSTER, workload) for each in fits)
    chosen = table.chosen.candidate
    assert MODEL.steps_per_second(chosen, CLUSTER, workload) >= 0.95 * best
    assert len(set(measured)) <= len(fits)
    assert all(row.measured_memory is None or row.measured_memory <= CLUSTER.memory_limit for row in table.rows)


def test_a_small_batch_does_not_take_the_whole_cluster_and_a_large_one_does():
    gpus = {}
    for num_envs in (4_096, 67_108_864):
        trials, _ = simulated(work(num_envs, 128))
        table = search(together(work(num_envs, 128)), trials, budget_seconds=1e6)
        gpus[num_envs] = table.chosen.candidate.gpus
        skipped = [row for row in table.rows if row.status == "skipped"]
        assert num_envs > 4_096 or any("saturated along learners" in row.reason for row in skipped)
    assert gpus[4_096] <= 8
    assert gpus[67_108_864] == 1_024


def test_a_batch_that_may_grow_stops_before_memory_does():
    workload = work(4_096, 128)
    machine_only = [each for each in together(workload, "grow-batch") if each.gpus == 1]
    trials, measured = simulated(workload)
    table = search(machine_only, trials, budget_seconds=1e6, memory_limit=CLUSTER.memory_limit)
    widths = [each.num_envs for each in measured]
    assert table.chosen.candidate.num_envs == max(widths) > 4_096
    rest = [row for row in table.rows if row.candidate not in measured]
    assert all(row.status in ("skipped", "rejected") for row in rest)
    assert max(row.measured_memory or 0 for row in table.rows) <= CLUSTER.memory_limit


def test_instances_of_a_gpu_take_turns_or_overlap():
    one = Candidate(place="mesh", learners=1, gpus=1)
    two = Candidate(place="mesh", learners=2, gpus=1, instances=2)
    model, workload = IterationModel(1e-3, 0.0, fit_collectives(MEASURED)), work(4_096, 128)
    turns = model.steps_per_second(two, HOST, workload) / model.steps_per_second(one, HOST, workload)
    assert 0.4 < turns < 0.5  # a start of its own for each, and all-reduces
    reduces = 16 * model.collectives.seconds(NETWORK, gpus=1, instances=2)
    assert model._replace(crowding=0.0).seconds(two, HOST, workload) == pytest.approx(1e-3 + reduces)


TIMES = StageTimes(collect=6.0, learn=2.0)


@pytest.mark.parametrize(
    ("candidate", "seconds"),
    [
        (Candidate(), 8.0),
        (Candidate(devices=2), 4.0),
        (Candidate(devices=4), 4.0),  # on two cores
        (Candidate("single-learner-coarse", "processes", actors=2), 5.0),
        (Candidate("single-learner-coarse", "processes", actors=2, asynchronous=True), 3.0),
        (Candidate("single-learner-fine", "processes", workers=2), 5.0),
        (Candidate("central", "processes", actors=2), 4.0),
        (Candidate("multi-learner", "processes", workers=2, learners=2), 4.0),
    ],
)
def test_replicas_divide_their_stage_among_cores(candidate, seconds):
    assert placed_seconds(candidate, TIMES, cores=2) == seconds
