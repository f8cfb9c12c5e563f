"""Figures of recent episodes while a training goes on, and of the best ones so far."""

import pytest

from rollmill.record.aggregates import EpisodeWindow


def window(*iterations):
    """A window after iterations in which `count` episodes ended, each with the same return."""
    after = EpisodeWindow()
    for count, value in iterations:
        after.add(float(count), count * value, count * 10.0)
    return after


@pytest.mark.parametrize(
    ("iterations", "mean", "best"),
    [
        ([], None, None),
        ([(3, 50.0)], 50.0, 50.0),  # too few for a full window: the present is all there is
        ([(3, 50.0), (3, 20.0)], 35.0, 35.0),
        ([(100, 50.0), (100, 20.0)], 20.0, 50.0),
        ([(1, 500.0), (99, 20.0)], 24.8, 24.8),  # one lucky episode is no record
        ([(60, 10.0), (60, 30.0), (60, 20.0)], 25.0, 25.0),
    ],
)
def test_means_over_recent_episodes(iterations, mean, best):
    after = window(*iterations)
    assert (after.mean_return, after.best) == (pytest.approx(mean), pytest.approx(best))
    again = EpisodeWindow.from_json(after.to_json())
    assert (again.mean_return, again.best, again.full) == (after.mean_return, after.best, after.full)


def test_the_best_is_never_below_the_present():
    seeds = [window((100, 20.0), (100, 10.0)), window((5, 400.0))]
    final = sum(seed.mean_return for seed in seeds) / 2
    assert sum(seed.best for seed in seeds) / 2 == 210.0 >= final == 205.0


def test_a_window_holds_the_returns_of_kinds_of_agents():
    after = EpisodeWindow()
    after.add(60.0, 0.0, 600.0, {"left": 30.0, "right": -30.0})
    after.add(40.0, 0.0, 400.0, {"left": -10.0, "right": 10.0})
    assert after.kind_returns == EpisodeWindow.from_json(after.to_json()).kind_returns
    assert after.kind_returns == pytest.approx({"left": 0.2, "right": -0.2})


def test_a_window_of_an_earlier_version_has_returns_of_kinds_once_its_episodes_are_gone():
    after = EpisodeWindow.from_json({"recent": [[60.0, 30.0, 600.0]], "best_return": None})
    after.add(50.0, 25.0, 500.0, {"left": 50.0, "right": 0.0})
    assert after.mean_return == 0.5 and after.kind_returns == {}
    after.add(50.0, 25.0, 500.0, {"left": 0.0, "right": 50.0})
    assert after.kind_returns == {"left": 0.5, "right": 0.5}
