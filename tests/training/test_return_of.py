"""The best checkpoint and the goal of a training whose kinds of agents have opposing rewards."""

import json

import numpy as np
import pytest

import rollmill
from agents_envs import opposed
from rollmill.record.metrics import read_metrics
from wordings import raises

QUIET = {"quiet": True, "tensorboard": False, "fusion": "off"}


def zero_sum():
    """One step: the left agent is paid 1 for action 0 and otherwise -1, and the right one loses as much."""
    env = opposed()

    def step(key, state, action, params):
        after = env.step(key, state, action, params)
        return after._replace(reward={"left": after.reward["left"], "right": -after.reward["left"]})

    return env._replace(name="ZeroSum", step=step)


def small(iterations=12, **config):
    network = rollmill.NetworkConfig(hidden_sizes=(4,))
    sizes = {"num_envs": 8, "num_steps": 16, "learning_rate": 0.02, "network": network}
    return rollmill.mappo(zero_sum(), total_timesteps=128 * iterations, **sizes | config)


def lines(run, name):
    return [row for row in read_metrics(run.directory / "metrics.jsonl") if name in row]


@pytest.mark.slow
def test_training_returns_of_one_kind_select_checkpoints_and_end_the_run(tmp_path):
    options = {"checkpoint_iterations": 1, "keep_last": 100, "return_of": "left", **QUIET}
    run = rollmill.train(small(200), run_dir=tmp_path / "run", stop_at_return=0.8, **options)
    assert run.summary["stopped_by"] == "stop_at_return" and run.summary["iterations"] < 200
    assert "the mean return of left of training" in run.summary["stop_reason"]
    rows = lines(run, "episode/returns/left")
    assert len(rows) == run.summary["iterations"] and rows[0]["episode/returns/left"] < 0.8
    # each iteration ends more than a hundred episodes, so the mean of a kind is over the latest iteration alone
    returns = [row["episode/returns/left"] for row in rows]
    assert returns == pytest.approx([row["returns/left"] for row in rows])
    assert all(row["episode/return"] == pytest.approx(0, abs=1e-6) for row in rows)
    assert all(row["episode/returns/right"] == pytest.approx(-row["episode/returns/left"]) for row in rows)
    assert run.summary["final_returns"] == {"left": returns[-1], "right": pytest.approx(-returns[-1])}
    scores = {
        int(path.parent.name): json.loads(path.read_text())["score"]
        for path in (run.directory / "checkpoints").glob("*/record.json")
    }
    saved = {row["iteration"]: row["episode/returns/left"] for row in rows}
    assert {i: score for i, score in scores.items() if score is not None} == saved
    again = rollmill.resume(run.directory, algorithm=small(200), quiet=True)
    assert again.summary["stopped_by"] == "stop_at_return"


@pytest.mark.slow
def test_evaluations_of_one_kind_select_checkpoints_and_end_the_run(tmp_path):
    options = {"evaluate_every": 128, "evaluate_episodes": 16, "evaluate_stochastic": True, "return_of": "right"}
    run = rollmill.train(
        small(), run_dir=tmp_path / "run", keep_last=1, checkpoint_seconds=1e6, **options, **QUIET
    )
    rows = lines(run, "evaluation/returns/right")
    best = max(rows, key=lambda row: (row["evaluation/returns/right"], row["iteration"]))
    assert best["iteration"] < 12  # the right one always loses more
    assert run.summary["best_evaluation_iteration"] == best["iteration"]
    assert run.summary["best_evaluation_return"] == best["evaluation/returns/right"]
    how = {"checkpoint": "best", "episodes": 16, "stochastic": True, "algorithm": small()}
    assert np.mean(rollmill.evaluate(run, **how).agent_returns["right"]) == pytest.approx(
        best["evaluation/returns/right"]
    )
    goal = best["evaluation/returns/right"]
    ended = rollmill.train(small(), run_dir=tmp_path / "ended", stop_at_return=goal, **options, **QUIET)
    assert "the mean return of right of the evaluation" in ended.summary["stop_reason"]


def test_a_kind_that_does_not_exist_is_refused(tmp_path):
    with raises("unknown-name", "kind of agents in return_of", "lefd", "Did you mean left?"):
        rollmill.train(small(), run_dir=tmp_path / "run", return_of="lefd", **QUIET)
    with raises("return-has-no-effect-because", "return_of=left", "CartPole-v1"):
        rollmill.train(rollmill.ppo("CartPole-v1"), run_dir=tmp_path / "run", return_of="left", **QUIET)
    assert not (tmp_path / "run").exists()
