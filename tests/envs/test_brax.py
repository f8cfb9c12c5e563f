"""Environments of Brax through their adapter."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import rollmill
from rollmill import envs
from wordings import raises

pytest.importorskip("brax", reason="pip install 'rollmill[brax]'")
pytestmark = [
    pytest.mark.slow,  # each program of Brax compiles for some ten seconds
    pytest.mark.filterwarnings("ignore"),  # Brax's and MuJoCo's own, of what they will no longer support
]


@pytest.fixture(scope="module")
def pendulum():
    env = envs.make("brax:inverted_pendulum", episode_length=3)
    return env, jax.jit(env.reset), jax.jit(env.step)


def test_steps_are_braxs_own_and_the_limit_truncates(pendulum):
    env, reset, step = pendulum
    key, action = jax.random.key(3), jnp.full((1,), 0.1, jnp.float32)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        source = importlib.import_module("brax.envs").get_environment("inverted_pendulum")
        theirs = jax.jit(source.reset)(key)
        after = jax.jit(source.step)(theirs, action)
    observation, state = reset(key, env.params)
    np.testing.assert_allclose(observation, theirs.obs, rtol=1e-6)
    flags = []
    for number in range(3):
        timestep = step(key, state, action, env.params)
        if number == 0:
            np.testing.assert_allclose(timestep.observation, after.obs, rtol=1e-5, atol=1e-6)
            assert timestep.reward == after.reward
        state = timestep.state
        flags.append((bool(timestep.terminated), bool(timestep.truncated)))
    assert flags == [(False, False), (False, False), (False, True)]
    assert env.action_space == spaces.Box(-1.0, 1.0, (1,), np.float32)


def test_a_fall_terminates(pendulum):
    env, reset, step = pendulum
    _, state = reset(jax.random.key(0), env.params)
    source = importlib.import_module("brax.envs").get_environment("inverted_pendulum")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        fallen = jax.jit(source.pipeline_init)(jnp.array([0.0, 0.5]), jnp.zeros(2))
    inner = state.inner.replace(pipeline_state=fallen)
    timestep = step(jax.random.key(1), type(state)(inner, state.elapsed), jnp.zeros(1), env.params)
    assert (bool(timestep.terminated), bool(timestep.truncated)) == (True, False)


@pytest.mark.parametrize(("name", "backend"), [("inverted_pendulum", "mjx"), ("ant", "spring")])
def test_environments_keep_the_contract(name, backend):
    envs.check_environment(envs.make(f"brax:{name}", backend=backend), num_steps=30)


def test_unknown_names_and_options_are_explained():
    with raises("unknown-name", "brax environment 'half_cheetah'", "Did you mean halfcheetah"):
        envs.make("brax:half_cheetah")
    with raises("has-no-option-options", "'episode_lenght'", "Did you mean episode_length"):
        envs.make("brax:ant", episode_lenght=5)
    with raises("brax-backend-has-to-be", "bullet", "generalized, mjx, positional, spring"):
        envs.make("brax:ant", backend="bullet")


def test_ppo_learns_to_balance(tmp_path):
    algorithm = rollmill.ppo(
        envs.make("brax:inverted_pendulum", episode_length=200),
        total_timesteps=200_000,
        num_envs=64,
        num_steps=32,
        normalize_observations=True,
    )
    run = rollmill.train(algorithm, run_dir=tmp_path / "run", quiet=True)
    assert run.summary["final_return"] > 100  # a random policy falls after some five steps
