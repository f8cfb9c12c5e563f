"""Trainings against a pool of opponents that begins with the checkpoints of another run."""

import json

import jax
import numpy as np
import pytest

import rollmill
from rollmill.core.errors import RollmillError
from rollmill.policies.loading import restore_newest, restore_run
from rollmill.runs import reopening
from rollmill.training import initial_weights as starting
from wordings import raises

ENV = "TagGridWorld-Small-v0"
SIZES = {"num_envs": 4, "num_steps": 4, "num_minibatches": 2, "update_epochs": 1}
TINY = rollmill.NetworkConfig(hidden_sizes=(4,))
AGAINST = {"pool_size": 3, "pool_roles": ("runner",), "pool_share": 1.0, "frozen": ("runner",)}


def graph_of(iterations=4, **settings):
    return rollmill.ippo(ENV, **SIZES, network=TINY, total_timesteps=16 * iterations, **settings)


def trained(directory, graph, **options):
    return rollmill.train(graph, run_dir=directory, quiet=True, tensorboard=False, **options).directory


def learner_of(run, **chosen):
    return restore_run(run, **chosen).restored.state.learner


def same(one, other):
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, one, other)))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A run with the checkpoints of iterations 0 to 4."""
    folder = tmp_path_factory.mktemp("source") / "run"
    return trained(folder, graph_of(), checkpoint_iterations=1, keep_last=5)


@pytest.mark.parametrize(
    "placement",
    [
        {},
        pytest.param({"num_seeds": 2}, marks=pytest.mark.slow),
        pytest.param({"devices": 2}, marks=pytest.mark.slow),
        pytest.param({"distribution": "single-learner-coarse", "place": "threads"}, marks=pytest.mark.slow),
        pytest.param({"place": "mesh", "learners": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_frozen_role_plays_by_checkpoints_of_another_run_and_the_other_learns(source, tmp_path, placement):
    run = trained(tmp_path / "run", graph_of(12, **AGAINST), pool_from=source, **placement)
    recorded = json.loads((run / "config.json").read_text())
    assert recorded["pool_started_from"] == {"run": str(source.resolve()), "iterations": [2, 3, 4]}
    learner = learner_of(run)
    if placement.get("num_seeds"):
        learner = jax.tree.map(lambda leaf: leaf[1], learner)
    theirs = [learner_of(source, checkpoint=at).weights.networks["runner"] for at in (2, 3, 4)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *theirs)
    assert same(learner.pool.networks, {"runner": stacked}) and int(learner.pool.kept["runner"]) == 3
    assert bool(learner.weights.opponents.playing["runner"])
    assert any(same(learner.weights.opponents.networks["runner"], their) for their in theirs)


def test_checkpoints_of_one_run_share_its_graph(source, monkeypatch):
    built, build = [], reopening.rebuild_graph
    counted = lambda *given, **named: built.append(build(*given, **named)) or built[-1]
    monkeypatch.setattr(reopening, "rebuild_graph", counted)
    found = restore_newest(source, count=3)
    assert [each.restored.iteration for each in found] == [2, 3, 4]
    assert len(built) == 1 and all(each.graph is built[0] for each in found)


def test_weights_and_pool_may_come_from_the_same_run(source):
    options = rollmill.RunOptions(start_from=str(source), pool_from=source)
    given = starting.given_weights(graph_of(**AGAINST), options, ())
    said = str(given)
    assert "the pool of opponents begins with the weights of" in said and said.endswith("iteration 2, 3, 4")
    assert given.source["lacking"] == [] and f"starts with {len(given.arrays)} arrays" in said
    assert not [place for place in given.arrays if "pool" in place or "opponents" in place]


def test_a_smaller_pool_takes_the_newest_checkpoints_and_a_larger_one_all(source):
    options = rollmill.RunOptions(pool_from=source)
    for size, iterations in ((2, [3, 4]), (9, [0, 1, 2, 3, 4])):
        given = starting.given_weights(graph_of(**AGAINST | {"pool_size": size}), options, ())
        assert given.pool["iterations"] == iterations
        assert {leaf.shape[0] for place, leaf in given.in_pool.items() if starting.POOL in place} == {size}
        assert given.in_pool["pool.kept.runner"] == len(iterations)


def test_the_note_lists_a_few_of_many_arrays_that_start_at_random():
    lacking = [f"weights.layer{number}" for number in range(48)]
    given = starting.GivenWeights({"weights.bias": np.zeros(2)}, {"run": "r", "iteration": 1, "lacking": lacking})
    assert "weights.layer5 and 42 more start with random weights" in str(given) and len(str(given)) < 200


def test_a_pool_that_could_not_be_filled_is_refused_before_anything_is_written(source, tmp_path):
    def refused(code, *values, graph=None, **options):
        with raises(code, *values):
            trained(tmp_path / "run", graph or graph_of(**AGAINST), **options)
        assert not (tmp_path / "run").exists()

    refused("is-frozen-so-all-weights", "runner", "--pool-from RUN")
    refused("pool-from-fills-pool-earlier", "--pool-size 10", graph=graph_of(), pool_from=source)
    ppo = rollmill.ppo("CartPole-v1", num_envs=4, num_steps=8, total_timesteps=32)
    refused("pool-from-has-no-effect", "ppo", graph=ppo, pool_from=source)
    other = {**AGAINST, "network": rollmill.NetworkConfig(hidden_sizes=(5,))}
    wider = rollmill.ippo(ENV, **SIZES, total_timesteps=16, **other)
    refused("pool-from-has-no-parameter", "runner", graph=wider, pool_from=source)
    refused("pool-from-is-not-supported", graph=graph_of(**AGAINST, normalize_observations=True), pool_from=source)
    with pytest.raises(RollmillError, match="nowhere"):
        trained(tmp_path / "run", graph_of(**AGAINST), pool_from=tmp_path / "nowhere")
