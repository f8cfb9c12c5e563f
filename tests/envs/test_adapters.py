"""Environments of gymnax and Gymnasium through their adapters."""

import builtins
import importlib
import importlib.metadata
import importlib.util
import sys
import urllib.error

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from rollmill import envs
from rollmill.core.errors import UsageError
from rollmill.core.types import HostEnvironment
from wordings import raises

# The same tests hold for both forms of gymnax; whichever is installed runs.
if importlib.util.find_spec("gymnax") is None:  # its import takes seconds, which only one process should spend
    pytest.skip("gymnax is not installed", allow_module_level=True)
GYMNAX_VERSION = importlib.metadata.version("gymnax")


def trajectory(env, action_of, num_steps):
    def step(carry, key):
        observation, state = carry
        timestep = env.step(key, state, action_of(observation), env.params)
        return (timestep.observation, timestep.state), timestep

    @eqx.filter_jit
    def run(key):
        return jax.lax.scan(step, env.reset(key, env.params), jax.random.split(key, num_steps))[1]

    return run(jax.random.key(0))


def test_gymnax_truncates_at_its_time_limit_without_terminating():
    env = envs.make("gymnax:Pendulum-v1")
    timestep = trajectory(env, lambda o: jnp.zeros(1), 200)
    np.testing.assert_array_equal(timestep.truncated, np.arange(1, 201) == 200)
    assert not np.asarray(timestep.terminated).any()


def test_gymnax_terminates_before_its_time_limit_without_truncating_and_does_not_reset():
    env = envs.make("gymnax:CartPole-v1")
    timestep = trajectory(env, lambda o: jnp.int32(1), 15)
    terminated, observation = np.asarray(timestep.terminated), np.asarray(timestep.observation)
    first = int(np.argmax(terminated))
    assert 5 < first < 14 and not np.asarray(timestep.truncated).any()
    assert abs(observation[first, 2]) > 12 * np.pi / 180  # the final observation, not a reset one
    assert np.asarray(timestep.state.time)[first] == first + 1


def test_gymnax_steps_are_gymnaxs_own():
    import gymnax

    source, params = gymnax.make("CartPole-v1")
    env = envs.make("gymnax:CartPole-v1")
    key = jax.random.key(5)
    with jax.numpy_dtype_promotion("standard"):
        observation, state = source.reset_env(key, params)
        theirs = source.step_env(key, state, 1, params)
    ours_observation, ours_state = env.reset(key, env.params)
    ours = env.step(key, ours_state, jnp.int32(1), env.params)
    np.testing.assert_array_equal(ours_observation, observation)
    np.testing.assert_array_equal(ours.observation, theirs[0])
    assert ours.reward == theirs[2] and ours.reward.dtype == jnp.float32


def test_gymnax_spaces_become_gymnasiums():
    env = envs.make("gymnax:CartPole-v1")
    assert env.action_space == spaces.Discrete(2)
    assert env.observation_space == gymnasium.make("CartPole-v1").observation_space
    box = envs.make("gymnax:Pendulum-v1").action_space
    assert box == spaces.Box(-2.0, 2.0, (1,), np.float32)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")  # gymnax 0.0.x, of its own code
@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "Catch-bsuite", "FourRooms-misc"])
@pytest.mark.slow_beyond(1)
def test_gymnax_environments_keep_the_contract(name):
    envs.check_environment(envs.make(f"gymnax:{name}"), num_steps=30)


def test_gymnax_params_vary_per_replica():
    batch = envs.vectorise(envs.make("gymnax:CartPole-v1"), 2)
    keys = jnp.stack([jax.random.key(0)] * 2)
    params = batch.params.replace(force_mag=jnp.array([10.0, 20.0]))
    _, state = batch.reset(keys, params)
    timestep = batch.step(keys, state, jnp.ones(2, jnp.int32), params)
    first, second = np.asarray(timestep.state.x_dot - state.x_dot)
    # The push is a linear function of the force, whose other terms are nearly zero near upright.
    np.testing.assert_allclose(second / first, 2.0, rtol=0.02)


def test_gymnax_unknown_id_offers_the_nearest():
    with raises("unknown-setting", "gymnax", "environment 'CartPole-v0'", "Did you mean CartPole-v1"):
        envs.make("gymnax:CartPole-v0")


