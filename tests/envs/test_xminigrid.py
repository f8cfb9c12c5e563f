"""Grid worlds of XLand-MiniGrid through their adapter."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rollmill
from rollmill import envs
from wordings import raises

pytest.importorskip("xminigrid", reason="pip install 'rollmill[xminigrid]'")

EMPTY = "xminigrid:MiniGrid-Empty-5x5"
FORWARD, RIGHT = 0, 1


def walk(env, actions):
    def step(state, action):
        timestep = env.step(jax.random.key(0), state, action, env.params)
        return timestep.state, timestep

    @jax.jit
    def go(key):
        return jax.lax.scan(step, env.reset(key, env.params)[1], jnp.asarray(actions, jnp.int32))[1]

    return go(jax.random.key(0))


def test_the_goal_terminates_and_the_limit_truncates():
    way = [FORWARD, FORWARD, RIGHT, FORWARD, FORWARD]
    steps = walk(envs.make(EMPTY, max_steps=100), way)
    np.testing.assert_array_equal(steps.terminated, [False] * 4 + [True])
    assert not steps.truncated.any()
    np.testing.assert_allclose(steps.reward, [0, 0, 0, 0, 1 - 0.9 * 5 / 100], rtol=1e-6)
    short = walk(envs.make(EMPTY, max_steps=3), way)
    np.testing.assert_array_equal(short.truncated[:3], [False, False, True])
    assert not short.terminated[:3].any()


def test_steps_are_xminigrids_own():
    env, raw = envs.make(EMPTY), envs.make(EMPTY, one_hot=False)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        source, params = importlib.import_module("xminigrid").make("MiniGrid-Empty-5x5")
        theirs = source.step(params, source.reset(params, jax.random.key(0)), FORWARD)
    np.testing.assert_array_equal(walk(raw, [FORWARD]).observation[0], theirs.observation)
    planes = walk(env, [FORWARD]).observation[0]
    np.testing.assert_array_equal(planes[..., :13].argmax(-1), theirs.observation[..., 0])
    np.testing.assert_array_equal(planes[..., 13:].argmax(-1), theirs.observation[..., 1])
    assert planes.sum() == 2 * 7 * 7


@pytest.mark.parametrize("name", ["MiniGrid-Empty-5x5", "XLand-MiniGrid-R1-9x9"])
def test_environments_keep_the_contract(name):
    envs.check_environment(envs.make(f"xminigrid:{name}", max_steps=20), num_steps=50)


def test_rules_of_xland_may_differ_between_environments():
    env = envs.make("xminigrid:XLand-MiniGrid-R1-9x9")
    batch = envs.vectorise(env, 2)
    ruleset = env.params.ruleset
    goals = jnp.stack([ruleset.goal, ruleset.goal.at[0].set(1)])
    params = env.params.replace(ruleset=ruleset.replace(goal=goals))
    _, state = batch.reset(jax.random.split(jax.random.key(0), 2), params)
    np.testing.assert_array_equal(state.state.goal_encoding, goals)


def test_unknown_names_and_options_are_explained():
    with raises("unknown-name", "xminigrid environment", "Did you mean MiniGrid-Empty-5x5"):
        envs.make("xminigrid:Minigrid-Empty-5x5")
    with raises("has-no-option-options", "'max_step'", "Did you mean max_steps"):
        envs.make(EMPTY, max_step=5)


@pytest.mark.slow
def test_ppo_learns_to_find_the_goal(tmp_path):
    algorithm = rollmill.ppo(envs.make(EMPTY), total_timesteps=100_000, num_envs=64, num_steps=32, network="mlp")
    run = rollmill.train(algorithm, run_dir=tmp_path / "run", quiet=True)
    assert run.summary["final_return"] > 0.85  # 0.955 at best
