"""Environments of MuJoCo Playground through their adapter."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rollmill
from rollmill import envs
from wordings import raises

pytest.importorskip("mujoco_playground", reason="pip install 'rollmill[playground]'")
pytestmark = [
    pytest.mark.slow,  # each program of MJX compiles for some ten seconds
    pytest.mark.filterwarnings("ignore"),  # MuJoCo's own, of what it will no longer support
]


def test_steps_are_playgrounds_own_and_the_limit_truncates():
    env = envs.make("playground:CartpoleBalance", episode_length=2)
    key, action = jax.random.key(3), jnp.full((1,), 0.5, jnp.float32)
    registry = importlib.import_module("mujoco_playground").registry
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        source = registry.load("CartpoleBalance", config_overrides={"impl": "jax"})
        theirs = jax.jit(source.reset)(key)
        after = jax.jit(source.step)(theirs, action)
    observation, state = jax.jit(env.reset)(key, env.params)
    np.testing.assert_allclose(observation, theirs.obs, rtol=1e-6)
    step = jax.jit(env.step)
    first = step(key, state, action, env.params)
    np.testing.assert_allclose(first.observation, after.obs, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(first.reward, after.reward, rtol=1e-5)
    second = step(key, first.state, action, env.params)
    assert [bool(flag) for flag in (first.truncated, second.truncated, second.terminated)] == [False, True, False]


def test_environments_keep_the_contract():
    envs.check_environment(envs.make("playground:CartpoleBalance"), num_steps=30)


def test_unknown_names_and_options_are_explained():
    with raises("unknown-name", "playground environment 'CartPoleBalance'", "Did you mean Cartpole"):
        envs.make("playground:CartPoleBalance")
    with raises("has-no-option-options", "'length'", "action_repeat", "impl"):
        envs.make("playground:CartpoleBalance", length=5)
    with raises("playground-cannot-be-made-with", "'impl': 'bullet'"):
        envs.make("playground:CartpoleBalance", impl="bullet")


def test_nothing_is_downloaded():
    models = importlib.import_module("mujoco_playground._src.mjx_env").MENAGERIE_PATH
    if models.exists():
        pytest.skip("the robots' models are there")
    with raises("playground-needs-models-robots-from"):
        envs.make("playground:Go1JoystickFlatTerrain")
    assert not models.exists()


def test_ppo_learns_to_balance(tmp_path):
    algorithm = rollmill.ppo(
        envs.make("playground:CartpoleBalance", episode_length=200),
        total_timesteps=300_000,
        num_envs=64,
        num_steps=32,
        normalize_observations=True,
    )
    run = rollmill.train(algorithm, run_dir=tmp_path / "run", quiet=True)
    assert run.summary["final_return"] > 120  # of 200; a random policy gets about 60
