"""Hooks that stop a training, by values."""

from dataclasses import replace
from functools import partial

import pytest

from rollmill import Stop
from rollmill.hooks import (
    MetricsLogged,
    PolicyEvaluated,
    TrainingRewound,
    TrainingStarted,
    early_stopping,
    hook_name,
    stop_at_return,
)
from wordings import raises


def logged(value, *, episodes=100.0, metric="episode/return"):
    return MetricsLogged(1, 64, seconds=0.1, row={metric: value}, episodes=episodes)


def evaluated(value):
    return PolicyEvaluated(1, 64, seconds=0.1, row={"evaluation/return": value, "episode/return": 0.0}, best=True)


def test_a_return_counts_once_enough_episodes_have_ended():
    hook = stop_at_return(10, episodes=50)
    assert hook(logged(None, episodes=0.0)) is None
    assert hook(logged(12.0, episodes=49.0)) is None
    assert hook(logged(9.99)) is None
    assert hook(evaluated(500.0)) is None
    assert hook(logged(10.0, episodes=50.0)) == Stop(
        "the mean return of training is 10, which reaches the goal of 10"
    )
    assert hook_name(hook) == "stop_at_return"


def test_hooks_are_named_by_where_they_are_defined():
    def own():
        return lambda event: None

    def closure(event):
        return None

    here = "test_hooks_are_named_by_where_they_are_defined"
    assert hook_name(closure) == hook_name(partial(closure)) == f"{here}.closure"
    assert hook_name(own()) == f"{here}.own.<lambda>"
    assert hook_name(early_stopping(patience=1)) == "early_stopping"
    assert hook_name([].append) == "list.append"


def test_a_return_of_evaluations_counts_at_once():
    hook = stop_at_return(-150, evaluated=True)
    assert hook(logged(0.0)) is None and hook(evaluated(-151.0)) is None
    assert (
        hook(evaluated(-149.0)).reason
        == "the mean return of the evaluation is -149, which reaches the goal of -150"
    )


def test_a_goal_of_one_kind_of_agents():
    hook = stop_at_return(5, kind="left")
    assert hook(logged(4.0, metric="episode/returns/left")) is None
    reason = "the mean return of left of training is 6, which reaches the goal of 5"
    assert hook(logged(6.0, metric="episode/returns/left")) == Stop(reason)
    with raises("unknown-name", "episode/returns/left"):
        hook(logged(6.0))


def test_a_goal_of_evaluations_in_a_run_without_evaluations_is_refused(tmp_path):
    config = {"options": {"evaluate_every": None}}
    begun = TrainingStarted(0, 0, directory=tmp_path, config=config, total_env_steps=64, seeds=(0,))
    with raises("early-stopping-waits-for-but", "stop_at_return waits for 'evaluation/return'"):
        stop_at_return(5, evaluated=True)(begun)


@pytest.mark.parametrize("episodes", [0, 101, -1])
def test_a_window_has_at_most_a_hundred_episodes(episodes):
    with raises("episodes-must-lie-between-1", f"episodes={episodes}", 100):
        stop_at_return(1.0, episodes=episodes)


def test_patience_begins_anew_with_each_improvement():
    hook = early_stopping(patience=2, min_change=1.0)
    answers = [hook(evaluated(value)) for value in (1.0, 2.5, 3.5, 3.4)]
    assert answers[:3] == [None, None, None]  # 3.5 is no improvement by more than 1
    assert answers[3] == Stop("evaluation/return has not improved on 2.5 in 2 lines")


def test_smaller_can_be_better_and_undefined_values_do_not_count():
    hook = early_stopping("losses/value", patience=1, smaller_is_better=True)
    answers = [hook(logged(value, metric="losses/value")) for value in (3.0, None, 2.0, 2.0)]
    assert answers == [None, None, None, Stop("losses/value has not improved on 2 in 1 lines")]
    assert hook(evaluated(1.0)) is None


def test_lines_that_a_run_discards_do_not_count():
    hook = early_stopping("episode/return", patience=3)
    line = lambda iteration, value: replace(logged(value), iteration=iteration)
    assert [hook(line(n, value)) for n, value in enumerate((5.0, 4.0, 9.0, 8.0, 8.0), 1)] == [None] * 5
    hook(TrainingRewound(2, 128))
    answers = [hook(line(n, value)) for n, value in enumerate((4.0, 6.0, 5.0, 5.0, 5.0), 3)]
    assert answers == [None] * 4 + [Stop("episode/return has not improved on 6 in 3 lines")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patience": 0}, ("patience-must-be-at-least", "0")),
        ({"patience": -3}, ("patience-must-be-at-least", "-3")),
        ({"patience": 1, "min_change": -1}, ("min-change-must-be-at", "-1.0")),
    ],
)
def test_patience_that_makes_no_sense_is_refused(options, message):
    with raises(*message):
        early_stopping(**options)


def test_metrics_that_a_run_never_logs_are_refused():
    with raises("unknown-name", "unknown metric 'episode/retrun'", "episode/return?"):
        early_stopping("episode/retrun", patience=1)(logged(1.0))
    with raises("unknown-name", "unknown metric of evaluations 'evaluation/retrun'", "evaluation/return"):
        early_stopping("evaluation/retrun", patience=1)(evaluated(1.0))


def test_evaluations_that_a_run_never_makes_are_refused(tmp_path):
    def started(every):
        config = {"options": {"evaluate_every": every}}
        return TrainingStarted(0, 0, directory=tmp_path, config=config, total_env_steps=1, seeds=(0,))

    hook = early_stopping(patience=1)
    with raises("early-stopping-waits-for-but", "evaluate_every"):
        hook(started(None))
    assert hook(started(100)) is None
