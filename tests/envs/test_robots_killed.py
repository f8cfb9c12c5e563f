"""A training of a robot that is killed by SIGKILL goes on with the same bits."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "rollmill"]
ITERATIONS, EVERY = 240, 20
SIZES = {"num-envs": 16, "num-steps": 16, "num-minibatches": 2, "update-epochs": 2, "unroll": 1, "seed": 3}
BACK_ENDS = {
    "XLA": ("robots:Cartpole", ["--fusion", "off"]),
    "kernel": ("robots:Cartpole", ["--fusion", "rollout"]),
    "C MuJoCo": ("robots:Cartpole", ["--env-option", "physics=mujoco"]),
}


def command_of(task, options, run):
    sizes = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
    steps = ITERATIONS * SIZES["num-envs"] * SIZES["num-steps"]
    ends = ["--total-timesteps", str(steps), "--checkpoint-iterations", str(EVERY), "--no-tensorboard", "--quiet"]
    return [*COMMAND, "train", "ppo", task, *options, *sizes, *ends, "--run-dir", str(run)]


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
@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_a_killed_training_goes_on(back_end, tmp_path):
    task, options = BACK_ENDS[back_end]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(command_of(task, options, whole), check=True)
    kill_after_checkpoints(command_of(task, options, killed), killed, 2)
    assert summary_of(killed).get("status") != "finished"
    subprocess.run([*COMMAND, "resume", str(killed), "--quiet"], check=True)
    right, found = summary_of(whole), summary_of(killed)
    assert found["status"] == right["status"] == "finished"
    assert found["env_steps"] == right["env_steps"] == ITERATIONS * SIZES["num-envs"] * SIZES["num-steps"]
    # The robots of C MuJoCo begin new episodes: their processes are gone.
    assert (found["weights_sha256"] == right["weights_sha256"]) == (back_end != "C MuJoCo")
