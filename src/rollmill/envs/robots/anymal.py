"""robots:Anymal: a quadruped with twelve joints that walks at a commanded velocity.

Observation, reward, reset and termination follow Anymal of Isaac Gym (Makoviychuk et al., "Isaac Gym: High
Performance GPU-Based Physics Simulation For Robot Learning", 2021; IsaacGymEnvs). MuJoCo replaces PhysX. Feet
touch the floor. The base and the knees have no contacts, because an episode ends when they would touch it. Torques
are the servos' torques at the end of a step.
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
from rollmill.envs.robots.pictures import ViewAngle
from rollmill.envs.robots.substeps import advance, in_float32, uniform
from rollmill.physics.algebra import quaternion_matrix

SUBSTEPS = 2
TIME_STEP = 0.02
STIFFNESS, DAMPING, STRONGEST = 85.0, 2.0, 80.0
"""Stiffness and damping of the servos (N m/rad, N m s/rad), and their maximum torque (N m)."""

LEGS = {"LF": (1, 1), "LH": (-1, 1), "RF": (1, -1), "RH": (-1, -1)}
"""Sign of each leg's place along x, forwards, and y, to the left."""
HIP, THIGH, KNEE, LOW = (0.2999, 0.104), (0.0599, 0.08381), (0.0303, -0.285), 0.05
"""Positions (m) of hips on the base, of thighs on hips and of knees on thighs, and the radius of a knee."""
BASE = (0.5245, 0.16, 0.09)
"""Half sizes (m) of the box around the base."""
DEFAULTS = tuple(angle for front, left in LEGS.values() for angle in (0.03 * left, 0.4 * front, -0.8 * front))
"""Angles (rad) at an action of 0: of hip, thigh and shank of each leg."""

_LEG_TEXT = """
<body name="{leg}_hip" pos="{hip_x} {hip_y} 0">
  <inertial mass="2.781" pos="{hip_center_x} {hip_center_y} 0" diaginertia="0.0033 0.0053 0.0055"/>
  <joint name="{leg}_HAA" axis="1 0 0" range="{low} {high}"/>
  <geom type="sphere" size="0.06" pos="{thigh_x} 0 0"/>
  <body name="{leg}_thigh" pos="{thigh_x} {thigh_y} 0">
    <inertial mass="3.071" pos="0 {thigh_center} -0.2457" diaginertia="0.03 0.0302 0.0042"/>
    <joint name="{leg}_HFE" axis="0 1 0"/>
    <geom type="capsule" fromto="0 {knee_y} 0 0 {knee_y} -0.285" size="0.05"/>
    <body name="{leg}_shank" pos="0 {shank_y} -0.285">
      <inertial mass="0.5884" pos="{shank_x} {shank_center} -0.0807" diaginertia="0.0092 0.0102 0.0011"/>
      <joint name="{leg}_KFE" axis="0 1 0"/>
      <geom type="capsule" fromto="0 0 0 {foot_x} {foot_y} -0.3" size="0.018"/>
      <geom name="{leg}_foot" class="foot" pos="{foot_x} {foot_y} -0.31547"/>
    </body>
  </body>
</body>"""


def model_text() -> str:
    """Returns the MJCF model of the quadruped, with the masses and lengths of ANYmal C."""
    legs = "".join(_leg(leg, front, left) for leg, (front, left) in LEGS.items())
    joints = [f"{leg}_{part}" for leg in LEGS for part in ("HAA", "HFE", "KFE")]
    servos = "".join(f'<position joint="{joint}"/>' for joint in joints)
    return f"""
<mujoco model="anymal">
  <compiler angle="radian" autolimits="true"/>
  <option timestep="{TIME_STEP / SUBSTEPS}" integrator="implicitfast"/>
  <default>
    <joint armature="0.02"/>
    <geom friction="1" contype="0" conaffinity="0"/>
    <position kp="{STIFFNESS}" kv="{DAMPING}" forcerange="-{STRONGEST} {STRONGEST}"/>
    <default class="foot"><geom type="sphere" size="0.03" conaffinity="1"/></default>
  </default>
  <worldbody>
    <geom name="floor" type="plane" size="0 0 1" contype="1"/>
    <body name="base" pos="0 0 0.62">
      <freejoint/>
      <inertial mass="19.2" pos="0 0 0.0502" diaginertia="0.2174 0.6396 0.624"/>
      <geom type="box" size="{BASE[0]} {BASE[1]} {BASE[2]}"/>{legs}
    </body>
  </worldbody>
  <actuator>{servos}</actuator>
</mujoco>"""


