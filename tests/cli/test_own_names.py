"""An algorithm, a network and an environment of one's own, by the commands that the documentation gives."""

import json
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
