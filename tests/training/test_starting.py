"""Trainings that begin with the weights of another run."""

import json
import shutil
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import rollmill
from rollmill.core.errors import RollmillError
from rollmill.dataflow import start_learner
from rollmill.policies import loading
from rollmill.policies.loading import load_weights, restore_run
from rollmill.record import stored_runs
from rollmill.training import initial_weights as starting
from small_ppo import small_ppo
from wordings import raises

SIZES = {"num_envs": 4, "num_steps": 8}
TOTAL = 4 * 8 * 2


def trained(directory, env="CartPole-v1", algorithm=rollmill.ppo, *, options=None, **config):
    graph = algorithm(env, **({"total_timesteps": TOTAL, **SIZES} | config))
    return rollmill.train(graph, run_dir=directory, quiet=True, tensorboard=False, **(options or {}))


def first_weights(directory, **kinds):
    """A training whose learning rate is 0 keeps the weights that it begins with."""
    return load_weights(trained(directory, learning_rate=0.0, **kinds).directory).weights


def by_place(weights):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(weights)}


def same(one, other):
    return one.shape == other.shape and bool((one == other).all())


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return rollmill.train(small_ppo(), run_dir=tmp_path_factory.mktemp("plain") / "run", quiet=True).directory


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("source") / "run", normalize_observations=True).directory


def test_hyperparameters_and_an_adapted_rate_are_not_taken():
    graph = rollmill.ppo("CartPole-v1", **SIZES, desired_kl=0.01, anneal_lr=False, total_timesteps=TOTAL)
    learner = jax.eval_shape(lambda: start_learner(graph, jax.random.key(0)))
    assert learner.hyperparameters and learner.rate_scale is not None
    places = starting._weights_of(learner)
    assert places and not [place for place in places if place.startswith(("hyperparameters", "rate_scale"))]
    assert any(place.startswith("weights") for place in places)


def test_returns_of_kinds_begin_anew():
    graph = rollmill.ippo("TagGridWorld-Small-v0", **SIZES, normalize_observations=True, total_timesteps=TOTAL)
    learner = jax.eval_shape(lambda: start_learner(graph, jax.random.key(0)))
    tops = {place.partition(".")[0] for place in starting._weights_of(learner)}
    assert set(learner.returns) == {"runner", "tagger"} and tops == {"weights", "targets"}


def test_statistics_of_observations_that_are_left_out_are_told(monkeypatch, tmp_path):
    def graph(normalize_observations):
        return rollmill.ppo("CartPole-v1", **SIZES, normalize_observations=normalize_observations)

    def told(theirs, ours):
        return str(given_by_zeros(monkeypatch, tmp_path, graph(theirs), graph(ours)))

    left_out = told(True, None)
    assert "weights.observations are left out" in left_out and "normalize_observations=True" in left_out
    assert told(True, True).endswith("after iteration 2")
    assert "weights.observations.mean" in told(None, True)  # of that run there are none


def given_by_zeros(monkeypatch, tmp_path, theirs, ours):
    """Returns what a training begins with after another whose arrays are all zeros."""
    shapes = jax.eval_shape(lambda: start_learner(theirs, jax.random.key(0)))
    learner = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    found = SimpleNamespace(state=SimpleNamespace(learner=learner), iteration=2)
    restored = SimpleNamespace(root=tmp_path), theirs, (0,), found
    monkeypatch.setattr(loading, "restore_run", lambda *_, **__: restored)
    return starting.given_weights(ours, rollmill.RunOptions(start_from=str(tmp_path)), ())


@pytest.mark.parametrize(
    ("ours", "lacking"),
    [({"value_distribution": "c51"}, 0), ({"value_distribution": "quantiles", "num_atoms": 51}, 4)]
    + [({"value_distribution": "c51", "min_value": 0.0}, 4)],
    ids=str,
)
def test_outputs_with_another_meaning_are_left_out(monkeypatch, tmp_path, ours, lacking):
    """The last layer of the network and of its target, though their shapes are equal."""
    theirs = rollmill.dqn("CartPole-v1", **SIZES, value_distribution="c51")
    given = given_by_zeros(monkeypatch, tmp_path, theirs, rollmill.dqn("CartPole-v1", **SIZES, **ours))
    assert len(given.source["lacking"]) == lacking
    assert all(".head." in place for place in given.source["lacking"])


