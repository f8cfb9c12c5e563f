"""`rollmill runs`: rows of runs and sweeps in every state, as numbers and as a table."""

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from recorded_runs import of_opponents, recorded
from rollmill.cli.main import main
from rollmill.overview.discovery import find_entries
from rollmill.overview.entries import read_run
from rollmill.overview.table import age, filter_rows, sort_rows, table
from rollmill.sweeps.directory import SweepDirectory
from rollmill.sweeps.search_space import listed_axis
from rollmill.sweeps.spec import SweepSpec
from rollmill.training.request import TrainingRequest
from wordings import raises


@pytest.fixture
def folder(tmp_path):
    recorded(tmp_path / "a", summary={"status": "finished"})
    recorded(tmp_path / "deep/b", summary={"status": "stopped", "stopped_by": "SIGTERM"}, rate=0.01)
    recorded(tmp_path / "c", algorithm="dqn", environment="Acrobot-v1")
    recorded(tmp_path / "d", summary={"status": "stopped", "env_steps": 200})  # resumed, then killed
    recorded(tmp_path / "e").fault.make()
    (tmp_path / "f").mkdir()
    (tmp_path / "f/config.json").write_text("{")
    os.symlink(tmp_path / "a", tmp_path / "link")
    return tmp_path


def states(folder, **options):
    return {str(entry.path.relative_to(folder)): entry.state for entry in find_entries(folder, **options)}


def test_each_run_of_a_folder_has_its_state(folder):
    expected = {"a": "finished", "c": "killed", "d": "killed", "deep/b": "stopped", "e": "failed", "f": "damaged"}
    assert states(folder) == expected
    assert states(folder / "a") == {".": "finished"}


def test_a_run_that_this_or_another_process_trains_is_running(tmp_path):
    run = recorded(tmp_path / "a", summary={"status": "stopped"})
    with run.lock():
        assert read_run(run.root).state == "running"
        probe = "import sys; from pathlib import Path; from rollmill.overview.entries import read_run"
        code = f"{probe}; print(read_run(Path(sys.argv[1])).state)"
        other = subprocess.run([sys.executable, "-c", code, run.root], capture_output=True, text=True, timeout=300)
        assert other.stdout.strip() == "running", other.stderr
    assert read_run(run.root).state == "stopped"


def test_numbers_are_those_of_the_summary_or_of_the_newest_lines(folder):
    rows = {entry.path.name: entry for entry in find_entries(folder)}
    ended, killed = rows["a"], rows["c"]
    assert (ended.steps, ended.planned_steps, ended.mean_return, ended.steps_per_second) == (600, 800, 12.5, 50.0)
    assert (killed.steps, killed.planned_steps, killed.mean_return, killed.steps_per_second) == (600, 800, 3, 30)
    assert (ended.seed, ended.num_seeds, ended.settings["network.hidden_sizes"]) == (7, 2, [64, 64])
    assert rows["b"].note == "SIGTERM" and "config.json" in rows["f"].note


def test_rows_are_selected_and_ordered(folder):
    rows = find_entries(folder)
    names = lambda entries: [entry.path.name for entry in entries]
    assert names(filter_rows(rows, states=["killed", "failed"])) == ["c", "d", "e"]
    assert names(filter_rows(rows, algorithm="d?n", environment="Acro*")) == ["c"]
    assert names(filter_rows(rows, where={"learning_rate": "0.01"})) == ["b"]
    assert names(sort_rows(rows, "return"))[:2] == ["a", "b"] and names(sort_rows(rows, "name"))[0] == "a"
    with raises("no-run-has-setting", "'learning_rat'", "Did you mean learning_rate"):
        filter_rows(rows, where={"learning_rat": "1"})


def test_a_table_ends_its_lines_with_the_path(folder):
    now = max(entry.changed for entry in find_entries(folder)) + timedelta(hours=3)
    text = table(sort_rows(find_entries(folder), "name"), folder=folder, show=["learning_rate"], now=now)
    head, first, *rest = text.splitlines()
    assert " ".join(head.split()) == "STATE ALGORITHM ENVIRONMENT STEPS RETURN STEPS/S CHANGED learning_rate RUN"
    assert " ".join(first.split()) == "finished ppo CartPole-v1 600 12.5 50 3 h ago 0.001 a"
    assert " ".join(rest[0].split()) == "killed dqn Acrobot-v1 600 (75%) 3.00 30 3 h ago 0.001 c"
    assert rest[2].endswith("deep/b  (SIGTERM)")


def test_names_and_numbers_of_a_hostile_run_are_harmless(tmp_path):
    run = recorded(tmp_path / "a", summary={"status": "finished", "total_env_steps": 2 * 10**18})
    config = json.loads(run.config_file.read_text())
    config["graph"]["algorithm"] = "\x1b[31m" + "x" * 1000
    config["options"]["num_seeds"] = {"a": 1}
    run.config_file.write_text(json.dumps(config))
    (row,) = find_entries(tmp_path)
    assert row.steps is None and row.num_seeds == 1
    assert "\x1b" not in (text := table([row], folder=tmp_path)) and len(text) < 400


