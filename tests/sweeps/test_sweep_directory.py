"""The files of a sweep: what follows from them, and what is refused."""

import json

import pytest

from rollmill.core.errors import CheckpointError
from rollmill.sweeps.directory import SweepDirectory
from rollmill.sweeps.early_stopping import EarlyStopping, describe_stop, goes_on
from rollmill.sweeps.halving import HalvingRule, HalvingState
from rollmill.sweeps.report import write_report
from rollmill.sweeps.search_space import listed_axis, parse_axis
from rollmill.sweeps.spec import SweepSpec
from rollmill.training.request import TrainingRequest
from wordings import raises

RULE = HalvingRule(100, 2)
REQUEST = TrainingRequest("ppo", "CartPole-v1", {"num_envs": 4})
PLAIN = TrainingRequest("ppo", "CartPole-v1")


def made(root, *, rule=None, sampler=None, trials=3):
    axes = (parse_axis("learning-rate=log:1e-5..1e-1"), listed_axis("network.torso", ["mlp", "gru"]))
    points = () if sampler else tuple((10.0 ** -(n + 2), "mlp") for n in range(trials))
    spec = SweepSpec(REQUEST, axes, trials, points, sampler, early_stopping=rule)
    return SweepDirectory.create(root, spec)


def write(sweep, trial, *lines):
    run = sweep.run(trial)
    run.root.mkdir(exist_ok=True)
    with run.metrics_file.open("a") as file:
        file.writelines(json.dumps({"env_steps": n, "episode/return": r}) + "\n" for n, r in lines)


def end(sweep, trial, status, result):
    sweep.run(trial).root.mkdir(exist_ok=True)
    summary = {"status": status, "final_return": result, "env_steps": 100}
    sweep.run(trial).summary_file.write_text(json.dumps(summary))


def test_a_sweep_is_opened_as_it_was_created(tmp_path):
    sweep = made(tmp_path / "sweep", rule=RULE)
    assert SweepDirectory.open(sweep.root) == sweep
    assert [trial.name for trial in sweep.trials()] == ["0", "1", "2"]
    settings = {"num_envs": 4, "tensorboard": False, "quiet": True, "learning_rate": 1e-3, "network.torso": "mlp"}
    assert sweep.trials()[1].request == TrainingRequest("ppo", "CartPole-v1", settings)


@pytest.mark.parametrize(
    ("algorithm", "recipe", "given", "wanted"),
    [
        ("ppo", None, {}, False),
        ("ppo", None, {"normalize_observations": None}, None),
        ("ppo", "sb3-ppo", {}, "default"),
        ("dqn", None, {}, "default"),
    ],
)
def test_trials_of_a_sweep_of_an_earlier_version_keep_its_defaults(tmp_path, algorithm, recipe, given, wanted):
    request = TrainingRequest(algorithm, "CartPole-v1", given, recipe=recipe)
    axes = (parse_axis("learning-rate=log:1e-5..1e-1"),)
    new = SweepDirectory.create(tmp_path / "sweep", SweepSpec(request, axes, 1, ((1e-3,),)))
    assert SweepDirectory.open(new.root) == new
    path = new.root / "sweep.json"
    described = json.loads(path.read_text())
    assert described.pop("defaults") == 1
    path.write_text(json.dumps(described))
    (trial,) = SweepDirectory.open(new.root).trials()
    assert trial.request.settings.get("normalize_observations", "default") == wanted


@pytest.mark.slow
def test_many_trials_fit_into_the_file(tmp_path):
    axes = tuple(listed_axis(f"option-{n}", ["0.12345678", "b"]) for n in range(5))
    points = (("0.12345678",) * 5,) * 100_000
    made = SweepDirectory.create(tmp_path / "sweep", SweepSpec(PLAIN, axes, 100_000, points))
    assert SweepDirectory.open(made.root).trials()[-1].name == "99999"


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("sweep.json", {"points": [["1e-2"]]}, "sweep.json is damaged"),
        ("sweep.json", {"points": "all"}, 'points="all" must be a list'),
        ("sweep.json", {"request": {"algorithm": "ppo"}}, "request.environment is missing"),
        ("sweep.json", {"options": ["--seed", "3"]}, "was written by Rollmill 0.1"),
        ("sweep.json", {"early_stopping": {"grace_steps": 0}}, "grace_steps=0 must be at least 1"),
        ("sweep.json", {"more": 1}, "more is unknown"),
        ("early_stopping.json", {"rungs": {"x": {}}}, "a rung is not a number of steps"),
        ("early_stopping.json", {"stopped": {"0": 3}}, "stopped"),
    ],
)
def test_damaged_files_are_refused(file, change, message, tmp_path):
    sweep = made(tmp_path / "sweep", rule=RULE)
    sweep.write_stopping(HalvingState())
    path = sweep.root / file
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        SweepDirectory.open(sweep.root)


