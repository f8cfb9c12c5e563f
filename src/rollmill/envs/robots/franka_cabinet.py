"""robots:FrankaCabinet: an arm of seven joints with a gripper that opens a drawer.

Observation, reward, reset and termination follow FrankaCabinet of Isaac Gym (Makoviychuk et al., "Isaac Gym: High
Performance GPU-Based Physics Simulation For Robot Learning", 2021; IsaacGymEnvs). MuJoCo replaces PhysX. Fingers
are capsules that touch the handle, which is a bar. Nothing else collides, so arm and cabinet pass through each
other. Fingers that enter the cabinet reduce the reward. The drawer is empty, and the servos of the fingers are
softer than in Isaac Gym.
"""

from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rollmill import physics
from rollmill.core.types import Environment, Key, Timestep
from rollmill.envs.physics import Scalar
from rollmill.envs.robots.building import load_model, robot_environment
from rollmill.envs.robots.flying import clip_action
from rollmill.envs.robots.pictures import ViewAngle
from rollmill.envs.robots.substeps import advance, in_float32, uniform
from rollmill.physics.algebra import dot, row, times
from rollmill.physics.kinematics import frames

SUBSTEPS = 2
TIME_STEP = 1 / 60
POSE = (1.157, -1.066, -0.155, -2.239, -1.841, 1.003, 0.469, 0.035, 0.035)
"""First coordinates of arm and fingers (rad, m)."""
LOW = (-2.8973, -1.7628, -2.8973, -3.0718, -2.8973, -0.0175, -2.8973, 0.0, 0.0)
HIGH = (2.8973, 1.7628, 2.8973, -0.0698, 2.8973, 3.7525, 2.8973, 0.04, 0.04)
SPEEDS = (1.0,) * 7 + (0.1,) * 2
"""Speeds at which the targets of the servos move, relative to the arm."""
HANDLE = (0.3, 0.01, 0.0)
"""Grasping point on the drawer (m)."""
GRASP = (0.0, 0.04, 0.107 + 0.0584)
"""Grasping point on the arm's last link (m)."""

_LINKS = (
    ("0 0 0.333", "1 0 0 0", 4.970684, "0.003875 0.002081 -0.04762"),
    ("0 0 0", "1 -1 0 0", 0.646926, "-0.003141 -0.02872 0.003495"),
    ("0 -0.316 0", "1 1 0 0", 3.228604, "0.027518 0.039252 -0.066502"),
    ("0.0825 0 0", "1 1 0 0", 3.587895, "-0.05317 0.104419 0.027454"),
    ("-0.0825 0.384 0", "1 -1 0 0", 1.225946, "-0.011953 0.041065 -0.038437"),
    ("0 0 0", "1 1 0 0", 1.666555, "0.060149 -0.014117 -0.010517"),
    ("0.088 0 0", "1 1 0 0", 0.735522, "0.010517 -0.004252 0.061597"),
)
"""Position and orientation of each link on the previous link, its mass and its centre, as for the Panda."""
_INERTIAS = (
    "0.70337 0.70661 0.009117 -0.000139 0.006772 0.019169",
    "0.007962 0.02811 0.025995 -0.003925 0.010254 0.000704",
    "0.037242 0.036155 0.01083 -0.004761 -0.011396 -0.012805",
    "0.025853 0.019552 0.028323 0.007796 -0.001332 0.008641",
    "0.035549 0.029474 0.008627 -0.002117 -0.004037 0.000229",
    "0.001964 0.004354 0.005433 0.000109 -0.001158 0.000341",
    "0.012516 0.010027 0.004815 -0.000428 -0.001196 -0.000741",
)
_SHAPES = (
    "0 0 -0.19 0 0 0",
    "0 0 -0.06 0 0 0.06",
    "0 0 -0.12 0 0 0",
    "0 0 -0.06 0 0 0.06",
    "0 0 -0.26 0 0.05 -0.02",
    "0 0 -0.04 0.07 0 0.01",
    "0 0 -0.02 0 0 0.08",
)
"""Ends of a capsule that shows each link."""

_HAND = """
<body name="hand" pos="0 0 0.107" quat="0.9238795 0 0 -0.3826834">
  <inertial mass="0.73" pos="-0.01 0 0.03" diaginertia="0.001 0.0025 0.0017"/>
  <geom type="box" size="0.02 0.1 0.03" pos="0 0 0.03"/>
  <body name="left_finger" pos="0 0 0.0584">
    <joint name="left_finger" class="finger"/>
    <geom name="left_finger" class="finger"/>
  </body>
  <body name="right_finger" pos="0 0 0.0584" quat="0 0 0 1">
    <joint name="right_finger" class="finger"/>
    <geom name="right_finger" class="finger"/>
  </body>
</body>"""

