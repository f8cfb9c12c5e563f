"""`rollmill sweep`: trials as processes, their failures, and going on after the sweep was killed."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollmill.api.sweeps import share_of_cores

TINY = ["--num-envs", "4", "--num-steps", "8", "--num-minibatches", "1", "--network.hidden-sizes", "4"]
SHORT = ["ppo", "CartPole-v1", "--total-timesteps", "128", *TINY]
LONG = ["ppo", "CartPole-v1", "--total-timesteps", str(4 * 8 * 10**6), "--checkpoint-seconds", "0.2", *TINY]


def sweep(*words):
    return [sys.executable, "-m", "rollmill", "sweep", *map(str, words)]


def table(folder: Path) -> list[dict]:
    with (folder / "table.csv").open() as file:
        return list(csv.DictReader(file))


def wait_until(happens, process):
    deadline = time.monotonic() + 240
    while not happens():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def checkpoints(run: Path) -> list[int]:
    return sorted(int(path.name) for path in (run / "checkpoints").glob("[0-9]*"))


def trial_process(run: Path) -> int | None:
    """The process that trains a run, by its command line."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"rollmill.cli.trial" in words and str(run).encode() in words:
            return int(folder.name)
    return None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ppo"], "needs an algorithm and an environment first"),
        (SHORT, "A sweep needs values to try"),
        ([*SHORT, "--over", "seed"], "has to be OPTION=V1,V2"),
        ([*SHORT, "--over", "learning-rte=1,2"], r"trial 0 \(learning-rte=1\): "),
        ([*SHORT, "--over", "gamma=0.9,1.5"], r"trial 1 \(gamma=1.5\): .*gamma=1.5"),
        ([*SHORT, "--over", "env-option.max_steps=1e,True"], "trial 1 .*write true"),
        ([*SHORT, "--over", "seed=0..1", "--at-once", "0"], "--at-once 0 has to be at least 1"),
        ([*SHORT, "--over", "seed=0..1", "--random", "0"], "--random 0 has to be at least 1"),
        ([*SHORT, "--over", "seed=0..1", "--run-dir", "x"], "the sweep's directory is --sweep-dir"),
        ([*SHORT, "--over", "seed=0..1", "--metric", "speed"], "invalid choice: 'speed'"),
        (["pppo", "CartPole-v1", "--over", "seed=0..1"], "unknown algorithm 'pppo'"),
        (["--resume", "/nonexistent"], "holds no sweep"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(words, message, tmp_path, monkeypatch):
    from rollmill.cli import sweep as command
    from rollmill.core.errors import UsageError

    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        command.run(words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("slots", "cores"), [(1, 4), (2, 4), (3, 4), (4, 4), (8, 4)])
def test_trials_share_the_cores(slots, cores, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(10, 10 + cores)))
    shares = [share_of_cores(slot, slots) for slot in range(slots)]
    assert all(shares) and {core for share in shares for core in share} == set(range(10, 10 + cores))
    if slots <= cores:
        assert sum(map(len, shares)) == cores


def test_a_failed_trial_does_not_stop_the_others(tmp_path):
    """The second environment does not exist, which only its training finds out."""
    words = [*SHORT, "--over", "environment=CartPole-v1,CartPole-v9", "--over", "learning-rate=1e-3"]
    done = subprocess.run(sweep(*words, "--sweep-dir", tmp_path / "sweep"), capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert (
        "trial 1 (environment=CartPole-v9, learning-rate=1e-3) failed with exit code 2: rollmill:" in done.stdout
    )
    first, second = table(tmp_path / "sweep")
    assert (first["trial"], first["status"], first["env_steps"]) == ("0", "finished", "128")
    assert (second["trial"], second["status"], second["final_return"]) == ("1", "open", "")
    summary = json.loads((tmp_path / "sweep/trials/0/summary.json").read_text())
    assert summary["status"] == "finished"
    again = subprocess.run(sweep(*words, "--sweep-dir", tmp_path / "sweep"), capture_output=True, text=True)
    assert again.returncode == 2 and "already holds a sweep: `rollmill sweep --resume" in again.stderr


@pytest.mark.slow
def test_killed_sweeps_and_trials_lose_nothing(tmp_path):
    folder = tmp_path / "sweep"
    runs = [folder / "trials" / name for name in "01"]
    first = subprocess.Popen(sweep(*LONG, "--over", "seed=0..1", "--sweep-dir", folder), stdout=subprocess.PIPE)
    wait_until(lambda: all(len(checkpoints(run)) > 1 for run in runs), first)
    killed, before = trial_process(runs[0]), checkpoints(runs[0])[-1]
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: trial_process(runs[0]) not in (None, killed) and checkpoints(runs[0])[-1] > before, first)
    second = subprocess.run(sweep("--resume", folder), capture_output=True, text=True)
    assert second.returncode == 2 and "is being written by process" in second.stderr
    first.kill()
    printed = first.communicate()[0].decode()
    assert "was ended by SIGKILL; it is resumed" in printed
    deadline = time.monotonic() + 60
    while any(trial_process(run) for run in runs):  # they stop with a checkpoint when their sweep is gone
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert all(json.loads((run / "summary.json").read_text())["status"] == "stopped" for run in runs)
    before = [checkpoints(run)[-1] for run in runs]
    third = subprocess.Popen(sweep("--resume", folder), stdout=subprocess.DEVNULL)
    wait_until(lambda: all(checkpoints(run)[-1] > last for run, last in zip(runs, before, strict=True)), third)
    third.send_signal(signal.SIGTERM)
    assert third.wait(timeout=60) == 143
    assert [row["status"] for row in table(folder)] == ["stopped", "stopped"]
    assert not any(trial_process(run) for run in runs)