def _leg(leg: str, front: int, left: int) -> str:
    low, high = (-0.72, 0.49) if left > 0 else (-0.49, 0.72)
    return _LEG_TEXT.format(
        leg=leg,
        low=low,
        high=high,
        hip_x=front * HIP[0],
        hip_y=left * HIP[1],
        hip_center_x=front * 0.0567,
        hip_center_y=left * 0.0174,
        thigh_x=front * THIGH[0],
        thigh_y=left * THIGH[1],
        thigh_center=left * 0.0308,
        knee_y=left * KNEE[0],
        shank_y=left * 0.1003,
        shank_x=front * 0.0613,
        shank_center=left * 0.0055,
        foot_x=front * 0.08795,
        foot_y=left * 0.01305,
    )


class AnymalState(eqx.Module):
    """State of the Anymal task: the robot, the commanded velocities, and the last action."""

    robot: physics.RobotState
    command: Float[Array, "3"]
    action: Float[Array, "12"]


class AnymalParams(eqx.Module):
    """Parameters of the quadruped and its task. Each leaf may hold one value per environment."""

    robot: physics.Params
    reach: Scalar = 0.5
    """Angle (rad) by which an action of 1 moves a joint."""
    fastest_x: Scalar = 2.0
    fastest_y: Scalar = 1.0
    fastest_yaw: Scalar = 1.0
    """Bounds of the commanded velocities (m/s, m/s, rad/s)."""
    forward: Scalar = 1.0
    turning: Scalar = 0.5
    torque_cost: Scalar = 2.5e-5
    """Weights of the reward per second."""
    width: Scalar = 0.25
    """Squared velocity error at which the velocity reward drops to 1/e."""
    reset_scale: Scalar = 0.5
    """Maximum relative difference between the initial angles and the angles at an action of 0."""
    reset_speed: Scalar = 0.1
    """Bound of the initial angular velocities (rad/s)."""


def anymal(
    *,
    max_steps: int = 2500,
    iterations: int = physics.ITERATIONS,
    line_search_iterations: int = physics.ITERATIONS,
) -> Environment:
    """A quadruped that walks at a commanded velocity, 12 continuous actions (Isaac Gym's Anymal).

    Args:
        max_steps: time limit of an episode, in steps of 0.02 s.
        iterations: Newton iterations in each of the two physics steps.
        line_search_iterations: number of points tried along each search direction.
    """
    model = load_model(model_text(), iterations, line_search_iterations)
    return robot_environment(
        "robots:Anymal",
        _Anymal(model.structure),
        AnymalParams(in_float32(model.params)),
        observations=48,
        actions=12,
        model=model_text(),
        view=ViewAngle(2.2, azimuth=130.0),
        max_steps=max_steps,
    )