_CABINET = """
<geom type="box" size="0.02 0.3 0.4" pos="-0.3 0 0.4"/>
<geom type="box" size="0.28 0.02 0.4" pos="-0.02 0.28 0.4"/>
<geom type="box" size="0.28 0.02 0.4" pos="-0.02 -0.28 0.4"/>
<body name="drawer" pos="0 0 0.7">
  <joint name="drawer" type="slide" axis="1 0 0" range="0 0.4" damping="10" armature="0.005"/>
  <geom type="box" size="0.01 0.26 0.09" pos="0.26 0 0" mass="1"/>
  <geom name="handle" type="capsule" fromto="0.3 -0.08 0 0.3 0.1 0" size="0.008" mass="0.1" conaffinity="1"/>
</body>"""


def model_text() -> str:
    """Returns the MJCF model of the arm and the cabinet, without gravity.

    The published arm compensates for gravity.
    """
    servos = "".join(
        f'<position joint="joint_{i}" kp="400" kv="80" forcerange="-{force} {force}"/>'
        for i, force in enumerate((87, 87, 87, 87, 12, 12, 12), 1)
    )
    fingers = "".join(
        f'<position joint="{side}_finger" kp="1000" kv="50" forcerange="-200 200"/>' for side in ("left", "right")
    )
    return f"""
<mujoco model="franka_cabinet">
  <compiler angle="radian" autolimits="true"/>
  <option timestep="{TIME_STEP / SUBSTEPS}" integrator="implicitfast" gravity="0 0 0"/>
  <default>
    <joint armature="0.1"/>
    <geom contype="0" conaffinity="0" friction="1"/>
    <default class="finger">
      <joint type="slide" axis="0 1 0" range="0 0.04"/>
      <geom type="capsule" fromto="0 0.01 0.01 0 0.01 0.046" size="0.009" mass="0.015" contype="1"/>
    </default>
  </default>
  <worldbody>{_CABINET}
    <body name="stand" pos="1 0 0" quat="0 0 0 1">
      <geom type="capsule" fromto="0 0 0 0 0 0.1" size="0.06"/>{_arm(0)}
    </body>
  </worldbody>
  <actuator>{servos}{fingers}</actuator>
</mujoco>"""


def _arm(index: int) -> str:
    """Returns the MJCF of a link and of everything attached to it."""
    if index == len(_LINKS):
        return _HAND
    place, turn, mass, center = _LINKS[index]
    low, high = LOW[index], HIGH[index]
    return f"""
<body name="link_{index + 1}" pos="{place}" quat="{turn}">
  <inertial mass="{mass}" pos="{center}" fullinertia="{_INERTIAS[index]}"/>
  <joint name="joint_{index + 1}" axis="0 0 1" range="{low} {high}"/>
  <geom type="capsule" fromto="{_SHAPES[index]}" size="0.05"/>{_arm(index + 1)}
</body>"""


class FrankaState(eqx.Module):
    """State of the FrankaCabinet task: the robot with the drawer, and the target positions of its servos."""

    robot: physics.RobotState
    targets: Float[Array, "9"]


class FrankaParams(eqx.Module):
    """Parameters of the robot and task of FrankaCabinet. Each leaf may hold one value per environment."""

    robot: physics.Params
    speed: Scalar = 7.5
    """Speed (rad/s) at which an action of 1 moves the target of a servo of the arm."""
    distance: Scalar = 2.0
    orientation: Scalar = 0.5
    around: Scalar = 0.25
    opened: Scalar = 7.5
    fingers: Scalar = 5.0
    action_cost: Scalar = 0.01
    """Cost of the squared action. This and the five fields above are weights of terms of the reward."""
    beyond: Scalar = 0.04
    """Distance (m) that a finger may pass beyond the handle. At a larger distance, the reward of a step is -1."""
    open: Scalar = 0.39
    """Opening (m) of the drawer at which an episode ends."""
    reset_noise: Scalar = 0.125
    """Bound of the noise on the initial coordinates."""


def franka_cabinet(
    *, max_steps: int = 500, iterations: int = physics.ITERATIONS, line_search_iterations: int = physics.ITERATIONS
) -> Environment:
    """An arm of seven joints that opens a drawer, 9 continuous actions (Isaac Gym's FrankaCabinet).

    Args:
        max_steps: time limit of an episode, in steps of 1/60 s.
        iterations: Newton iterations in each of the two physics steps.
        line_search_iterations: number of points tried along each search direction.
    """
    model = load_model(model_text(), iterations, line_search_iterations)
    return robot_environment(
        "robots:FrankaCabinet",
        _FrankaCabinet(model.structure),
        FrankaParams(in_float32(model.params)),
        observations=23,
        actions=9,
        model=model_text(),
        view=ViewAngle(2.6, azimuth=125.0, height=0.6, follows=False, ahead=0.5),
        max_steps=max_steps,
    )


class Grip(NamedTuple):
    """Positions of the hand, the fingers and the handle of the drawer."""

    to_handle: Float[Array, "3"]
    """Vector from the hand's grasping point to the handle's grasping point (m)."""
    hand: Float[Array, "3 3"]
    """Rotation of the hand. Its z axis points forwards and its y axis to the left finger."""
    handle: Float[Array, "3"]
    left: Float[Array, "3"]
    right: Float[Array, "3"]
    """Positions of the fingers' origins."""


