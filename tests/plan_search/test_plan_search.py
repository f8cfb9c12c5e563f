"""The parts of a plan search around processes: throughput from metrics, plans of candidates, stored results."""

import io
import json
import os
import time
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import jax
import pytest

import rollmill
from rollmill.cli import candidate_process as measured
from rollmill.cli.requests import parse_training
from rollmill.core.machine import return_freed_memory
from rollmill.core.process_tree import descendants_of, kill_all, resident_memory
from rollmill.plan_search import process as process_module, trials as trials_module
from rollmill.plan_search.compiled_program import memory_in_use
from rollmill.plan_search.finding import SearchRequest, list_candidates, this_machine, workload_of
from rollmill.plan_search.process import CandidateProcess, MetricsPoint, SearchStopped, measured_between
from rollmill.plan_search.result_store import file_for, read_stored, store
from rollmill.plan_search.search.candidate import Candidate, StageTimes
from rollmill.plan_search.search.machine import Machine
from rollmill.plan_search.search.result_table import CandidateRow, Measurement, PlanTable
from rollmill.plan_search.search.searching import CannotRun, OutOfTime
from rollmill.plan_search.trials import ProcessTrials
from rollmill.planning.distribution import find_distribution
from rollmill.planning.placement import Counts
from rollmill.planning.plan import Plan, PlanSettings
from rollmill.runs.options import RunOptions
from rollmill.training.request import TrainingRequest
from wordings import raises


def lines(*points):
    return [MetricsPoint(*point) for point in points]


@pytest.mark.parametrize(
    ("points", "bound", "ended", "found"),
    [
        ([], None, False, None),
        ([(1.0, 100), (1.2, 900)], None, False, None),  # not warm yet
        ([(1.0, 100), (1.5, 200), (3.5, 600)], None, False, None),  # not long enough
        ([(1.0, 100), (1.5, 200), (4.5, 800)], None, False, Measurement(200.0)),
        ([(1.0, 100), (1.5, 200), (2.5, 400)], None, True, Measurement(200.0)),
        ([(1.0, 100), (1.5, 200), (2.5, 400)], 250.0, False, Measurement(200.0, None, True)),
        ([(1.0, 100), (1.5, 200), (2.5, 400)], 230.0, False, None),  # it might still win
        ([(1.0, 100), (1.5, 200), (2.25, 400)], 900.0, False, None),  # too early to say
        ([(0.25, 100), (0.5, 250)], None, True, Measurement(500.0)),  # a training of less than a second
        ([], None, True, None),
    ],
)
def test_throughput_is_that_between_lines_of_metrics(points, bound, ended, found):
    measured = measured_between(lines(*points), bound=bound, learns_from=0, ended=ended)
    assert measured == found


def test_nothing_counts_before_anything_is_learned():
    points = lines((1.0, 100), (5.0, 900), (6.0, 1_000), (6.5, 1_050), (9.5, 1_200))
    assert measured_between(points, bound=None, learns_from=1_000, ended=False).steps_per_second == pytest.approx(
        50
    )


TRAINING = TrainingRequest("ppo", "CartPole-v1")


@pytest.fixture(scope="module")
def trials():
    def graph_of(num_envs):
        return rollmill.ppo("CartPole-v1", total_timesteps=4096, num_envs=num_envs or 8, num_steps=8)

    options, machine = RunOptions(), Machine(2, memory=8 * 10**9)
    graph_of = cache(graph_of)
    return ProcessTrials(
        graph_of, TRAINING, options, machine, workload_of(graph_of(None), options), lambda: None, dict(os.environ)
    )


def test_the_plan_of_a_candidate_carries_all_that_was_chosen(trials):
    plan = trials.plan_of(Candidate(devices=2, fusion="full", num_envs=16))
    assert plan.place == "program"
    assert plan.settings == PlanSettings(devices=2, fusion="full", num_envs=16)
    plan = trials.plan_of(Candidate("single-learner-coarse", "processes", actors=2))
    assert plan.settings == PlanSettings(num_envs=8)
    assert [group.replicas for group in plan.partition.groups] == [2, 1]


@pytest.mark.parametrize(
    ("candidate", "reason"),
    [
        (Candidate(devices=3, fusion="off"), "3 devices cannot hold equal shares of num_shards="),
        (Candidate("central", "processes", actors=3), "which do not divide num_shards="),
        (
            Candidate(fusion="auto"),
            "the same as fusion=off: kernels are timed only from 10,000,000 steps on, and 4,096",
        ),
        (Candidate("multi-learner", "processes", workers=3, learners=2), "One must be a multiple of the other"),
    ],
)
def test_what_cannot_run_is_told_before_anything_starts(trials, candidate, reason):
    assert reason in trials.check(candidate)
    assert trials._open is None


def test_machine_and_training_as_numbers():
    graph = rollmill.ppo("CartPole-v1", num_envs=8, num_steps=16, num_minibatches=2, update_epochs=3)
    work = workload_of(graph, RunOptions(num_seeds=2))
    assert (work.num_envs, work.num_steps, work.updates, work.num_seeds) == (8, 16, 6, 2)
    assert work.gradient_bytes > 4 * 64 * 64
    assert work.batch(16) == 16 * 16 * 2
    machine = this_machine()
    assert machine.cores == len(os.sched_getaffinity(0))
    assert machine.gpus == 0
    assert machine.memory_limit == 0.9 * machine.memory


