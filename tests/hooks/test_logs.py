"""Hooks that write metrics elsewhere: CSV, and trackers, for which modules of the same functions stand in."""

import csv
import hashlib
import shutil
import sys
from types import ModuleType, SimpleNamespace

import pytest

from rollmill.hooks import (
    FailureReported,
    MetricsLogged,
    PolicyEvaluated,
    TrainingFinished,
    TrainingRewound,
    TrainingStarted,
    csv_log,
    mlflow_log,
    wandb_log,
)
from wordings import raises


def started(folder, iteration=0):
    config = {"graph": {"algorithm": "ppo", "config": {"gamma": 0.9}}, "options": {"seed": 3}}
    return TrainingStarted(iteration, 64 * iteration, folder, config, 640, (3,))


def logged(iteration, **metrics):
    row = {"iteration": iteration, "env_steps": 64 * iteration, "episode/return": None, **metrics}
    return MetricsLogged(iteration, 64 * iteration, seconds=0.5, row=row, episodes=0.0)


def evaluated(iteration):
    row = {"iteration": iteration, "env_steps": 64 * iteration, "evaluation/return": 7.5}
    return PolicyEvaluated(iteration, 64 * iteration, seconds=0.5, row=row, best=True)


def finished(status="finished"):
    return TrainingFinished(4, 256, status, {"status": status, "final_return": 2.5})


def failed():
    return FailureReported(4, 256, "number", "a number is not finite", ends=True)


# --- CSV ------------------------------------------------------------------------------------------------


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_get_a_column_for_each_metric(tmp_path):
    hook = csv_log()
    for event in (started(tmp_path), logged(1), evaluated(1), logged(2, loss=0.25)):
        assert hook(event) is None
    rows = rows_of(tmp_path / "metrics.csv")
    assert [row["iteration"] for row in rows] == ["1", "1", "2"]
    assert [row["evaluation/return"] for row in rows] == ["", "7.5", ""]
    assert [row["loss"] for row in rows] == ["", "", "0.25"] and rows[0]["episode/return"] == ""


def test_rows_after_a_checkpoint_are_cut(tmp_path):
    path = tmp_path / "log.csv"
    hook = csv_log(path)
    for event in (
        started(tmp_path),
        logged(1),
        logged(2),
        logged(3),
        TrainingRewound(2, 128),
        logged(3, loss=1.0),
    ):
        hook(event)
    assert [(row["iteration"], row["loss"]) for row in rows_of(path)] == [("1", ""), ("2", ""), ("3", "1.0")]
    again = csv_log(str(path))
    again(started(tmp_path, iteration=1))
    again(logged(2))
    assert [row["iteration"] for row in rows_of(path)] == ["1", "2"]


def test_another_table_is_not_overwritten(tmp_path):
    path = tmp_path / "shares.csv"
    path.write_text("name,price\nsteel,3\n")
    with raises("is-there-already-and-has", "shares.csv", "'iteration'"):
        csv_log(path)(started(tmp_path))
    assert path.read_text() == "name,price\nsteel,3\n"


# --- trackers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("package", "log"), [("wandb", wandb_log), ("mlflow", mlflow_log)])
def test_a_tracker_that_is_not_installed_is_named_with_its_extra(monkeypatch, package, log):
    monkeypatch.setitem(sys.modules, package, None)
    with raises("log-needs-package-is-not", package, package, "pip install", f"[{package}]"):
        log()


class FakeWandb(ModuleType):
    def __init__(self):
        super().__init__("wandb")
        self.calls = []

    def init(self, **settings):
        self.settings = settings
        note = lambda name: lambda *words, **named: self.calls.append((name, *words, named))
        return SimpleNamespace(
            log=note("log"),
            define_metric=note("define_metric"),
            finish=note("finish"),
            summary=SimpleNamespace(update=note("summary")),
        )


