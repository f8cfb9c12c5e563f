"""Robots' tasks: their physics beside C MuJoCo's, and rewards and ends by value."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

import rollmill
from rollmill.core.drawing import Drawing, Line
from rollmill.core.errors import UsageError
from rollmill.core.machine import usable_cores
from rollmill.envs.host import Film, film_environment
from rollmill.envs.robots import (
    MODELS,
    ant,
    anymal,
    ball_balance,
    cartpole,
    franka_cabinet,
    hand_model,
    humanoid,
    ingenuity,
    quadcopter,
    shadow_hand,
)
from rollmill.envs.robots.mujoco_batch import MujocoBatch
from rollmill.envs.robots.walking import WalkerState, progress_of
from rollmill.programs.compiled import lower
from rollmill.programs.dispatch import dispatch_ahead
from rollmill.record.leaves import to_host
from wordings import raises


def test_unknown_robots_and_options_are_refused():
    with pytest.raises(UsageError, match="Ant"):
        rollmill.make("robots:Aunt")
    with raises("has-no-option-options", "'max_step'"):
        rollmill.make("robots:Ant", max_step=3)
    with raises("has-to-be-at-least", "iterations", 0):
        rollmill.make("robots:Ant", iterations=0)


def test_robots_in_c_mujoco_are_drawn_by_the_physics_of_this_package():
    with raises("cannot-be-drawn-is-no", "robots:Cartpole", "robots:Cartpole (env= in Python) plays in it"):
        film_environment(rollmill.make("robots:Cartpole", physics="mujoco"), Film([], []))


def test_the_ant_starts_on_bent_legs():
    env = rollmill.make("robots:Ant")
    observation, state = env.reset(jax.random.key(0), env.params)
    q = np.asarray(state.inner.robot.positions)
    assert observation.shape == env.observation_space.shape == (60,)
    np.testing.assert_allclose(q[:7], [0, 0, 0.44, 1, 0, 0, 0], atol=1e-7)
    np.testing.assert_array_less(np.abs(q[7::2]), 0.2)
    resting = np.radians([30, -30, -30, 30])
    assert np.all(np.abs(q[8::2] - resting) <= 0.2) and np.all(np.abs(q[8::2]) >= np.radians(30) - 1e-6)
    np.testing.assert_allclose(observation[:10], [0.44, *[0] * 9], atol=1e-6)
    np.testing.assert_allclose(observation[10:12], 1)


def test_rewards_by_hand():
    params = rollmill.make("robots:Ant").params
    task = ant._Ant(rollmill.physics.load(ant.model_text()).structure)
    observation = jnp.zeros(60).at[10].set(0.95).at[11].set(0.4).at[12:14].set(1.0).at[20].set(0.5)
    action = jnp.zeros(8).at[0].set(-1.0)
    reward = task.merits(observation, action, params)
    assert float(reward) == pytest.approx(0.5 + 0.1 + 0.5 * 0.5 - 0.005 - 0.05 * 0.5 - 0.1 * 2)
    before, after = jnp.zeros(15), jnp.zeros(15).at[0].set(0.05).at[1].set(0.3)
    closer = (1000 - np.hypot(999.95, 0.3)) * 60
    assert float(progress_of(before, after, params.target, 1 / 60)) == pytest.approx(closer, rel=1e-4)


def test_the_cart_moves_as_in_mujoco():
    env = rollmill.make("robots:Cartpole", max_steps=1000)
    compiled = mujoco.MjModel.from_xml_string(cartpole.MODEL)
    data, random = mujoco.MjData(compiled), np.random.default_rng(0)
    step = jax.jit(env.step)
    first, state = env.reset(jax.random.key(3), env.params)
    data.qpos[:], data.qvel[:] = np.asarray(first)[[0, 2]], np.asarray(first)[[1, 3]]
    ended = False
    while not ended:
        action = random.uniform(-0.05, 0.05, 1).astype(np.float32)
        timestep = step(jax.random.key(0), state, jnp.asarray(action), env.params)
        data.ctrl[:] = action
        mujoco.mj_step(compiled, data, nstep=2)
        (x, angle), (speed, rate) = data.qpos, data.qvel
        np.testing.assert_allclose(timestep.observation, [x, speed, angle, rate], rtol=1e-3, atol=1e-3)
        ended = abs(x) > 3 or abs(angle) > np.pi / 2
        expected = -2 if ended else 1 - angle**2 - 0.01 * abs(speed) - 0.005 * abs(rate)
        assert float(timestep.reward) == pytest.approx(expected, abs=2e-3)
        assert bool(timestep.terminated) == ended and not bool(timestep.truncated)
        state = timestep.state


@pytest.mark.slow
def test_the_ant_moves_as_in_mujoco_and_falls():
    env = rollmill.make("robots:Ant", max_steps=5, iterations=8, line_search_iterations=8)
    compiled = mujoco.MjModel.from_xml_string(ant.model_text())
    data, random = mujoco.MjData(compiled), np.random.default_rng(0)
    step = jax.jit(env.step)
    _, state = env.reset(jax.random.key(1), env.params)
    data.qpos[:], data.qvel[:] = np.asarray(state.inner.robot.positions), np.asarray(state.inner.robot.velocities)
    for count in range(1, 31):
        action = random.uniform(-1, 1, 8).astype(np.float32)
        timestep = step(jax.random.key(0), state, jnp.asarray(action), env.params)
        data.ctrl[:] = action
        mujoco.mj_step(compiled, data, nstep=2)
        robot, state = timestep.state.inner.robot, timestep.state
        np.testing.assert_allclose(robot.positions, data.qpos, atol=2e-4)
        np.testing.assert_allclose(robot.velocities, data.qvel, atol=2e-2)
        assert bool(timestep.truncated) == (count >= 5)
        assert bool(timestep.terminated) == (data.qpos[2] < 0.31)
    on_its_back = jnp.asarray(robot.positions).at[2:7].set(jnp.array([0.28, 0.0, 1.0, 0.0, 0.0]))
    robot = rollmill.physics.RobotState(on_its_back, jnp.zeros(14), jnp.zeros(14), robot.sensors)
    fallen = type(state)(inner=WalkerState(robot, state.inner.action), elapsed=state.elapsed)
    timestep = step(jax.random.key(0), fallen, jnp.zeros(8), env.params)
    assert bool(timestep.terminated) and float(timestep.reward) == -2.0


def test_rewards_of_the_humanoid_by_hand():
    env = rollmill.make("robots:Humanoid")
    observation = jnp.zeros(108).at[10].set(0.95).at[11].set(0.4).at[12].set(-1.0).at[33].set(0.5)
    action = jnp.zeros(21).at[0].set(-1.0)
    task = humanoid._Humanoid(rollmill.physics.load(humanoid.model_text()).structure)
    reward = task.merits(observation, action, env.params)
    share = 67.5 / 135
    expected = 2 + 0.1 + 0.5 * 0.5 - 0.01 - 0.05 * 0.5 * share - 0.25 * (0.02 / 0.02) * share
    assert float(reward) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_the_humanoid_moves_as_in_mujoco_and_falls():
    env = rollmill.make("robots:Humanoid", iterations=8, line_search_iterations=8)
    compiled = mujoco.MjModel.from_xml_string(humanoid.model_text())
    data, random = mujoco.MjData(compiled), np.random.default_rng(0)
    step = jax.jit(env.step)
    observation, state = env.reset(jax.random.key(1), env.params)
    assert observation.shape == (108,) and float(observation[0]) == pytest.approx(1.34)
    flown(state, data)
    data.qpos[2] = 1.27  # so that it comes down at once
    task = state.inner
    task = type(task)(dataclasses.replace(task.robot, positions=task.robot.positions.at[2].set(1.27)), task.action)
    state, touched, limited = type(state)(inner=task, elapsed=state.elapsed), 0, 0
    for _ in range(12):
        action = random.uniform(-1, 1, 21).astype(np.float32)
        timestep = step(jax.random.key(0), state, jnp.asarray(action), env.params)
        data.ctrl[:] = action
        mujoco.mj_step(compiled, data, nstep=2)
        robot, state = timestep.state.inner.robot, timestep.state
        touched, limited = touched + data.ncon, limited + data.nefc - 4 * data.ncon
        np.testing.assert_allclose(robot.positions, data.qpos, atol=1e-3)
        np.testing.assert_allclose(robot.velocities, data.qvel, atol=5e-2)
        assert bool(timestep.terminated) == (data.qpos[2] < 0.8)
    assert touched and limited
    np.testing.assert_allclose(timestep.observation[87:], action)
    below = dataclasses.replace(robot, positions=jnp.asarray(robot.positions).at[2].set(0.7))
    fallen = type(state)(inner=WalkerState(below, state.inner.action), elapsed=state.elapsed)
    timestep = step(jax.random.key(0), fallen, jnp.zeros(21), env.params)
    assert bool(timestep.terminated) and float(timestep.reward) == -1.0


# --- robots that fly ----------------------------------------------------------------------------------


def flown(state, data):
    """Puts MuJoCo into the state of a task."""
    robot = state.inner.robot
    data.qpos[:], data.qvel[:] = np.asarray(robot.positions), np.asarray(robot.velocities)


def expected_reward(data, target, upright):
    away, rotation = np.linalg.norm(np.asarray(target) - data.qpos[:3]), np.zeros(9)
    mujoco.mju_quat2Mat(rotation, data.qpos[3:7])
    spin = rotation.reshape(3, 3) @ data.qvel[3:6]
    tilt, near = 1 - rotation[8], 1 / (1 + away**2)
    return near + near * (upright / (1 + tilt**2) + 1 / (1 + spin[2] ** 2)), away, spin


def test_the_helicopter_flies_as_in_mujoco():
    env = rollmill.make("robots:Ingenuity", max_steps=20)
    compiled = mujoco.MjModel.from_xml_string(ingenuity.MODEL)
    data, random, step = mujoco.MjData(compiled), np.random.default_rng(0), jax.jit(env.step)
    first, state = env.reset(jax.random.key(1), env.params)
    assert first.shape == env.observation_space.shape
    flown(state, data)
    assert np.all(np.abs(data.qpos[:2]) <= 1.5) and 0.8 <= data.qpos[2] <= 2.5
    target = np.asarray(state.inner.target)
    assert np.all(np.abs(target[:2]) <= 5) and 1 <= target[2] <= 2
    for count in range(1, 21):
        action = random.uniform(-1.5, 1.5, 6).astype(np.float32)
        timestep = step(jax.random.key(count), state, jnp.asarray(action), env.params)
        (x1, y1, _, x2, y2, _), thrust = np.clip(action, -0.2, 0.2), 20 * np.clip(action, -1, 1)[[2, 5]]
        data.ctrl[:] = [*(thrust[0] * np.array([x1, y1, 1])), *(thrust[1] * np.array([x2, y2, 1]))]
        mujoco.mj_step(compiled, data, nstep=2)
        state = timestep.state
        np.testing.assert_allclose(state.inner.robot.positions, data.qpos, atol=2e-3)
        reward, away, spin = expected_reward(data, target, 5)
        assert float(timestep.reward) == pytest.approx(reward, rel=2e-2)
        np.testing.assert_allclose(timestep.observation[:3], (target - data.qpos[:3]) / 3, atol=1e-3)
        np.testing.assert_allclose(timestep.observation[10:13], spin / np.pi, rtol=1e-2, atol=1e-2)
        assert bool(timestep.terminated) == (away > 8 or data.qpos[2] < 0.5)
        assert bool(timestep.truncated) == (count >= 20)


def test_a_helicopter_gets_another_target():
    env = rollmill.make("robots:Ingenuity")
    params = dataclasses.replace(env.params, target_steps=2.0)
    _, state = env.reset(jax.random.key(1), params)
    step, targets = jax.jit(env.step), [np.asarray(state.inner.target)]
    for count in range(4):
        state = step(jax.random.key(count), state, jnp.zeros(6), params).state
        targets.append(np.asarray(state.inner.target))
    changes = [bool(np.any(one != other)) for one, other in zip(targets, targets[1:], strict=False)]
    assert changes == [False, True, False, True]


def test_the_quadcopter_hovers_as_in_mujoco():
    env = rollmill.make("robots:Quadcopter", max_steps=40, iterations=8)
    compiled = mujoco.MjModel.from_xml_string(quadcopter.model_text())
    data, random, step = mujoco.MjData(compiled), np.random.default_rng(0), jax.jit(env.step)
    first, state = env.reset(jax.random.key(1), env.params)
    assert first.shape == env.observation_space.shape
    flown(state, data)
    control, bounds = np.concatenate([data.qpos[7:], np.zeros(4)]), np.radians(30)
    limited = 0
    for _ in range(30):
        action = np.clip(random.normal(size=12).astype(np.float32), -1, 1)
        timestep = step(jax.random.key(0), state, jnp.asarray(action), env.params)
        control[:8] = np.clip(control[:8] + 0.01 * 8 * np.pi * action[:8], -bounds, bounds)
        control[8:] = np.clip(control[8:] + 0.01 * 200 * action[8:], 0, 2)
        data.ctrl[:] = control
        mujoco.mj_step(compiled, data, nstep=2)
        state, limited = timestep.state, limited + data.nefc
        np.testing.assert_allclose(state.inner.robot.positions, data.qpos, atol=2e-3)
        reward, away, _ = expected_reward(data, [0, 0, 1], 1)
        assert float(timestep.reward) == pytest.approx(reward, rel=2e-2)
        np.testing.assert_allclose(timestep.observation[13:], data.qpos[7:], atol=2e-3)
        assert bool(timestep.terminated) == (away > 3 or data.qpos[2] < 0.3)
    assert limited > 0


# --- a quadruped, and a tray with a ball --------------------------------------------------------------


def test_rewards_of_the_quadruped_by_hand():
    env = rollmill.make("robots:Anymal")
    observation = jnp.zeros(48).at[:2].set(jnp.array([2.0, -1.0])).at[5].set(0.1)  # 1 m/s, -0.5 m/s, 0.4 rad/s
    command, torques = jnp.array([1.5, 0.0, 0.0]), jnp.full(12, 10.0)
    expected = np.exp(-(0.25 + 0.25) / 0.25) + 0.5 * np.exp(-0.16 / 0.25) - 2.5e-5 * 1200
    assert float(anymal._merit(observation, command, torques, env.params)) == pytest.approx(
        0.02 * expected, rel=1e-5
    )
    assert float(anymal._merit(observation, command, 10 * torques, env.params)) == 0.0


def test_the_quadruped_feels_gravity_in_the_frame_of_its_base():
    env = rollmill.make("robots:Anymal")
    _, state = env.reset(jax.random.key(0), env.params)
    quaternion = np.array([0.8, 0.1, -0.2, 0.55]) / np.linalg.norm([0.8, 0.1, -0.2, 0.55])
    rotation = np.zeros(9)
    mujoco.mju_quat2Mat(rotation, quaternion)
    robot = state.inner.robot
    turned = dataclasses.replace(robot, positions=robot.positions.at[3:7].set(quaternion))
    task = anymal._Anymal(anymal.physics.load(anymal.model_text()).structure)
    observed = task.observe(dataclasses.replace(state.inner, robot=turned))
    np.testing.assert_allclose(observed[6:9], rotation.reshape(3, 3).T @ [0, 0, -1], atol=1e-6)


def test_the_quadruped_is_down_where_a_knee_or_the_base_is():
    compiled = mujoco.MjModel.from_xml_string(anymal.model_text())
    data, random, outcomes = mujoco.MjData(compiled), np.random.default_rng(0), []
    for _ in range(40):
        data.qpos[2], data.qpos[3:7] = random.uniform(0.2, 0.6), random.normal(size=4)
        data.qpos[3:7] = data.qpos[3:7] / np.linalg.norm(data.qpos[3:7]) * 0.2 + np.array([1, 0, 0, 0]) * 0.8
        data.qpos[3:7] /= np.linalg.norm(data.qpos[3:7])
        data.qpos[7:] = anymal.DEFAULTS + random.normal(size=12)
        mujoco.mj_kinematics(compiled, data)
        heights = []
        for leg, (_, left) in anymal.LEGS.items():
            thigh, knee = data.body(f"{leg}_thigh"), np.array([0, left * anymal.KNEE[0], anymal.KNEE[1]])
            heights.append((thigh.xpos + thigh.xmat.reshape(3, 3) @ knee)[2] - anymal.LOW)
        up = data.body("base").xmat.reshape(3, 3)[2]
        lowest = data.qpos[2] - np.abs(up) @ np.array(anymal.BASE)
        outcomes.append(min(lowest, *heights) < 0)
        assert bool(anymal._is_down(jnp.asarray(data.qpos, jnp.float32))) == outcomes[-1]
    assert 5 < sum(outcomes) < 35


@pytest.mark.slow
def test_the_quadruped_moves_as_in_mujoco():
    env = rollmill.make("robots:Anymal", max_steps=20, iterations=8, line_search_iterations=8)
    compiled = mujoco.MjModel.from_xml_string(anymal.model_text())
    data, random, step = mujoco.MjData(compiled), np.random.default_rng(0), jax.jit(env.step)
    observation, state = env.reset(jax.random.key(1), env.params)
    assert observation.shape == env.observation_space.shape == (48,)
    assert np.all(np.abs(state.inner.command) <= [2, 1, 1])
    flown(state, data)
    touched = 0
    for count in range(1, 21):
        action = random.uniform(-1, 1, 12).astype(np.float32)
        timestep = step(jax.random.key(0), state, jnp.asarray(action), env.params)
        data.ctrl[:] = np.array(anymal.DEFAULTS) + 0.5 * action
        mujoco.mj_step(compiled, data, nstep=2)
        state, touched = timestep.state, touched + data.ncon
        np.testing.assert_allclose(state.inner.robot.positions, data.qpos, atol=1e-3)
        np.testing.assert_allclose(state.inner.robot.velocities, data.qvel, atol=5e-2)
        assert not bool(timestep.terminated) and bool(timestep.truncated) == (count >= 20)
    assert touched > 10


def test_a_ball_falls_towards_the_tray():
    env = rollmill.make("robots:BallBalance")
    observation, state = env.reset(jax.random.key(0), env.params)
    robot = state.inner.robot
    assert observation.shape == env.observation_space.shape == (24,)
    np.testing.assert_allclose(robot.positions[:3], [0, 0, ball_balance.HEIGHT], rtol=1e-6)
    place, flight = np.asarray(robot.positions[13:16]), np.asarray(robot.velocities[12:15])
    assert np.hypot(*place[:2]) <= 0.5 and 1 <= place[2] <= 2 and flight[2] == -5
    assert place[:2] @ flight[:2] <= 0 and abs(place[0] * flight[1] - place[1] * flight[0]) < 1e-6
    np.testing.assert_allclose(observation[6:12], [*place, *flight])


@pytest.mark.slow
def test_the_tray_moves_as_in_mujoco():
    env = rollmill.make("robots:BallBalance", max_steps=40, iterations=8, line_search_iterations=8)
    compiled = mujoco.MjModel.from_xml_string(ball_balance.model_text())
    compiled.opt.tolerance = 1e-12
    data, random, step = mujoco.MjData(compiled), np.random.default_rng(0), jax.jit(env.step)
    _, state = env.reset(jax.random.key(1), env.params)
    flown(state, data)
    angles, touched = np.zeros(3), 0
    for count in range(1, 41):
        action = 0.1 * random.uniform(-1, 1, 3).astype(np.float32)
        timestep = step(jax.random.key(0), state, jnp.asarray(action), env.params)
        angles = np.clip(angles + 0.2 * action, ball_balance.LOWEST, ball_balance.HIGHEST)
        data.ctrl[:] = angles
        mujoco.mj_step(compiled, data, nstep=2)
        robot, state, touched = timestep.state.inner.robot, timestep.state, touched + data.ncon
        np.testing.assert_allclose(robot.positions, data.qpos, atol=2e-3)
        np.testing.assert_allclose(robot.sensors, data.sensordata, rtol=2e-2, atol=2.0)
        away = np.linalg.norm(data.qpos[13:16] - [0, 0, 0.7])
        expected = 1 / (1 + away) / (1 + np.linalg.norm(data.qvel[12:15]))
        assert float(timestep.reward) == pytest.approx(expected, rel=2e-2)
        assert not bool(timestep.terminated) and bool(timestep.truncated) == (count >= 40)
    assert touched


def test_rewards_of_the_arm_by_hand():
    params = rollmill.make("robots:FrankaCabinet").params
    hand = jnp.array([[0.0, 0, -0.8], [0, 0.6, 0], [0, 0.5, 0]])  # z ahead by 0.8 along -x, y upwards by 0.5
    handle, action = np.array([0.3, 0.0, 0.7]), jnp.full(9, 0.5)
    grip = franka_cabinet.Grip(
        jnp.array([0.1, 0.0, 0.0]),
        hand,
        jnp.asarray(handle),
        jnp.asarray(handle + [0, 0, 0.03]),
        jnp.asarray(handle - [0, 0, 0.02]),
    )
    near, oriented, closed = 2 / 1.01**2, 0.5 * 0.5 * (0.64 + 0.25), 5 * (0.08 - 0.05)
    shut = near + oriented + 0.25 * 0.5 + closed - 0.01 * 9 * 0.25
    for opened, more in (
        (0.0, 0.0),
        (0.1, 7.5 * 0.15 + 0.5),
        (0.3, 7.5 * 0.45 + 1.0),
        (0.395, 7.5 * 0.5925 + 2.0),
    ):
        reward = franka_cabinet._reward(grip, jnp.float32(opened), action, params)
        assert float(reward) == pytest.approx(shut + more, rel=1e-5), opened
    beyond = grip._replace(left=grip.left - jnp.array([0.05, 0.0, 0.0]))
    assert float(franka_cabinet._reward(beyond, jnp.float32(0.3), action, params)) == -1.0


@pytest.mark.slow
def test_the_arm_moves_as_in_mujoco_and_opens_the_drawer():
    env = rollmill.make("robots:FrankaCabinet", max_steps=50, iterations=8, line_search_iterations=8)
    compiled = mujoco.MjModel.from_xml_string(franka_cabinet.model_text())
    data, random, step = mujoco.MjData(compiled), np.random.default_rng(0), jax.jit(env.step)
    observation, state = env.reset(jax.random.key(1), env.params)
    assert observation.shape == env.observation_space.shape == (23,)
    flown(state, data)
    targets = np.asarray(state.inner.targets, float)
    np.testing.assert_allclose(data.qpos[1:], targets)
    assert np.all(np.abs(targets - franka_cabinet.POSE) <= 0.125 + 1e-6) and data.qpos[0] == 0
    for _ in range(30):
        action = random.uniform(-1, 1, 9).astype(np.float32)
        timestep = step(jax.random.key(0), state, jnp.asarray(action), env.params)
        moved = targets + 7.5 / 60 * np.array(franka_cabinet.SPEEDS) * action
        data.ctrl[:] = targets = np.clip(moved, franka_cabinet.LOW, franka_cabinet.HIGH)
        mujoco.mj_step(compiled, data, nstep=2)
        state = timestep.state
        np.testing.assert_allclose(state.inner.robot.positions, data.qpos, atol=1e-3)
        mujoco.mj_kinematics(compiled, data)
        grasp = data.body("link_7").xpos + data.body("link_7").xmat.reshape(3, 3) @ franka_cabinet.GRASP
        away = data.body("drawer").xpos + franka_cabinet.HANDLE - grasp
        np.testing.assert_allclose(timestep.observation[18:21], away, atol=2e-3)
        assert not bool(timestep.terminated)
    robot = state.inner.robot
    opened = dataclasses.replace(
        robot, positions=robot.positions.at[0].set(0.395), velocities=0 * robot.velocities
    )
    inner = franka_cabinet.FrankaState(opened, state.inner.targets)
    timestep = step(jax.random.key(0), type(state)(inner=inner, elapsed=state.elapsed), jnp.zeros(9), env.params)
    assert bool(timestep.terminated)


def test_rewards_of_the_hand_by_hand():
    params = rollmill.make("robots:ShadowHand").params
    action = jnp.full(20, 0.5)
    away = 1 / (0.4 + 0.1) - 10 * 0.05 - 0.0002 * 20 * 0.25
    for angle, reached, more in ((0.4, False, 0.0), (0.4, True, 250.0)):
        reward = shadow_hand._reward(jnp.float32(0.05), jnp.float32(angle), jnp.asarray(reached), action, params)
        assert float(reward) == pytest.approx(away + more, rel=1e-5)


def test_orientations_of_the_hand_and_the_block():
    turns = np.random.default_rng(0).normal(size=(20, 4))
    turns *= np.sign(turns[:, :1]) / np.linalg.norm(turns, axis=1, keepdims=True)
    matrices, product, angle = np.zeros((20, 9)), np.zeros(4), np.zeros(3)
    for matrix, turn in zip(matrices, turns, strict=True):
        mujoco.mju_quat2Mat(matrix, turn)
    ours = shadow_hand._quaternions(jnp.asarray(matrices.reshape(-1, 3, 3), jnp.float32))
    np.testing.assert_allclose(ours, turns, atol=1e-5)
    for one, other in zip(turns[:10], turns[10:], strict=True):
        mujoco.mju_mulQuat(product, one, other * [1, -1, -1, -1])
        mujoco.mju_quat2Vel(angle, product, 1.0)
        found = shadow_hand.angle_between(jnp.asarray(one, jnp.float32), jnp.asarray(other, jnp.float32))
        assert float(found) == pytest.approx(np.linalg.norm(angle), abs=1e-4)


@pytest.mark.slow
def test_the_hand_moves_as_in_mujoco_and_drops_the_block():
    env = rollmill.make("robots:ShadowHand", max_steps=50, iterations=8, line_search_iterations=8)
    compiled = mujoco.MjModel.from_xml_string(hand_model.model_text())
    data, random, step = mujoco.MjData(compiled), np.random.default_rng(0), jax.jit(env.step)
    observation, state = env.reset(jax.random.key(1), env.params)
    assert observation.shape == env.observation_space.shape == (211,)
    flown(state, data)
    low, high = compiled.actuator_ctrlrange.T
    tip = data.body("th_distal")
    for _ in range(20):
        action = random.uniform(-1, 1, 20).astype(np.float32)
        timestep = step(jax.random.key(0), state, jnp.asarray(action), env.params)
        data.ctrl[:] = low + 0.5 * (action + 1) * (high - low)
        mujoco.mj_step(compiled, data, nstep=2)
        state = timestep.state
        np.testing.assert_allclose(state.inner.robot.positions, data.qpos, atol=2e-3)
        mujoco.mj_kinematics(compiled, data)
        np.testing.assert_allclose(timestep.observation[148:151], tip.xpos, atol=2e-3)
        assert abs(timestep.observation[151:155] @ tip.xquat) == pytest.approx(1, abs=1e-3)
        away = np.linalg.norm(data.qpos[24:27] - shadow_hand.GOAL)
        assert bool(timestep.terminated) == (away >= 0.24)
    robot = state.inner.robot
    turned = dataclasses.replace(
        robot,
        positions=robot.positions.at[24:].set(jnp.array([0, -0.39, 0.9, *state.inner.goal])),
        velocities=0 * robot.velocities,
    )
    inner = dataclasses.replace(state.inner, robot=turned)
    timestep = step(jax.random.key(0), type(state)(inner=inner, elapsed=state.elapsed), jnp.zeros(20), env.params)
    assert bool(timestep.terminated) and float(timestep.reward) > 250
    assert float(timestep.state.inner.successes) == float(state.inner.successes) + 1
    after = step(jax.random.key(5), timestep.state, jnp.zeros(20), env.params)
    assert np.abs(after.state.inner.goal - timestep.state.inner.goal).max() > 1e-3


def test_robots_are_drawn_without_opengl(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "disable")
    env = rollmill.make("robots:Cartpole")
    _, state = env.reset(jax.random.key(0), env.params)
    drawing = env.draw(state, env.params)
    assert isinstance(drawing, Drawing) and len(drawing.shapes) == 3
    own = rollmill.robot(ARM, reward=lambda before, action, after: action[0])
    drawing = own.draw(own.reset(jax.random.key(0), own.params)[1], own.params)
    assert sum(isinstance(shape, Line) for shape in drawing.shapes) == 1


# --- tasks in C MuJoCo --------------------------------------------------------------------------------


def test_a_task_runs_in_c_mujoco():
    env = rollmill.make("robots:Cartpole", physics="mujoco", max_steps=25)
    vector, compiled = env.start(range(2), seed=3), mujoco.MjModel.from_xml_string(cartpole.MODEL)
    random, rows, ended = np.random.default_rng(0), [mujoco.MjData(compiled) for _ in range(2)], 0
    observed = np.array(vector.reset().observation)
    assert np.abs(observed[0] - observed[1]).max() > 1e-3
    for _ in range(25):
        actions = random.uniform(-0.1, 0.1, (2, 1)).astype(np.float32)
        step = vector.step(actions)
        for row, data in enumerate(rows):
            data.qpos[:], data.qvel[:] = observed[row][[0, 2]], observed[row][[1, 3]]
            data.ctrl[:] = actions[row]
            mujoco.mj_step(compiled, data, nstep=2)
            (x, angle), (speed, rate) = data.qpos, data.qvel
            final = step.info["final_observation"][row]
            np.testing.assert_allclose(final, [x, speed, angle, rate], rtol=1e-5, atol=1e-6)
            outside = abs(x) > 3 or abs(angle) > np.pi / 2
            reward = -2 if outside else 1 - angle**2 - 0.01 * abs(speed) - 0.005 * abs(rate)
            assert step.reward[row] == pytest.approx(reward, abs=1e-5) and step.terminated[row] == outside
            done = step.terminated[row] or step.truncated[row]
            assert done == bool(np.abs(step.observation[row] - final).max() > 1e-6)
            ended += done
        observed = np.array(step.observation)
    assert ended >= 2
    vector.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODELS))
def test_robots_of_all_tasks_are_those_of_c_mujoco(name):
    batch = MujocoBatch(rollmill.make(f"robots:{name}"), MODELS[name](), 2)
    compiled, random = mujoco.MjModel.from_xml_string(MODELS[name]()), np.random.default_rng(0)
    data, touched = mujoco.MjData(compiled), 0.0
    one_number = compiled.jnt_dofadr[compiled.jnt_type >= int(mujoco.mjtJoint.mjJNT_SLIDE)]  # slides and hinges
    batch.reset(seed=0)
    for _ in range(10):
        actions = random.uniform(-1, 1, (2, *batch.single_action_space.shape)).astype(np.float32)
        before = batch._now[1]
        robots, controls = batch._functions.controls(jax.random.split(jax.random.key(0), 2), before, actions)
        data.qpos[:], data.qvel[:] = robots.positions[1], robots.velocities[1]
        data.qacc_warmstart[:], data.ctrl[:] = robots.accelerations[1], controls[1]
        mujoco.mj_step(compiled, data, nstep=batch._functions.substeps)
        batch.step(actions)
        robot = batch._now[1].inner if name == "Cartpole" else batch._now[1].inner.robot
        np.testing.assert_allclose(robot.positions[1], data.qpos, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(robot.velocities[1], data.qvel, rtol=1e-4, atol=1e-4)
        forces = (data.qfrc_actuator + data.qfrc_constraint)[one_number]
        readings = np.concatenate([data.sensordata, forces])[: len(robot.sensors[1])]
        np.testing.assert_allclose(robot.sensors[1], readings, rtol=1e-3, atol=1e-3)
        touched += np.abs(robot.sensors).sum()
    assert touched > 0 or not robot.sensors.size


def test_other_physics_are_refused_with_a_way_out():
    with raises("robots-option-solver-physics-jax", "iterations"):
        rollmill.make("robots:Ant", physics="mujoco", iterations=8)
    with raises("robots-has-no-physics-is", "'bullet'"):
        rollmill.make("robots:Ant", physics="bullet")


# --- robots of the user's -----------------------------------------------------------------------------

ARM = """
<mujoco><option timestep="0.01"/><worldbody><body>
  <joint name="shoulder" axis="0 1 0" damping="0.2" range="-90 90"/>
  <geom type="capsule" fromto="0 0 0 0 0 -0.5" size="0.04"/>
