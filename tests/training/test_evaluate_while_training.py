"""Evaluations while training: the numbers of `rollmill evaluate`, and a training that they do not change."""

import json

import numpy as np
import pytest

import rollmill
from rollmill.hooks import MetricsLogged, PolicyEvaluated
from rollmill.record.checkpoints import Checkpoints
from rollmill.record.metrics import read_metrics
from rollmill.training import evaluations as while_training
from small_ppo import SIZES, TINY
from wordings import raises

QUIET = {"quiet": True, "tensorboard": False}
EVERY = {"evaluate_every": 64 * 3, "evaluate_episodes": 5}
SELDOM = {"evaluate_every": 64 * 290, "evaluate_episodes": 5}
THREADS = {"distribution": "single-learner-coarse", "place": "threads"}
SLOW = pytest.mark.slow


def small(env="CartPole-v1", *, iterations=10, algorithm="ppo", **config):
    return getattr(rollmill, algorithm)(env, total_timesteps=64 * iterations, **(SIZES | config))


def evaluations(run):
    return [row for row in read_metrics(run.directory / "metrics.jsonl") if "evaluation/return" in row]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """A run that was evaluated, with its events, and all of its checkpoints."""
    events, folder = [], tmp_path_factory.mktemp("evaluated")
    options = {**EVERY, "checkpoint_iterations": 1, "keep_last": 100, "hooks": [events.append], **QUIET}
    return rollmill.train(small(), run_dir=folder / "run", **options), events


@pytest.mark.slow
def test_an_evaluation_is_that_of_the_command_at_the_same_checkpoint(evaluated):
    run, _ = evaluated
    rows = evaluations(run)
    assert [row["iteration"] for row in rows] == [3, 6, 9, 10]
    for row in rows:
        episodes = rollmill.evaluate(run.directory, checkpoint=row["iteration"], episodes=5)
        assert row["env_steps"] == 64 * row["iteration"] and row["evaluation/episodes"] == 5
        assert row["evaluation/return"] == np.mean(episodes.returns, dtype=np.float64)
        assert row["evaluation/length"] == np.mean(episodes.lengths)
        assert row["evaluation/return_min"] == episodes.returns.min()
        assert row["evaluation/return_max"] == episodes.returns.max()
        assert row["evaluation/return_std"] == pytest.approx(np.std(episodes.returns), rel=1e-6)


def test_evaluations_are_events_and_do_not_change_the_training(tmp_path, evaluated):
    run, events = evaluated
    found = [event for event in events if isinstance(event, PolicyEvaluated)]
    assert [event.row for event in found] == evaluations(run)
    returns = [event.row["evaluation/return"] for event in found]
    assert [event.best for event in found] == [x >= max(returns[:i], default=-1) for i, x in enumerate(returns)]
    plain = rollmill.train(small(), run_dir=tmp_path / "run", **QUIET)
    assert plain.summary["weights_sha256"] == run.summary["weights_sha256"]
    names = ("episode/return", "losses/policy", "losses/gradient_norm")
    logged = [event.row for event in events if isinstance(event, MetricsLogged)]
    for row, other in zip(logged, read_metrics(plain.directory / "metrics.jsonl"), strict=True):
        assert [row[name] for name in names] == [other[name] for name in names]
    assert "evaluation_return" not in plain.summary


def test_the_best_checkpoint_is_that_of_the_best_evaluation(tmp_path, evaluated):
    run, _ = evaluated
    best = max(evaluations(run), key=lambda row: (row["evaluation/return"], row["iteration"]))
    assert run.summary["best_evaluation_return"] == best["evaluation/return"]
    episodes = rollmill.evaluate(run.directory, checkpoint="best", episodes=5)
    assert np.mean(episodes.returns, dtype=np.float64) == best["evaluation/return"]
    few = rollmill.train(small(), run_dir=tmp_path / "run", keep_last=1, checkpoint_seconds=1e6, **EVERY, **QUIET)
    kept = {int(path.name) for path in (few.directory / "checkpoints").iterdir()}
    assert kept == {10, few.summary["best_evaluation_iteration"]}


def test_of_equal_best_evaluations_the_newest_has_the_best_checkpoint(tmp_path, monkeypatch):
    play, returns = while_training._metrics, iter([1.0, 3.0, 3.0, 2.0])
    tied = lambda found, seeds: play(found, seeds) | {"evaluation/return": next(returns)}
    monkeypatch.setattr(while_training, "_metrics", tied)
    run = rollmill.train(small(), run_dir=tmp_path / "run", keep_last=1, checkpoint_seconds=1e6, **EVERY, **QUIET)
    assert [row["iteration"] for row in evaluations(run)] == [3, 6, 9, 10]
    assert (run.summary["best_evaluation_iteration"], run.summary["best_evaluation_return"]) == (9, 3.0)
    assert {path.name for path in (run.directory / "checkpoints").iterdir()} == {"9", "10"}
    assert Checkpoints(run.directory / "checkpoints", read_only=True).best() == 9


