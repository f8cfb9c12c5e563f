"""A sweep from a stranger is data: no link in it is followed, and nothing that it names is imported."""

import json
import os
import sys

import pytest

from rollmill.cli.main import _exit_code as command
from rollmill.core.imports import ONLY, ImportRefused, import_named, only_importing
from rollmill.gpus.machine_parts import MachinePart
from rollmill.sweeps.directory import SweepDirectory
from rollmill.sweeps.trial_processes import start_trials
from rollmill.training.request import TrainingRequest, named_by, resolve
from wordings import raises

SETTINGS = {"num_envs": 8, "total_timesteps": 512, "num_steps": 32}


def foreign(root, *, request=None, **changes):
    """A sweep of one trial that nobody made here.

    Args:
        root: its folder.
        request: fields of what all trials have in common.
        **changes: fields of sweep.json.
    """
    (root / "trials").mkdir(parents=True)
    spec = {
        "request": {"algorithm": "ppo", "environment": "CartPole-v1", "settings": SETTINGS} | (request or {}),
        "axes": [["seed", [0], 0.0, 0.0, False]],
        "num_trials": 1,
        "points": [[0]],
    }
    (root / "sweep.json").write_text(json.dumps(spec | changes))
    return root


@pytest.fixture
def precious(tmp_path):
    (tmp_path / "precious" / "0").mkdir(parents=True)
    file = tmp_path / "precious" / "0" / "thesis.txt"
    file.write_text("precious")
    return file


def refused(capsys, *words):
    """Standard error of a command that is refused."""
    assert command(list(map(str, words))) == 2
    return capsys.readouterr().err


def test_a_link_in_place_of_the_trials_leads_nowhere(tmp_path, precious, capsys):
    root = foreign(tmp_path / "got")
    (root / "trials").rmdir()
    (root / "trials").symlink_to(precious.parents[1])
    assert "trials is missing, or is a link" in refused(capsys, "sweep", "--resume", root)
    assert precious.read_text() == "precious"


@pytest.mark.parametrize("name", ["0.log", "0"])
def test_a_link_in_place_of_a_log_or_a_run_is_not_written_through(name, tmp_path, precious):
    root = foreign(tmp_path / "got")
    target = precious if name.endswith("log") else precious.parents[1]
    (root / "trials" / name).symlink_to(target)
    sweep = SweepDirectory.open(root)
    with raises("is-link-and-links-inside"):
        start_trials(sweep, sweep.trials()[:1], MachinePart((), {}), ())
    assert precious.read_text() == "precious"


def test_a_pipe_in_place_of_a_log_blocks_nobody(tmp_path):
    root = foreign(tmp_path / "got")
    os.mkfifo(root / "trials" / "0.log")
    sweep = SweepDirectory.open(root)
    with raises("is-is-not-expected-there", "a pipe"):
        start_trials(sweep, sweep.trials()[:1], MachinePart((), {}), ())


NAMING = {
    "an import": ({"request": {"imports": ["evil_tool"]}}, "import evil_tool"),
    "an environment": ({"request": {"environment": "gymnasium:evil_tool:Id-v0"}}, "import evil_tool"),
    "an environment of an axis": (
        {
            "axes": [["environment", ["pettingzoo:evil_tool:a"], 0.0, 0.0, False]],
            "points": [["pettingzoo:evil_tool:a"]],
        },
        "import evil_tool",
    ),
    "a policy": ({"request": {"settings": {"distribution": "evil_tool:policy"}}}, "import evil_tool"),
    "a policy of an axis": (
        {"axes": [["distribution", ["evil_tool:f"], 0.0, 0.0, False]], "points": [["evil_tool:f"]]},
        "import evil_tool",
    ),
    "a cluster": ({"request": {"settings": {"cluster": "evil.example:6379"}}}, "use cluster=evil.example:6379"),
    "a cluster's client server": (
        {"request": {"settings": {"cluster": "ray://evil:1"}}},
        "use cluster=ray://evil:1",
    ),
}


@pytest.mark.parametrize("name", NAMING)
def test_code_that_a_foreign_sweep_names_is_asked_for(name, tmp_path, monkeypatch, capsys):
    changes, said = NAMING[name]
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "evil_tool.py").write_text("")
    (tmp_path / "evil.toml").write_text('import = ["evil_tool"]\n')
    monkeypatch.chdir(tmp_path)
    assert said in refused(capsys, "sweep", "--resume", foreign(tmp_path / "got", **changes))
    assert "evil_tool" not in sys.modules


@pytest.mark.parametrize("option", ["import", "imports", "config", "import=evil_tool", "recipe"])
def test_an_axis_that_is_no_setting_imports_nothing(option, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "evil_tool.py").write_text("")
    root = foreign(tmp_path / "got", axes=[[option, ["evil_tool"], 0.0, 0.0, False]], points=[["evil_tool"]])
    (trial,) = SweepDirectory.open(root).trials()
    with raises("unknown-name", "setting"):
        resolve(trial.request)
    assert "evil_tool" not in sys.modules


def test_what_was_trusted_is_remembered(tmp_path, monkeypatch, capsys):
    from rollmill.cli import sweep as sweep_command

    monkeypatch.setenv("ROLLMILL_STATE_DIR", str(tmp_path / "state"))
    sweep = SweepDirectory.open(foreign(tmp_path / "got", request={"imports": ["own_tool"]}))
    sweep_command._check_trust(sweep, set(), trust=True)
    sweep_command._check_trust(sweep, set(), trust=False)
    foreign_file = tmp_path / "got/sweep.json"
    foreign_file.write_text(foreign_file.read_text().replace("own_tool", "another_tool"))
    assert "import another_tool" in refused(capsys, "sweep", "--resume", tmp_path / "got")


def test_a_process_of_a_sweep_imports_what_the_sweep_may(monkeypatch):
    for name, text in only_importing(["json", "own"]).items():
        monkeypatch.setenv(name, text)
    assert import_named("json.decoder").__name__ == "json.decoder"
    for name in ("this", "jso", "jsonx"):
        with raises("module-is-not-imported-because", f"'{name}'"):
            import_named(name)
    monkeypatch.setenv(ONLY, "")
    with pytest.raises(ImportRefused):
        import_named("json")


def test_code_is_found_wherever_a_request_names_it():
    first = TrainingRequest("ppo", "gymnasium:m:Id", {"distribution": "a:f", "seed": 3}, imports=("b", "c"))
    second = TrainingRequest("ppo", "CartPole-v1", {"cluster": "h:1", "distribution": "central"})
    found = named_by([first, second])
    assert found.modules == {"m", "a", "b", "c"} and found.clusters == {"cluster=h:1"}
