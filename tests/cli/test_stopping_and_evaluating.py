"""`--stop-at-return` and `--evaluate-every`, as a user gives them."""

import json
import time

import pytest

SIZES = ["--num-envs", 16, "--num-steps", 16, "--total-timesteps", 16 * 16 * 60, "--network.hidden-sizes", 8]
RUN = ["--run-dir", "run", "--no-tensorboard", "--checkpoint-iterations", 2]


def summary(folder):
    return json.loads((folder / "run/summary.json").read_text())


@pytest.mark.slow
def test_a_training_stops_at_a_return_and_says_so(rollmill, tmp_path):
    done = rollmill("train", "ppo", "CartPole-v1", *SIZES, *RUN, "--stop-at-return", 10)
    assert done.returncode == 0, done.stderr
    found = summary(tmp_path)
    assert found["status"] == "stopped" and found["stopped_by"] == "stop_at_return" and found["iterations"] < 60
    assert f"stopped by stop_at_return after iteration {found['iterations']}: the mean return" in done.stderr
    assert "rollmill resume" in done.stderr and "evaluate it: " in done.stdout
    again = rollmill("resume", "run")
    assert again.returncode == 0 and summary(tmp_path)["stopped_by"] == "stop_at_return"
    last = rollmill("resume", "run", "--stop-at-return", "never")
    assert last.returncode == 0 and summary(tmp_path)["status"] == "finished", last.stderr
    wrong = rollmill("train", "ppo", "CartPole-v1", *SIZES, "--stop-at-return", "nan")
    assert wrong.returncode == 2 and "stop_at_return=nan must be finite" in wrong.stderr


@pytest.mark.slow
def test_evaluations_are_those_of_the_command(rollmill, tmp_path):
    options = ["--evaluate-every", 16 * 16 * 20, "--evaluate-episodes", 6]
    done = rollmill("train", "ppo", "CartPole-v1", *SIZES, *RUN, *options)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    rows = [line for line in lines if "evaluation/return" in line]
    assert [row["iteration"] for row in rows] == [20, 40, 60]
    asked = rollmill("evaluate", "run", "--episodes", 6, "--json")
    found = json.loads(asked.stdout)
    assert (found["mean_return"], found["mean_length"]) == (
        rows[-1]["evaluation/return"],
        rows[-1]["evaluation/length"],
    )
    assert f"last evaluation {rows[-1]['evaluation/return']:.4g}, best " in done.stdout
    best = json.loads(rollmill("evaluate", "run", "--episodes", 6, "--json", "--checkpoint", "best").stdout)
    assert best["mean_return"] == max(row["evaluation/return"] for row in rows)
    refused = rollmill("train", "ppo", "CartPole-v1", *SIZES, "--evaluate-every", -5)
    assert refused.returncode == 2 and "evaluate_every=-5 must be at least 1" in refused.stderr


@pytest.mark.slow
def test_a_training_is_watched_by_another_process_until_it_ends(rollmill, tmp_path):
    sizes = ["--num-envs", 16, "--num-steps", 16, "--total-timesteps", 16 * 16 * 400]
    kept = ["--run-dir", "run", "--checkpoint-iterations", 40, "--keep-last", 99]
    training = rollmill.start("train", "ppo", "CartPole-v1", *sizes, *kept)
    while not (tmp_path / "run/checkpoints").is_dir() and training.poll() is None:
        time.sleep(0.05)
    watched = rollmill("evaluate", "run", "--watch", "--episodes", 2, "--json")
    _, errors = training.communicate(timeout=60)
    assert training.returncode == 0, errors
    rows = [json.loads(line) for line in watched.stdout.splitlines()]
    kept = sorted(int(path.name) for path in (tmp_path / "run/checkpoints").iterdir())
    assert watched.returncode == 0 and [row["iteration"] for row in rows] == kept and kept[-1] == 400, (
        watched.stderr
    )
    asked = json.loads(rollmill("evaluate", "run", "--episodes", 2, "--json").stdout)
    assert asked == rows[-1]
    lines = [json.loads(line) for line in (tmp_path / "run/evaluations.jsonl").read_text().splitlines()]
    assert lines == [{**row, "seed": 0, "train_seed": None, "stochastic": False} for row in rows]


@pytest.mark.parametrize("words", [["--checkpoint", "best"], ["--against", "random"], ["--env-option", "a=1"]])
def test_a_watched_run_takes_no_single_checkpoint(rollmill, tmp_path, words):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text("{}")
    refused = rollmill("evaluate", "run", "--watch", *words)
    assert refused.returncode == 2 and ("--watch" in refused.stderr or "without --env" in refused.stderr)
