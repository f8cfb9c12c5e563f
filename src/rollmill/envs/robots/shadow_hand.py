"""robots:ShadowHand: a hand that turns a block to one orientation after another.

Observation, reward, reset and termination follow ShadowHand of Isaac Gym with the full state observed (Makoviychuk
et al., "Isaac Gym: High Performance GPU-Based Physics Simulation For Robot Learning", 2021; IsaacGymEnvs). MuJoCo
replaces PhysX, quaternions begin with w, the palm is made of capsules, parts of the hand do not touch each other,
and force sensors measure the forces between a fingertip and its finger.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from rollmill import physics
from rollmill.core.types import Environment, Key, Timestep
from rollmill.envs.physics import Scalar
from rollmill.envs.robots.building import load_model, robot_environment
from rollmill.envs.robots.flying import clip_action
from rollmill.envs.robots.hand_model import SERVOS, SUBSTEPS, TIPS, model_text
from rollmill.envs.robots.pictures import ViewAngle
from rollmill.envs.robots.substeps import advance, in_float32, uniform
from rollmill.physics.algebra import cross, pick, point_velocity, quaternion_matrix, spatial_vector, times
from rollmill.physics.kinematics import frames, in_world, velocities

JOINTS, ACTIONS, READINGS = 24, 20, 30 + 24
START, GOAL = (0.0, -0.39, 0.6), (0.0, -0.39, 0.56)
"""Initial position and target position of the block (m)."""


class HandState(eqx.Module):
    """State of the ShadowHand task: the hand and the block, the target orientation, and the last action."""

    robot: physics.RobotState
    goal: Float[Array, "4"]
    reached: Bool[Array, ""]
    """Whether the block has reached the target orientation. The next step then has a new target."""
    successes: Float[Array, ""]
    """Number of target orientations that were reached in this episode."""
    action: Float[Array, "20"]


class HandParams(eqx.Module):
    """Parameters of the robot and task of ShadowHand. Each leaf may hold one value per environment."""

    robot: physics.Params
    distance_cost: Scalar = 10.0
    """Cost of each metre between the block and its place."""
    rotation: Scalar = 1.0
    rotation_offset: Scalar = 0.1
    """The reward of an orientation is `rotation / (angle + rotation_offset)`."""
    action_cost: Scalar = 0.0002
    success: Scalar = 250.0
    """Reward for reaching the target orientation."""
    tolerance: Scalar = 0.1
    """Angle to the target (rad) below which it counts as reached."""
    fallen: Scalar = 0.24
    """Distance (m) of the block from its place at which it counts as fallen."""
    reset_place: Scalar = 0.01
    """Bound of the noise on the block's initial position (m)."""
    reset_angle: Scalar = 0.2
    """Noise on the initial joint angles, relative to the joints' ranges."""


def shadow_hand(
    *, max_steps: int = 600, iterations: int = physics.ITERATIONS, line_search_iterations: int = physics.ITERATIONS
) -> Environment:
    """A hand of 24 joints that turns a block, 20 continuous actions (Isaac Gym's ShadowHand).

    Args:
        max_steps: time limit of an episode, in steps of 1/60 s.
        iterations: Newton iterations in each of the two physics steps.
        line_search_iterations: number of points tried along each search direction.
    """
    model = load_model(model_text(), iterations, line_search_iterations, joint_forces=True)
    return robot_environment(
        "robots:ShadowHand",
        _ShadowHand(model.structure),
        HandParams(in_float32(model.params)),
        observations=211,
        actions=ACTIONS,
        model=model_text(),
        view=ViewAngle(0.5, azimuth=225.0, elevation=-40.0, height=0.5),
        max_steps=max_steps,
    )


