"""The page on hooks: its code runs as it stands, and its tables name all that there is."""

import dataclasses
import re
from pathlib import Path

import pytest

import rollmill
from rollmill import hooks

PAGE = (Path(__file__).parents[2] / "docs/hooks.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
EVENTS = [
    kind for kind in vars(hooks).values() if isinstance(kind, type) and issubclass(kind, hooks.TrainingEvent)
]
EVENTS.remove(hooks.TrainingEvent)


@pytest.mark.slow
def test_the_code_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    scope = {}
    for block in BLOCKS:
        exec(block, scope)
    assert scope["run"].summary["best_evaluation_return"] > 0
    assert (scope["run"].directory / "metrics.csv").is_file()
    assert "'losses/policy': " in capsys.readouterr().out


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
def test_each_event_is_in_the_table_with_its_fields(kind):
    row = re.search(rf"^\| `{kind.__name__}` .*$", PAGE, re.M)[0]
    own = {field.name for field in dataclasses.fields(kind)} - {"iteration", "env_steps"}
    assert {name for name in own if f"`{name}`" in row} == own


@pytest.mark.parametrize("name", ["stop_at_return", "early_stopping", "csv_log", "wandb_log", "mlflow_log"])
def test_each_hook_is_in_the_table(name):
    assert re.search(rf"^\| `{name}\(", PAGE, re.M) and hasattr(hooks, name)


def test_each_option_of_evaluations_is_in_the_table():
    known = {field.name for field in dataclasses.fields(rollmill.RunOptions) if field.name.startswith("evaluate_")}
    named = {name.replace("-", "_") for name in re.findall(r"^\| `--(evaluate-[a-z-]+)", PAGE, re.M)}
    assert named == known
