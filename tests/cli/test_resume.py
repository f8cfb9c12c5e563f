"""Runs that are killed or stopped go on as if they never had been."""

import json
import random
import signal
import time
from functools import partial
from pathlib import Path

import pytest

SIZES = ["--num-envs", 16, "--num-steps", 16, "--total-timesteps", 16 * 16 * 60, "--learning-rate", 1e-3]
ENDLESS = [*SIZES, "--total-timesteps", 10**8, "--fusion", "off"]  # a run of that length would tune kernels first
RUN = ["--run-dir", "run", "--no-tensorboard", "--log-every", 1]
ALWAYS = ["--checkpoint-iterations", 1, "--no-tensorboard"]

REPLAY = [
    *("--num-envs", 16, "--num-steps", 4, "--total-timesteps", 16 * 4 * 60, "--learning-rate", 1e-3),
    *("--buffer-size", 16 * 60, "--batch-size", 64, "--learning-starts", 128, "--gradient-steps", 2),
]
SEQUENCES = ["--sequence-length", 8, "--burn-in", 2, "--network.hidden-sizes", 8, "--network.recurrent-size", 8]
SEARCH = [
    *("--num-envs", 16, "--num-steps", 4, "--total-timesteps", 16 * 4 * 60, "--num-minibatches", 2),
    *("--num-simulations", 8, "--network.hidden-sizes", 16),
]
COARSE = ["--distribution", "single-learner-coarse", "--actors", 2]
VARIANTS = {
    "plain": ["ppo", "CartPole-v1", *SIZES],
    "normalised": ["ppo", "CartPole-v1", *SIZES, "--normalize-observations", "--normalize-rewards"],
    "recurrent": ["ppo", "CartPole-v1", *SIZES, "--network.torso", "gru"],
    "two-devices": ["ppo", "CartPole-v1", *SIZES, "--devices", 2],
    "two-seeds": ["ppo", "CartPole-v1", *SIZES, "--num-seeds", 2],
    "replay": ["sac", "Pendulum-v1", *REPLAY],
    "replay-two-devices": ["dqn", "CartPole-v1", *REPLAY, "--prioritised", "--devices", 2],
    "replay-two-seeds": ["dqn", "CartPole-v1", *REPLAY, "--num-seeds", 2],
    "replay-apart": ["dqn", "CartPole-v1", *REPLAY, "--prioritised", *COARSE],
    "replay-apart-continuous": ["sac", "Pendulum-v1", *REPLAY, *COARSE],
    "replay-recurrent": ["rsac", "Pendulum-v1", *REPLAY, *SEQUENCES],
    "team": ["qmix", "TwoStepGame-v0", *REPLAY],
    "team-two-devices": ["vdn", "TwoStepGame-v0", *REPLAY, "--devices", 2],
    "search": ["alphazero", "TicTacToe-v0", *SEARCH],
    "search-two-devices": ["alphazero", "TicTacToe-v0", *SEARCH, "--devices", 2],
    "search-apart": ["alphazero", "TicTacToe-v0", *SEARCH, *COARSE],
}


def summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


def iterations_logged(run: Path) -> list[int]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["iteration"] for line in lines]


LONG_SECONDS = 500
"""Only a test that fails waits so long: it ends before the limit of all tests, and says why."""