def test_values_without_a_candidate_are_refused():
    graph = rollmill.ppo("CartPole-v1", num_envs=8, num_steps=8)
    request = SearchRequest(TRAINING.changed({"devices": 64}))
    with raises("no-way-to-run-on", "2", "0", "devices=64"):
        list_candidates(request, Machine(2), workload_of(graph, request.options))


def table(*, complete=True):
    candidate = Candidate(devices=2, fusion="off")
    rows = [
        CandidateRow(candidate, "chosen", "the only one", 1e5, 2e5, 3e8, None),
        CandidateRow(Candidate(), "skipped" if complete else "not reached", "the time budget was used up"),
    ]
    return PlanTable(tuple(rows), 12.5)


PLAN = Plan(find_distribution("gpu-only")(Counts()), settings=PlanSettings(devices=2, num_envs=8))


def test_a_result_is_stored_and_read_again(tmp_path):
    file = tmp_path / "plans" / "a.json"
    assert read_stored(file, budget=10.0) is None
    store(file, table(), PLAN, budget=10.0)
    assert read_stored(file, budget=1e6) == (table(), PLAN)
    store(file, table(complete=False), PLAN, budget=10.0)
    assert read_stored(file, budget=10.0) == (table(complete=False), PLAN)
    assert read_stored(file, budget=11.0) is None  # a larger budget may find a better one
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("change", [{"plan": {}}, {"table": []}, {"budget": "much"}, {"more": 1}])
def test_a_damaged_result_is_searched_for_again(tmp_path, change):
    file = tmp_path / "a.json"
    store(file, table(), PLAN, budget=10.0)
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    assert read_stored(file, budget=10.0) is None
    file.write_text("{")
    assert read_stored(file, budget=10.0) is None


class WaitingProcess:
    """Stands in for a process of a candidate."""

    started: list["WaitingProcess"]

    def __init__(self, *, check_stop, environment):
        self.training, self.closed = None, False
        self.started.append(self)

    def prepare(self, training):
        self.training = training

    def ask(self, command, name, *, seconds):
        return {"process": 1, "bytes": 2, "held": 0, "identity": str(self.training)}

    def measure(self, **limits):
        return Measurement(100.0, None)

    def close(self):
        assert not self.closed
        self.closed = True


@pytest.mark.parametrize("cores", [2, 8])
def test_where_there_are_cores_the_next_process_starts_while_a_candidate_compiles(trials, monkeypatch, cores):
    WaitingProcess.started = started = []
    monkeypatch.setattr(trials_module, "CandidateProcess", WaitingProcess)
    trials.machine = Machine(cores, memory=8 * 10**9)
    ahead = 1 if cores == 8 else 0
    for number, fusion in enumerate(("off", "full"), 1):
        trials.predict_memory(Candidate(fusion=fusion))
        assert len(started) == number + ahead and started[number - 1].training.settings["fusion"] == fusion
        trials.measure(Candidate(fusion=fusion), None, 10.0)
        assert started[number - 1].closed and not any(each.closed for each in started[number:])
    trials.close()
    assert all(each.closed for each in started)
    assert [each.training is None for each in started] == [False, False, *[True] * ahead]


