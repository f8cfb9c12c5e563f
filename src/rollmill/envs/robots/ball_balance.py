"""robots:BallBalance: a tray on three legs that catches a ball and holds it in its middle.

Observation, reward, reset and termination follow BallBalance of Isaac Gym (Makoviychuk et al., "Isaac Gym: High
Performance GPU-Based Physics Simulation For Robot Learning", 2021; IsaacGymEnvs). MuJoCo replaces PhysX, with
servos a tenth as stiff as published, because stiffer servos shake. Feet are held by `connect` constraints, legs do
not touch the ball, and the observed force and torques act from the legs on the tray. There is no floor, because an
episode ends above it.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rollmill import physics
from rollmill.core.types import Environment, Key, Timestep
from rollmill.envs.physics import Scalar
from rollmill.envs.robots.building import load_model, robot_environment
from rollmill.envs.robots.flying import clip_action
from rollmill.envs.robots.pictures import ViewAngle
from rollmill.envs.robots.substeps import advance, in_float32
from rollmill.physics.algebra import cross, product, times

SUBSTEPS = 2
TIME_STEP = 0.01
TRAY, THICKNESS, LEG, BALL = 0.5, 0.02, 0.02, 0.1
"""Radius and thickness of the tray, radii of the legs and of the ball (m)."""
OUTER = TRAY - 0.1
"""Distance (m) of hips and feet from the axis."""
LENGTH = OUTER - 2 * LEG
"""Length (m) of each half of a leg."""
REACH = LENGTH / math.sqrt(2)
"""Horizontal and vertical distance of a knee from its hip (m)."""
HIP = -LEG - 0.5 * THICKNESS
"""Height (m) of the hips from the middle of the tray."""
HEIGHT = 2 * REACH + 2 * LEG + 0.5 * THICKNESS
"""Height (m) of the tray in the first pose."""
ANGLES = tuple(2 * math.pi * i / 3 for i in range(3))
LOWEST, HIGHEST = math.radians(-70), math.radians(90)
"""Range (rad) of the knees."""

_UPPER, _KNEES = (7, 9, 11), (8, 10, 12)
"""Indices of hips and knees among the positions. Indices among velocities are lower by one."""

_LEG_TEXT = """
<body name="upper_leg_{i}" pos="{x} {y} {hip}" euler="0 0 {angle}">
  <joint name="hip_{i}" axis="0 1 0" range="{low} {high}"/>
  <geom fromto="0 0 0 -{reach} 0 -{reach}"/>
  <site name="hip_{i}"/>
  <body name="lower_leg_{i}" pos="-{reach} 0 -{reach}">
    <joint name="knee_{i}" axis="0 1 0" range="{lowest} {highest}"/>
    <geom fromto="0 0 0 {reach} 0 -{reach}"/>
  </body>
</body>"""


def model_text() -> str:
    """Returns the MJCF model of the tray on its legs, and of the ball."""
    shared = {"hip": HIP, "reach": REACH, "low": -math.pi / 4, "high": math.pi / 4}
    shared |= {"lowest": LOWEST, "highest": HIGHEST}
    legs = "".join(
        _LEG_TEXT.format(i=i, x=OUTER * math.cos(angle), y=OUTER * math.sin(angle), angle=angle, **shared)
        for i, angle in enumerate(ANGLES)
    )
    pins = "".join(f'<connect body1="lower_leg_{i}" body2="world" anchor="{REACH} 0 -{REACH}"/>' for i in range(3))
    servos = "".join(f'<position joint="knee_{i}"/>' for i in range(3))
    sensors = "".join(f'<force site="hip_{i}"/><torque site="hip_{i}"/>' for i in range(3))
    return f"""
<mujoco model="ball_balance">
  <compiler angle="radian" autolimits="true"/>
  <option timestep="{TIME_STEP / SUBSTEPS}" integrator="implicitfast"/>
  <default>
    <geom type="capsule" size="{LEG}" density="1000" friction="1" contype="0" conaffinity="0"/>
    <joint armature="0.02"/>
    <position kp="400" kv="20" forcerange="-100 100"/>
  </default>
  <worldbody>
    <body name="tray" pos="0 0 {HEIGHT}">
      <freejoint/>
      <geom name="tray" type="cylinder" size="{TRAY} {THICKNESS / 2}" density="100" conaffinity="1"/>{legs}
    </body>
    <body name="ball" pos="0.2 0 2">
      <freejoint/>
      <geom name="ball" type="sphere" size="{BALL}" density="200" contype="1"/>
    </body>
  </worldbody>
  <equality>{pins}</equality>
  <actuator>{servos}</actuator>
  <sensor>{sensors}</sensor>
</mujoco>"""


class BallBalanceState(eqx.Module):
    """State of the BallBalance task: the robot with the ball, and the target angles of its servos (rad)."""

    robot: physics.RobotState
    angles: Float[Array, "3"]


class BallBalanceParams(eqx.Module):
    """Parameters of the robot and task of BallBalance. Each leaf may hold one value per environment."""

    robot: physics.Params
    turn: Scalar = 20.0
    """Speed (rad/s) at which an action of 1 moves where a servo turns to."""
    target_height: Scalar = 0.7
    """Height (m) on the axis at which the reward of the ball is largest."""
    reset_nearest: Scalar = 0.001
    reset_farthest: Scalar = 0.5
    """Bounds of the ball's initial distance (m) from the axis."""
    reset_speed: Scalar = 5.0
    """Bound of the ball's initial speed (m/s) towards the axis, for a ball that starts at the maximum distance."""
    fall_speed: Scalar = 5.0
    """Initial downward speed of the ball (m/s)."""
    lowest: Scalar = 1.5 * BALL
    """Height of the ball (m) below which an episode ends."""


