"""Transforms by value, on a countdown whose every number is known."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from rollmill import envs
from rollmill.core.types import Environment, Timestep
from rollmill.envs.cartpole import CartPoleParams
from wordings import raises

UNBOUNDED = spaces.Box(-np.inf, np.inf, (1,), np.float32)


def counter(*, end=3, start=0.0):
    """Counts up from `start` by `params`; terminated at `end`. The state keeps a typed key."""

    def reset(key, params):
        return jnp.full((1,), start, jnp.float32), {"count": jnp.float32(start), "key": key}

    def step(key, state, action, params):
        count = state["count"] + params["stride"]
        return Timestep(
            observation=count[None],
            state={"count": count, "key": key},
            reward=count,
            terminated=count >= end,
            truncated=jnp.asarray(False),
            info={"seen": count},
        )

    return Environment(
        "Counter",
        reset,
        step,
        UNBOUNDED,
        spaces.Discrete(2),
        params={"stride": jnp.float32(1.0)},
        action_mask=lambda state, params: jnp.stack([state["count"] < 2, params["stride"] > 0]),
    )


def run(env, num_steps, params=None, seed=0):
    params = env.params if params is None else params

    def step(state, key):
        timestep = env.step(key, state, jnp.int32(0), params)
        return timestep.state, timestep

    @eqx.filter_jit
    def go(key):
        _, state = env.reset(key, params)
        return jax.lax.scan(step, state, jax.random.split(key, num_steps))[1]

    return go(jax.random.key(seed))


def test_time_limit_truncates_at_the_limit_also_where_terminated():
    timestep = run(envs.time_limit(counter(end=3), 3), 4)
    np.testing.assert_array_equal(timestep.truncated, [False, False, True, True])
    np.testing.assert_array_equal(timestep.terminated, [False, False, True, True])
    np.testing.assert_array_equal(timestep.state.elapsed, [1, 2, 3, 4])
    timestep = run(envs.time_limit(counter(end=9), 2), 3)
    np.testing.assert_array_equal(timestep.truncated, [False, True, True])
    np.testing.assert_array_equal(timestep.terminated, [False, False, False])


def test_time_limit_keeps_an_earlier_truncation():
    inner = counter(end=9)

    def step(key, state, action, params):
        timestep = inner.step(key, state, action, params)
        return timestep._replace(truncated=timestep.reward == 1)

    timestep = run(envs.time_limit(inner._replace(step=step), 3), 3)
    np.testing.assert_array_equal(timestep.truncated, [True, False, True])


@pytest.mark.parametrize("max_steps", [0, -3])
def test_time_limit_below_one_is_refused(max_steps):
    with raises("time-limit-max-steps-must", "Counter", max_steps):
        envs.time_limit(counter(), max_steps)


def test_auto_reset_keeps_the_final_observation():
    timestep = run(envs.auto_reset(counter(end=3)), 7)
    np.testing.assert_array_equal(timestep.observation[:, 0], [1, 2, 0, 1, 2, 0, 1])
    np.testing.assert_array_equal(timestep.info["final_observation"][:, 0], [1, 2, 3, 1, 2, 3, 1])
    np.testing.assert_array_equal(timestep.info["seen"], [1, 2, 3, 1, 2, 3, 1])
    np.testing.assert_array_equal(timestep.reward, [1, 2, 3, 1, 2, 3, 1])
    np.testing.assert_array_equal(timestep.state["count"], [1, 2, 0, 1, 2, 0, 1])
    np.testing.assert_array_equal(timestep.terminated, [False, False, True] * 2 + [False])


def test_auto_reset_follows_truncation_and_restarts_the_clock():
    timestep = run(envs.auto_reset(envs.time_limit(counter(end=9), 2)), 5)
    np.testing.assert_array_equal(timestep.truncated, [False, True, False, True, False])
    np.testing.assert_array_equal(timestep.terminated, [False] * 5)
    np.testing.assert_array_equal(timestep.observation[:, 0], [1, 0, 1, 0, 1])
    np.testing.assert_array_equal(timestep.info["final_observation"][:, 0], [1, 2, 1, 2, 1])
    np.testing.assert_array_equal(timestep.state.elapsed, [1, 0, 1, 0, 1])


def test_step_and_reset_have_keys_of_their_own():
    env, key = envs.auto_reset(counter(end=1)), jax.random.key(7)
    step_key, reset_key = jax.random.fold_in(key, envs.transforms.STEP_FOLD), key
    state = {"count": jnp.float32(0), "key": jax.random.key(1)}
    ended = env.step(key, state, jnp.int32(0), env.params)
    going = envs.auto_reset(counter(end=9)).step(key, state, jnp.int32(0), env.params)
    for found, expected in ((ended, reset_key), (going, step_key)):
        np.testing.assert_array_equal(jax.random.key_data(found.state["key"]), jax.random.key_data(expected))


def test_vectorised_steps_equal_single_ones_with_params_of_each_replica():
    env = envs.auto_reset(envs.make("CartPole-v1", max_steps=30))
    batch = envs.vectorise(env, 3)
    forces, keys = jnp.array([5.0, 10.0, 20.0]), jax.random.split(jax.random.key(0), 3)
    params = dataclasses.replace(CartPoleParams(), force=forces)

    def trajectory(env, key_of, action):
        def go(params):
            def step(state, t):
                timestep = env.step(key_of(t), state, action, params)
                return timestep.state, (timestep.observation, timestep.reward)

            return jax.lax.scan(step, env.reset(key_of(0), params)[1], jnp.arange(50))[1]

        return eqx.filter_jit(go)

    def keys_at(t):
        return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, t)

    together = trajectory(batch, keys_at, jnp.ones(3, jnp.int32))(params)
    for replica in range(3):
        own = dataclasses.replace(CartPoleParams(), force=forces[replica])
        alone = trajectory(env, lambda t, key=keys[replica]: jax.random.fold_in(key, t), jnp.int32(1))(own)
        for found, expected in zip(together, alone, strict=True):
            np.testing.assert_allclose(found[:, replica], expected, rtol=1e-5, atol=1e-5)
    ended = np.asarray(together[0])[:, :, 0]
    assert not np.allclose(ended[:, 0], ended[:, 2])


def test_vectorise_shares_leaves_of_the_environments_own_shape():
    batch = envs.vectorise(counter(end=9), 2)
    keys = jax.random.split(jax.random.key(0), 2)
    _, state = batch.reset(keys, batch.params)
    shared = batch.step(keys, state, jnp.zeros(2, jnp.int32), batch.params)
    own = batch.step(keys, state, jnp.zeros(2, jnp.int32), {"stride": jnp.array([2.0, -5.0])})
    np.testing.assert_array_equal(shared.reward, [1, 1])
    np.testing.assert_array_equal(own.reward, [2, -5])
    masks = batch.action_mask(own.state, {"stride": jnp.array([2.0, -5.0])})
    np.testing.assert_array_equal(masks, [[False, True], [True, False]])
    assert batch.action_space == spaces.Discrete(2)


def test_vectorise_decides_leaf_by_leaf_where_num_envs_equals_a_leafs_own_size():
    def reset(key, params):
        return params["vector"], params["vector"]

    env = Environment("Vector", reset, counter().step, UNBOUNDED, spaces.Discrete(2), {"vector": jnp.zeros(2)})
    batch, keys = envs.vectorise(env, 2), jax.random.split(jax.random.key(0), 2)
    shared, _ = batch.reset(keys, {"vector": jnp.array([1.0, 2.0])})
    own, _ = batch.reset(keys, {"vector": jnp.array([[1.0, 2.0], [3.0, 4.0]])})
    np.testing.assert_array_equal(shared, [[1, 2], [1, 2]])
    np.testing.assert_array_equal(own, [[1, 2], [3, 4]])


def test_vectorise_names_a_leaf_of_the_wrong_shape():
    batch = envs.vectorise(counter(), 4)
    keys = jax.random.split(jax.random.key(0), 4)
    message = ("params-has-shape-expected-shared", "Counter", "(3,)", "(4,)")
    with raises(*message):
        batch.reset(keys, {"stride": jnp.ones(3)})
    with raises("params-has-structure-expected-environments-own", "Counter"):
        batch.reset(keys, {"step": jnp.ones(3)})
    with raises("vectorise-num-envs-must-be"):
        envs.vectorise(counter(), 0)


def test_vary_draws_parameters_for_each_episode_and_keeps_them():
    def sample(key, params):
        return {"stride": params["stride"] * jax.random.randint(key, (), 1, 4).astype(jnp.float32)}

    env = envs.auto_reset(envs.vary(envs.time_limit(counter(end=99), 4), sample))
    timestep = run(env, 400)
    episodes = np.asarray(timestep.reward).reshape(100, 4)
    strides = episodes[:, 0]
    assert set(strides) == {1.0, 2.0, 3.0}
    np.testing.assert_array_equal(episodes, strides[:, None] * np.array([[1, 2, 3, 4]]))


def test_vary_gives_the_mask_the_parameters_of_the_episode():
    env = envs.vary(envs.time_limit(counter(), 4), lambda key, params: {"stride": -params["stride"]})
    _, state = env.reset(jax.random.key(0), env.params)
    np.testing.assert_array_equal(env.action_mask(state, env.params), [True, False])


def test_vary_makes_python_numbers_strong_arrays():
    env = envs.vary(envs.make("CartPole-v1"), lambda key, params: params)
    envs.check_environment(env, num_steps=20)
    _, state = env.reset(jax.random.key(0), env.params)
    assert state.params.gravity.dtype == jnp.float32 and not state.params.gravity.weak_type


def test_environments_without_a_mask_stay_without():
    env = envs.make("CartPole-v1")
    wrapped = envs.vectorise(envs.auto_reset(envs.vary(env, lambda key, params: params)), 2)
    assert wrapped.action_mask is None


def test_discounted_returns_begin_anew_at_every_end():
    """Rewards of 1 to 3 end by a limit or a termination, and the next episode begins with 1, whatever gamma is."""
    for env in (envs.time_limit(counter(end=99), 3), counter(end=3)):
        timestep = run(envs.record_discounted_returns(envs.auto_reset(env), 1.0), 7)
        assert np.asarray(timestep.terminated | timestep.truncated).tolist() == [False, False, True] * 2 + [False]
        np.testing.assert_array_equal(timestep.info["discounted_return"], [1, 3, 6, 1, 3, 6, 1])
