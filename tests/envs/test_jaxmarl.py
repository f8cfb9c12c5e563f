"""Environments of JaxMARL through their adapter."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rollmill
from rollmill import envs
from rollmill.core.errors import UsageError
from wordings import raises

pytest.importorskip("jaxmarl", reason="pip install 'rollmill[jaxmarl]'")
pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype")

SPREAD = "jaxmarl:MPE_simple_spread_v3"


def run(env, actions):
    """Timesteps under the same actions in every step."""

    def step(state, key):
        timestep = env.step(key, state, actions, env.params)
        return timestep.state, timestep

    @jax.jit
    def go(key):
        return jax.lax.scan(step, env.reset(key, env.params)[1], jax.random.split(key, 40))[1]

    return go(jax.random.key(0))


def test_steps_are_jaxmarls_own_and_the_limit_truncates():
    env, key = envs.make(SPREAD, max_steps=10), jax.random.key(2)
    actions = jnp.array([1, 2, 3], jnp.int32)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        source = importlib.import_module("jaxmarl").make("MPE_simple_spread_v3", max_steps=10)
        first, theirs = source.reset(key)
        last, _, rewards, *_ = source.step_env(key, theirs, dict(zip(source.agents, actions, strict=True)))
    observation, state = env.reset(key, env.params)
    timestep = env.step(key, state, {"agent": actions}, env.params)
    for number, agent in enumerate(source.agents):
        np.testing.assert_allclose(observation["agent"][number], first[agent], rtol=1e-6)
        np.testing.assert_allclose(timestep.observation["agent"][number], last[agent], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(timestep.reward["agent"][number], rewards[agent], rtol=1e-5)
    steps = run(env, {"agent": actions})
    assert not steps.terminated.any()
    np.testing.assert_array_equal(steps.truncated, np.arange(40) >= 10)  # one step later than it says


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["MPE_simple_spread_v3", "MPE_simple_world_comm_v3", "SMAX", "HeuristicEnemySMAX"]
)
def test_environments_keep_the_contract(name):
    envs.check_environment(envs.make(f"jaxmarl:{name}"), num_steps=50)


def test_battles_end_by_death_or_by_their_limit_and_the_dead_are_inactive():
    env = envs.make("jaxmarl:HeuristicEnemySMAX", scenario="3m")
    assert [(kind.name, kind.count) for kind in env.agents] == [("ally", 3)]
    steps = run(env, {"ally": jnp.full(3, 4, jnp.int32)})  # who does nothing is shot
    end = int(np.argmax(steps.terminated))
    assert steps.terminated[end] and not steps.truncated.any()
    alive = jax.vmap(env.active, in_axes=(0, None))(steps.state, env.params)["ally"]
    assert alive[0].all() and not alive[end].any()
    short = run(
        envs.make("jaxmarl:HeuristicEnemySMAX", scenario="3m", max_steps=3), {"ally": jnp.zeros(3, jnp.int32)}
    )
    assert short.truncated[3] and not short.terminated[:4].any()


def test_unknown_names_and_options_are_explained():
    with raises("unknown-name", "jaxmarl environment", "Did you mean MPE_simple_spread_v3"):
        envs.make("jaxmarl:MPE_simple_spread_v2")
    with raises("has-no-option-options", "'num_agent'", "Did you mean num_agents"):
        envs.make(SPREAD, num_agent=5)
    with pytest.raises(UsageError, match="unknown scenario of SMAX '4m'"):
        envs.make("jaxmarl:SMAX", scenario="4m")


@pytest.mark.slow
def test_mappo_learns_to_spread(tmp_path):
    algorithm = rollmill.mappo(
        envs.make(SPREAD), total_timesteps=400_000, num_envs=64, num_steps=26, learning_rate=1e-3
    )
    run = rollmill.train(algorithm, run_dir=tmp_path / "run", quiet=True)
    assert run.summary["final_return"] > -40