def test_gymnax_without_its_data_is_explained(monkeypatch):
    def offline(name):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr("gymnax.make", offline)
    with raises("gymnax-needs-data-could-not", "MNISTBandit-bsuite", "URLError", "no network"):
        envs.make("gymnax:MNISTBandit-bsuite")


@pytest.mark.parametrize(
    ("module", "environment", "code"),
    [
        ("ale_py", "ale:Pong", "id-environments-need-package-is"),
        ("envpool", "envpool:CartPole-v1", "envpools-environments-need-package-is"),
        ("gymnax", "gymnax:CartPole-v1", "id-environments-need-package-is"),
        ("pgx", "pgx:othello", "id-environments-need-package-is"),
    ],
)
def test_a_missing_package_names_the_extra(module, environment, code, monkeypatch):
    real = importlib.import_module

    def without_package(name, package=None):
        if name.startswith(module):
            raise ModuleNotFoundError(f"No module named {module!r}")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without_package)
    extra = f"[{environment.partition(':')[0]}]"
    with raises(code, f"No module named {module!r}", "pip install", extra):
        envs.make(environment)


def test_gymnasium_environments_are_host_environments():
    env = envs.make("gymnasium:CartPole-v1")
    assert isinstance(env, HostEnvironment) and env.name == "gymnasium:CartPole-v1"
    assert env.observation_space == gymnasium.make("CartPole-v1").observation_space


def test_gymnasiums_time_limit_stays_and_keeps_the_final_observation():
    vector = envs.make("gymnasium:CartPole-v1", max_episode_steps=3).start([0], seed=0)
    vector.reset()
    steps = [vector.step(np.array([t % 2])) for t in range(4)]
    vector.close()
    assert [bool(step.truncated[0]) for step in steps] == [False, False, True, False]
    assert not any(step.terminated[0] for step in steps)
    assert np.abs(steps[2].observation).max() <= 0.05
    assert not np.array_equal(steps[2].info["final_observation"], steps[2].observation)


def test_gymnasiums_mujoco_environments_run(tmp_path, monkeypatch):
    pytest.importorskip("mujoco", reason="pip install 'rollmill[mujoco]'")
    monkeypatch.chdir(tmp_path)  # MuJoCo writes a log into the directory it runs in
    env = envs.make("gymnasium:HalfCheetah-v5")
    vector, theirs = env.start([0], seed=0), gymnasium.make("HalfCheetah-v5")
    first, _ = theirs.reset(seed=vector.seeds[0])
    np.testing.assert_array_equal(vector.reset().observation[0], first.astype(np.float32))
    action = np.full((1, 6), 0.3, np.float32)
    for _ in range(3):
        observation, reward, *_ = theirs.step(action[0])
        step = vector.step(action)
    np.testing.assert_array_equal(step.observation[0], observation.astype(np.float32))
    assert step.reward[0] == np.float32(reward) and vector.drain_failures() == []
    vector.close()


def test_gymnasium_environments_keep_the_contract():
    envs.check_environment(envs.make("gymnasium:CartPole-v1"), num_steps=30)


def test_gymnasium_unknown_ids_and_modules():
    with pytest.raises(UsageError, match="unknown Gymnasium environment 'CartPole-v11'.*CartPole-v1.*MODULE:ID"):
        envs.make("gymnasium:CartPole-v11")
    with pytest.raises(UsageError, match="cannot import 'no_such_module'"):
        envs.make("gymnasium:no_such_module:CartPole-v1")


def test_gymnasium_missing_package_names_the_way_out(monkeypatch):
    for module in [name for name in sys.modules if name.startswith(("mujoco", "gymnasium.envs.mujoco"))]:
        monkeypatch.delitem(sys.modules, module)
    real = builtins.__import__

    def without_mujoco(name, *args, **kwargs):
        if name.partition(".")[0] == "mujoco":
            raise ImportError("No module named 'mujoco'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_mujoco)
    with raises("gymnasium-needs-package-is-not", "HalfCheetah-v5", "mujoco"):
        envs.make("gymnasium:HalfCheetah-v5")