</body></worldbody><actuator><motor joint="shoulder" ctrlrange="-1 3"/></actuator></mujoco>
"""


TURN = '<sensor><jointpos name="turn" joint="shoulder"/></sensor>'


def test_an_own_robot_moves_as_in_mujoco():
    env = rollmill.robot(
        ARM,
        reward=lambda before, action, after: after.positions[0] - before.positions[0] + action[0],
        terminated=lambda state: state.positions[0] > 0.5,
        substeps=3,
        max_steps=8,
        reset_angle=0.2,
    )
    compiled = mujoco.MjModel.from_xml_string(ARM)
    data, step = mujoco.MjData(compiled), jax.jit(env.step)
    observation, state = env.reset(jax.random.key(0), env.params)
    data.qpos[:], data.qvel[:] = np.asarray(observation)[:1], np.asarray(observation)[1:]
    assert 0 < abs(data.qpos[0]) < 0.2
    for count in range(1, 10):
        before = float(data.qpos[0])
        timestep = step(jax.random.key(0), state, jnp.full(1, 0.5 * (count % 3)), env.params)
        data.ctrl[:] = -1 + 4 * (0.5 * (count % 3) + 1) / 2
        mujoco.mj_step(compiled, data, nstep=3)
        state = timestep.state
        np.testing.assert_allclose(timestep.observation, [data.qpos[0], data.qvel[0]], rtol=1e-4, atol=1e-4)
        assert float(timestep.reward) == pytest.approx(data.qpos[0] - before + 0.5 * (count % 3), abs=1e-4)
        assert bool(timestep.terminated) == (data.qpos[0] > 0.5)
        assert bool(timestep.truncated) == (count >= 8)


SHAKING = ARM.replace("<motor ", '<general biastype="affine" biasprm="0 0 900" ')
"""A servo that drives the arm on the faster, the faster it is."""


def test_an_unstable_robot_ends_its_episode_with_finite_numbers():
    env = rollmill.robot(SHAKING, reward=lambda before, action, after: after.velocities[0] ** 3, max_speed=500.0)
    step, ends, speeds = jax.jit(rollmill.envs.auto_reset(env).step), [], []
    _, state = env.reset(jax.random.key(0), env.params)
    for count in range(40):
        timestep = step(jax.random.key(count), state, jnp.ones(1), env.params)
        after, seen = timestep.state.inner.velocities, timestep.info["final_observation"]
        ended, speed = bool(timestep.terminated), abs(float(seen[1]))
        assert np.all(np.isfinite(after)) and np.isfinite(timestep.reward) and speed <= 500
        assert ended == bool(timestep.info["unstable_state"]) == (float(timestep.reward) == 0 and not np.any(seen))
        ends.append(ended)
        speeds.append(speed)
        state = timestep.state
    assert 1 < sum(ends) < 20 and max(speeds) > 50


@pytest.mark.parametrize("speed", [1001.0, -1e30, np.inf, np.nan])
def test_what_is_no_state_of_a_robot_ends_the_episode(speed):
    env = rollmill.make("robots:Cartpole")
    _, state = env.reset(jax.random.key(0), env.params)
    for rate, is_unstable in ((900.0, False), (speed, True)):
        robot = dataclasses.replace(state.inner, velocities=jnp.array([rate, 0.0]))
        timestep = env.step(jax.random.key(0), dataclasses.replace(state, inner=robot), jnp.zeros(1), env.params)
        assert bool(timestep.info["unstable_state"]) == is_unstable and bool(timestep.terminated)
        assert float(timestep.reward) == (0.0 if is_unstable else -2.0)
        assert np.all(np.isfinite(timestep.observation))


@pytest.mark.parametrize("fusion", [pytest.param("off", marks=pytest.mark.slow), "rollout"])
def test_trainings_survive_unstable_robots_and_count_them(fusion):
    env = rollmill.robot(SHAKING, reward=lambda before, action, after: after.velocities[0])
    network = rollmill.NetworkConfig(hidden_sizes=(8,))
    graph = rollmill.ppo(env, num_envs=8, num_steps=32, total_timesteps=512, network=network)
    program = lower(graph, fusion=fusion)
    *_, last = dispatch_ahead(program, program.start(), first=0, until=graph.loops.iterations)
    (row,) = last.metrics[-1:]
    unstable = float(np.sum(row["episodes/unstable"]))
    assert unstable == float(np.sum(row["episodes/ended"])) > 8
    assert all(np.all(np.isfinite(leaf)) for leaf in to_host(last.after).values() if leaf.dtype == np.float32)


BOXES = """
<mujoco><option timestep="0.01" cone="elliptic"/><worldbody><geom type="plane" size="0 0 1"/>
<body pos="0 0 0.11"><freejoint/><geom type="box" size="0.1 0.1 0.1"/></body>
<body pos="0 0 0.305"><joint name="lift" type="slide" axis="0 0 1" damping="1"/>
<geom type="box" size="0.1 0.1 0.1"/></body>
</worldbody><actuator><position joint="lift" kp="20"/></actuator><sensor><jointpos joint="lift"/></sensor></mujoco>
"""
"""Contacts and a cone that this package does not cover."""


def test_a_robot_with_any_parts_runs_in_c_mujoco():
    options = {"reward": lambda before, action, after: after.sensors[0], "substeps": 2, "reset_speed": 0.0}
    options["reset_angle"] = 1e-3
    with raises("hint-physics-mujoco-steps-such-robot", "elliptic friction cones"):
        rollmill.robot(BOXES, **options)
    env = rollmill.robot(BOXES, **options, physics="mujoco")
    compiled = mujoco.MjModel.from_xml_string(BOXES)
    data, vector = mujoco.MjData(compiled), env.start(range(2), seed=0)
    first = vector.reset().observation[1]
    assert first.shape == (14,)  # height and turn of the box, the lift, seven velocities, a reading
    data.qpos[7] = first[5]
    for action in (-1.0, -0.5, 0.5, 1.0):
        step = vector.step(np.full((2, 1), action, np.float32))
        data.ctrl[:] = action
        mujoco.mj_step(compiled, data, nstep=2)
        np.testing.assert_allclose(step.observation[1][:6], data.qpos[2:], atol=1e-4)
        assert float(step.reward[1]) == pytest.approx(data.sensordata[0], abs=1e-4)
    assert data.ncon > 4
    vector.close()
    with raises("robot-has-whose-state-is", "activations"):
        rollmill.robot(BOXES.replace("<position", '<intvelocity actrange="-1 1"'), **options, physics="mujoco")


def test_robots_that_mujoco_resets_end_their_episodes():
    env = rollmill.robot(SHAKING, reward=lambda before, action, after: after.velocities[0], max_speed=1e30)
    batch, ends = MujocoBatch(env, SHAKING, 2), 0
    batch.reset(seed=0)
    for _ in range(60):
        observed, rewards, terminated, _, info = batch.step(np.ones((2, 1), np.float32))
        assert np.all(np.isfinite(observed)) and np.all(rewards[terminated] == 0)
        np.testing.assert_array_equal(info["unstable_state"], terminated)
        ends += terminated.sum()
        batch.reset(options={"reset_mask": terminated})
    assert 2 <= ends < 60
    batch.close()


def test_trainings_in_c_mujoco_count_unstable_robots(tmp_path):
    env = rollmill.robot(SHAKING, reward=lambda before, action, after: after.velocities[0], physics="mujoco")
    network = rollmill.NetworkConfig(hidden_sizes=(8,))
    algorithm = rollmill.ppo(env, num_envs=4, num_steps=32, total_timesteps=256, network=network)
    placed = {"distribution": "single-learner-coarse", "place": "threads"}
    rollmill.train(algorithm, run_dir=tmp_path / "run", **placed, quiet=True, tensorboard=False)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(row["episode/unstable"] for row in rows) == sum(row["episode/ended"] for row in rows) > 2


@pytest.mark.parametrize(("share", "threads"), [("1", 1), ("100", usable_cores()), (None, usable_cores())])
def test_workers_use_their_share_of_the_cores(share, threads, monkeypatch):
    monkeypatch.delenv("NPROC", raising=False)
    if share:
        monkeypatch.setenv("NPROC", share)
    batch = MujocoBatch(rollmill.make("robots:Cartpole"), MODELS["Cartpole"](), 500)
    assert len(batch._steps._parts) == threads
    batch.close()


PILE = "".join(
    f'<body pos="{0.25 * i} 0 0.09"><freejoint/><geom type="box" size="0.1 0.1 0.1"/></body>' for i in range(10)
)
"""Ten boxes on the floor, with forty contacts."""


@pytest.mark.parametrize(
    ("memory", "what"),
    [("40K", "constraints"), pytest.param("60K", "stack overflow", id="the stack"), ("2M", None)],
)
def test_too_little_memory_for_contacts_is_told(memory, what):
    floor = f'<size memory="{memory}"/><worldbody><geom type="plane" size="0 0 1"/>'
    arm = '<body pos="0 0 3"><joint name="j"/><geom size="0.1"/></body></worldbody>'
    text = f'<mujoco>{floor}{PILE}{arm}<actuator><motor joint="j"/></actuator></mujoco>'
    env = rollmill.robot(text, reward=lambda before, action, after: action[0], physics="mujoco")
    vector = env.start(range(1), seed=0)
    vector.reset()
    if what is None:
        assert np.all(np.isfinite(vector.step(np.zeros((1, 1), np.float32)).observation))
    else:
        with raises("bytes-robots-model-gives-mujoco", f"{int(memory[:-1]) * 1024:,}", what):
            vector.step(np.zeros((1, 1), np.float32))
    vector.close()


def test_an_own_robot_is_compared_with_mujoco(capsys):
    env = rollmill.robot(ARM, reward=lambda before, action, after: action[0], max_steps=40)
    rollmill.check_environment(env, num_steps=50)
    assert "50 of 50 steps under random controls agree with C MuJoCo" in capsys.readouterr().out


def test_where_physics_differ_and_are_unstable_is_told():
    other = rollmill.physics.load(ARM.replace('damping="0.2"', 'damping="0.3"'))
    told = str(rollmill.physics.compare(ARM, other, steps=20))
    assert (
        " of 20 steps" in told
        and "accelerations differ by up to" in told
        and "'shoulder', with 0 contacts" in told
    )
    told = rollmill.physics.compare(SHAKING, rollmill.physics.load(SHAKING), steps=60)
    assert told.unstable_step is not None and "MuJoCo itself becomes unstable at step" in str(told)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": lambda before, action, after: action}, ("has-to-return-for-one", "reward", "a number")),
        ({"observe": lambda state: state.positions[0]}, ("has-to-return-for-one", "observe", "a vector")),
        ({"terminated": lambda state: state.positions[0]}, ("has-to-return-for-one", "terminated", "a boolean")),
        ({"reward": 3.0}, ("is-and-has-to-be", "reward", "float")),
        (
            {"reward": lambda state, action: action[0]},
            ("takes-but-is-called-with", "reward takes (state, action)", "(before, action, after)", "test_robots"),
        ),
        ({"observe": lambda: jnp.zeros(2)}, ("takes-but-is-called-with", "observe takes ()", "(state)")),
        (
            {"model": ARM.replace("</mujoco>", f"{TURN}</mujoco>")},
            ("sensor-is-not-covered-force", "'turn'", "delete it from the model", "physics='mujoco'"),
        ),
        ({"substeps": 0}, ("has-to-be-at-least", "substeps")),
        (
            {"model": ARM.replace("motor", "general").split("<actuator>")[0] + "</mujoco>"},
            ("has-no-actuators-give-model",),
        ),
    ],
)
def test_what_is_no_task_is_refused(changes, message):
    given = {"model": ARM, "reward": lambda before, action, after: action[0]} | changes
    with raises(*message):
        rollmill.robot(given.pop("model"), **given)