def test_trials_that_are_worse_at_a_rung_are_stopped(tmp_path):
    sweep = made(tmp_path / "sweep", rule=RULE)
    good, bad, new = sweep.trials()
    early = EarlyStopping(sweep, RULE)
    assert early.look(good) is None
    write(sweep, good, (50, 1.0), (100, None), (130, 30.0), (200, 40.0))
    write(sweep, bad, (99, 90.0))
    assert early.look(good) is None and early.look(bad) is None
    write(sweep, bad, (150, 20.0), (180, 99.0))
    judgement = early.look(bad)
    assert judgement is not None
    assert describe_stop(judgement) == "at 100 steps, where its return of 20 was number 2 of 2"
    assert json.loads((sweep.root / "early_stopping.json").read_text())["rungs"] == {
        "100": {"0": 30.0, "1": 20.0},
        "200": {"0": 40.0},
    }
    assert early.look(bad) is None  # it is told once

    # Another process goes on after a kill, and comes to no other decision.
    again = EarlyStopping(SweepDirectory.open(sweep.root), RULE)
    assert [again.look(trial) for trial in (good, bad, new)] == [None, None, None]
    assert [trial.name for trial in sweep.unfinished()] == ["0", "2"]
    end(sweep, bad, "stopped", 20.0)
    assert {row["trial"]: row["status"] for row in sweep.rows("final_return")} == {
        "0": "unfinished",
        "1": "stopped early",
        "2": "unfinished",
    }


def test_failed_trials_are_told_apart_until_they_are_tried_again(tmp_path):
    sweep = made(tmp_path / "sweep")
    first, second, _ = sweep.trials()
    for trial in (first, second):
        sweep.note_failure(trial, failed=True)
    end(sweep, first, "finished", 1.0)
    again = SweepDirectory.open(sweep.root)
    status = {row["trial"]: row["status"] for row in again.rows("final_return", running=["2"])}
    assert status == {"0": "finished", "1": "failed", "2": "running"}
    assert second in again.unfinished()
    for trial in (first, second):
        again.note_failure(trial, failed=False)
    assert {row["status"] for row in sweep.rows("final_return")} == {"finished", "unfinished"}
    (sweep.root / "failures.json").write_text("{")
    with raises("cannot-be-read", "failures.json"):
        SweepDirectory.open(sweep.root)


def test_stopped_trials_go_on_if_asked(tmp_path):
    sweep = made(tmp_path / "sweep", rule=HalvingRule(100, 3))
    for trial, result in zip(sweep.trials(), (3.0, 2.0, 1.0), strict=True):
        write(sweep, trial, (100, result))
        EarlyStopping(sweep, sweep.spec.early_stopping).look(trial)
    assert [trial.name for trial in sweep.unfinished()] == ["0"]
    goes_on(sweep)
    assert [trial.name for trial in sweep.unfinished()] == ["0", "1", "2"]
    write(sweep, sweep.trials()[2], (300, -5.0))
    assert EarlyStopping(sweep, HalvingRule(100, 3)).look(sweep.trials()[2]) is None


def grouped(root, seeds="3..5"):
    axes = (listed_axis("gamma", [0.9, 0.99]), listed_axis("seed", [seeds]))
    return SweepDirectory.create(root, SweepSpec(PLAIN, axes, 2, ((0.9, seeds), (0.99, seeds))))


