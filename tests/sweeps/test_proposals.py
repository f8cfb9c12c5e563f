"""Samplers of Optuna: a proposal follows from the trials so far."""

import importlib
import math

import pytest

from rollmill.sweeps.proposals import PastTrial, check_sampler, propose
from rollmill.sweeps.search_space import Axis, parse_axis
from wordings import raises

AXES = [parse_axis("lr=log:1e-5..1e-1"), parse_axis("num-steps=1..64"), parse_axis("torso=mlp,gru")]


def score(point: dict) -> float:
    """Best at lr=1e-3, 32 steps and gru."""
    distance = abs(math.log10(point["lr"]) + 3) + abs(point["num-steps"] - 32) / 32
    return (point["torso"] == "gru") - distance


def proposals(count, sampler="tpe", seed=0):
    trials = []
    for _ in range(count):
        point = propose(AXES, trials, sampler=sampler, seed=seed)
        trials.append(PastTrial(point, "finished", score(point), 100))
    return trials


def test_no_sampler_without_optuna(monkeypatch):
    def without(name):
        raise ImportError(f"no module named {name}")

    monkeypatch.setattr(importlib, "import_module", without)
    with raises("samplers-need-optuna-is-not", "pip install", "optuna"):
        check_sampler("tpe")
    with raises("unknown-sampler-known-grid-random", "'tpee'", "tpe"):
        check_sampler("tpee")


@pytest.mark.parametrize("sampler", ["tpe", "multivariate-tpe"])
def test_proposals_lie_on_the_axes_and_become_better(sampler):
    pytest.importorskip("optuna")
    trials = proposals(40, sampler)
    for trial in trials:
        assert 1e-5 <= trial.point["lr"] <= 1e-1 and 1 <= trial.point["num-steps"] <= 64
        assert trial.point["torso"] in ("mlp", "gru")
    scores = [trial.result for trial in trials]
    assert sum(scores[-10:]) / 10 > sum(scores[:10]) / 10 + 0.3


def test_the_same_trials_lead_to_the_same_proposal():
    pytest.importorskip("optuna")
    trials = proposals(12)
    assert propose(AXES, trials, sampler="tpe", seed=0) == propose(AXES, trials, sampler="tpe", seed=0)
    assert proposals(12) == trials != proposals(12, seed=1)


def test_running_failed_and_stopped_trials_are_told():
    pytest.importorskip("optuna")
    trials = proposals(12)
    trials[3] = trials[3]._replace(state="running", result=None)
    trials[4] = trials[4]._replace(state="failed", result=None)
    trials[5] = trials[5]._replace(state="stopped", steps=10)
    trials[6] = trials[6]._replace(result=math.nan)
    assert set(propose(AXES, trials, sampler="tpe", seed=0)) == {"lr", "num-steps", "torso"}


def test_each_value_comes_once():
    pytest.importorskip("optuna")
    axes, trials = [parse_axis("seed=0..3"), parse_axis("torso=mlp,gru")], []
    for _ in range(8):
        trials.append(PastTrial(propose(axes, trials, sampler="tpe", seed=0), "finished", 1.0, 1))
    assert len({tuple(trial.point.values()) for trial in trials}) == 8


def test_lists_are_proposed_as_points_hold_them():
    pytest.importorskip("optuna")
    axes, trials = [Axis("network.hidden-sizes", ([64, 64], [32])), parse_axis("seed=0..1")], []
    for _ in range(4):
        trials.append(PastTrial(propose(axes, trials, sampler="tpe", seed=0), "finished", 1.0, 1))
    assert {trial.point["network.hidden-sizes"] for trial in trials} == {(64, 64), (32,)}
