"""Population-based training: who takes over from whom, exactness after a kill, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from rollmill.core.folder import Folder
from rollmill.record.checkpoint_files import read_arrays, read_record
from rollmill.record.checkpoints import Checkpoints
from rollmill.sweeps.creation import NewSweep, create_sweep
from rollmill.sweeps.search_space import Axis, listed_axis
from rollmill.training import population as population_module
from rollmill.training.evolution import Evolution, EvolutionRule, next_rung
from rollmill.training.evolving import common_point, read_evolution
from rollmill.training.population import Population, train_population
from rollmill.training.request import TrainingRequest
from rollmill.training.resuming import resume
from wordings import raises

RATES = {"learning_rate": (1e-5, 3e-2)}
RULE = EvolutionRule(every_steps=64, share=0.34, names=("learning_rate", "gamma"), bounds=RATES)
SIZES = {"num_envs": 4, "num_steps": 8, "num_minibatches": 1, "update_epochs": 1, "total_timesteps": 32 * 7}


def test_the_worst_take_over_from_the_best_and_change_numbers():
    values = [{"learning_rate": rate, "gamma": "linear:0.9:1"} for rate in (1e-3, 2.9e-2, 1e-2, 1e-5, 1e-4, 1e-2)]
    assert not next_rung(RULE, 2, [5.0, None, 8.0, 1.0, None, None], values).takeovers  # two of three, from two
    rung = next_rung(RULE, 2, [5.0, 9.0, 8.0, 1.0, 2.0, 3.0], values)
    assert [takeover.training for takeover in rung.takeovers] == [3, 4]
    for takeover in rung.takeovers:
        assert takeover.source in (1, 2)
        assert takeover.before == values[takeover.training]
        first = values[takeover.source]["learning_rate"]
        changed = [pytest.approx(0.8 * first), pytest.approx(min(1.2 * first, 3e-2))]
        assert takeover.after["learning_rate"] in changed
        assert takeover.after["gamma"] == "linear:0.9:1"
    assert rung == next_rung(RULE, 2, rung.results, values)
    assert Evolution((rung,)).values(values)[3] == rung.takeovers[0].after
    assert Evolution((rung,)).until(1) == Evolution()


def test_broken_members_take_over_first_and_alone_if_asked():
    values = [{"learning_rate": 1e-3, "gamma": 0.9} for _ in range(6)]
    results = [5.0, 9.0, 8.0, 1.0, 2.0, 3.0]
    rung = next_rung(RULE, 2, results, values, broken=[1])
    assert [takeover.training for takeover in rung.takeovers] == [1, 3]  # two of six, the best of all among them
    assert {takeover.source for takeover in rung.takeovers} <= {0, 2} and rung.results[1] is None
    rung = next_rung(RULE, 2, results, values, broken=[0, 2, 3], only_broken=True)
    assert [takeover.training for takeover in rung.takeovers] == [0, 2, 3] and rung.broken == (0, 2, 3)
    rung = next_rung(RULE, 2, [None] * 6, values, broken=[0], left_out=[1, 2, 3, 4])
    assert [(takeover.training, takeover.source) for takeover in rung.takeovers] == [(0, 5)]


def requests_in(root: Path) -> list[TrainingRequest]:
    settings = {**SIZES, "network.hidden_sizes": (4,), "tensorboard": False, "quiet": True}
    return [
        TrainingRequest(
            "ppo",
            "CartPole-v1",
            {**settings, "learning_rate": rate, "gamma": 0.9, "seed": seed, "run_dir": str(root / str(seed))},
        )
        for seed, rate in enumerate((1e-5, 1e-3, 1e-2))
    ]


class Killed(BaseException):
    """Ends a training where a signal would."""


@pytest.mark.slow
def test_a_population_that_was_killed_is_the_one_that_was_not(tmp_path, monkeypatch):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for root in (whole, cut):
        root.mkdir()
    runs = train_population(requests_in(whole), Population(RULE, whole))
    assert [rung.iteration for rung in read_evolution(whole).rungs] == [2, 4, 6]
    keep = population_module._keep

    def keep_of_one(lanes, iteration, state, **how):
        """Saves the state of the first training after the second rung, and no other."""
        keep(lanes if iteration < 4 else lanes[:1], iteration, state, **how)
        if iteration == 4:
            lanes[0].wait()
            raise Killed

    monkeypatch.setattr(population_module, "_keep", keep_of_one)
    with pytest.raises(Killed):
        train_population(requests_in(cut), Population(RULE, cut))
    monkeypatch.setattr(population_module, "_keep", keep)
    assert common_point([cut / str(seed) for seed in range(3)]) == (2, (0, 1, 2))
    again = train_population(requests_in(cut), Population(RULE, cut))
    for mine, theirs in zip(again, runs, strict=True):
        for name in ("weights_sha256", "final_return", "iterations"):
            assert mine.summary[name] == theirs.summary[name]
        assert changes_of(mine.directory) == changes_of(theirs.directory)
    assert read_evolution(cut) == read_evolution(whole)
    taken_over = read_evolution(whole).rungs[-1].takeovers[0]
    change = changes_of(runs[taken_over.training].directory)[-1]
    assert change == {
        "iteration": 6,
        "before": taken_over.before,
        "after": taken_over.after,
        "source": str(taken_over.source),
    }
    # Such a trial goes on alone, with the numbers that it has by then.
    more = resume(runs[taken_over.training].directory, changes={"total_timesteps": 32 * 8}, quiet=True)
    graph = json.loads((more.directory / "config.json").read_text())["graph"]
    assert more.summary["iterations"] == 8
    assert graph["config"]["learning_rate"] == taken_over.after["learning_rate"]


def test_a_broken_trial_takes_over_from_another_and_goes_on(tmp_path):
    """Its weights are infinite from the first update on. Others' states are also saved between rungs."""
    requests = [request.changed({"checkpoint_seconds": 0.0, "keep_last": 9}) for request in requests_in(tmp_path)]
    requests[1] = requests[1].changed({"learning_rate": 1e38})
    runs = train_population(requests, Population(RULE, tmp_path))
    first = read_evolution(tmp_path).rungs[0]
    assert (first.iteration, first.broken, first.results[1]) == (2, (1,), None)
    assert [takeover.training for takeover in first.takeovers] == [1]
    assert [run.summary["status"] for run in runs] == ["finished"] * 3
    saved = [{int(path.name) for path in run.directory.glob("checkpoints/*")} for run in runs]
    assert {0, 2, 4, 6, 7} <= saved[0] == saved[1] == saved[2] and len(saved[0]) > 5
    for iteration in (2, 7):
        arrays = arrays_of(runs[1].directory, iteration)
        assert all(np.isfinite(array).all() for array in arrays.values() if array.dtype == np.float32)
    # The rung's checkpoint is ranked by the episodes of the policy that it holds.
    mine, source = (record_of(runs[n].directory, 2).metadata["episodes"] for n in (1, first.takeovers[0].source))
    assert [window["recent"] for window in mine] == [window["recent"] for window in source]


