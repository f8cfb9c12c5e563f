"""An algorithm, a network and an environment of one's own, by the commands that the documentation gives."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
MODULE = ["--import", "custom_algorithm"]


@pytest.mark.slow
def test_the_example_trains_in_processes_by_its_names(rollmill, tmp_path):
    own = {"env": {"PYTHONPATH": str(EXAMPLES)}}
    assert len((EXAMPLES / "custom_algorithm.py").read_text().splitlines()) < 80
    listed = rollmill("list", *MODULE, **own).stdout
    assert all(f"  {name} " in listed for name in ("decayed-ppo", "tiny", "Reach-v0"))
    sizes = ["--num-envs", "4", "--num-steps", "8", "--total-timesteps", "64", "--run-dir", "run"]
    chosen = ["--network", "tiny", "--weight-decay", "0.5", "--env-option", "speed=0.3", "--actors", "1"]
    where = ["--distribution", "single-learner-coarse"]
    done = rollmill("train", "decayed-ppo", "Reach-v0", *MODULE, *sizes, *chosen, *where, **own)
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "run/config.json").read_text())
    graph = config["graph"]
    assert config["imports"] == MODULE[1:] and graph["custom"] == [] and config["plan"]["place"] == "processes"
    assert (graph["algorithm"], graph["environment_options"]) == ("decayed-ppo", {"speed": 0.3})
    assert (graph["config"]["weight_decay"], graph["config"]["network"]["name"]) == (0.5, "tiny")
    done = rollmill("evaluate", "run", *MODULE, "--episodes", "2", **own)
    assert done.returncode == 0 and "Reach-v0, 2 episodes" in done.stdout, done.stderr
    done = rollmill("train", "decayed-ppo", "Reach-v0", *sizes, **own)
    assert done.returncode == 2 and "unknown algorithm 'decayed-ppo'" in done.stderr


BOATS = """
import rollmill

rollmill.register("Boat-v0", lambda: rollmill.make("CartPole-v1"))
"""
PROGRAM = """
import boats, rollmill

small = rollmill.ppo("Boat-v0", num_envs=4, num_steps=8, total_timesteps=64, num_minibatches=2)
rollmill.train(small, run_dir="run", tensorboard=False, hooks=[lambda event: rollmill.Stop("enough")])
"""


@pytest.mark.slow
def test_the_command_printed_by_a_program_that_imports_its_own_module_works(tmp_path):
    folder = tmp_path / "my parts"
    folder.mkdir()
    (folder / "boats.py").write_text(BOATS)
    (folder / "program.py").write_text(PROGRAM)
    started = subprocess.run(
        [sys.executable, folder / "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert started.returncode == 0, started.stderr
    assert json.loads((tmp_path / "run/config.json").read_text())["imports"] == ["boats"]
    printed = started.stderr.partition("Resume with\n")[2].strip().splitlines()[0]
    assert printed == "rollmill resume run --import 'my parts/boats.py'"
    command = printed.replace("rollmill resume", f"{shlex.quote(sys.executable)} -P -m rollmill resume")
    quiet = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    resumed = subprocess.run(
        command, cwd=tmp_path, env=quiet, capture_output=True, text=True, timeout=300, shell=True
    )
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "finished"


def test_commands_on_a_run_find_the_file_that_was_imported(rollmill, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    for folder in ("code", "other"):
        (tmp_path / folder).mkdir()
    file = tmp_path / "code/boats.py"
    file.write_text(BOATS)
    sizes = ["--num-envs", "8", "--num-steps", "8", "--num-minibatches", "2", "--update-epochs", "1"]
    small = [*sizes, "--network.hidden-sizes", "8", "--no-tensorboard", "--total-timesteps"]
    done = rollmill("train", "ppo", "Boat-v0", "--import", "code/boats.py", *small, "64", "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/config.json").read_text())["import_files"] == {"boats": str(file)}
    done = rollmill("evaluate", "run", "--episodes", "2")
    assert done.returncode == 0 and "Boat-v0, 2 episodes" in done.stdout, done.stderr
    moved = tmp_path / "other/boats.py"
    file.rename(moved)
    done = rollmill("evaluate", "run", "--episodes", "2")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"imported 'boats' from {file}, which does not exist any more" in done.stderr
    resume = ["resume", "run", "--set", "total_timesteps=128"]
    done = rollmill(*resume, "--import", "other/boats.py")
    assert done.returncode == 0, done.stderr
    done = rollmill("train", "--config", "run/config.json", "--seed", "5", "--run-dir", "again")
    assert done.returncode == 0, done.stderr  # the resumed run has recorded the new place
    file.write_text(f"{BOATS}\n# changed")
    done = rollmill("evaluate", "run", "--episodes", "2", env={"PYTHONPATH": str(file.parent)})
    assert done.returncode == 2 and f"finds another module with this name, at {file}" in done.stderr
    done = rollmill("evaluate", "run", "--episodes", "2", "--import", "code/boats.py")
    assert done.returncode == 0, done.stderr