def test_the_seed_that_is_taken_is_told(monkeypatch, tmp_path):
    graph = rollmill.dqn("CartPole-v1", **SIZES)
    learner = jax.eval_shape(lambda: start_learner(graph, jax.random.key(0)))
    several = jax.tree.map(
        lambda leaf: np.stack([np.full(leaf.shape, seed, leaf.dtype) for seed in (7, 8)]), learner
    )
    found = SimpleNamespace(state=SimpleNamespace(learner=several), iteration=2)
    monkeypatch.setattr(
        loading, "restore_run", lambda *_, **__: (SimpleNamespace(root=tmp_path), graph, (7, 8), found)
    )
    given = starting.given_weights(graph, rollmill.RunOptions(start_from=str(tmp_path)), ())
    assert f"{tmp_path} (seed 7) after iteration 2" in str(given) and given.source["seed"] == 7
    assert all((array == 7).all() for array in given.arrays.values())


def test_statistics_of_values_that_are_left_out_are_told(monkeypatch, tmp_path):
    ppo, a2c = rollmill.ppo("CartPole-v1", **SIZES), rollmill.a2c("CartPole-v1", **SIZES)
    assert "weights.values are left out" in str(given_by_zeros(monkeypatch, tmp_path, ppo, a2c))
    assert "left out" not in str(given_by_zeros(monkeypatch, tmp_path, a2c, ppo))
    scaled = rollmill.ppo("CartPole-v1", **SIZES, normalize_rewards=True)
    assert "returns are left out" in str(given_by_zeros(monkeypatch, tmp_path, scaled, ppo))
    team, settings = partial(rollmill.mappo, "TagGridWorld-Small-v0", num_envs=4), ("observations", "values")
    theirs = team(**{f"normalize_{name}": True for name in settings})
    told = str(given_by_zeros(monkeypatch, tmp_path, theirs, team(normalize_values=False)))
    assert "weights.agents are left out" in told and "targets are left out" in told
    td3 = rollmill.td3("Pendulum-v1", num_envs=4)  # its targets are networks
    assert "left out" not in str(given_by_zeros(monkeypatch, tmp_path, td3, rollmill.ddpg("Pendulum-v1")))


@pytest.mark.parametrize(
    ("env", "theirs", "ours", "lacking"),
    [
        ("CartPole-v1", "pqn", "dqn", 0),
        ("Pendulum-v1", "td3", "sac", 5),  # another head of the actor, and a temperature
        ("Pendulum-v1", "sac", "td3", 4),  # the same head of the actor, and of the target actor
        ("Pendulum-v1", "ddpg", "td3", 12),  # the second critic and its target
    ],
)
def test_target_networks_that_a_run_lacks_equal_the_networks(monkeypatch, tmp_path, env, theirs, ours, lacking):
    sizes = {"num_envs": 4, "network": rollmill.NetworkConfig(hidden_sizes=(4, 4))}
    graphs = [getattr(rollmill, name)(env, **sizes) for name in (theirs, ours)]
    given = given_by_zeros(monkeypatch, tmp_path, *graphs)
    learner = starting.begin_with(graphs[1], (0,), given).learner
    network, target = (learner.network, learner.target) if ours == "dqn" else (learner.networks, learner.targets)
    jax.tree.map(np.testing.assert_array_equal, network.critics if ours == "sac" else network, target)
    assert len(given.source["lacking"]) == lacking


def test_statistics_of_targets_are_not_taken_for_target_networks(monkeypatch, tmp_path):
    settings = {"num_envs": 4, "normalize_observations": True}
    theirs = rollmill.mappo("TagGridWorld-Small-v0", **settings, normalize_values=False)
    given = given_by_zeros(monkeypatch, tmp_path, theirs, rollmill.mappo("TagGridWorld-Small-v0", **settings))
    assert not [place for place in given.arrays if place.startswith("targets.")]


