"""`rollmill.sweep`: the command as a function."""

import csv
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rollmill
from rollmill.sweeps.call import _settings, json_value
from rollmill.sweeps.directory import SweepDirectory
from rollmill.training.request import TrainingRequest, read_request, resolve
from wordings import raises

TINY = {"num_envs": 4, "num_steps": 8, "num_minibatches": 1, "network": {"hidden_sizes": (4,)}}


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (0.1 + 0.2, 0.1 + 0.2),
        (float("inf"), float("inf")),
        (np.float64(2.5e-3), 2.5e-3),
        (np.array(7), 7),
        (10**12, 10**12),
        (np.bool_(False), False),
        (None, None),
        ((64, np.int32(32)), [64, 32]),
        ([], []),
        (Path("a/b"), "a/b"),
        ("gru", "gru"),
        ({"a": None}, {"a": None}),
    ],
)
def test_values_have_a_form_in_json(value, plain):
    found = json_value("option", value)
    assert found == plain and type(found) is type(plain)


@pytest.mark.parametrize("value", [float("nan"), object(), 1j, b"x", {1: 2}, lambda step: 1e-3])
def test_values_without_a_form_in_json(value):
    with raises("has-no-json-form", "option"):
        json_value("option", value)


def test_options_are_settings_of_the_command():
    options = {
        "learning_rate": 0.1 + 0.2,
        "anneal_lr": False,
        "normalize_observations": np.True_,
        "target_kl": None,
        "max_grad_norm": float("inf"),
        "network": {"hidden_sizes": (8, 4), "shared_torso": True, "state_dependent_std": False},
        "network.activation": "relu",
        "tensorboard": True,
        "keep_last": 7,
    }
    asked = TrainingRequest("ppo", "CartPole-v1", _settings(options))
    read = resolve(read_request(json.loads(json.dumps(asked.to_json())), where="here"))
    config = read.config
    assert (config.learning_rate, config.anneal_lr, config.target_kl) == (0.1 + 0.2, False, None)
    assert (config.normalize_observations, config.max_grad_norm) == (True, float("inf"))
    network = config.network
    assert (network.hidden_sizes, network.shared_torso, network.activation) == ((8, 4), True, "relu")
    assert (read.options.tensorboard, read.options.keep_last) == (True, 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "pppo"}, ("unknown-name", "algorithm", "'pppo'")),
        ({"over": {}}, ("sweep-needs-values-to-try",)),
        ({"over": {"seed": 5}}, ("over-has-to-be-list", "seed", "5")),
        ({"over": {"seed": {1, 2}}}, ("over-has-to-be-list",)),
        ({"over": {"seed": []}}, ("over-is-empty-or-has",)),
        ({"over": {"seed": [1, 1]}}, ("over-is-empty-or-has",)),
        ({"over": {"gamma": [0.9, 1.5]}}, ("out-of-bounds", "gamma", "1.5", "lie between 0 and 1")),
        ({"over": {"anneal_lr": [True, 3]}}, ("expected-number", "anneal-lr", "3", "True or False")),
        ({"over": {"gamma": "0.1..0.9"}}, ("over-range-numbers-cannot-be",)),
        (
            {"learning_rte": 1},
            (
                "unknown-name",
                "setting",
                "'learning_rte'",
                "Did you mean learning_rate or min_learning_rate or max_learning_rate?",
            ),
        ),
        ({"lr": 1}, ("unknown-name", "setting", "'lr'", "Did you mean learning_rate")),
        ({"at_once": 0}, ("at-once-has-to-be-at", "0")),
        ({"metric": "speed"}, ("unknown-name", "metric", "'speed'")),
        ({"random": 0}, ("has-to-be-at-least-1", "--random", "0")),
        ({"run_dir": "x"}, ("run-dir-each-trial-has",)),
    ],
)
def test_bad_input_is_refused_before_anything_starts(changes, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call = {"algorithm": "ppo", "environment": "CartPole-v1", "over": {"seed": range(2)}} | changes
    with raises(*message):
        rollmill.sweep(**call)
    assert not list(tmp_path.iterdir())


OTHER_KINDS = {
    'environment=rollmill.make("CartPole-v1")': "must be a name, because trials are separate processes",
    "algorithm=rollmill.ppo": "must be a name",
    "over=[1]": "over=[1] must be a dictionary",
    "over={1: [2]}": "over={1: [2]} must be a dictionary with strings",
    "env_options=[1]": "env_options=[1] must be a dictionary",
    'gpu_sharing="some"': "unknown gpu_sharing 'some'",
    'imports="my_module"': "imports='my_module' must be a tuple",
    "trials=2.5": "trials=2.5 must be an integer",
    'random="3"': "random='3' must be an integer",
    "sweep_dir=3": "sweep_dir=3 must be a path",
    'stop_early="median"': "unknown way to stop early 'median'",
    'sampler="tpee"': "unknown sampler 'tpee'. Did you mean tpe",
    "learning_rate=lambda step: 1e-3": "cannot be represented in JSON",
}


def test_arguments_of_another_kind(tmp_path):
    """In a process of its own, without the tests' checks of types, as a user's."""
    script = """
import json, sys, rollmill
for mistake in json.loads(sys.argv[1]):
    call = {"algorithm": "ppo", "environment": "CartPole-v1", "over": {"seed": range(2)}}
    try:
        rollmill.sweep(**(call | eval(f"dict({mistake})")))
    except rollmill.RollmillError as error:
        print(json.dumps(str(error)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(list(OTHER_KINDS))], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    said = dict(zip(OTHER_KINDS, map(json.loads, done.stdout.splitlines()), strict=True))
    assert not {mistake: said[mistake] for mistake, words in OTHER_KINDS.items() if words not in said[mistake]}
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_sweep_returns_its_table(tmp_path, capsys):
    rates = [0.1 + 0.2, 1e-3]
    done = rollmill.sweep(
        "ppo",
        "CartPole-v1",
        over={"learning_rate": iter(rates), "anneal_lr": [False]},
        total_timesteps=128,
        env_options={"max_steps": 20},
        metric="env_steps",
        sweep_dir=tmp_path / "sweep",
        quiet=True,
        **TINY,
    )
    assert capsys.readouterr().out == ""
    assert done.exit_code == 0 and done.directory == tmp_path / "sweep"
    assert [(row["trial"], row["learning_rate"], row["anneal_lr"]) for row in done.rows] == [
        ("0", rates[0], False),
        ("1", rates[1], False),
    ]
    assert all(row["status"] == "finished" and row["env_steps"] == 128 for row in done.rows)
    with (done.directory / "table.csv").open() as file:
        assert [row["learning-rate"] for row in csv.DictReader(file)] == ["0.30000000000000004", "0.001"]
    config = SweepDirectory.open(done.directory)
    saved = config.run(config.trials()[0]).read_config()
    assert saved["graph"]["config"]["learning_rate"] == rates[0]
    assert saved["graph"]["config"]["network"]["hidden_sizes"] == [4]
    assert 'class="line"' in (done.directory / "report.html").read_text()


@pytest.mark.slow
def test_seeds_in_one_program(tmp_path):
    how = {"total_timesteps": 128, "quiet": True, "sweep_dir": tmp_path / "sweep", **TINY}
    done = rollmill.sweep("ppo", "CartPole-v1", over={"seed": range(1, 3)}, group_seeds=True, **how)
    summary = json.loads((done.directory / "trials/0/summary.json").read_text())
    assert done.exit_code == 0 and summary["seeds"] == [1, 2] and summary["env_steps"] == 128
    found = {row["seed"]: row["final_return"] for row in done.rows}
    assert found == dict(zip((1, 2), summary["final_return_per_seed"], strict=True))
    assert (done.directory / "report.html").read_text().count('<path class="line') == 2


OWN_PARTS = """
import rollmill

def make():
    return rollmill.make("CartPole-v1")

rollmill.register("{name}", make)
"""


@pytest.mark.slow
def test_modules_that_the_program_imports_are_imported_by_trials(tmp_path, monkeypatch):
    (tmp_path / "my_parts.py").write_text(OWN_PARTS.format(name="Imported-v0"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    importlib.import_module("my_parts")
    how = {"total_timesteps": 128, "quiet": True, "sweep_dir": tmp_path / "sweep", **TINY}
    done = rollmill.sweep("ppo", "CartPole-v1", over={"environment": ["CartPole-v1", "Imported-v0"]}, **how)
    assert [row["status"] for row in done.rows] == ["finished"] * 2


def test_names_that_no_module_registers_are_refused(tmp_path):
    program = (
        OWN_PARTS.format(name="Here-v0")
        + """
rollmill.sweep("ppo", "Here-v0", over={"seed": range(2)})
"""
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert "cannot create environment Here-v0, because only the running program" in done.stderr
    assert "hint: call rollmill.register in a separate module" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_example_runs(tmp_path):
    example = Path(__file__).parents[2] / "examples/sweep.py"
    done = subprocess.run([sys.executable, str(example), str(tmp_path / "sweep")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "mean final return by learning rate" in done.stdout
    assert len(list((tmp_path / "sweep/trials").glob("*/summary.json"))) == 4
