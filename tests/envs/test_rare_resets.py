"""Resets of finished environments alone: the results of a reset in every step, at fewer resets."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from emitters import AS_USERS
from rollmill import envs
from rollmill.core.types import Timestep
from rollmill.envs import rare_resets

NUM_ENVS, NUM_STEPS = 6, 60


def trajectory(env, *, num_envs=NUM_ENVS, params=None):
    """Steps of CartPole under random actions, with parameters of each environment."""
    batch = envs.vectorise(envs.record_episodes(envs.auto_reset(env)), num_envs)
    params = batch.params if params is None else params

    @partial(jax.jit, compiler_options=AS_USERS)
    def run(key):
        def step(state, key):
            keys = jax.random.split(key, num_envs)
            timestep = batch.step(
                keys, state, jax.random.bernoulli(key, 0.5, (num_envs,)).astype(jnp.int32), params
            )
            return timestep.state, timestep._replace(state=())

        _, state = batch.reset(jax.random.split(key, num_envs), params)
        return jax.lax.scan(step, state, jax.random.split(key, NUM_STEPS))[1]

    return run(jax.random.key(0)), run


def forces(num_envs):
    cartpole = envs.make("CartPole-v1")
    return eqx.tree_at(lambda p: p.force, cartpole.params, jnp.linspace(5.0, 20.0, num_envs))


@pytest.mark.parametrize("ratio", [2, 4, 6, 100])
def test_rare_resets_give_the_results_of_a_reset_in_every_step(ratio):
    env, params = envs.make("CartPole-v1"), forces(NUM_ENVS)
    always, _ = trajectory(env, params=params)
    rare, _ = trajectory(env._replace(reset_ratio=ratio), params=params)
    assert int(np.sum(always.terminated)) > 10
    for expected, found in zip(jax.tree.leaves(always), jax.tree.leaves(rare), strict=True):
        np.testing.assert_array_equal(expected, found)


def test_large_and_small_arrays_of_a_state_are_reset_together():
    """A large array is scattered, and small ones are selected."""
    size = rare_resets.MAX_SELECTED + 1

    def reset(key, params):
        number = jax.random.uniform(key)
        return number, {
            "large": jnp.full(size, number),
            "small": number,
            "left": jax.random.randint(key, (), 1, 9),
        }

    def step(key, state, action, params):
        state = {name: leaf - 1 for name, leaf in state.items()}
        return Timestep(state["small"], state, jnp.float32(0), state["left"] <= 0, jnp.bool_(False), {})

    env = envs.make("Pendulum-v1")._replace(reset=reset, step=step, params=())
    keys, states = jax.random.split(jax.random.key(0), 40), []
    for ratio in (1, 4):
        batch = envs.vectorise(envs.auto_reset(env._replace(reset_ratio=ratio)), 12)
        _, state = batch.reset(jax.random.split(keys[0], 12), ())
        advance = jax.jit(lambda state, key, batch=batch: batch.step(jax.random.split(key, 12), state, None, ()))
        for key in keys:
            state = advance(state, key).state
            np.testing.assert_array_equal(state["large"], jnp.broadcast_to(state["small"][:, None], (12, size)))
        states.append(state)
    np.testing.assert_array_equal(states[0]["large"], states[1]["large"])
    np.testing.assert_array_equal(states[0]["left"], states[1]["left"])


@pytest.mark.slow
def test_rare_resets_batch_twice_and_not_at_all():
    env = envs.make("CartPole-v1")
    _, always = trajectory(env)
    _, rare = trajectory(env._replace(reset_ratio=3))
    keys = jax.random.split(jax.random.key(1), 3)
    expected, found = jax.vmap(always)(keys), jax.vmap(rare)(keys)
    np.testing.assert_array_equal(expected.observation, found.observation)
    single, rare_single = envs.auto_reset(env), envs.auto_reset(env._replace(reset_ratio=3))
    _, state = env.reset(keys[0], env.params)
    for key in jax.random.split(keys[1], 20):
        first = single.step(key, state, jnp.int32(1), env.params)
        second = rare_single.step(key, state, jnp.int32(1), env.params)
        np.testing.assert_array_equal(first.observation, second.observation)
        state = first.state


def test_only_groups_with_a_finished_environment_are_reset():
    calls = []
    env = envs.make("CartPole-v1")

    def counted(key, params):
        jax.debug.callback(lambda _: calls.append(1), key)
        return env.reset(key, params)

    steps, _ = trajectory(env._replace(reset=counted, reset_ratio=3))
    jax.effects_barrier()
    ended = np.sum(steps.terminated | steps.truncated, axis=1)
    group = NUM_ENVS // 3
    assert ended.max() > 0 and (ended == 0).any()
    assert len(calls) == NUM_ENVS + int(np.sum(-(-ended // group) * group))