def test_results_are_kept_apart_by_all_that_they_depend_on(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLMILL_CACHE_DIR", str(tmp_path))
    one, other = file_for({"graph": "a", "machine": [1]}), file_for({"graph": "a", "machine": [2]})
    assert one != other
    assert one.parent == tmp_path / "plans"


@pytest.fixture
def process():
    opened = []

    def start(*words, check_stop=lambda: None):
        environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        opened.append(CandidateProcess(check_stop=check_stop, environment=environment))
        opened[-1].prepare(parse_training(words).request)
        return opened[-1]

    yield start
    for each in opened:
        each.close()
        assert each.process.poll() is not None


WORDS = ["ppo", "CartPole-v1", "--num-envs", "8", "--num-steps", "8", "--total-timesteps", "6400"]


@pytest.mark.slow
def test_what_a_training_says_before_it_ends_is_the_reason(process):
    with pytest.raises(CannotRun, match="num_envs=7"):
        process(*WORDS, "--num-envs", "7", "--devices", "2").ask(None, "program", seconds=120.0)


def test_a_process_that_does_not_answer_is_given_up(process):
    with pytest.raises(OutOfTime):
        process(*WORDS).ask(None, "program", seconds=0.01)


def test_what_timing_a_stage_left_in_the_process_is_not_the_training_s_memory(process, monkeypatch):
    training = process(*WORDS)
    training._reports, reports = os.pipe()
    os.set_blocking(training._reports, False)
    os.write(reports, b'{"collect": 0.1, "leftover": 30}\n')
    assert training.ask(None, "collect", seconds=10.0) == 0.1
    monkeypatch.setattr(process_module, "_PeakMemory", lambda pid: SimpleNamespace(look=lambda: None, peak=100))
    monkeypatch.setattr(process_module, "measured_between", lambda points, **how: Measurement(5.0))
    assert training.measure(bound=None, seconds=10.0, seeds=2, learns_from=0) == Measurement(10.0, memory=70.0)
    os.close(reports)


def test_a_signal_ends_the_wait(process):
    def stop():
        raise SearchStopped("SIGTERM", 143)

    with pytest.raises(SearchStopped, match="stopped by SIGTERM"):
        process(*WORDS, check_stop=stop).ask(None, "program", seconds=60.0)


@pytest.mark.slow
def test_a_process_is_ended_with_its_workers(process):
    training = process(
        *WORDS, "--total-timesteps", "10000000", "--distribution", "single-learner-coarse", "--actors", "1"
    )
    assert training.ask(None, "program", seconds=120.0) is None
    training._send("begin")
    deadline = time.monotonic() + 120
    while len(family := descendants_of(training.process.pid)) < 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(family) >= 4  # itself, the server that forks, an actor and a learner
    assert resident_memory(family) > 10**8
    folder = training._folder
    training.close()
    deadline = time.monotonic() + 10
    while any(descendants_of(pid) for pid, _ in family) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(descendants_of(pid) for pid, _ in family)
    assert not folder.exists()
    training.close = lambda: None


def test_a_process_with_a_number_used_again_is_left_alone():
    (own,) = (each for each in descendants_of(os.getpid()) if each.pid == os.getpid())
    kill_all([replace_start(own)])  # would end this test


def replace_start(identity):
    return identity._replace(start_time=identity.start_time + "1")


def test_a_machine_of_another_kind_has_another_limit():
    assert Machine(8, memory=10**10, gpus_per_host=2, gpu_memory=10**9).memory_limit == 10**9
    assert Machine(8).memory_limit is None
    assert replace(Machine(8), memory=10**10).memory_limit == 9 * 10**9


def on_a_gpu(trials):
    return replace(
        trials, machine=Machine(16, gpus_per_host=1, gpu_memory=10**9, max_instances=4), program_bytes={}
    )


def test_memory_of_a_gpu_is_what_is_held_before_and_what_the_program_needs(trials):
    single = on_a_gpu(trials)
    compiled = {"bytes": 500, "held": 100, "process": 9, "identity": ""}
    assert single._memory_of(compiled, Candidate()) == 600


def test_workers_that_share_a_gpu_need_as_much_as_the_program(trials):
    single = on_a_gpu(trials)
    mesh = Candidate(place="mesh", learners=2, gpus=1, instances=2)
    assert single.predict_memory(mesh).memory is None
    single.program_bytes = {8: 600.0, 16: 1200.0}
    assert single.predict_memory(mesh).memory == 600
    assert single.predict_memory(replace(mesh, num_envs=16)).memory == 1200
    assert single.predict_memory(replace(mesh, gpus=2)).memory == 300


def test_placements_on_a_gpu_are_estimated_by_the_stages_of_one_program(trials):
    single = replace(on_a_gpu(trials), times=StageTimes(collect=3.0, learn=1.0))
    actors = Candidate("single-learner-coarse", "processes", actors=2, gpus=1)
    assert single.estimate_speed(actors) == 64 / 2.5
    assert single.estimate_speed(replace(actors, num_envs=16)) is None


def test_freed_memory_goes_back_to_the_system():
    (own,) = (each for each in descendants_of(os.getpid()) if each.pid == os.getpid())
    kept = [bytes(60_000) for _ in range(4_000)]  # too small for pages of their own
    kept = kept[::4_000]  # the last ones keep the heap from shrinking by itself
    before = resident_memory([own])
    return_freed_memory()
    assert resident_memory([own]) <= before
    assert len(kept) == 1


@pytest.mark.parametrize("answer", [None, {"bytes_in_use": 3, "peak_bytes_in_use": 5}])
def test_memory_of_devices_counts_where_they_have_their_own(answer):
    device = SimpleNamespace(memory_stats=lambda: answer)
    assert memory_in_use([device]) == (3 if answer else 0)


@pytest.mark.parametrize(("trained", "reported"), [(0, [40, 70]), (60, [60, 70]), (80, [80])])
def test_memory_that_only_compiling_took_is_not_the_training_s(monkeypatch, trained, reported):
    """Compiling took 90 bytes, and the training's iterations take up to 70."""
    stats, written = {"bytes_in_use": 5, "peak_bytes_in_use": 90}, io.StringIO()
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(memory_stats=lambda: stats)])
    steps = iter([40, 30, 70, 90])

    def train(seconds):
        stats["bytes_in_use"] = next(steps)
        if stats["bytes_in_use"] == 90:
            written.close()

    monkeypatch.setattr(measured.time, "sleep", train)
    lines = []
    monkeypatch.setattr(measured, "_report", lambda file, **report: lines.append(report) or file.write("."))
    measured._watch_memory(written, trained=trained)
    assert [line["peak"] for line in lines[:-1]] == reported