def test_ages_have_one_unit():
    ages = [age(timedelta(seconds=seconds)) for seconds in (-5, 59, 3_599, 86_400)]
    assert ages == ["0 s ago", "59 s ago", "59 min ago", "1 d ago"]


def test_a_sweep_is_one_row_or_one_and_its_trials(tmp_path):
    axes, points = (listed_axis("gamma", [0.9, 0.99, 0.999]),), ((0.9,), (0.99,), (0.999,))
    spec = SweepSpec(TrainingRequest("ppo", "CartPole-v1"), axes, 3, points)
    sweep = SweepDirectory.create(tmp_path / "sweep", spec)
    first, second, _ = (sweep.run(trial) for trial in sweep.trials())
    recorded(first.root, summary={"status": "finished"})
    recorded(second.root)
    (row,) = find_entries(tmp_path)
    assert (row.kind, row.state, row.trials, row.finished_trials) == ("sweep", "stopped", 3, 1)
    assert (row.algorithm, row.mean_return, row.steps, row.steps_per_second) == ("ppo", 12.5, 1200, None)
    assert table([row], folder=tmp_path).endswith("sweep  sweep, 1 of 3 trials")
    assert [entry.kind for entry in find_entries(tmp_path, trials=True)] == ["sweep", "run", "run"]
    with second.lock():
        (row,) = find_entries(tmp_path)
    assert (row.state, row.steps_per_second) == ("running", 30.0)


def test_each_kind_of_agents_has_its_return(tmp_path):
    """Those of opponents cancel out, so that their mean says nothing."""
    of_kinds = {
        "status": "finished",
        "final_return": 0.0,
        "final_returns": {"guard": 0.32, "thief": -0.32, "x": "y"},
    }
    recorded(tmp_path / "a", summary=of_kinds, more=of_opponents)
    recorded(tmp_path / "b", more=of_opponents)
    recorded(tmp_path / "c", lines=1, more=of_opponents)  # no episode ended
    rows = sort_rows(find_entries(tmp_path), "name")
    assert [row.returns for row in rows] == [
        {"guard": 0.32, "thief": -0.32},
        {"guard": 0.75, "thief": -0.75},
        {},
    ]
    assert rows[0].to_json()["returns"] == rows[0].returns and rows[0].mean_return == 0.0
    assert "  guard 0.320, thief -0.320  " in table(rows, folder=tmp_path).splitlines()[1]


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("returns/thief", "thief 0.500"),
        ("final_return", "guard 0.500, thief -0.500"),
        ("env_steps", ""),
    ],
)
def test_a_sweep_shows_the_kind_by_which_trials_are_compared(tmp_path, metric, expected):
    axes, points = (listed_axis("gamma", [0.9, 0.99]),), ((0.9,), (0.99,))
    spec = SweepSpec(TrainingRequest("mappo", "TagGridWorld-v0"), axes, 2, points, metric=metric)
    sweep = SweepDirectory.create(tmp_path / "sweep", spec)
    for trial, guard in zip(sweep.trials(), (0.5, -0.5), strict=True):
        returns = {"guard": guard, "thief": -guard}
        recorded(sweep.run(trial).root, summary={"status": "finished", "final_returns": returns})
    recorded(tmp_path / "low", summary={"status": "finished", "final_return": 0.1})
    rows = find_entries(tmp_path)
    row = next(row for row in rows if row.kind == "sweep")
    assert row.return_text == (expected or "")
    first = sort_rows(rows, "return")[0].kind
    assert first == ("run" if metric == "env_steps" else "sweep")


def command(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(["runs", *map(str, words)])
    return ended.value.code, *capsys.readouterr()


def test_the_command_prints_json_of_every_value(folder, capsys):
    code, output, errors = command(capsys, folder, "--json", "--sort", "name", "--limit", 1)
    (row,) = json.loads(output)
    assert code == 0 and "5 more" in errors
    assert row["path"] == str(folder / "a") and row["state"] == "finished" and row["steps"] == 600
    assert row["settings"]["learning_rate"] == 0.001
    assert datetime.fromisoformat(row["changed"]) <= datetime.now(UTC)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["missing"], 2, "missing does not exist. hint: name the folder"),
        (["empty"], 0, "contains no runs"),
        ([".", "--state", "finished", "--algorithm", "sac"], 0, "none of the 6 runs and sweeps"),
        ([".", "--state", "done"], 2, "'done'"),
        ([".", "--where", "gamma"], 2, "must be NAME=VALUE"),
        ([".", "--limit", "0"], 2, "must be at least 1"),
    ],
)  # fmt: skip
def test_the_command_says_what_it_does_not_show(folder, capsys, words, code, said):
    (folder / "empty").mkdir()
    ended, output, errors = command(capsys, folder / words[0], *words[1:])
    assert (ended, output) == (code, "") and said in errors