class _ShadowHand:
    """The functions of the task, for the structure of its robot."""

    def __init__(self, structure: physics.Structure):
        self.structure = structure
        ranges = {joint.name: joint.range or (-np.pi, np.pi) for joint in structure.joints[:JOINTS]}
        self.low, self.high = np.array([*ranges.values()], np.float32).T
        self.lowest, self.highest = np.array([ranges[name] for name in SERVOS], np.float32).T
        """Ranges of the servos."""
        names = [body.name for body in structure.bodies]
        self.tips = [names.index(tip) for tip in TIPS]

    def reset(self, key: Key, params: HandParams) -> tuple[Float[Array, "211"], HandState]:
        """Starts with noise on the joints, and with the block above the palm in a random orientation."""
        for_joints, for_place, for_block, for_goal = jax.random.split(key, 4)
        shares = 0.5 * (1.0 + uniform(for_joints, JOINTS, 1.0))
        angles = params.reset_angle * (self.low + (self.high - self.low) * shares)
        place = jnp.asarray(START, jnp.float32) + uniform(for_place, 3, params.reset_place)
        positions = jnp.concatenate([angles, place, _orientation(for_block)])
        zeros = jnp.zeros(JOINTS + 6)
        robot = physics.RobotState(positions, zeros, zeros, jnp.zeros(READINGS))
        none = jnp.zeros((), bool)
        state = HandState(robot, _orientation(for_goal), none, jnp.zeros(()), jnp.zeros(ACTIONS))
        return self.observe(state, params), state

    def step(self, key: Key, state: HandState, action: Float[Array, "20"], params: HandParams) -> Timestep:
        """Advances the physics twice. Terminates if the block falls."""
        action = clip_action(action)
        goal = jnp.where(state.reached, _orientation(key), state.goal)
        targets = self.lowest + 0.5 * (action + 1.0) * (self.highest - self.lowest)
        robot = advance(physics.Model(self.structure, params.robot), state.robot, targets, SUBSTEPS)
        place = robot.positions[JOINTS : JOINTS + 3]
        away = place - jnp.asarray(GOAL, jnp.float32)
        distance = jnp.sqrt(jnp.sum(away * away))
        angle = angle_between(robot.positions[JOINTS + 3 :], goal)
        reached = angle <= params.tolerance
        successes = state.successes + jnp.where(reached, 1.0, 0.0)
        moved = HandState(robot, goal, reached, successes, action)
        return Timestep(
            observation=self.observe(moved, params),
            state=moved,
            reward=_reward(distance, angle, reached, action, params),
            terminated=distance >= params.fallen,
            truncated=jnp.zeros((), bool),
            info={},
        )

    def observe(self, state: HandState, params: HandParams) -> Float[Array, "211"]:
        """Returns joints, block and goal, fingertips with the forces on them, and the last action."""
        robot = state.robot
        q, v, readings = robot.positions, robot.velocities, robot.sensors
        angles = (2.0 * q[:JOINTS] - (self.low + self.high)) / (self.high - self.low)
        spin = times(quaternion_matrix(q[JOINTS + 3 :]), v[JOINTS + 3 :])
        block = [q[JOINTS:], v[JOINTS : JOINTS + 3], 0.2 * spin]
        goal = [jnp.asarray(GOAL, jnp.float32), state.goal, _turn(q[JOINTS + 3 :], _reverse(state.goal))]
        tips = self.fingertips(physics.Model(self.structure, params.robot), robot)
        joints = [angles, 0.2 * v[:JOINTS], 10.0 * readings[30:]]
        return jnp.concatenate([*joints, *block, *goal, tips, 10.0 * readings[:30], state.action])

    def fingertips(self, model: physics.Model, robot: physics.RobotState) -> Float[Array, "65"]:
        """Returns position, orientation, linear and angular velocity of each fingertip."""
        placed = frames(model, robot.positions)
        motions = velocities(self.structure, placed, in_world(self.structure, placed, robot.velocities))
        arms = pick(placed.positions, self.tips)
        moving = pick(motions, self.tips)
        speeds = spatial_vector(point_velocity(moving, arms), moving[:, :3])
        places = pick(placed.references, self.tips) + arms
        return jnp.concatenate([places, _quaternions(pick(placed.rotations, self.tips)), speeds], axis=1).reshape(
            -1
        )


def angle_between(one: Float[Array, "4"], other: Float[Array, "4"]) -> Float[Array, ""]:
    """Returns the angle between two orientations (rad)."""
    vector = _turn(one, _reverse(other))[1:]
    return 2.0 * jnp.arcsin(jnp.minimum(jnp.sqrt(jnp.sum(vector * vector)), 1.0))


def _reward(
    distance: Float[Array, ""],
    angle: Float[Array, ""],
    reached: Bool[Array, ""],
    action: Float[Array, "20"],
    params: HandParams,
) -> Float[Array, ""]:
    """Returns the reward for holding the block in place and turning it to the target orientation."""
    turned = params.rotation / (angle + params.rotation_offset)
    costs = params.distance_cost * distance + params.action_cost * jnp.sum(action * action)
    return turned - costs + jnp.where(reached, params.success, 0.0)


def _orientation(key: Key) -> Float[Array, "4"]:
    """Returns a quaternion of a turn about y and then one about x, each by up to half a turn."""
    halves = uniform(key, 2, 0.5 * jnp.pi)
    zero = jnp.zeros(())
    (c, s), (d, t) = ((jnp.cos(half), jnp.sin(half)) for half in halves)
    return _turn(jnp.stack([c, s, zero, zero]), jnp.stack([d, zero, t, zero]))


def _turn(a: Float[Array, "4"], b: Float[Array, "4"]) -> Float[Array, "4"]:
    """Returns the product of two quaternions."""
    real_part = a[:1] * b[:1] - jnp.sum(a[1:] * b[1:], keepdims=True)
    return jnp.concatenate([real_part, a[:1] * b[1:] + b[:1] * a[1:] + cross(a[1:], b[1:])])


def _reverse(q: Float[Array, "4"]) -> Float[Array, "4"]:
    return jnp.concatenate([q[:1], -q[1:]])


def _quaternions(rotations: Float[Array, "n 3 3"]) -> Float[Array, "n 4"]:
    """Returns the quaternions of rotations, with w at least 0."""
    x, y, z = (rotations[:, i, i] for i in range(3))
    squares = [1.0 + x + y + z, 1.0 + x - y - z, 1.0 - x + y - z, 1.0 - x - y + z]
    around = [rotations[:, (i + 2) % 3, (i + 1) % 3] - rotations[:, (i + 1) % 3, (i + 2) % 3] for i in range(3)]
    sizes = [0.5 * jnp.sqrt(jnp.maximum(square, 0.0)) for square in squares]
    signed = [jnp.where(turn < 0, -size, size) for turn, size in zip(around, sizes[1:], strict=True)]
    return jnp.stack([sizes[0], *signed], axis=1)
