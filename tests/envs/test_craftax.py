"""Craftax through its adapter."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import rollmill
from rollmill import envs
from wordings import raises

pytest.importorskip("craftax", reason="pip install 'rollmill[craftax]'")

CLASSIC = "craftax:Craftax-Classic-Symbolic-v1"
NOOP = jnp.int32(0)


@pytest.fixture(scope="module")
def classic():
    env = envs.make(CLASSIC, max_timesteps=20)
    return env, jax.jit(env.reset), jax.jit(env.step)


def test_steps_are_craftaxs_own_and_load_no_textures(classic):
    env, reset, step = classic
    symbolic = importlib.import_module("craftax.craftax_classic.envs.craftax_symbolic_env")
    source, key = symbolic.CraftaxClassicSymbolicEnvNoAutoReset(), jax.random.key(3)
    params = source.default_params
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        first, theirs = jax.jit(source.reset_env)(key, params)
        last, theirs, reward, *_ = jax.jit(source.step_env)(key, theirs, 6, params)
    observation, state = reset(key, env.params)
    timestep = step(key, state, jnp.int32(6), env.params)
    np.testing.assert_array_equal(observation, first)
    np.testing.assert_array_equal(timestep.observation, last)
    np.testing.assert_array_equal(timestep.state.map, theirs.map)
    assert timestep.reward == reward and timestep.reward.dtype == jnp.float32
    assert env.action_space == spaces.Discrete(17)
    assert symbolic.load_all_textures.cache_info().misses == 0


def test_the_time_limit_truncates_and_death_terminates_without_a_reset(classic):
    env, reset, step = classic
    _, state = reset(jax.random.key(0), env.params)
    last = state.replace(timestep=state.timestep + 19)
    for before, ends in ((state, (False, False)), (last, (False, True))):
        timestep = step(jax.random.key(1), before, NOOP, env.params)
        assert (bool(timestep.terminated), bool(timestep.truncated)) == ends
        assert timestep.state.timestep == before.timestep + 1
    dead = state.replace(player_health=jnp.zeros_like(state.player_health))
    timestep = step(jax.random.key(1), dead, NOOP, env.params)
    assert (bool(timestep.terminated), bool(timestep.truncated)) == (True, False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Craftax-Classic-Symbolic-v1", "Craftax-Symbolic-v1"])
def test_environments_keep_the_contract(name):
    env = envs.make(f"craftax:{name}", max_timesteps=40)
    envs.check_environment(env, num_steps=60)


def test_worlds_are_made_in_groups_by_default(classic):
    env, *_ = classic
    assert env.reset_ratio == 16
    assert envs.make(CLASSIC, reset_ratio=1).reset_ratio == 1
    with raises("reset-ratio-has-to-be", "reset_ratio=0"):
        envs.make(CLASSIC, reset_ratio=0)


def test_unknown_names_and_options_are_explained():
    with raises("unknown-name", "craftax environment", "Did you mean Craftax-Classic-Symbolic-v1"):
        envs.make("craftax:Craftax-Classic-Symbolic-v0")
    with raises("has-no-option-options", "'max_timestep'", "Did you mean max_timesteps"):
        envs.make(CLASSIC, max_timestep=5)
    with raises("has-to-be-type-as", "max_timesteps=2.5", "int", 10000):
        envs.make(CLASSIC, max_timesteps=2.5)


@pytest.mark.slow
def test_ppo_learns_to_collect(tmp_path):
    algorithm = rollmill.ppo(
        envs.make(CLASSIC),
        total_timesteps=300_000,
        num_envs=64,
        num_steps=64,
        num_minibatches=8,
        learning_rate=1e-3,
    )
    run = rollmill.train(algorithm, run_dir=tmp_path / "run", quiet=True)
    assert run.summary["final_return"] > 3  # a random policy gets less than 2 of the 22 achievements
