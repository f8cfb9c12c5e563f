"""Sweeps that compare trials by the return of one kind of agent: ranking, proposals, early stopping, tables."""

import csv
import json
import subprocess
from dataclasses import replace

import pytest

from rollmill.record.metric_curves import newest_means
from rollmill.record.metrics import read_metrics
from rollmill.record.run_directory import RunDirectory
from rollmill.record.run_files import METRICS
from rollmill.record.status import Status
from rollmill.sweeps import running
from rollmill.sweeps.creation import NewSweep, create_sweep
from rollmill.sweeps.directory import SweepDirectory
from rollmill.sweeps.early_stopping import EarlyStopping
from rollmill.sweeps.halving import HalvingRule
from rollmill.sweeps.metrics import check_metric
from rollmill.sweeps.results import SweepResults
from rollmill.sweeps.search_space import parse_axis
from rollmill.sweeps.spec import SweepSpec
from rollmill.training.evolving import read_evolution
from rollmill.training.population import Population, train_population
from rollmill.training.request import TrainingRequest
from wordings import raises

REQUEST = TrainingRequest("mappo", "TagGridWorld-Small-v0")
PREY = "returns/prey"


def made(root, metric=PREY, **more):
    axes, points = (parse_axis("learning-rate=log:1e-5..1e-1"),), ((1e-2,), (1e-3,), (1e-4,))
    return SweepDirectory.create(root, SweepSpec(REQUEST, axes, 3, points, metric=metric, **more))


def end(sweep, number, **results):
    trial = sweep.trials()[number]
    sweep.run(trial).root.mkdir(exist_ok=True)
    summary = {"status": "finished", "final_return": 0.0, "env_steps": 100, **results}
    sweep.run(trial).summary_file.write_text(json.dumps(summary))
    return trial


def write(run, *lines):
    run.root.mkdir(exist_ok=True)
    with run.metrics_file.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def test_the_first_metrics_of_a_trial_show_which_kinds_there_are(tmp_path):
    sweep = made(tmp_path / "sweep", metric="returns/pray")
    trials, results = sweep.trials(), SweepResults(sweep, "returns/pray")
    results.check_kind(trials)  # none has begun
    write(sweep.run(trials[1]), {"env_steps": 10, "episode/return": None})
    results.check_kind(trials)  # nothing was learned
    write(sweep.run(trials[1]), {"losses/total": 1.0, PREY: None, "returns/predator": None})
    with raises("trials-have-no-metric-only", "returns/pray", "returns/prey, returns/predator"):
        results.check_kind(trials)
    other = SweepResults(sweep, PREY)
    other.check_kind(trials)
    assert other.checked


class Training(subprocess.Popen):
    """A process that trains until it is terminated, or fails after a while."""

    def __init__(self):
        self.returncode, self.polls = None, 0

    def poll(self):
        self.polls += 1
        if self.polls > 50 and self.returncode is None:
            self.returncode = 1
        return self.returncode

    def wait(self, timeout=None):
        return self.returncode

    def terminate(self):
        self.returncode = 143


def test_a_sweep_without_the_kind_ends_its_trials(tmp_path, monkeypatch):
    sweep, processes = made(tmp_path / "sweep", metric="returns/pray"), []

    def start(sweep, trials, part, imports):
        write(sweep.run(trials[0]), {"losses/total": 1.0, PREY: None, "returns/predator": None})
        processes.append(Training())
        return processes[-1]

    monkeypatch.setattr(running, "start_trials", start)
    options = {"say": lambda line: None, "imports": (), "together": "off", "sharing": "auto"}
    with raises("trials-have-no-metric-only", "returns/pray"):
        running.run_sweep(sweep, at_once=1, metric="returns/pray", **options)
    assert [process.returncode for process in processes] == [143] and (sweep.root / "table.csv").exists()


def test_a_kind_needs_several(tmp_path):
    sweep = made(tmp_path / "sweep")
    write(sweep.run(sweep.trials()[0]), {"losses/total": 1.0, PREY: None})
    with raises("metric-needs-several-kinds-agents", PREY):
        SweepResults(sweep, PREY).check_kind(sweep.trials())


def test_trials_of_several_environments_may_have_different_kinds(tmp_path):
    axes, points = (parse_axis("environment=A,B"),), (("A",), ("B",))
    sweep = SweepDirectory.create(tmp_path / "sweep", SweepSpec(REQUEST, axes, 2, points, metric=PREY))
    write(sweep.run(sweep.trials()[0]), {"losses/total": 1.0})
    SweepResults(sweep, PREY).check_kind(sweep.trials())


