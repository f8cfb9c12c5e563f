"""Settings that PPO accepts, those that it refuses, and the words of the refusal."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import rollmill
from rollmill.algorithms import environment_functions
from rollmill.core.errors import UsageError
from rollmill.core.spaces import is_unbounded
from rollmill.dataflow import collect, init_state
from rollmill.envs.cartpole import CartPoleState, step
from rollmill.runs.specification import rebuild_graph
from wordings import raises

CARTPOLE = rollmill.make("CartPole-v1")


def small(**sizes):
    return {"num_envs": 8, "num_steps": 4, "total_timesteps": 320} | sizes


# --- sizes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_envs": 0}, ("must-be-at-least-1", "num_envs", "0")),
        ({"num_minibatches": 32}, ("num-minibatches-num-envs-x",)),
        ({"num_steps": -3}, ("must-be-at-least-1", "num_steps", "-3")),
        ({"update_epochs": 0}, ("must-be-at-least-1", "update_epochs", "0")),
        ({"num_minibatches": 0}, ("must-be-at-least-1", "num_minibatches", "0")),
        ({"total_timesteps": 0}, ("must-be-at-least-1", "total_timesteps", "0")),
        ({"num_shards": 0}, ("must-be-at-least-1", "num_shards", "0")),
        ({"num_shards": -2}, ("must-be-at-least-1", "num_shards", "-2")),
        ({"gamma": 1.5}, ("out-of-bounds", "gamma", "1.5", "lie between 0 and 1")),
        ({"gae_lambda": -0.1}, ("out-of-bounds", "gae_lambda", "-0.1", "lie between 0 and 1")),
        ({"num_minibatches": 5}, ("do-not-divide-into-num", "32", "samples", "5", "2 or 4")),
        ({"total_timesteps": 31}, ("total-timesteps-is-less-than", "31", "8", "4", "32", "32")),
        ({"num_shards": 3}, ("num-shards-does-not-divide", "3", "8")),
        (
            {"num_shards": 8, "num_minibatches": 8},
            ("shard-holds-rows-num-envs", "4", "8", "8", "4", "8"),
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_numbers(sizes, message):
    with raises(*message):
        rollmill.ppo(CARTPOLE, **small(**sizes))


def test_sequences_are_what_a_recurrent_policy_cuts():
    recurrent = rollmill.NetworkConfig(torso="gru")
    with raises("do-not-divide-into-num", "8", "sequences (num_envs)", "3", "2 or 4"):
        rollmill.ppo(CARTPOLE, rollmill.PPOConfig(**small(num_minibatches=3, num_steps=3, network=recurrent)))
    loops = rollmill.ppo(CARTPOLE, rollmill.PPOConfig(**small(num_minibatches=4, network=recurrent))).loops
    assert (loops.minibatch_items, loops.num_shards) == ("sequences", 2)


def test_loops_are_the_sizes():
    loops = rollmill.ppo(CARTPOLE, **small(total_timesteps=33, num_minibatches=2, update_epochs=3)).loops
    assert (loops.iterations, loops.num_envs, loops.num_steps, loops.epochs) == (2, 8, 4, 3)
    assert (loops.num_minibatches, loops.num_shards, loops.minibatch_items, loops.batch_size) == (
        2,
        8,
        "samples",
        32,
    )
    assert rollmill.ppo(CARTPOLE, **small(num_shards=2)).loops.num_shards == 2


def test_action_spaces_without_a_policy_are_refused():
    step = lambda key, state, action, params: CARTPOLE.step(key, state, action["a"], params)
    env = CARTPOLE._replace(action_space=spaces.Dict({"a": spaces.Discrete(2)}), step=step)
    with raises("action-space-has-no-policy"):
        rollmill.ppo(env)


# --- settings ----------------------------------------------------------------------------------------


def test_settings_survive_json_and_build_the_same_graph():
    config = rollmill.PPOConfig(
        **small(target_kl=0.01, normalize_rewards=True),
        network=rollmill.NetworkConfig(torso="gru", hidden_sizes=(5, 3), recurrent_size=4),
    )
    graph = rollmill.ppo(CARTPOLE, config)
    settings = json.loads(json.dumps(graph.settings))
    assert (settings["algorithm"], settings["environment"], settings["custom"]) == ("ppo", "CartPole-v1", [])
    assert settings["config"]["target_kl"] == 0.01 and settings["config"]["network"]["hidden_sizes"] == [5, 3]
    again = rebuild_graph(settings)
    assert again.loops == graph.loops and again.settings == graph.settings
    learners = [jax.eval_shape(g.start_learner, jax.random.key(0)) for g in (graph, again)]
    shapes = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(learner)] for learner in learners]
    assert shapes[0] == shapes[1]


def test_settings_name_what_a_file_cannot_hold():
    make_network = lambda *args: rollmill.actor_critic(*args)
    graph = rollmill.ppo(CARTPOLE, params=CARTPOLE.params, network=make_network)
    assert graph.settings["custom"] == ["params", "network"]


def test_keywords_replace_fields_of_the_config():
    config = rollmill.PPOConfig(**small())
    graph = rollmill.ppo(CARTPOLE, config, num_envs=16, gamma=0.5)
    plain = rollmill.ppo(CARTPOLE, config).settings["config"]
    assert graph.settings["config"] == plain | {"num_envs": 16, "gamma": 0.5}
    assert graph.loops.num_envs == 16 and config.num_envs == 8


@pytest.mark.parametrize("bound", [np.inf, 3.0e38])
def test_observations_without_bounds_are_normalised_unless_one_says_otherwise(bound):
    env = CARTPOLE._replace(observation_space=spaces.Box(-np.inf, bound, (4,), np.float32))
    config = lambda **chosen: rollmill.ppo(env, **small(), **chosen).settings["config"]
    for chosen, normalises in [(None, bound == np.inf), (True, True), (False, False)]:
        assert config(normalize_observations=chosen)["normalize_observations"] is normalises


def test_a_space_is_unbounded_if_all_its_parts_are():
    free, gear = spaces.Box(-np.inf, np.inf, (2,)), spaces.Discrete(5)
    assert is_unbounded(spaces.Tuple([free, spaces.Dict(inner=free)]))
    assert not any(map(is_unbounded, [gear, spaces.Dict(velocity=free, gear=gear), spaces.Box(0, np.inf)]))


# --- parameters of the environment -------------------------------------------------------------------


@pytest.mark.slow
def test_parameters_may_differ_from_environment_to_environment():
    """A force of its own for each of 8 carts: the trajectory is that of the environment so configured."""
    forces = jnp.arange(1.0, 9.0) * 4
    params = eqx.tree_at(lambda p: p.force, CARTPOLE.params, forces)
    graph = rollmill.ppo(CARTPOLE, **small(), params=params)
    key = jax.random.key(0)
    state = eqx.filter_jit(lambda key: init_state(graph, key, jnp.arange(8, dtype=jnp.int32)))(key)
    rollout = eqx.filter_jit(lambda state: collect(graph, state.learner.weights, state.collector, key)[1])
    steps = rollout(state).steps
    velocity = np.asarray(steps.observation[..., 1])
    change = np.asarray(steps.final_observation[..., 1]) - velocity
    push = np.where(np.asarray(steps.action) == 1, 1.0, -1.0) * np.asarray(forces)
    # Near upright a push of F changes the cart's velocity by nearly 0.02 F / 1.025.
    np.testing.assert_allclose(change, 0.02 * push / 1.025, atol=0.01)
    moved = eqx.filter_jit(jax.vmap(jax.vmap(_cartpole_step)))
    shared = jnp.broadcast_to(forces, (4, 8))
    expected = moved(steps.observation, steps.action, shared)
    np.testing.assert_allclose(steps.final_observation, expected, rtol=1e-5, atol=1e-6)


def _cartpole_step(observation, action, force):
    params = eqx.tree_at(lambda p: p.force, CARTPOLE.params, force)
    return step(jax.random.key(0), CartPoleState(*observation), action, params).observation


def test_shared_parameters_replace_the_environments_own():
    params = eqx.tree_at(lambda p: p.reset_bound, CARTPOLE.params, 0.0)
    functions = environment_functions(CARTPOLE, params=params, num_envs=8)
    _, observation = functions.start(jax.random.key(0), jnp.int32(3))
    np.testing.assert_array_equal(observation, np.zeros(4))


def test_parameters_of_another_shape_are_refused_with_the_shapes_that_fit():
    params = eqx.tree_at(lambda p: p.force, CARTPOLE.params, jnp.ones(5))
    with pytest.raises(UsageError) as error:
        graph = rollmill.ppo(CARTPOLE, **small(), params=params)
        jax.eval_shape(lambda: init_state(graph, jax.random.key(0), jnp.arange(8, dtype=jnp.int32)))
    assert "a leaf of params has shape (5,), expected () for one value in all environments, or (8,)" in str(
        error.value
    )
    assert "num_envs=8" in str(error.value)


def test_parameters_of_another_structure_are_refused_in_words():
    with raises("params-has-structure-expected-environments", "'force'", "CartPoleParams"):
        graph = rollmill.ppo(CARTPOLE, **small(), params={"force": 3.0})
        jax.eval_shape(lambda: init_state(graph, jax.random.key(0), jnp.arange(8, dtype=jnp.int32)))


def test_actions_outside_of_a_bounded_box_reach_the_environment_clipped():
    env = rollmill.make("Probe-ContinuousAction-v0")
    functions = environment_functions(env, num_envs=1)
    state, observation = functions.start(jax.random.key(0), jnp.int32(0))
    for action, inside in ((3.0, 1.0), (-2.0, -1.0), (0.25, 0.25)):
        timestep = functions.step(jax.random.key(1), state, jnp.full((1,), action, jnp.float32))
        np.testing.assert_allclose(timestep.reward, 1 - (inside - observation[0]) ** 2, rtol=1e-6)