@pytest.mark.slow
def test_a_run_that_goes_on_evaluates_where_one_that_never_stopped_does(tmp_path, evaluated):
    run, _ = evaluated
    stop = lambda event: rollmill.Stop("to go on") if event.iteration >= 5 else None
    first = rollmill.train(
        small(), run_dir=tmp_path / "run", hooks=[stop], checkpoint_iterations=1, **EVERY, **QUIET
    )
    assert 5 <= first.summary["iterations"] < 10
    again = rollmill.resume(first.directory, quiet=True)
    without_times = lambda rows: [{k: v for k, v in row.items() if "seconds" not in k} for row in rows]
    due = {row["iteration"] for row in evaluations(run)}
    made = evaluations(again)
    assert without_times([row for row in made if row["iteration"] in due]) == without_times(evaluations(run))
    assert {row["iteration"] for row in made} == due | {first.summary["iterations"]}
    assert again.summary["weights_sha256"] == run.summary["weights_sha256"]
    assert again.summary["best_evaluation_return"] == max(row["evaluation/return"] for row in made)


@pytest.mark.slow
@pytest.mark.parametrize("placement", [{}, THREADS], ids=["program", "threads"])
def test_a_training_that_a_hook_stops_is_evaluated_at_its_end(tmp_path, placement):
    stop = lambda event: rollmill.Stop("enough") if isinstance(event, MetricsLogged) else None
    options = {"run_dir": tmp_path / "run", "hooks": [stop], **SELDOM, **placement, **QUIET}
    run = rollmill.train(small(iterations=300), **options)
    row = evaluations(run)[-1]
    assert row["iteration"] == run.summary["iterations"] < 300
    assert run.summary["evaluation_return"] == row["evaluation/return"]
    episodes = rollmill.evaluate(run.directory, episodes=5, checkpoint="best")
    assert row["evaluation/return"] == np.mean(episodes.returns, dtype=np.float64)


@pytest.mark.slow
def test_a_training_whose_hook_failed_is_not_evaluated_at_its_end(tmp_path):
    def fail(event):
        if isinstance(event, MetricsLogged):
            raise ValueError("a mistake")

    with raises("hook-failed-at", "test_a_training_whose_hook_failed", "MetricsLogged"):
        rollmill.train(small(iterations=300), run_dir=tmp_path / "run", hooks=[fail], **SELDOM, **QUIET)
    assert not [row for row in read_metrics(tmp_path / "run/metrics.jsonl") if "evaluation/return" in row]


@pytest.mark.slow
def test_workers_are_evaluated_some_iterations_later(tmp_path):
    graph = small(iterations=300)
    run = rollmill.train(
        graph, run_dir=tmp_path / "run", evaluate_every=64 * 60, evaluate_episodes=5, **THREADS, **QUIET
    )
    rows = evaluations(run)
    assert len(rows) >= 2 and rows[-1]["iteration"] == 300
    assert rows[0]["iteration"] >= 60
    episodes = rollmill.evaluate(run.directory, episodes=5)
    assert rows[-1]["evaluation/return"] == np.mean(episodes.returns, dtype=np.float64)


@pytest.mark.slow
def test_each_seed_is_evaluated(tmp_path):
    run = rollmill.train(small(iterations=3), run_dir=tmp_path / "run", num_seeds=2, seed=4, **EVERY, **QUIET)
    (row,) = evaluations(run)
    each = [rollmill.evaluate(run.directory, train_seed=seed, episodes=5).returns.mean() for seed in (4, 5)]
    assert [row["evaluation/return_seed4"], row["evaluation/return_seed5"]] == pytest.approx(each)
    assert row["evaluation/return"] == pytest.approx(np.mean(each)) and row["evaluation/episodes"] == 10


@pytest.mark.slow
def test_agents_of_each_seed_are_evaluated(tmp_path):
    graph = small("TagGridWorld-Small-v0", iterations=3, algorithm="ippo")
    run = rollmill.train(graph, run_dir=tmp_path / "run", num_seeds=2, **EVERY, **QUIET)
    (row,) = evaluations(run)
    for kind in ("tagger", "runner"):
        found = [
            rollmill.evaluate(run.directory, train_seed=seed, episodes=5).agent_returns[kind] for seed in (0, 1)
        ]
        each = [row[f"evaluation/returns/{kind}_seed{seed}"] for seed in (0, 1)]
        assert each == pytest.approx([part.mean() for part in found])
        assert row[f"evaluation/returns/{kind}"] == pytest.approx(np.mean(each))


