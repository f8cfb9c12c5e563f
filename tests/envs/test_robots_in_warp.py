"""Tasks of robots in MuJoCo Warp: the physics are those of C MuJoCo, and the rest is that of the same task.

MuJoCo Warp compiles its kernels for CPUs too, which takes half a minute for each robot and thread of a program.
"""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

import rollmill
from physics.robots import relative, visited
from rollmill.envs.robots import MODELS
from rollmill.physics import RobotState
from wordings import raises

pytest.importorskip("mujoco_warp")
in_warp = pytest.importorskip("rollmill.physics.warp_robots")


ITERATIONS = 8


def stepped(robots, size, seen):
    """One step of many robots in MuJoCo Warp."""

    def one(q, v, w, u):
        return robots.advance(RobotState(q, v, w, jnp.zeros(size)), u, 1)

    return jax.jit(jax.vmap(one))(*(jnp.asarray(seen[name], jnp.float32) for name in "qvwu"))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_step_of_each_robot_is_that_of_c_mujoco(name):
    compiled = mujoco.MjModel.from_xml_string(MODELS[name]())
    compiled.opt.iterations = compiled.opt.ls_iterations = ITERATIONS
    compiled.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_ISLAND
    seen = visited(compiled, 128)
    robots = in_warp.WarpRobots(compiled, iterations=ITERATIONS, line_search_iterations=ITERATIONS)
    after, overflows = stepped(robots, compiled.nsensordata, seen)
    assert not np.any(overflows)
    assert seen["contacts"].any() == (name in ("Ant", "Anymal", "Humanoid", "ShadowHand"))
    # The line searches differ, so a humanoid whose solver has not converged does, too.
    share = 0.96 if name == "Humanoid" else 0.99
    for ours, theirs in ((after.positions, "q1"), (after.velocities, "v1"), (after.accelerations, "a")):
        assert np.mean(relative(ours, seen[theirs]) < 1e-3) >= share
    if compiled.nsensordata:
        assert np.mean(relative(after.sensors, seen["s"]) < 1e-2) >= share


BOX = """
<mujoco><option timestep="0.005" cone="elliptic"/><worldbody><geom type="plane" size="0 0 1"/>
<body pos="0 0 0.11"><freejoint/><geom type="box" size="0.1 0.1 0.1"/></body>
<body pos="0 0 0.305"><joint name="lift" type="slide" axis="0 0 1" damping="1"/>
<geom type="box" size="0.1 0.1 0.1"/></body>
</worldbody><actuator><position joint="lift" kp="20"/></actuator><sensor><jointpos joint="lift"/></sensor></mujoco>
"""
"""Boxes that touch and an elliptic cone, which this package's own physics do not cover."""


@pytest.mark.slow
def test_an_own_robot_is_that_of_the_host():
    made = {"reward": lambda before, action, after: after.sensors[0], "substeps": 2, "reset_angle": 0.0}
    env = rollmill.robot(BOX, **made, reset_speed=0.0, iterations=50, physics="warp", max_steps=30)
    compiled, step = mujoco.MjModel.from_xml_string(BOX), jax.jit(jax.vmap(env.step, (None, 0, 0, None)))
    data, start = mujoco.MjData(compiled), env.reset(jax.random.key(0), env.params)[1]
    state = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), start)
    for action in np.linspace(-1, 1, 20):
        actions = np.array([[0.0], [action], [1.0]], np.float32)
        timestep = step(jax.random.key(0), state, actions, env.params)
        data.ctrl[:] = action
        mujoco.mj_step(compiled, data, nstep=2)
        state = timestep.state
        np.testing.assert_allclose(timestep.observation[1, :6], data.qpos[2:], atol=1e-3)
        assert float(timestep.reward[1]) == pytest.approx(data.sensordata[0], abs=1e-3)
        assert not np.any(timestep.terminated | timestep.info["simulation_overflow"])
    assert data.ncon > 4
    assert np.abs(timestep.observation[0] - timestep.observation[2]).max() > 2e-5


@pytest.fixture(scope="module")
def ants():
    """The ant's task in both physics, and a batch of states of robots that have walked for some steps."""
    own, other = rollmill.make("robots:Ant"), rollmill.make("robots:Ant", physics="warp")
    keys = jax.random.split(jax.random.key(0), 4)
    state = jax.vmap(own.reset, (0, None))(keys, own.params)[1]
    step = jax.jit(jax.vmap(own.step, (0, 0, 0, None)))
    for key in jax.random.split(jax.random.key(1), 30):
        actions = jax.random.uniform(key, (4, 8), minval=-0.3, maxval=0.3)
        state = step(keys, state, actions, own.params).state
    return own, other, keys, state, actions