def record_of(directory: Path, iteration: int):
    return read_record(Folder(directory / "checkpoints" / str(iteration)))


def arrays_of(directory: Path, iteration: int):
    return read_arrays(Folder(directory / "checkpoints" / str(iteration)), record_of(directory, iteration).types)


def changes_of(directory: Path) -> list[dict]:
    return json.loads((directory / "config.json").read_text()).get("changes", [])


def test_runs_without_a_common_checkpoint_are_told(tmp_path):
    for name, iteration in (("0", 2), ("1", 3)):
        (tmp_path / name / "checkpoints" / str(iteration)).mkdir(parents=True)
    with raises("trials-in-have-no-intact"):
        common_point([tmp_path / "0", tmp_path / "1"])


def test_a_trial_that_went_on_alone_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(Checkpoints, "check", lambda self, iteration: None)
    for name, iterations in (("0", (2, 4)), ("1", (6, 7)), ("2", (2, 4, 6))):
        for iteration in iterations:
            (tmp_path / name / "checkpoints" / str(iteration)).mkdir(parents=True)
    assert common_point([tmp_path / name for name in "012"]) == (4, (0, 2))
    assert common_point([tmp_path / name for name in "02"]) == (4, (0, 1))


RATE, SEEDS = Axis("learning-rate", (), 1e-4, 1e-2, True), listed_axis("seed", [0, 1, 2, 3, 4])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"pbt_every": 0}, ("pbt-every-has-to-be", "0")),
        ({"pbt_every": None}, ("pbt-share-is-population-based",)),
        ({"pbt_share": 0.7}, ("pbt-share-has-to-be", "0.7")),
        ({"random": 2}, ("pbt-share-trials-is-less", "0.2")),
        ({"pbt_every": 224}, ("pbt-every-has-to-be-less", "224")),
        ({"pbt_every": 200}, ("steps-between-rungs-are-iterations",)),
        ({"stop_early": "asha"}, ("pbt-every-trials-take-over",)),
        ({"axes": (SEEDS,), "random": None}, ("pbt-every-no-hyperparameter-is",)),
        ({"axes": (RATE, listed_axis("anneal-lr", [True, False]))}, ("trials-and-cannot-share-program",)),
        ({"axes": (RATE, listed_axis("normalize-rewards", [True, False]))}, ("trials-and-cannot-share-program",)),
    ],
)
def test_what_cannot_be_a_population_is_refused(tmp_path, asked, message):
    request = TrainingRequest("ppo", "CartPole-v1", dict(SIZES))
    given = {"axes": (RATE,), "random": 6, "pbt_every": 64, "pbt_share": 0.2, **asked}
    with raises(*message):
        create_sweep(NewSweep(request, directory=tmp_path / "sweep", **given))
    assert not (tmp_path / "sweep").exists()


def test_bounds_are_those_of_the_axes(tmp_path):
    request = TrainingRequest("ppo", "CartPole-v1", dict(SIZES))
    axes = (RATE, listed_axis("ent-coef", [0.0, 0.01]), listed_axis("gamma", ["linear:0.9:1", "linear:0.8:1"]))
    made = create_sweep(NewSweep(request, axes, random=6, pbt_every=64, directory=tmp_path / "sweep"))
    rule = type(made).open(made.root).spec.evolution
    assert rule is not None and rule.names == ("learning_rate", "ent_coef", "gamma")
    assert rule.bounds == {"learning_rate": (1e-4, 1e-2), "ent_coef": (0.0, 0.01)}