@pytest.mark.slow
def test_a_replay_memory_is_evaluated_on_a_state_that_is_there(tmp_path):
    config = {"num_envs": 8, "num_steps": 8, "total_timesteps": 640, "network": TINY, "buffer_size": 320}
    graph = rollmill.dqn("CartPole-v1", batch_size=8, learning_starts=64, **config)
    run = rollmill.train(graph, run_dir=tmp_path / "run", **EVERY, **QUIET)
    plain = rollmill.train(graph, run_dir=tmp_path / "plain", **QUIET)
    assert plain.summary["weights_sha256"] == run.summary["weights_sha256"]
    assert [row["iteration"] for row in evaluations(run)] == [3, 6, 9, 10]


@pytest.mark.parametrize(
    ("algorithm", "env"),
    [("mappo", "TagGridWorld-Small-v0"), pytest.param("ppo", "gymnasium:CartPole-v1", marks=SLOW)],
)
@pytest.mark.slow
def test_several_agents_and_environments_of_the_host_are_evaluated(tmp_path, algorithm, env):
    graph = small(env, iterations=3, algorithm=algorithm)
    run = rollmill.train(graph, run_dir=tmp_path / "run", **EVERY, **QUIET)
    episodes = rollmill.evaluate(run.directory, episodes=5)
    assert evaluations(run)[-1]["evaluation/return"] == np.mean(episodes.returns, dtype=np.float64)


@pytest.mark.slow
def test_evaluations_have_a_seed_and_an_environment_of_their_own(tmp_path):
    options = {"evaluate_seed": 3, "evaluate_stochastic": True, "evaluate_env_options": ("length=9",)}
    graph = small("TMaze-v0", iterations=3)
    run = rollmill.train(graph, run_dir=tmp_path / "run", **options, **EVERY, **QUIET)
    (row,) = evaluations(run)
    episodes = rollmill.evaluate(
        run.directory, env="TMaze-v0", env_options={"length": 9}, episodes=5, seed=3, stochastic=True
    )
    assert row["evaluation/length"] == np.mean(episodes.lengths)
    assert row["evaluation/return"] == np.mean(episodes.returns, dtype=np.float64)
    saved = json.loads((run.directory / "config.json").read_text())["options"]
    assert saved["evaluate_env_options"] == ["length=9"]


def test_a_training_stops_at_the_return_of_an_evaluation(tmp_path):
    run = rollmill.train(small(), run_dir=tmp_path / "run", stop_at_return=-1.0, **EVERY, **QUIET)
    assert run.summary["stopped_by"] == "stop_at_return" and run.summary["iterations"] < 10
    assert "the mean return of the evaluation is" in run.summary["stop_reason"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"evaluate_every": -5}, ("must-be-at-least-1", "evaluate_every", "-5")),
        ({"evaluate_every": 0}, ("must-be-at-least-1", "evaluate_every", "0")),
        ({"evaluate_episodes": 7}, ("has-no-effect-without-evaluate", "evaluate_episodes", "7")),
        ({**EVERY, "evaluate_episodes": 0}, ("episodes-must-be-at-least", "evaluate_", "0")),
        (
            {**EVERY, "evaluate_episodes": 10**8},
            ("expected-number", "evaluate_episodes", "100000000", "at most 10000000"),
        ),
        ({**EVERY, "evaluate_seed": 2**32}, ("out-of-bounds", "evaluate_seed", "4294967296")),
        (
            {**EVERY, "evaluate_env_options": ("colour",)},
            ("has-to-be-key-value", "--evaluate-env-options", "'colour'"),
        ),
        ({**EVERY, "evaluate_env_options": ("colour=3",)}, ("has-no-option-options", "CartPole-v1")),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_is_written(tmp_path, options, message):
    with raises(*message):
        rollmill.train(small(), run_dir=tmp_path / "run", **options, **QUIET)
    assert not (tmp_path / "run").exists()


def test_other_options_of_an_environment_made_in_python_are_refused(tmp_path):
    env = rollmill.time_limit(rollmill.make("CartPole-v1"), 20)
    with raises("evaluate-env-options-environment-was", "CartPole-v1"):
        rollmill.train(small(env), run_dir=tmp_path / "run", evaluate_env_options=("x=1",), **EVERY, **QUIET)
