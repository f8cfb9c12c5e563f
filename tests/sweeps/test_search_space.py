"""Axes of a sweep, grids of them, and random draws."""

import math

import pytest

from rollmill.core.errors import UsageError
from rollmill.sweeps.creation import typed_axis
from rollmill.sweeps.search_space import Axis, combinations, listed_axis, parse_axis, points
from wordings import raises


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        ("learning_rate=1e-4,3e-4", Axis("learning-rate", ("1e-4", "3e-4"))),
        ("--seed=-1..2", Axis("seed", (-1, 0, 1, 2))),
        ("gamma=0.9..0.99", Axis("gamma", (), 0.9, 0.99)),
        ("lr=log:1e-5..1e-2", Axis("lr", (), 1e-5, 1e-2, True)),
        ("env-option.max_steps=100,200", Axis("env-option.max_steps", ("100", "200"))),
        ("network.torso=mlp,gru", Axis("network.torso", ("mlp", "gru"))),
        ("network.hidden_sizes=64 64,32", Axis("network.hidden-sizes", ("64 64", "32"))),
        ("env_option.max_steps=100,200", Axis("env-option.max_steps", ("100", "200"))),
    ],
)
def test_axes(text, axis):
    assert parse_axis(text) == axis


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning-rate", ("over-has-to-be-option",)),
        ("=1,2", ("over-has-to-be-option",)),
        ("seed=1,,2", ("over-has-empty-value-or",)),
        ("seed=1,1", ("over-has-empty-value-or",)),
        ("seed=5..1", ("over-has-to-be-low",)),
        ("seed=0..100000000", ("over-has-to-be-low", "100,000")),
        ("gamma=a..b", ("over-and-have-to-be",)),
        ("gamma=0.9..0.5", ("over-range-has-to-go",)),
        ("gamma=0.1..nan", ("over-range-has-to-go",)),
        ("lr=log:0.0..1.0", ("over-logarithmic-range-has-to",)),
        ("lr=log:1e-3", ("over-log-needs-range-such",)),
    ],
)
def test_bad_axes(text, message):
    with raises(*message):
        parse_axis(text)


@pytest.mark.parametrize("values", [[{"low": 1}, {"low": 2}], [[1, {"low": 2}], [3]]])
def test_objects_cannot_be_varied(values):
    with raises("over-object-cannot-be-varied", "--over env-option.reset_options"):
        listed_axis("env-option.reset_options", values)


def test_integers_with_a_dash_between_get_a_hint():
    with pytest.raises(UsageError, match=r"--seed 0-2 must be an integer\. hint: --over seed=0\.\.2 for"):
        typed_axis("ppo", parse_axis("seed=0-2"))


def test_a_grid_has_all_combinations():
    axes = [parse_axis("seed=0..2"), parse_axis("lr=1e-3,1e-4")]
    found = points(axes)
    assert len(found) == 6 and found[:2] == [{"seed": 0, "lr": "1e-3"}, {"seed": 0, "lr": "1e-4"}]
    with raises("over-range-numbers-cannot-be"):
        points([parse_axis("gamma=0.1..0.9")])
    with raises("over-is-given-twice-list", "seed"):
        points([axes[0], axes[0]])
    with raises("these-axes-have-combinations-more", "1,000,000", "100,000"):
        points([parse_axis("a=1..1000"), parse_axis("b=1..1000")])


def test_draws_lie_in_their_ranges_and_follow_the_seed():
    axes = [parse_axis("gamma=0.9..0.99"), parse_axis("lr=log:1e-5..1e-1"), parse_axis("seed=0..3")]
    drawn = points(axes, draws=400, seed=1)
    assert drawn == points(axes, draws=400, seed=1) != points(axes, draws=400, seed=2)
    assert all(0.9 <= point["gamma"] <= 0.99 for point in drawn)
    exponents = [math.log10(point["lr"]) for point in drawn]
    assert -5 <= min(exponents) < -4.9 and -1.1 < max(exponents) <= -1
    assert sum(exponents) / 400 == pytest.approx(-3, abs=0.2)
    assert {point["seed"] for point in drawn} == {0, 1, 2, 3}


def test_draws_of_listed_values_differ():
    axes = [parse_axis("seed=0..2"), parse_axis("gamma=0.9,0.99")]
    assert combinations(axes) == 6
    for draws in (1, 4, 6):
        drawn = points(axes, draws=draws, seed=3)
        assert len({tuple(point.items()) for point in drawn}) == draws
    everything = sorted(map(str, points(axes)))
    assert sorted(map(str, points(axes, draws=6, seed=3))) == everything != list(map(str, points(axes, draws=6)))
    assert len(points(axes, draws=50)) == 6, "there are no more"
    huge = [parse_axis(f"option-{number}=0..99999") for number in range(4)]
    assert len(points(huge, draws=3)) == 3
    assert combinations([*axes, parse_axis("learning-rate=1e-4..1e-2")]) is None


def test_draws_do_not_leave_a_range_by_rounding():
    axis = parse_axis("gamma=0.99999991..0.99999994")
    drawn = [point["gamma"] for point in points([axis], draws=20)]
    assert all(0.99999991 <= gamma <= 0.99999994 for gamma in drawn) and len(set(drawn)) == 20


@pytest.mark.parametrize(
    ("values", "integers"),
    [
        ((2, 3, 4, 5), (2, 5)),
        ((1, 3), None),
        (("a", "b"), None),
        ((1.0, 2.0), None),
        ((True, False), None),
        ((-1, 0, 1), (-1, 1)),
        (("0..4",), None),
        ((), None),
    ],
)
def test_integers_in_a_row(values, integers):
    assert Axis("n", values).integers == integers


def test_points_hold_tuples_where_values_are_lists():
    axis = Axis("network.hidden-sizes", ([64, 64], [32]))
    assert points([axis]) == [{"network.hidden-sizes": (64, 64)}, {"network.hidden-sizes": (32,)}]