def test_statistics_of_a_dictionary_are_taken_as_a_whole_or_not_at_all(monkeypatch, tmp_path):
    def graph(size):
        parts = {name: spaces.Box(-np.inf, np.inf, (n,)) for name, n in (("goal", 2), ("joints", size))}
        env = rollmill.make("DictGoal-v0")._replace(
            observation_space=spaces.Dict(parts),
            reset=lambda key, params: ({"goal": jnp.zeros(2), "joints": jnp.zeros(size)}, jnp.int32(0)),
            step=lambda key, state, action, params: rollmill.Timestep(
                {"goal": jnp.zeros(2), "joints": jnp.zeros(size)}, state, jnp.float32(0), state > 1, state > 1, {}
            ),
        )
        return rollmill.ppo(env, **SIZES, normalize_observations=True)

    def given(theirs, ours):
        learner = jax.eval_shape(lambda: start_learner(graph(theirs), jax.random.key(0)))
        found = SimpleNamespace(
            state=SimpleNamespace(learner=jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), learner)),
            iteration=2,
        )
        restored = SimpleNamespace(root=tmp_path), graph(theirs), (0,), found
        monkeypatch.setattr(loading, "restore_run", lambda *_, **__: restored)
        return starting.given_weights(graph(ours), rollmill.RunOptions(start_from=str(tmp_path)), ())

    names = [f"weights.observations.{name}" for name in ("count", "mean.goal", "mean.joints", "variance.goal")]
    same, other = given(3, 3), given(3, 4)
    assert set(names) <= set(same.arrays) and not same.source["lacking"]
    assert set(names) <= set(other.source["lacking"]) and not set(names) & set(other.arrays)
    assert "weights.values.count" in other.arrays  # the critic's targets have the same shape


def test_a_run_of_a_stranger_is_not_resumed_from_a_store_that_it_names(plain, tmp_path, monkeypatch):
    def asked(*_, **__):
        raise AssertionError("the store was asked")

    shutil.copytree(plain, tmp_path / "theirs")
    shutil.rmtree(tmp_path / "theirs/checkpoints")
    config = json.loads((tmp_path / "theirs/config.json").read_text())
    config["options"]["start_from"] = "s3://stranger/run"
    (tmp_path / "theirs/config.json").write_text(json.dumps(config))
    monkeypatch.setattr(stored_runs, "download_run", asked)
    with raises("was-not-made-here-and-begins", "s3://stranger/run"):
        rollmill.resume(tmp_path / "theirs", quiet=True)
    with pytest.raises(AssertionError, match="the store was asked"):
        rollmill.resume(tmp_path / "theirs", quiet=True, trust=True)


@pytest.mark.slow
def test_numbers_are_those_of_the_new_training(tmp_path):
    old = {"learning_rate": 1e-3, "ent_coef": "linear:0.5:0.1"}
    new = {"learning_rate": 1e-5, "ent_coef": "linear:0.2:0", "total_timesteps": 2 * TOTAL}
    first = trained(tmp_path / "first", **old).directory
    run = trained(tmp_path / "run", **new, options={"start_from": str(first)})
    lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    np.testing.assert_allclose([line["learning_rate"] for line in lines][0], 1e-5, rtol=1e-5)
    np.testing.assert_allclose([line["schedules/ent_coef"] for line in lines], [0.2, 0.15, 0.1, 0.05], rtol=1e-5)


@pytest.mark.slow
def test_a_training_begins_with_the_weights_and_statistics_of_the_run(source, tmp_path):
    begun = first_weights(
        tmp_path / "run", normalize_observations=True, options={"start_from": str(source), "seed": 3}
    )
    theirs = load_weights(source).weights
    jax.tree.map(np.testing.assert_array_equal, begun.network, theirs.network)
    assert begun.observations.count > theirs.observations.count > 0
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())
    assert recorded["started_from"] == {"run": str(source.resolve()), "iteration": 2, "lacking": []}
    assert recorded["options"]["start_from"] == str(source.resolve())


