"""Settings that MAPPO and IPPO accept and refuse, with the words; runs with them, from start to evaluation."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rollmill
from agents_envs import crafts, crowd, numbered, opposed
from rollmill.policies.loading import load_weights
from rollmill.recipes import RECIPES
from rollmill.runs.algorithms import find_algorithm
from rollmill.runs.specification import rebuild_graph
from wordings import raises

SMALL = {"num_envs": 8, "num_steps": 4, "total_timesteps": 8 * 4 * 6, "num_minibatches": 2}
NETWORK = rollmill.NetworkConfig(hidden_sizes=(6,))
QUIET = {"quiet": True, "tensorboard": False}

# --- what is refused ----------------------------------------------------------------------------------


def test_algorithms_for_one_agent_and_for_several_tell_them_apart():
    with raises("has-one-agent-is-for-environments", "CartPole-v1", "mappo", "ppo"):
        rollmill.mappo(rollmill.make("CartPole-v1"))
    with raises("has-several-agents-train-with", "Crowd", "walker, keeper"):
        rollmill.ppo(crowd())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            {"sharing": {"walkers": "all"}},
            ("unknown-name", "kind", "of agents in sharing 'walkers'", "Did you mean walker?"),
        ),
        (
            {"sharing": {"walker": "all", "keeper": "all"}},
            ("sharing-gives-and-parameters-but", "walker", "keeper", "'all'", "observation_space", "Box", "Box"),
        ),
        (
            {"sharing": {"walker": "independent", "keeper": "walker"}},
            ("sharing-gives-each-weights-own", "walker"),
        ),
        (
            {"networks": {"keepers": NETWORK}},
            ("unknown-name", "parameter", "set in networks 'keepers'", "Did you mean keeper?"),
        ),
        (
            {"network": rollmill.NetworkConfig(shared_torso=True)},
            ("shared-torso-true-needs-critic",),
        ),
        ({"gamma": 2.0}, ("out-of-bounds", "gamma", "2.0", "lie between 0 and 1")),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_words(how, message):
    with raises(*message):
        rollmill.mappo(crowd(), **(SMALL | how))


def test_critics_that_see_what_actors_see_may_share_their_torso():
    shared = rollmill.NetworkConfig(shared_torso=True)
    rollmill.ippo(crowd(), **SMALL, network=shared)


def test_central_features_are_one_vector():
    env = crowd()._replace(central=lambda state, params: state.numbers)
    with raises("central-returned-expected-one-float32"):
        rollmill.mappo(env, **SMALL)


# --- settings -----------------------------------------------------------------------------------------


def weight_shapes(graph):
    networks = jax.eval_shape(graph.start_learner, jax.random.key(0)).weights.networks
    return {name: sorted(leaf.shape for leaf in jax.tree.leaves(of_set)) for name, of_set in networks.items()}


def test_settings_survive_json_and_build_the_same_graph():
    rollmill.register("Crowd", crowd, overwrite=True)
    how = {"sharing": {"walker": "independent"}, "networks": {"keeper": NETWORK}, "target_kl": 0.01}
    graph = rollmill.ippo(crowd(), **SMALL, **how)
    settings = json.loads(json.dumps(graph.settings))
    assert (settings["algorithm"], settings["environment"], settings["custom"]) == ("ippo", "Crowd", [])
    again = rebuild_graph(settings)
    assert again.loops == graph.loops and again.settings == graph.settings
    assert weight_shapes(again) == weight_shapes(graph)


def test_parameter_sets_decide_which_weights_there_are():
    apart, together = (
        weight_shapes(rollmill.ippo(opposed(), **SMALL, sharing=s)) for s in ({}, {"left": "right"})
    )
    assert set(apart) == {"left", "right"} and set(together) == {"right"}
    assert apart["left"] == together["right"]
    own = weight_shapes(rollmill.ippo(numbered(), **SMALL, sharing={"agent": "independent"}))["agent"]
    one = weight_shapes(rollmill.ippo(numbered(), **SMALL))["agent"]
    assert own == sorted((3, *shape) for shape in one)


def test_centralised_critics_see_more_than_actors():
    decentral, central = (
        weight_shapes(algorithm(crowd(), **SMALL)) for algorithm in (rollmill.ippo, rollmill.mappo)
    )
    assert [shape for shape in decentral["walker"] if 64 not in shape[:1]].count((2, 64)) == 2
    everything = 3 * 2 + 4 + 4  # observations of three walkers and a keeper, and who is active
    assert (2, 64) in central["walker"] and (2 + everything, 64) in central["walker"]
    assert (4, 64) in central["keeper"] and (4 + everything, 64) in central["keeper"]


def test_a_network_of_ones_own():
    def make(key, observation_space, action_space, critic_space):
        return rollmill.actor_critic(key, observation_space, action_space, NETWORK, critic_space=critic_space)

    graph = rollmill.mappo(crowd(), **SMALL, network=make)
    assert graph.settings["custom"] == ["network"]
    assert weight_shapes(graph) == weight_shapes(rollmill.mappo(crowd(), **SMALL, network=NETWORK))


@pytest.mark.parametrize("name", ("tag-continuous", "tag-gridworld"))
def test_recipes_fit_their_environments(name):
    recipe = RECIPES[name]()
    graph = find_algorithm(recipe.algorithm).build(rollmill.make(recipe.environment), recipe.config)
    assert graph.settings["custom"] == []
    assert 500_000 < graph.loops.iterations * graph.loops.batch_size < 1_100_000


# --- runs ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_is_trained_loaded_resumed_and_evaluated(tmp_path):
    rollmill.register("Crafts", crafts, overwrite=True)
    graph = rollmill.mappo(crafts(), **SMALL, network=NETWORK, normalize_observations=True)
    run = rollmill.train(graph, run_dir=tmp_path / "run", checkpoint_iterations=1, **QUIET)
    logged = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    assert logged[-1]["returns/clerk"] == 1.0 and -1 <= logged[-1]["returns/reader"] <= 1
    assert {"losses/policy", "losses/policy/reader", "losses/value/painter"} < logged[-1].keys()

    shown = {
        "reader": [[-1.0], [1.0]],
        "painter": {"hue": np.zeros((1, 1))},
        "packer": np.ones((2, 2)),
        "clerk": np.zeros((3, 1)),
    }
    policy, loaded = rollmill.load(run.directory), load_weights(run.directory)
    legal = {"clerk": np.eye(4, dtype=bool)[[2, 0, 3]]}
    action = policy(shown, action_mask=legal)
    arrays = jax.tree.map(jnp.asarray, {**shown, "reader": np.asarray(shown["reader"])})
    arrays = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), arrays)
    decided = graph.greedy(loaded.weights, jax.random.key(0), (), arrays, jax.tree.map(jnp.asarray, legal))
    assert action.keys() == shown.keys()
    for name, chosen in action.items():
        np.testing.assert_allclose(chosen, np.clip(decided.action[name], -1, 3), err_msg=name)
    np.testing.assert_array_equal(action["clerk"], [2, 0, 3])
    assert all(np.abs(policy(shown, stochastic=True)["painter"]) <= 1 for _ in range(20))

    episodes = rollmill.evaluate(run.directory, episodes=16)
    elsewhere = rollmill.evaluate(run.directory, episodes=16, env="Crafts")
    assert episodes.lengths.tolist() == [1] * 16
    np.testing.assert_array_equal(episodes.returns, elsewhere.returns)

    newest = max((run.directory / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    shutil.rmtree(newest)
    (run.directory / "summary.json").unlink()
    again = rollmill.resume(run.directory, quiet=True)
    assert again.summary["weights_sha256"] == run.summary["weights_sha256"]
