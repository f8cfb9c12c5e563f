"""The task of walking to a distant place on the x axis, which Ant and Humanoid share."""

from abc import ABC, abstractmethod

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rollmill import physics
from rollmill.core.types import Key, Timestep
from rollmill.envs.physics import Scalar, wrap_angle
from rollmill.envs.robots.substeps import advance, uniform
from rollmill.physics.algebra import quaternion_matrix

SUBSTEPS = 2
TIME_STEP = 1 / 60


class WalkerState(eqx.Module):
    """State of the walking task: the robot, and the last action."""

    robot: physics.RobotState
    action: Float[Array, " n"]


class WalkerParams(eqx.Module):
    """Parameters of a walking robot and its task. Each leaf may hold one value per environment."""

    robot: physics.Params
    target: Scalar = 1000.0
    """Position on the x axis that the robot walks to (m)."""
    alive: Scalar = 0.5
    up: Scalar = 0.1
    heading: Scalar = 0.5
    action_cost: Scalar = 0.005
    energy_cost: Scalar = 0.05
    limit_cost: Scalar = 0.1
    fallen: Scalar = -2.0
    """Reward of the step in which the robot falls."""
    fallen_height: Scalar = 0.31
    """Height of the torso (m) below which it has fallen."""
    reset_angle: Scalar = 0.2
    reset_speed: Scalar = 0.1
    """Bounds of the first angles (rad) of the joints around their first pose, and of their rates (rad/s)."""


class WalkingTask(ABC):
    """The functions of the task, for the structure of a robot."""

    def __init__(self, structure: physics.Structure):
        self.structure = structure
        ranges = [joint.range or (-np.pi, np.pi) for joint in structure.joints[1:]]
        self.low, self.high = np.array(ranges, np.float32).T

    def reset(self, key: Key, params: WalkerParams) -> tuple[Float[Array, " m"], WalkerState]:
        """Starts in the pose nearest to straight limbs that the joints allow, with noise."""
        for_angles, for_rates = jax.random.split(key)
        num_joints = len(self.low)
        straight = np.clip(np.zeros_like(self.low), self.low, self.high)
        angles = jnp.clip(straight + uniform(for_angles, num_joints, params.reset_angle), self.low, self.high)
        pose = jnp.asarray(self.structure.initial_positions[:7], jnp.float32)
        rates = jnp.concatenate([jnp.zeros(6), uniform(for_rates, num_joints, params.reset_speed)])
        readings = jnp.zeros(self.structure.num_readings)
        robot = physics.RobotState(jnp.concatenate([pose, angles]), rates, jnp.zeros(6 + num_joints), readings)
        state = WalkerState(robot, jnp.zeros(num_joints))
        return self.observe(state, params), state

    def step(self, key: Key, state: WalkerState, action: Float[Array, " n"], params: WalkerParams) -> Timestep:
        """Advances the physics twice. Terminates if the robot falls."""
        action = jnp.clip(action, -1.0, 1.0)
        robot = advance(physics.Model(self.structure, params.robot), state.robot, action, SUBSTEPS)
        moved = WalkerState(robot, action)
        observation = self.observe(moved, params)
        fallen = observation[0] < params.fallen_height
        progress = progress_of(state.robot.positions, robot.positions, params.target, TIME_STEP)
        reward = progress + self.merits(observation, action, params)
        return Timestep(
            observation=observation,
            state=moved,
            reward=jnp.where(fallen, params.fallen, reward),
            terminated=fallen,
            truncated=jnp.zeros((), bool),
            info={},
        )

    @abstractmethod
    def observe(self, state: WalkerState, params: WalkerParams) -> Float[Array, " m"]:
        """Returns the observation, which begins with the result of `observe_posture`."""

    @abstractmethod
    def merits(
        self, observation: Float[Array, " m"], action: Float[Array, " n"], params: WalkerParams
    ) -> Float[Array, ""]:
        """Returns the reward without the progress term, computed from the observation."""

    def relative_angles(self, positions: Float[Array, " k"]) -> Float[Array, " n"]:
        """Returns the angles of the joints, scaled so that their ranges extend from -1 to 1."""
        return (2.0 * positions[7:] - (self.low + self.high)) / (self.high - self.low)


def observe_posture(
    positions: Float[Array, " n"], rates: Float[Array, " m"], target: Scalar, spin_scale: float
) -> Float[Array, "12"]:
    """Returns the observed posture of a walking robot.

    The result contains its height, its velocity and spin in the torso's frame, yaw, roll, and the angle to the
    target. The last two values, which are at most 1, say how upright the torso is and how well it points to the
    target.
    """
    rotation = quaternion_matrix(positions[3:7])
    away_x, away_y = target - positions[0], -positions[1]
    yaw = jnp.arctan2(rotation[1, 0], rotation[0, 0])
    roll = jnp.arctan2(rotation[2, 1], rotation[2, 2])
    aside = wrap_angle(jnp.arctan2(away_y, away_x) - yaw)
    distance = jnp.sqrt(away_x * away_x + away_y * away_y)
    heading = (rotation[0, 0] * away_x + rotation[1, 0] * away_y) / distance
    local = jnp.sum(rotation * rates[:3, None], axis=0)
    pose = jnp.stack([yaw, roll, aside, rotation[2, 2], heading])
    return jnp.concatenate([positions[2:3], local, spin_scale * rates[3:6], pose])


def progress_of(
    before: Float[Array, " n"], after: Float[Array, " n"], target: Scalar, duration: float
) -> Float[Array, ""]:
    """Returns the speed of a walking robot towards its target (m/s).

    It is computed without the difference of two large distances, to keep precision.
    """
    x0, x1, y0, y1 = target - before[0], target - after[0], before[1], after[1]
    gained = (after[0] - before[0]) * (x0 + x1) + (y0 - y1) * (y0 + y1)
    return gained / (jnp.sqrt(x0 * x0 + y0 * y0) + jnp.sqrt(x1 * x1 + y1 * y1)) / duration


def posture_reward(observation: Float[Array, " m"], params: WalkerParams) -> Float[Array, ""]:
    """Returns the reward for being upright and for pointing to the target."""
    upright, heading = observation[10], observation[11]
    return params.up * jnp.where(upright > 0.93, 1.0, 0.0) + params.heading * jnp.minimum(heading / 0.8, 1.0)