def are_equal(one, other):
    return jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), one, other))


def in_batch(env):
    return jax.jit(jax.vmap(env.step, (0, 0, 0, None)))


@pytest.mark.slow
def test_task_and_resets_are_the_same_in_both_physics(ants):
    own, other, keys, state, actions = ants
    right, found = (
        in_batch(own)(keys, state, actions, own.params),
        in_batch(other)(keys, state, actions, other.params),
    )
    assert float(jnp.abs(right.state.inner.robot.sensors).max()) > 1  # feet on the floor
    for name in ("observation", "reward", "terminated", "truncated"):
        np.testing.assert_allclose(getattr(found, name), getattr(right, name), rtol=2e-3, atol=2e-3)
    assert set(found.info) - set(right.info) == {"simulation_overflow"}
    first, second = (jax.vmap(env.reset, (0, None))(keys, env.params) for env in (own, other))
    assert are_equal(first, second)
    assert other.params.robot is None and other.options.keys() == {"contacts", "rows", "physics"}


@pytest.mark.slow
def test_nothing_but_its_state_remains_of_a_robot(ants):
    _, env, keys, state, actions = ants
    step = in_batch(env)
    first = step(keys, state, actions, env.params)
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan if leaf.dtype == jnp.float32 else leaf, state)
    mixed = jax.tree.map(lambda a, b: jnp.concatenate([a[:1], b[1:]]), broken, state)
    second = step(keys, mixed, -actions, env.params)
    assert bool(second.terminated[0]) and bool(second.info["unstable_state"][0])
    assert np.all(np.isfinite(second.observation)) and not np.any(second.info["unstable_state"][1:])
    third = step(keys, state, actions, env.params)
    assert are_equal(first, third)
    pairs = lambda tree: jax.tree.map(lambda leaf: leaf.reshape(2, 2, *leaf.shape[1:]), tree)
    nested = jax.jit(jax.vmap(jax.vmap(env.step, (0, 0, 0, None)), (0, 0, 0, None)))
    again = nested(pairs(keys), pairs(state), pairs(actions), env.params)
    assert are_equal(pairs(first), again)


COMMAND = [sys.executable, "-m", "rollmill"]
SIZES = ["--num-envs", "4", "--num-steps", "8", "--num-minibatches", "1", "--update-epochs", "1", "--seed", "1"]


def train(run, *options, steps=64, check=True):
    words = [*SIZES, "--total-timesteps", str(steps), "--run-dir", str(run), "--no-tensorboard", "--quiet"]
    command = [*COMMAND, "train", "ppo", "robots:Ant", "--env-option", "physics=warp", *options, *words]
    return subprocess.run(command, check=check, capture_output=True, text=True)


@pytest.mark.slow
def test_buffers_that_are_too_small_stop_a_training_with_a_sentence(tmp_path):
    small = ("--env-option", "contacts=12", "--env-option", "rows=1")
    ended = train(tmp_path / "small", *small, check=False)
    assert ended.returncode == 2, ended.stderr
    assert "MuJoCo Warp left out contacts or constraints in" in ended.stderr
    assert "(contacts=12, rows=1)" in ended.stderr
    assert "Traceback" not in ended.stderr
    rows = [json.loads(line) for line in (tmp_path / "small" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["episode/overflows"] > 0
    train(tmp_path / "enough")
    rows = [json.loads(line) for line in (tmp_path / "enough" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["episode/overflows"] == 0 for row in rows) and rows[-1]["env_steps"] == 64


def test_what_mujoco_warp_cannot_do_is_refused(monkeypatch):
    with raises("hint-physics-mujoco-steps-such", "PGS"):
        by_pgs = BOX.replace("cone=", 'solver="PGS" cone=')
        rollmill.robot(by_pgs, reward=lambda before, action, after: action[0], physics="warp")
    with raises("has-to-be-at-least", "contacts", 0):
        rollmill.make("robots:Cartpole", physics="warp", contacts=0)
    with raises("robots-sets-size-buffer-mujoco", "rows=3", "'jax'"):
        rollmill.make("robots:Cartpole", rows=3)
    monkeypatch.setitem(sys.modules, "mujoco_warp", None)
    with raises("physics-warp-needs-packages-mujoco", "pip install"):
        rollmill.make("robots:Cartpole", physics="warp")