def test_trials_are_ranked_by_the_return_of_a_kind(tmp_path):
    sweep = made(tmp_path / "sweep")
    for number, prey in enumerate((-3.0, -1.0)):
        end(sweep, number, final_returns={"predator": -prey, "prey": prey})
    rows = sweep.rows(PREY)
    assert [(row["trial"], row[PREY], row["returns/predator"]) for row in rows] == [
        ("1", -1.0, 1.0),
        ("0", -3.0, 3.0),
        ("2", None, None),
    ]
    assert [row["trial"] for row in sweep.rows("returns/predator")] == ["0", "1", "2"]
    SweepResults(sweep, PREY).write()
    with (sweep.root / "table.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [(row["trial"], row[PREY]) for row in table] == [("1", "-1.0"), ("0", "-3.0"), ("2", "")]
    assert ">returns/predator</th>" in (sweep.root / "report.html").read_text()
    past = [sweep._past(trial, ()).result for trial in sweep.trials()]
    assert past == [-3.0, -1.0, None]


def test_a_trial_without_the_kind_is_noted_once(tmp_path):
    sweep = made(tmp_path / "sweep", metric="returns/pray")
    trials = [end(sweep, number, final_returns={"predator": 1.0, "prey": -1.0}) for number in (0, 1)]
    results = SweepResults(sweep, "returns/pray")
    note = results.note_on(trials[0])
    assert "trial 0 has no returns/pray, only returns/predator, returns/prey" in note and "--metric" in note
    assert results.note_on(trials[1]) is None
    assert SweepResults(sweep, PREY).note_on(trials[0]) is None
    alone = end(sweep, 2)
    assert "one kind of agent" in SweepResults(sweep, PREY).note_on(alone)


def test_trials_are_stopped_early_by_the_return_of_the_kind(tmp_path):
    sweep = made(tmp_path / "sweep", early_stopping=HalvingRule(100, 2))
    trials = sweep.trials()
    line = {"env_steps": 100, "episode/return": 0.0}
    write(sweep.run(trials[0]), {**line, PREY: -1.0, "returns/predator": 1.0})
    write(sweep.run(trials[1]), {**line, PREY: -2.0, "returns/predator": 2.0})
    early = EarlyStopping(sweep, HalvingRule(100, 2))
    assert early.look(trials[0]) is None
    assert early.look(trials[1]).result == -2.0
    by_all = made(tmp_path / "by_all", metric="final_return", early_stopping=HalvingRule(100, 2))
    for trial in by_all.trials()[:2]:
        write(by_all.run(trial), {**line, PREY: -1.0})
    early = EarlyStopping(by_all, HalvingRule(100, 2))
    assert all(early.look(trial) is None for trial in by_all.trials()[:2])  # equal by the mean over all agents


def test_means_over_the_newest_lines_are_weighted_by_episodes(tmp_path):
    run = RunDirectory(tmp_path / "run")
    line = lambda ended, prey: {"episode/ended": ended, PREY: prey, "returns/predator": -prey, "losses/total": 9.0}
    write(run, line(50, -100.0), line(30, -4.0), line(0, -4.0), {"evaluation/returns/prey": 5.0}, line(10, -2.0))
    assert newest_means(run, "returns/", episodes=40) == pytest.approx({PREY: -3.5, "returns/predator": 3.5})
    assert newest_means(run, "returns/", episodes=10)[PREY] == -2.0
    assert newest_means(run, "returns/", episodes=1000)[PREY] == pytest.approx(-(5000 + 120 + 20) / 90)
    assert newest_means(RunDirectory(tmp_path / "none"), "returns/", episodes=1) == {}


def test_progress_has_the_return_of_each_kind():
    status = Status(10, 100, 5.0, 0.0, 20.0, row={PREY: -1.5, "returns/predator": 1.5})
    assert "returns prey -1.5, predator 1.5  length 20" in str(status)
    assert "return 0  length 20" in str(status._replace(row={PREY: -1.5}))
    assert "return 0  length 20" in str(status._replace(row={PREY: None, "returns/predator": None}))


def test_results_that_no_sweep_has_are_refused(tmp_path):
    assert check_metric(PREY) == PREY and check_metric("best_return") == "best_return"
    for wrong in ("final-return", "returns/", "return/prey"):
        with raises("unknown-metric-known-where-kind", wrong, "returns/KIND"):
            check_metric(wrong)
    asked = NewSweep(REQUEST, (parse_axis("seed=0..2"),), metric=PREY, directory=tmp_path / "sweep")
    with raises("metric-is-not-supported-with", PREY):
        create_sweep(replace(asked, group_seeds=True))
    with raises("pbt-every-compares-trials-by", "--return-of runner", PREY):
        create_sweep(replace(asked, request=REQUEST.changed({"return_of": "runner"}), pbt_every=1000))
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize("more", [{}, {"random": 4, "pbt_every": 10_000}])
def test_a_misspelt_kind_is_refused_before_anything_is_written(tmp_path, more):
    axes = (parse_axis("learning-rate=log:1e-5..1e-1" if more else "seed=0..2"),)
    asked = NewSweep(REQUEST, axes, metric="returns/tager", directory=tmp_path / "sweep", **more)
    with raises("trials-have-no-metric-only", "returns/tager", "returns/tagger, returns/runner"):
        create_sweep(asked)
    with raises("metric-needs-several-kinds-agents", "returns/tagger"):
        create_sweep(replace(asked, request=TrainingRequest("ppo", "CartPole-v1"), metric="returns/tagger"))
    assert not (tmp_path / "sweep").exists()


@pytest.mark.slow
def test_a_population_is_compared_by_the_return_of_one_kind(tmp_path):
    sizes = {"num_envs": 8, "num_steps": 100, "total_timesteps": 3_200, "network.hidden_sizes": (4,)}
    request = REQUEST.changed({**sizes, "fusion": "off"})
    axes = (parse_axis("learning-rate=log:1e-5..1e-2"), parse_axis("seed=0..3"))
    population = {"random": 4, "pbt_every": 1_600, "pbt_share": 0.25, "metric": "returns/runner"}
    sweep = create_sweep(NewSweep(request, axes, directory=tmp_path / "sweep", **population))
    trials = sweep.trials()
    assert [trial.request.settings["return_of"] for trial in trials] == ["runner"] * 4
    requests = [trial.request.changed({"run_dir": str(tmp_path / trial.name)}) for trial in trials]
    runs = train_population(requests, Population(sweep.spec.evolution, tmp_path))
    (rung,) = read_evolution(tmp_path).rungs
    rows = [next(row for row in read_metrics(run.directory / METRICS) if row["iteration"] == 2) for run in runs]
    assert list(rung.results) == [row["episode/returns/runner"] for row in rows]
    assert list(rung.results) != [row["episode/return"] for row in rows]
    assert rung.takeovers[0].training == min(range(4), key=lambda trial: (rung.results[trial], -trial))