class _Anymal:
    """The functions of the task, for the structure of its robot."""

    def __init__(self, structure: physics.Structure):
        self.structure = structure
        self.defaults = np.array(DEFAULTS, np.float32)

    def reset(self, key: Key, params: AnymalParams) -> tuple[Float[Array, "48"], AnymalState]:
        """Starts in the air just above the floor, with a commanded velocity for the whole episode."""
        for_angles, for_rates, for_command = jax.random.split(key, 3)
        angles = self.defaults * (1.0 + uniform(for_angles, 12, params.reset_scale))
        pose = jnp.asarray(self.structure.initial_positions[:7], jnp.float32)
        rates = jnp.concatenate([jnp.zeros(6), uniform(for_rates, 12, params.reset_speed)])
        robot = physics.RobotState(jnp.concatenate([pose, angles]), rates, jnp.zeros(18), jnp.zeros(0))
        fastest = jnp.stack([jnp.asarray(params.fastest_x), params.fastest_y, params.fastest_yaw])
        state = AnymalState(robot, fastest * uniform(for_command, 3, 1.0), jnp.zeros(12))
        return self.observe(state), state

    def step(self, key: Key, state: AnymalState, action: Float[Array, "12"], params: AnymalParams) -> Timestep:
        """Advances the physics twice. Terminates if the base or a knee reaches the floor."""
        action = clip_action(action)
        targets = jnp.asarray(self.defaults) + params.reach * action
        robot = advance(physics.Model(self.structure, params.robot), state.robot, targets, SUBSTEPS)
        moved = AnymalState(robot, state.command, action)
        observation = self.observe(moved)
        torques = STIFFNESS * (targets - robot.positions[7:]) - DAMPING * robot.velocities[6:]
        return Timestep(
            observation=observation,
            state=moved,
            reward=_merit(observation, state.command, jnp.clip(torques, -STRONGEST, STRONGEST), params),
            terminated=_is_down(robot.positions),
            truncated=jnp.zeros((), bool),
            info={},
        )

    def observe(self, state: AnymalState) -> Float[Array, "48"]:
        """Returns velocities in the base's frame, gravity, the command, the joints, and the last action."""
        q, v = state.robot.positions, state.robot.velocities
        rotation = quaternion_matrix(q[3:7])
        local = jnp.sum(rotation * v[:3, None], axis=0)
        command = state.command * jnp.array([2.0, 2.0, 0.25])
        joints = [q[7:] - self.defaults, 0.05 * v[6:]]
        return jnp.concatenate([2.0 * local, 0.25 * v[3:6], -rotation[2], command, *joints, state.action])


def _merit(
    observation: Float[Array, "48"], command: Float[Array, "3"], torques: Float[Array, "12"], params: AnymalParams
) -> Float[Array, ""]:
    """Returns the reward of a step, which is never negative."""
    forward, aside, yaw = observation[0] / 2.0, observation[1] / 2.0, 4.0 * observation[5]
    lacking = (command[0] - forward) ** 2 + (command[1] - aside) ** 2
    reward = params.forward * jnp.exp(-lacking / params.width)
    reward = reward + params.turning * jnp.exp(-((command[2] - yaw) ** 2) / params.width)
    return TIME_STEP * jnp.maximum(reward - params.torque_cost * jnp.sum(torques * torques), 0.0)


def _is_down(positions: Float[Array, "19"]) -> Bool[Array, ""]:
    """Returns whether a corner of the base or a knee is below the floor."""
    up = quaternion_matrix(positions[3:7])[2]
    lowest = positions[2] - jnp.sum(jnp.abs(up) * jnp.array(BASE))
    joints = positions[7:].reshape(4, 3)
    front, left = jnp.array(list(LEGS.values()), jnp.float32).T
    # A thigh hangs from its hip, and turns about y before the hip turns about x.
    aside, down = left * (THIGH[1] + KNEE[0]), KNEE[1] * jnp.cos(joints[:, 1])
    c, s = jnp.cos(joints[:, 0]), jnp.sin(joints[:, 0])
    x = front * (HIP[0] + THIGH[0]) + KNEE[1] * jnp.sin(joints[:, 1])
    y, z = left * HIP[1] + c * aside - s * down, s * aside + c * down
    knees = positions[2] + up[0] * x + up[1] * y + up[2] * z - LOW
    return (lowest < 0.0) | jnp.any(knees < 0.0)