def wait_for_checkpoint(run: Path, at_least: int, process, seconds: float = LONG_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done = [int(p.name) for p in (run / "checkpoints").glob("[0-9]*") if p.name.isdecimal()]
        if done and max(done) >= at_least:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    raise AssertionError(f"no checkpoint {at_least} within {seconds} s")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.slow
def test_killed_and_resumed_is_never_stopped(rollmill, tmp_path, variant):
    train = ["train", *VARIANTS[variant], *ALWAYS]
    whole = rollmill(*train, "--run-dir", "whole")
    assert whole.returncode == 0, whole.stderr
    process = rollmill.start(*train, "--run-dir", "killed")
    wait_for_checkpoint(tmp_path / "killed", 10, process)
    process.kill()
    process.communicate()
    assert not (tmp_path / "killed/summary.json").exists(), "the run ended before it could be killed"
    resumed = rollmill("resume", "killed")
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed from iteration" in resumed.stderr
    ends = [summary(tmp_path / name) for name in ("whole", "killed")]
    assert ends[0]["weights_sha256"] == ends[1]["weights_sha256"]
    assert ends[0]["final_return"] == ends[1]["final_return"]
    assert ends[0]["best_return"] == ends[1]["best_return"]
    assert iterations_logged(tmp_path / "killed") == list(range(1, 61))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_ends_the_iteration_saves_and_says_how_to_go_on(rollmill, tmp_path, name, code):
    process = rollmill.start("train", "ppo", "CartPole-v1", *ENDLESS, *RUN)
    wait_for_checkpoint(tmp_path / "run", 0, process)
    time.sleep(0.5)
    process.send_signal(getattr(signal, name))
    _, errors = process.communicate(timeout=LONG_SECONDS)
    assert process.returncode == code, errors
    assert "rollmill resume run" in errors and f"stopped by {name}" in errors
    assert "Traceback" not in errors
    stopped = summary(tmp_path / "run")
    assert stopped["status"] == "stopped"
    newest = max(int(p.name) for p in (tmp_path / "run/checkpoints").iterdir())
    assert newest == stopped["iterations"] == iterations_logged(tmp_path / "run")[-1]


@pytest.mark.slow
def test_ctrl_c_while_it_compiles_ends_it(rollmill):
    listening = partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # whatever started the tests
    sizes = ["--network.hidden-sizes", 67, "--run-dir", "run"]
    process = rollmill.start("train", "ppo", "CartPole-v1", *SIZES, *sizes, preexec_fn=listening)
    assert "compiling" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=LONG_SECONDS)
    assert process.returncode == 130, errors
    lost = "stopped by SIGINT after iteration"  # in a finaliser, where Python lets nothing out
    twice = "compiling ...\n"  # where the signal came while Python cleared the buffer that it had written
    assert errors.removeprefix(twice) == "rollmill: interrupted\n" or lost in errors


def kill_at_random_moments(rollmill, tmp_path, times: int, seed: int) -> None:
    rng = random.Random(seed)
    train = ["train", "ppo", "CartPole-v1", *SIZES, *ALWAYS, "--total-timesteps", 16 * 16 * 4000]
    process = rollmill.start(*train, "--run-dir", "run")
    wait_for_checkpoint(tmp_path / "run", 0, process)
    reached = -1
    for _ in range(times):
        time.sleep(rng.uniform(0.0, 4.0))
        assert process.poll() is None, process.communicate()
        process.kill()
        process.communicate()
        newest = max(int(p.name) for p in (tmp_path / "run/checkpoints").iterdir() if p.name.isdecimal())
        assert newest >= reached, "a checkpoint that was there is gone"
        reached = newest
        process = rollmill.start("resume", "run")
    wait_for_checkpoint(tmp_path / "run", reached + 1, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=LONG_SECONDS)
    assert process.returncode in (0, 130), errors
    last = summary(tmp_path / "run")["iterations"]
    assert last > reached
    assert iterations_logged(tmp_path / "run") == list(range(1, last + 1))


@pytest.mark.slow
def test_three_kills_at_random_moments(rollmill, tmp_path):
    kill_at_random_moments(rollmill, tmp_path, 3, seed=0)


@pytest.mark.slow
def test_twenty_kills_at_random_moments(rollmill, tmp_path):
    kill_at_random_moments(rollmill, tmp_path, 20, seed=1)


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_passed_over(rollmill, tmp_path):
    train = ["train", "ppo", "CartPole-v1", *SIZES, *ALWAYS]
    assert rollmill(*train, "--run-dir", "run").returncode == 0
    before = summary(tmp_path / "run")
    for path in (tmp_path / "run/checkpoints/60").rglob("*"):
        if path.is_file() and path.stat().st_size > 100:
            path.write_bytes(path.read_bytes()[:-50])
    (tmp_path / "run/summary.json").unlink()
    resumed = rollmill("resume", "run")
    assert resumed.returncode == 0, resumed.stderr
    assert "checkpoint 60" in resumed.stderr and "damaged" in resumed.stderr
    assert "resumed from iteration 59" in resumed.stderr
    assert summary(tmp_path / "run")["weights_sha256"] == before["weights_sha256"]


@pytest.mark.slow
def test_a_run_that_is_being_written_is_refused(rollmill, tmp_path):
    train = ["train", "ppo", "CartPole-v1", *ENDLESS, "--run-dir", "run"]
    process = rollmill.start(*train)
    wait_for_checkpoint(tmp_path / "run", 0, process)
    second = rollmill("resume", "run")
    assert process.poll() is None
    process.kill()
    process.communicate()
    assert second.returncode == 2
    assert f"process {process.pid} is writing to" in second.stderr and "compil" not in second.stderr
