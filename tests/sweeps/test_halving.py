"""Asynchronous successive halving, by tables."""

import pytest

from rollmill.sweeps.halving import CurvePoint, HalvingRule, HalvingState, default_grace_steps, judge
from wordings import raises


def arrivals(rule, results, steps=None):
    """Whether each of the trials, which come to a rung in this order, goes on."""
    state = HalvingState()
    judged = [
        state.judge(rule, str(n), [CurvePoint(steps or rule.grace_steps, float(r))]) for n, r in enumerate(results)
    ]
    assert all(len(each) == 1 for each in judged)
    return [each[0].stays for each in judged]


@pytest.mark.parametrize(
    ("factor", "results", "stays"),
    [
        # The k-th best goes on, with k = floor(trials / factor), and at least the best.
        (3, [1, 2, 3], [True, True, True]),
        (3, [3, 2, 1], [True, False, False]),
        (3, [5, 1, 2, 3, 4, 4.5], [True, False, False, False, False, True]),  # of six, two go on
        (
            3,
            [9, 8, 7, 6, 5, 8.5, 1, 2, 8.2],
            [True] + [False] * 4 + [True] + [False] * 2 + [True],
        ),  # of nine, three
        (2, [4, 3, 2, 3.5], [True, False, False, True]),
        (4, [4, 3, 2, 3.5, 1, 0, 0, 3.9], [True] + [False] * 6 + [True]),
        (3, [500, 500, 500, 499], [True, True, True, False]),  # ties go on
        (3, [-200, -150, -180], [True, True, False]),
    ],
)
def test_the_best_of_a_rung_go_on(factor, results, stays):
    assert arrivals(HalvingRule(100, factor), results) == stays


def test_the_rungs_of_the_paper():
    """Figure 1 of the paper: 9 trials, factor 3, resources 1, 3 and 9; the best come first, so 9, 3 and 1 run."""
    rule, state = HalvingRule(1, 3), HalvingState()
    curves = {str(n): [CurvePoint(steps, 9.0 - n) for steps in (1, 3, 9)] for n in range(9)}
    for steps in range(3):  # all trials make their first steps, then the rest theirs
        for name, curve in curves.items():
            state.judge(rule, name, curve[: steps + 1])
    assert {steps: sorted(results) for steps, results in state.rungs.items()} == {
        1: [str(n) for n in range(9)],
        3: ["0"],
        9: ["0"],
    }
    assert sorted(state.stopped) == [str(n) for n in range(1, 9)]


def test_worse_first_wastes_no_trial():
    rule, state = HalvingRule(1, 3), HalvingState()
    for n in range(9):  # each better than all before it: none can be told from the best
        assert [j.steps for j in state.judge(rule, str(n), [CurvePoint(s, float(n)) for s in (1, 3, 9)])] == [
            1,
            3,
            9,
        ]
    assert not state.stopped


def test_a_result_is_the_first_at_a_rung_or_later():
    rule = HalvingRule(10, 2)
    curve = [CurvePoint(9, 1.0), CurvePoint(12, 2.0), CurvePoint(19, 3.0), CurvePoint(45, 4.0)]
    assert [(j.steps, j.result) for j in judge(rule, {}, "a", curve)] == [(10, 2.0), (20, 4.0), (40, 4.0)]
    assert judge(rule, {}, "a", curve[:1]) == []


def test_no_trial_is_judged_twice_at_a_rung():
    rule, state = HalvingRule(10, 3), HalvingState()
    assert len(state.judge(rule, "a", [CurvePoint(10, 1.0)])) == 1
    assert state.judge(rule, "a", [CurvePoint(10, 1.0)]) == []  # read again after the sweep was killed
    assert [j.steps for j in state.judge(rule, "a", [CurvePoint(10, 1.0), CurvePoint(30, 1.0)])] == [30]
    stopped = state.judge(rule, "b", [CurvePoint(10, 0.5), CurvePoint(30, 9.0)])
    assert [(j.steps, j.place, j.trials, j.stays) for j in stopped] == [(10, 2, 2, False)]
    assert state.judge(rule, "b", [CurvePoint(30, 9.0)]) == [] and 30 in state.rungs
    state.ended = True
    assert state.judge(rule, "c", [CurvePoint(10, 0.0)]) == []


def test_bad_rules():
    with raises("reduction-factor-has-to-be-at", "1"):
        HalvingRule(10, 1)
    with raises("grace-steps-has-to-be-at", "0"):
        HalvingRule(0)
    assert default_grace_steps(27_000, 3) == 1000 and default_grace_steps(5, 4) == 1