def test_seeds_in_one_program_have_a_row_each(tmp_path):
    sweep = grouped(tmp_path / "sweep")
    first, second = sweep.trials()
    settings = first.request.settings
    assert (settings["gamma"], settings["seed"], settings["num_seeds"]) == (0.9, 3, 3)
    assert list(second.seeds) == [3, 4, 5]
    end(sweep, first, "finished", 20.0)
    summary = json.loads(sweep.run(first).summary_file.read_text())
    more = {"final_return_per_seed": [10.0, 20.0, 30.0], "best_return_per_seed": [11.0, None, 31.0]}
    sweep.run(first).summary_file.write_text(json.dumps(summary | more))
    write(sweep, first, (100, 20.0))
    rows = sweep.rows("final_return")
    assert [
        (row["trial"], row["gamma"], row["seed"], row["final_return"], row["best_return"]) for row in rows
    ] == [
        ("0", 0.9, 5, 30.0, 31.0),
        ("0", 0.9, 4, 20.0, None),
        ("0", 0.9, 3, 10.0, 11.0),
        *(("1", 0.99, seed, None, None) for seed in (3, 4, 5)),
    ]
    assert all(row["env_steps"] == 100 for row in rows[:3])
    write_report(sweep, rows, "final_return")
    assert "0 (gamma=0.9, seed=3..5)" not in (sweep.root / "report.html").read_text()  # no curve of single seeds
    with sweep.run(first).metrics_file.open("a") as file:
        file.write(json.dumps({"env_steps": 200} | {f"episode/return_seed{n}": n for n in (3, 4, 5)}) + "\n")
    write_report(sweep, rows, "final_return")
    text = (sweep.root / "report.html").read_text()
    assert text.count('<path class="line') == 3 and "</i>0 (gamma=0.9, seed=3..5), seed 5</span>" in text


def test_the_best_of_a_sweep_over_seeds_has_the_highest_mean(tmp_path):
    # Means by hand: (100 + 0 + 20) / 3 = 40 of gamma 0.9 with the luckiest seed, (60 + 50 + 40) / 3 = 50 of 0.99.
    # Seed 2 of 0.999 has no result: its mean of 90 is one over two seeds.
    results = {0.9: (100.0, 0.0, 20.0), 0.99: (60.0, 50.0, 40.0), 0.999: (90.0, 90.0, None)}
    axes = (listed_axis("gamma", list(results)), listed_axis("seed", [0, 1, 2]))
    points = tuple((gamma, seed) for gamma in results for seed in range(3))
    sweep = SweepDirectory.create(tmp_path / "sweep", SweepSpec(PLAIN, axes, 9, points))
    for trial in sweep.trials():
        result = results[trial.point["gamma"]][trial.point["seed"]]
        if result is not None:
            end(sweep, trial, "finished", result)
    rows = sweep.rows("final_return")
    assert [(row["gamma"], row["seed"], row["mean_over_seeds"], row["num_seeds"]) for row in rows] == [
        *((0.99, seed, 50.0, 3) for seed in (0, 1, 2)),
        *((0.9, seed, 40.0, 3) for seed in (0, 2, 1)),
        *((0.999, seed, 90.0, 2) for seed in (0, 1, 2)),
    ]
    sweep.write_table(rows)
    table = (sweep.root / "table.csv").read_text().splitlines()
    assert table[0].endswith(",mean_over_seeds,num_seeds") and table[1].endswith(",50.0,3")
    write_report(sweep, rows, "final_return")
    report = (sweep.root / "report.html").read_text()
    assert report.count('<tr class="marked">') == 3
    assert "The best trials by the mean final_return over the seeds of a configuration" in report


def test_more_seeds_than_a_run_can_have(tmp_path):
    sweep = grouped(tmp_path / "sweep")
    path = sweep.root / "sweep.json"
    path.write_text(path.read_text().replace("3..5", "0..99999999999"))
    with raises("is-damaged", "between 1 and 16,384"):
        SweepDirectory.open(sweep.root)


def test_proposals_are_written_down_before_a_trial_begins(tmp_path):
    pytest.importorskip("optuna")
    sweep = made(tmp_path / "sweep", sampler="tpe")
    assert sweep.trials() == [] and sweep.remaining == 3
    first = sweep.propose(())
    again = SweepDirectory.open(sweep.root)  # after a kill
    assert again.trials() == [first] == again.unfinished() and again.remaining == 2
    end(sweep, first, "finished", 1.0)
    second = again.propose(())
    assert [trial.name for trial in again.trials()] == ["0", "1"] and second.point != first.point
    again.propose({"1"})
    assert again.remaining == 0 and [trial.name for trial in again.unfinished()] == ["1", "2"]
    (sweep.root / "proposals.json").write_text('{"points": [["1e-3"]]}')
    with raises("is-damaged", "proposals.json"):
        SweepDirectory.open(sweep.root)
