"""Readers and terminals that go away: nothing is lost, and no traceback is shown."""

import json
import os
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
    assert done.stderr == "rollmill: the output cannot be written: No space left on device.\n"