def ball_balance(
    *, max_steps: int = 500, iterations: int = physics.ITERATIONS, line_search_iterations: int = physics.ITERATIONS
) -> Environment:
    """A tray on three legs that catches a ball and holds it, 3 continuous actions (Isaac Gym's BallBalance).

    Args:
        max_steps: time limit of an episode, in steps of 0.01 s.
        iterations: Newton iterations in each of the two physics steps.
        line_search_iterations: number of points tried along each search direction.
    """
    model = load_model(model_text(), iterations, line_search_iterations)
    return robot_environment(
        "robots:BallBalance",
        _BallBalance(model.structure),
        BallBalanceParams(in_float32(model.params)),
        observations=24,
        actions=3,
        model=model_text(),
        view=ViewAngle(2.4, elevation=-15.0, height=0.6, follows=False),
        max_steps=max_steps,
    )


class _BallBalance:
    """The functions of the task, for the structure of its robot."""

    def __init__(self, structure: physics.Structure):
        self.structure = structure

    def reset(self, key: Key, params: BallBalanceParams) -> tuple[Float[Array, "24"], BallBalanceState]:
        """Starts with a tray at rest, and a ball that falls towards it."""
        distance, angle, height, speed = jax.random.uniform(key, (4,), jnp.float32)
        span = params.reset_farthest - params.reset_nearest
        direction = jnp.stack([jnp.cos(2 * jnp.pi * angle), jnp.sin(2 * jnp.pi * angle)])
        place = (params.reset_nearest + distance * span) * direction
        flight = -distance * speed * params.reset_speed * direction
        pose = jnp.asarray(self.structure.initial_positions, jnp.float32)
        positions = jnp.concatenate([pose[:13], place, 1.0 + height[None], pose[16:]])
        falling = -params.fall_speed * jnp.ones(1)
        rates = jnp.concatenate([jnp.zeros(12), flight, falling, jnp.zeros(3)])
        robot = physics.RobotState(positions, rates, jnp.zeros(18), jnp.zeros(18))
        return _observe(robot), BallBalanceState(robot, jnp.zeros(3))

    def step(
        self, key: Key, state: BallBalanceState, action: Float[Array, "3"], params: BallBalanceParams
    ) -> Timestep:
        """Advances the physics twice. Terminates if the ball has fallen off."""
        angles = jnp.clip(state.angles + TIME_STEP * params.turn * clip_action(action), LOWEST, HIGHEST)
        robot = advance(physics.Model(self.structure, params.robot), state.robot, angles, SUBSTEPS)
        observation = _observe(robot)
        place, flight = observation[6:9], observation[9:12]
        away = place - params.target_height * jnp.array([0.0, 0.0, 1.0])
        near = 1.0 / (1.0 + jnp.sqrt(jnp.sum(away * away)))
        slow = 1.0 / (1.0 + jnp.sqrt(jnp.sum(flight * flight)))
        return Timestep(
            observation=observation,
            state=BallBalanceState(robot, angles),
            reward=near * slow,
            terminated=place[2] < params.lowest,
            truncated=jnp.zeros((), bool),
            info={},
        )


def _observe(robot: physics.RobotState) -> Float[Array, "24"]:
    """Returns the knees, the ball, and the force and three torques of the legs on the tray."""
    positions, rates = robot.positions, robot.velocities
    knees = jnp.stack([positions[i] for i in _KNEES] + [rates[i - 1] for i in _KNEES])
    hips = jnp.stack([positions[i] for i in _UPPER])
    pushes = _on_tray(hips, robot.sensors)
    return jnp.concatenate([knees, positions[13:16], rates[12:15], pushes / 20.0])


def _on_tray(hips: Float[Array, "3"], readings: Float[Array, "18"]) -> Float[Array, "12"]:
    """Returns in the tray's frame the force of the legs, and their torques about three places above the hips.

    Sensors read what a leg takes from the tray, in the leg's frame.
    """
    wrenches = -readings.reshape(3, 2, 3)
    zero, one = jnp.zeros(3), jnp.ones(3)
    c, s = jnp.cos(hips), jnp.sin(hips)
    tilted = jnp.stack([c, zero, s, zero, one, zero, -s, zero, c], axis=-1).reshape(3, 3, 3)
    around = np.array([[[math.cos(a), -math.sin(a), 0], [math.sin(a), math.cos(a), 0], [0, 0, 1]] for a in ANGLES])
    rotations = product(jnp.asarray(around, jnp.float32), tilted)
    forces, torques = times(rotations, wrenches[:, 0]), times(rotations, wrenches[:, 1])
    places = OUTER * np.array([[math.cos(a), math.sin(a), 0.0] for a in ANGLES])
    arms = (places + np.array([0.0, 0.0, HIP]))[None] - places[:, None]
    turning = cross(jnp.asarray(arms, jnp.float32), jnp.broadcast_to(forces[None], (3, 3, 3)))
    about = jnp.sum(torques, axis=0)[None] + jnp.sum(turning, axis=1)
    return jnp.concatenate([jnp.sum(forces, axis=0), about.reshape(9)])