@pytest.mark.slow
def test_what_has_other_shapes_begins_at_random_as_a_whole(source, tmp_path):
    config = {"env": "Acrobot-v1", "normalize_observations": True, "normalize_values": False}
    begun = first_weights(tmp_path / "run", **config, options={"start_from": str(source), "seed": 3})
    random = first_weights(tmp_path / "random", **config, options={"seed": 3})
    ours, theirs, fresh = map(by_place, (begun, load_weights(source).weights, random))
    taken = {place for place in ours if same(ours[place], theirs[place])}
    anew = {place for place in ours if same(ours[place], fresh[place])}
    assert taken and anew and taken | anew == set(ours)
    assert {place for place in ours if "observations" in place} <= anew
    lacking = json.loads((tmp_path / "run" / "config.json").read_text())["started_from"]["lacking"]
    assert any("observations.mean" in place for place in lacking)
    assert {place.rpartition(".")[2] for place in lacking} >= {"weight", "bias", "count"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "placement",
    [
        {"num_seeds": 2},
        {"devices": 2},
        pytest.param({"distribution": "single-learner-coarse", "place": "threads"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_placement_begins_with_them(source, tmp_path, placement):
    options = {"start_from": str(source), **placement}
    run = trained(tmp_path / "run", learning_rate=0.0, options=options, normalize_observations=True).directory
    theirs = load_weights(source).weights.network
    for seed in range(placement.get("num_seeds", 1)):
        jax.tree.map(np.testing.assert_array_equal, load_weights(run, seed=seed).weights.network, theirs)


@pytest.mark.slow
def test_environments_of_python_begin_with_them_in_workers(tmp_path):
    source = trained(tmp_path / "source", "gymnasium:CartPole-v1").directory
    options = {"start_from": str(source), "distribution": "single-learner-fine", "place": "threads"}
    begun = first_weights(tmp_path / "run", env="gymnasium:CartPole-v1", options=options)
    jax.tree.map(np.testing.assert_array_equal, begun.network, load_weights(source).weights.network)


@pytest.mark.slow
def test_target_networks_are_taken_and_counts_are_not(tmp_path):
    sizes = {"algorithm": rollmill.dqn, "learning_starts": 16, "buffer_size": 128, "batch_size": 8}
    source = trained(tmp_path / "source", target_interval=1000, **sizes).directory
    run = trained(tmp_path / "run", learning_rate=0.0, options={"start_from": str(source)}, **sizes).directory
    before, after = (restore_run(directory).restored.state.learner for directory in (source, run))
    jax.tree.map(np.testing.assert_array_equal, before.network, after.network)
    jax.tree.map(np.testing.assert_array_equal, before.progress, after.progress)  # of as many steps, not of twice


@pytest.mark.slow
def test_a_killed_run_without_a_checkpoint_begins_with_them_again(source, tmp_path):
    options = {"start_from": str(source)}
    whole = trained(tmp_path / "whole", normalize_observations=True, options=options)
    again = trained(tmp_path / "again", normalize_observations=True, options=options)
    for each in (again.directory / "checkpoints").glob("[0-9]*"):
        for file in each.iterdir():
            file.unlink()
        each.rmdir()
    (again.directory / "summary.json").unlink()
    resumed = rollmill.resume(again.directory, quiet=True)
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]


@pytest.mark.parametrize(
    ("start_from", "settings", "message"),
    [
        ("nowhere", {}, "nowhere"),
        (None, {"network": rollmill.NetworkConfig(hidden_sizes=(7,))}, "no weights with the same names"),
    ],
)
def test_nothing_to_begin_with_is_an_error_before_anything_is_written(
    plain, tmp_path, start_from, settings, message
):
    chosen = str(plain) if start_from is None else str(tmp_path / start_from)
    with pytest.raises(RollmillError, match=message):
        trained(tmp_path / "run", "Pendulum-v1", options={"start_from": chosen}, **settings)
    assert not (tmp_path / "run").exists()
