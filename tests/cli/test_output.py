"""Readers and terminals that go away: nothing is lost, and no traceback is shown."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

SIZES = ["--num-envs", 16, "--num-steps", 16, "--checkpoint-iterations", 5, "--no-tensorboard"]


def wait_for(path, process, seconds=300):
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)


def closed_pipe() -> int:
    read, write = os.pipe()
    os.close(read)
    return write


@pytest.mark.slow
def test_a_training_whose_reader_went_away_goes_on_and_finishes(rollmill, tmp_path):
    pipe = closed_pipe()
    train = ["train", "ppo", "CartPole-v1", *SIZES, "--total-timesteps", 16 * 16 * 10, "--run-dir", "run"]
    process = rollmill.start(*train, stdout=pipe, stderr=pipe)
    os.close(pipe)
    assert process.wait(timeout=300) == 0
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "finished"


@pytest.mark.slow
def test_a_closed_standard_error_ends_no_training_and_is_no_file_of_the_run(rollmill, tmp_path):
    train = ["train", "ppo", "CartPole-v1", *SIZES, "--total-timesteps", 16 * 16 * 10, "--run-dir", "run"]
    process = rollmill.start(*train, stderr=None, preexec_fn=lambda: os.close(2))
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and "run: run" in output
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == list(range(1, 11))


@pytest.mark.slow
def test_a_closed_terminal_ends_a_training_with_a_checkpoint(rollmill, tmp_path):
    train = [
        "train",
        "ppo",
        "CartPole-v1",
        *SIZES,
        "--total-timesteps",
        10**8,
        "--fusion",
        "off",
        "--run-dir",
        "run",
    ]
    process = rollmill.start(*train, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))
    wait_for(tmp_path / "run/checkpoints/5", process)
    process.send_signal(signal.SIGHUP)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 129 and "stopped by SIGHUP" in errors and "rollmill resume run" in errors
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    newest = max(int(entry.name) for entry in (tmp_path / "run/checkpoints").iterdir())
    assert summary["status"] == "stopped" and newest == summary["iterations"]


LIST = "import sys; from rollmill.cli.main import main; main(['list'])"


def test_a_list_whose_reader_went_away_is_quiet(environment_variables):
    pipe = closed_pipe()
    done = subprocess.run(
        [sys.executable, "-c", LIST], stdout=pipe, stderr=subprocess.PIPE, text=True, env=environment_variables
    )
    os.close(pipe)
    assert done.returncode == 141 and done.stderr == ""


def test_a_list_that_cannot_be_written_says_so(environment_variables):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", LIST], stdout=full, stderr=subprocess.PIPE, text=True, env=environment_variables
        )
    assert done.returncode == 1
    assert done.stderr == "rollmill: output cannot be written: No space left on device.\n"


HOARDING = """
import gymnasium
import numpy as np
from gymnasium import spaces


class Hoarding(gymnasium.Env):
    observation_space, action_space = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2)
    kept = []

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.kept.append(bytearray(b"x" * 65_536))
        return np.zeros(2, np.float32), 1.0, len(self.kept) % 50 == 0, False, {}


gymnasium.register("Hoarding-v0", Hoarding)
"""


@pytest.mark.slow
def test_a_training_says_that_an_environment_of_its_leaks_memory(rollmill, tmp_path):
    (tmp_path / "hoarding.py").write_text(HOARDING)
    train = ["train", "ppo", "gymnasium:hoarding:Hoarding-v0", "--num-envs", 4, "--num-steps", 64]
    train += ["--total-timesteps", 6144, "--num-minibatches", 1, "--update-epochs", 1]
    where = ["--distribution", "single-learner-coarse", "--actors", 1, "--no-tensorboard", "--run-dir", "run"]
    done = rollmill(*train, *where, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "memory grows" in line]
    found = re.fullmatch(
        r"actor/0: its memory grows by about ([\d.]+) kB per environment step, to [\d.]+ [MG]B so far, while "
        r"it steps environments 0 to 3 of gymnasium:hoarding:Hoarding-v0: "
        r"the environment does not free memory, or records all of its steps",
        line,
    )
    assert found and 60 <= float(found[1]) <= 80, line
