"""A training of a robot that is killed by SIGKILL goes on with the same bits."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "rollmill"]
CHECKPOINTS = 12
SIZES = {"num-envs": 16, "num-steps": 16, "num-minibatches": 2, "update-epochs": 2, "unroll": 1, "seed": 3}
BACK_ENDS = {
    "XLA": (20, ["--fusion", "off"]),
    "kernel": (20, ["--fusion", "rollout"]),
    "C MuJoCo": (20, ["--env-option", "physics=mujoco"]),
    "MuJoCo Warp": (1, ["--env-option", "physics=warp"]),
}
"""Iterations from one checkpoint to the next, and options."""


def command_of(every, options, run):
    sizes = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
    ends = ["--total-timesteps", str(steps_of(every)), "--checkpoint-iterations", str(every)]
    quietly = ["--no-tensorboard", "--quiet", "--run-dir", str(run)]
    return [*COMMAND, "train", "ppo", "robots:Cartpole", *options, *sizes, *ends, *quietly]


def steps_of(every):
    return CHECKPOINTS * every * SIZES["num-envs"] * SIZES["num-steps"]


def summary_of(run):
    file = Path(run) / "summary.json"
    return json.loads(file.read_text()) if file.exists() else {}


def kill_after_checkpoints(command, run, count):
    """Starts a training, and ends it by SIGKILL once there are some checkpoints."""
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while len(list((run / "checkpoints").glob("*"))) < count:
        assert child.poll() is None, child.stderr.read().decode()
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    child.stderr.close()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_a_killed_training_goes_on(back_end, tmp_path):
    if back_end == "MuJoCo Warp" and importlib.util.find_spec("mujoco_warp") is None:
        pytest.skip("mujoco-warp is not installed")
    every, options = BACK_ENDS[back_end]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(command_of(every, options, whole), check=True)
    kill_after_checkpoints(command_of(every, options, killed), killed, 2)
    assert summary_of(killed).get("status") != "finished"
    subprocess.run([*COMMAND, "resume", str(killed), "--quiet"], check=True)
    right, found = summary_of(whole), summary_of(killed)
    assert found["status"] == right["status"] == "finished"
    assert found["env_steps"] == right["env_steps"] == steps_of(every)
    # The robots of C MuJoCo begin new episodes: their processes are gone.
    assert (found["weights_sha256"] == right["weights_sha256"]) == (back_end != "C MuJoCo")