@pytest.fixture
def wandb(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", module := FakeWandb())
    return module


def test_weights_and_biases_gets_numbers_over_environment_steps(wandb, tmp_path):
    hook = wandb_log("walking", tags=["a"])
    for event in (started(tmp_path), logged(1, loss=0.5), evaluated(1), finished()):
        assert hook(event) is None
    assert wandb.settings["project"] == "walking" and wandb.settings["tags"] == ["a"]
    assert wandb.settings["name"] == tmp_path.name and wandb.settings["config"]["options"] == {"seed": 3}
    assert wandb.calls == [
        ("define_metric", "*", {"step_metric": "env_steps"}),
        ("log", {"iteration": 1, "env_steps": 64, "loss": 0.5}, {}),
        ("log", {"iteration": 1, "env_steps": 64, "evaluation/return": 7.5}, {}),
        ("summary", {"status": "finished", "final_return": 2.5}, {}),
        ("finish", {"exit_code": 0}),
    ]


def test_weights_and_biases_continues_the_run_of_a_directory(wandb, tmp_path):
    def id_of(name, iteration):
        (tmp_path / name).mkdir(exist_ok=True)
        wandb_log()(started(tmp_path / name, iteration))
        assert wandb.settings["resume"] == "allow"
        return wandb.settings["id"]

    first = id_of("a", 0)
    assert first == id_of("a", 3) != id_of("b", 0)
    (tmp_path / "a").rename(tmp_path / "machine")
    assert id_of("a", 0) != first == id_of("machine", 3)  # one path on two machines, and a run that has moved
    shutil.copytree(tmp_path / "machine", tmp_path / "copy")
    copied = id_of("copy", 3)
    assert copied not in (first, id_of("a", 3)) and copied == id_of("copy", 6)
    assert first == id_of("machine", 6)
    before = hashlib.sha256(str(tmp_path / "old").encode()).hexdigest()[:16]
    assert id_of("old", 5) == before == id_of("old", 6)  # a run of the version before
    (tmp_path / "a/wandb_id.txt").write_text("../x\n")
    assert id_of("a", 0) != "../x"


def test_trials_are_grouped_by_their_sweep(wandb, tmp_path):
    (tmp_path / "rates/trials/07").mkdir(parents=True)
    wandb_log()(started(tmp_path / "rates/trials/07"))
    assert (wandb.settings["name"], wandb.settings["group"]) == ("rates/07", "rates")


def test_weights_and_biases_is_told_of_a_failure(wandb, tmp_path):
    hook = wandb_log()
    hook(failed())  # before there is a run
    hook(started(tmp_path))
    hook(FailureReported(1, 64, "worker", "a worker was lost", ends=False))
    hook(failed())
    assert wandb.calls[1:] == [("finish", {"exit_code": 1})]


class FakeMlflow(ModuleType):
    def __init__(self):
        super().__init__("mlflow")
        self.entities = SimpleNamespace(Metric=lambda name, value, time, step: (name, value, step))
        self.runs, self.params, self.tags, self.metrics, self.status = {}, {}, {}, [], {}
        self.experiments = {}

    def MlflowClient(self, tracking_uri):
        self.uri = tracking_uri
        return self

    def get_experiment_by_name(self, name):
        known = self.experiments.get(name)
        return known and SimpleNamespace(experiment_id=known)

    def create_experiment(self, name):
        return self.experiments.setdefault(name, f"id of {name}")

    def search_runs(self, experiments, wanted):
        return [
            run for run in self.runs.values() if f"= '{run.path}'" in wanted and experiments == [run.experiment]
        ]

    def create_run(self, experiment, run_name, tags):
        name = f"{run_name}/{len(self.runs)}"
        path = tags["rollmill.run"]
        self.runs[name] = SimpleNamespace(info=SimpleNamespace(run_id=name), path=path, experiment=experiment)
        return self.runs[name]

    def update_run(self, run_id, status):
        self.status[run_id] = status

    set_terminated = update_run

    def log_param(self, run_id, name, value):
        self.params[name] = value

    def set_tag(self, run_id, name, value):
        self.tags[name] = value

    def log_batch(self, run_id, metrics):
        self.metrics += [(run_id, *metric) for metric in metrics]


@pytest.fixture
def mlflow(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", module := FakeMlflow())
    return module


def test_mlflow_gets_parameters_numbers_and_the_summary(mlflow, tmp_path):
    hook = mlflow_log("walking", tracking_uri="sqlite:///x.db")
    for event in (started(tmp_path), logged(1, loss=0.5), evaluated(2), finished()):
        assert hook(event) is None
    (run,) = mlflow.runs
    assert mlflow.uri == "sqlite:///x.db" and mlflow.status == {run: "FINISHED"}
    assert mlflow.params == {"graph.algorithm": "ppo", "graph.config.gamma": "0.9", "options.seed": "3"}
    assert (run, "loss", 0.5, 64) in mlflow.metrics and (run, "evaluation/return", 7.5, 128) in mlflow.metrics
    assert not [metric for metric in mlflow.metrics if metric[1] == "episode/return"]  # not defined yet
    assert mlflow.tags == {"summary.status": "finished", "summary.final_return": "2.5"}


def test_mlflow_continues_the_run_of_a_directory(mlflow, tmp_path):
    for iteration in (0, 3):
        hook = mlflow_log()
        hook(started(tmp_path, iteration))
        hook(failed())
    assert list(mlflow.status.values()) == ["FAILED"] and len(mlflow.runs) == 1
    assert mlflow.tags["failure"] == "a number is not finite"
    mlflow_log()(started(tmp_path / "another"))
    assert len(mlflow.runs) == 2
