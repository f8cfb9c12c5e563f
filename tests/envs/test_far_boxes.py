"""Boxes of actions that a Gaussian policy with mean 0 and standard deviation 1 hardly reaches."""

import numpy as np
import pytest
from gymnasium import spaces

from rollmill.envs.box_coverage import far_boxes


def box(low, high):
    return spaces.Box(low, high, (2,), np.float32)


# By hand, from a table of the normal distribution: within +-0.1 lie 8 %, within +-0.4 31 %, beyond 2 are 2.3 %.
# Of a width of 20, four units lie within two standard deviations: a fifth. Of a width of 16, a quarter.
@pytest.mark.parametrize(
    ("low", "high"),
    [
        (290, 300),
        (0, 1000),
        (-1000, 1000),
        (-0.01, 0.01),
        (-0.1, 0.1),
        (-10, 10),
        (0, 10),
        (2, 3),
        (-300, -299),
        (5, np.inf),
        (-np.inf, -5),
        (-1e38, 1e38),
    ],
)
def test_far_boxes(low, high):
    (far,) = far_boxes(box(low, high))
    assert (far.low, far.high, far.where) == (np.float32(low), np.float32(high), "")
    assert f"between {np.float32(low):g} and {np.float32(high):g}" in str(far)


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (-1, 1),
        (-2, 2),
        (-0.4, 0.4),
        (-3, 3),
        (0, 1),
        (-8, 8),
        (-np.inf, np.inf),
        (0, np.inf),
        (7, 7),
        (-3.4e38, 3.4e38),
    ],
)
def test_near_boxes(low, high):
    assert far_boxes(box(low, high)) == []


def test_the_share_of_the_gaussian():
    # The normal distribution between 1 and 3: 0.99865 - 0.84134; between -0.05 and 0.05: 2 * 0.01994.
    assert far_boxes(box(-0.05, 0.05))[0].inside == pytest.approx(0.03988, abs=1e-5)
    assert far_boxes(box(2, 3))[0].inside == pytest.approx(0.99865 - 0.97725, abs=1e-5)
    assert far_boxes(box(1, 3)) == []  # half of it lies below 2, and 16 % of the actions lie within


def test_another_standard_deviation_reaches_another_range():
    assert far_boxes(box(-1000, 1000), std=500.0) == []
    assert far_boxes(box(-1, 1), std=500.0)
    assert far_boxes(box(290, 300), std=10.0)


def test_the_worst_dimension_is_named():
    space = spaces.Box(np.float32([-1, 0, 290]), np.float32([1, 100, 300]))
    (far,) = far_boxes(space)
    assert (far.low, far.high) == (290, 300)


def test_kinds_of_agents_are_named():
    space = spaces.Dict(
        {
            "pump": box(0, 500),
            "valve": box(-1, 1),
            "switch": spaces.Discrete(3),
            "gear": spaces.Box(0, 90, (2,), int),
        }
    )
    (far,) = far_boxes(space)
    assert far.where == "['pump']" and "the actions['pump'] lie between 0 and 500" in str(far)


def test_the_way_out():
    assert "--transform rescale-actions" in str(far_boxes(box(0, 1000))[0])
    assert "--network.squash-actions" in str(far_boxes(box(0, 1000))[0])
    # Both need two bounds.
    assert "rescale" not in str(far_boxes(box(5, np.inf))[0])
    assert "in the environment's step" in str(far_boxes(box(5, np.inf))[0])