class _FrankaCabinet:
    """The functions of the task, for the structure of its robot."""

    def __init__(self, structure: physics.Structure):
        self.structure = structure
        self.low, self.high, self.speeds = (np.array(values, np.float32) for values in (LOW, HIGH, SPEEDS))
        names = [body.name for body in structure.bodies]
        parts = ("link_7", "left_finger", "right_finger", "drawer")
        self.link, self.left, self.right, self.drawer = (names.index(name) for name in parts)
        self.order = np.argsort([joint.name == "drawer" for joint in structure.joints], kind="stable")
        """Order of the coordinates: arm and fingers first, then the drawer."""

    def reset(self, key: Key, params: FrankaParams) -> tuple[Float[Array, "23"], FrankaState]:
        """Starts at rest near one pose, with a closed drawer."""
        noise = uniform(key, 9, params.reset_noise)
        targets = jnp.clip(jnp.asarray(POSE, jnp.float32) + noise, self.low, self.high)
        ordered = jnp.concatenate([targets, jnp.zeros(1)])
        positions = ordered[np.argsort(self.order)]
        robot = physics.RobotState(positions, jnp.zeros(10), jnp.zeros(10), jnp.zeros(0))
        model = physics.Model(self.structure, params.robot)
        return self.observe(robot, self.grip(model, robot)), FrankaState(robot, targets)

    def step(self, key: Key, state: FrankaState, action: Float[Array, "9"], params: FrankaParams) -> Timestep:
        """Advances the physics twice. Terminates once the drawer is open."""
        action = clip_action(action)
        moved = state.targets + TIME_STEP * params.speed * self.speeds * action
        targets = jnp.clip(moved, self.low, self.high)
        model = physics.Model(self.structure, params.robot)
        robot = advance(model, state.robot, targets, SUBSTEPS)
        grip = self.grip(model, robot)
        observation = self.observe(robot, grip)
        return Timestep(
            observation=observation,
            state=FrankaState(robot, targets),
            reward=_reward(grip, observation[21], action, params),
            terminated=observation[21] > params.open,
            truncated=jnp.zeros((), bool),
            info={},
        )

    def observe(self, robot: physics.RobotState, grip: Grip) -> Float[Array, "23"]:
        """Returns the scaled coordinates and velocities of arm and drawer, and the vector to the handle."""
        q, v = robot.positions[self.order], robot.velocities[self.order]
        scaled = 2.0 * (q[:9] - self.low) / (self.high - self.low) - 1.0
        return jnp.concatenate([scaled, 0.1 * v[:9], grip.to_handle, q[9:], v[9:]])

    def grip(self, model: physics.Model, robot: physics.RobotState) -> Grip:
        """Returns the poses of hand, fingers and handle."""
        placed = frames(model, robot.positions)
        places = placed.references + placed.positions
        link = row(placed.rotations, self.link)
        grasp = row(places, self.link) + times(link, jnp.array(GRASP))
        handle = row(places, self.drawer) + jnp.array(HANDLE)
        hand = row(placed.rotations, self.left)
        return Grip(handle - grasp, hand, handle, row(places, self.left), row(places, self.right))


def _reward(
    grip: Grip, opened: Float[Array, ""], action: Float[Array, "9"], params: FrankaParams
) -> Float[Array, ""]:
    """Returns the reward for a hand that is at the handle, grasps it from both sides and pulls."""
    squared = dot(grip.to_handle, grip.to_handle)
    near = 1.0 / (1.0 + squared) ** 2
    near = jnp.where(squared <= 0.02**2, 2.0 * near, near)
    ahead, upwards = -grip.hand[0, 2], grip.hand[2, 1]  # the directions -x and z
    oriented = 0.5 * (jnp.abs(ahead) * ahead + jnp.abs(upwards) * upwards)
    over, under = grip.left[2] - grip.handle[2], grip.handle[2] - grip.right[2]
    is_around = (over > 0.0) & (under > 0.0)
    around = jnp.where(is_around, 0.5, 0.0)
    closed = jnp.where(is_around, 0.08 - over - under, 0.0)
    reward = (
        params.distance * near
        + params.orientation * oriented
        + params.around * around
        + params.opened * opened * (1.0 + around)
        + params.fingers * closed
        - params.action_cost * jnp.sum(action * action)
    )
    reward = reward + jnp.where(opened > 0.01, 0.5, 0.0)
    reward = (
        reward + around * jnp.where(opened > 0.2, 1.0, 0.0) + 2.0 * around * jnp.where(opened > 0.39, 1.0, 0.0)
    )
    edge = grip.handle[0] - params.beyond
    return jnp.where(jnp.minimum(grip.left[0], grip.right[0]) < edge, -1.0, reward)
