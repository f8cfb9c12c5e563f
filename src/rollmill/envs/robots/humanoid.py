"""robots:Humanoid: a person of 21 joints that walks along the x axis.

Observation, reward, reset and termination follow Humanoid of Isaac Gym (Makoviychuk et al., "Isaac Gym: High
Performance GPU-Based Physics Simulation For Robot Learning", 2021; IsaacGymEnvs). MuJoCo replaces PhysX, angles
are within [-pi, pi], force sensors measure the forces between a foot and its shin, and parts of the body do not
touch each other.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rollmill import physics
from rollmill.core.types import Environment, Key, Timestep
from rollmill.envs.physics import Scalar
from rollmill.envs.robots.building import load_model, robot_environment
from rollmill.envs.robots.pictures import ViewAngle
from rollmill.envs.robots.substeps import advance, in_float32, uniform
from rollmill.envs.robots.walking import observe_posture, progress_of

SUBSTEPS = 2
TIME_STEP = 1 / 60
JOINTS = 21
READINGS = 12 + JOINTS

_LEG = """
<body name="{side}_thigh" pos="0 {y} -0.04">
  <joint name="{side}_hip_x" axis="{mirror} 0 0" range="-25 5" stiffness="10" armature="0.01" {hip}/>
  <joint name="{side}_hip_z" axis="0 0 {mirror}" range="-60 35" stiffness="10" armature="0.01" {hip}/>
  <joint name="{side}_hip_y" axis="0 1 0" range="-120 20" stiffness="20" armature="0.01" {hip}/>
  <geom fromto="0 0 0 0 {inwards} -0.34" size="0.06"/>
  <body name="{side}_shin" pos="0 {inwards} -0.403">
    <joint name="{side}_knee" axis="0 -1 0" pos="0 0 0.02" range="-160 2" stiffness="5" damping="0.1"/>
    <geom fromto="0 0 0 0 0 -0.3" size="0.049"/>
    <geom name="{side}_knee" class="touching" size="0.049"/>
    <body name="{side}_foot" pos="0 0 -0.39">
      <joint name="{side}_ankle_y" axis="0 1 0" pos="0 0 0.08" range="-50 50" stiffness="4"/>
      <joint name="{side}_ankle_x" axis="{mirror} 0 {half}" pos="0 0 0.08" range="-50 50" stiffness="1"/>
      <geom name="{side}_sole_1" class="sole" fromto="-0.07 -0.02 0 0.14 -0.04 0"/>
      <geom name="{side}_sole_2" class="sole" fromto="-0.07 0.02 0 0.14 0.04 0"/>
      <site name="{side}_foot"/>
    </body>
  </body>
</body>"""

_ARM = """
<body name="{side}_upper_arm" pos="0 {y} 0.06">
  <joint name="{side}_shoulder_1" axis="{twice} 1 {mirror}" range="-90 70" stiffness="10" damping="5"/>
  <joint name="{side}_shoulder_2" axis="0 -1 {mirror}" range="-90 70" stiffness="10" damping="5"/>
  <geom fromto="0 0 0 0.16 {hand} -0.16" size="0.04"/>
  <body name="{side}_lower_arm" pos="0.18 {elbow} -0.18">
    <joint name="{side}_elbow" axis="0 -1 {mirror}" range="-90 50" stiffness="2" damping="1"/>
    <geom fromto="0.01 {back} 0.01 0.17 {front} 0.17" size="0.031"/>
    <geom type="sphere" pos="0.18 {palm} 0.18" size="0.04"/>
  </body>
</body>"""

GEARS = {
    "abdomen_y": 67.5,
    "abdomen_z": 67.5,
    "abdomen_x": 67.5,
    "hip_x": 45.0,
    "hip_z": 45.0,
    "hip_y": 135.0,
    "knee": 90.0,
    "ankle_y": 22.5,
    "ankle_x": 22.5,
    "shoulder_1": 67.5,
    "shoulder_2": 67.5,
    "elbow": 45.0,
}
"""Torque (N m) of a joint's motor at an action of 1."""


def model_text() -> str:
    """Returns the MJCF model of the humanoid, with the proportions of the MuJoCo humanoid.

    Only its soles and knees touch the floor, because the episode ends before other parts could reach it.
    """
    legs = "".join(
        _LEG.format(side=side, y=-0.1 * s, mirror=s, half=0.5 * s, inwards=0.01 * s, hip='damping="5"')
        for side, s in (("right", 1), ("left", -1))
    )
    arms = "".join(
        _ARM.format(
            **{"side": side, "mirror": s, "twice": 2 * s, "y": -0.17 * s, "hand": -0.16 * s, "elbow": -0.18 * s},
            **{"back": 0.01 * s, "front": 0.17 * s, "palm": 0.18 * s},
        )
        for side, s in (("right", 1), ("left", -1))
    )
    return f"""
<mujoco model="humanoid">
  <compiler angle="degree" autolimits="true"/>
  <option timestep="{TIME_STEP / SUBSTEPS}" integrator="implicitfast"/>
  <default>
    <joint armature="0.006" damping="1"/>
    <geom type="capsule" density="1000" friction="1" margin="0.001" contype="0" conaffinity="0"/>
    <default class="waist"><joint damping="5" armature="0.02"/></default>
    <default class="touching"><geom type="sphere" mass="0" conaffinity="1"/></default>
    <default class="sole"><geom size="0.027" conaffinity="1"/></default>
  </default>
  <worldbody>
    <geom name="floor" type="plane" size="0 0 1" contype="1"/>
    <body name="torso" pos="0 0 1.34">
      <freejoint/>
      <geom fromto="0 -0.07 0 0 0.07 0" size="0.07"/>
      <geom type="sphere" pos="0 0 0.19" size="0.09"/>
      <geom fromto="-0.01 -0.06 -0.12 -0.01 0.06 -0.12" size="0.06"/>
      <body name="lower_waist" pos="-0.01 0 -0.26">
        <joint name="abdomen_z" class="waist" axis="0 0 1" pos="0 0 0.065" range="-45 45" stiffness="20"/>
        <joint name="abdomen_y" class="waist" axis="0 1 0" pos="0 0 0.065" range="-75 30" stiffness="20"/>
        <geom fromto="0 -0.06 0 0 0.06 0" size="0.06"/>
        <body name="pelvis" pos="0 0 -0.165">
          <joint name="abdomen_x" class="waist" axis="1 0 0" pos="0 0 0.1" range="-35 35" stiffness="10"/>
          <geom fromto="-0.02 -0.07 0 -0.02 0.07 0" size="0.09"/>{legs}
        </body>
      </body>{arms}
    </body>
  </worldbody>
  <actuator>{_motors()}</actuator>
  <sensor>
    <force site="right_foot"/><torque site="right_foot"/><force site="left_foot"/><torque site="left_foot"/>
  </sensor>
</mujoco>"""


def _motors() -> str:
    """Returns the motors in the order of the joints."""
    leg, arm = ["hip_x", "hip_z", "hip_y", "knee", "ankle_y", "ankle_x"], ["shoulder_1", "shoulder_2", "elbow"]
    names = ["abdomen_z", "abdomen_y", "abdomen_x"]
    names += [f"{side}_{part}" for group in (leg, arm) for side in ("right", "left") for part in group]
    return "".join(f'<motor joint="{name}" gear="{_gear(name)}" ctrlrange="-1 1"/>' for name in names)


def _gear(joint: str) -> float:
    return GEARS[joint.removeprefix("right_").removeprefix("left_")]


class HumanoidState(eqx.Module):
    """State of the humanoid task: the robot, and the last action."""

    robot: physics.RobotState
    action: Float[Array, "21"]


class HumanoidParams(eqx.Module):
    """Parameters of the humanoid and its task. Each leaf may hold one value per environment."""

    robot: physics.Params
    target: Scalar = 1000.0
    """Position on the x axis that the robot walks to (m)."""
    alive: Scalar = 2.0
    up: Scalar = 0.1
    heading: Scalar = 0.5
    action_cost: Scalar = 0.01
    energy_cost: Scalar = 0.05
    limit_cost: Scalar = 0.25
    fallen: Scalar = -1.0
    """Reward of the step in which the robot falls."""
    fallen_height: Scalar = 0.8
    """Height of the torso (m) below which it has fallen."""
    reset_angle: Scalar = 0.2
    reset_speed: Scalar = 0.1
    """Bounds of the first angles (rad) of the joints around their first pose, and of their rates (rad/s)."""


def humanoid(
    *,
    max_steps: int = 1000,
    iterations: int = physics.ITERATIONS,
    line_search_iterations: int = physics.ITERATIONS,
) -> Environment:
    """A person of 21 joints that walks along the x axis, 21 continuous actions (Isaac Gym's Humanoid).

    Args:
        max_steps: time limit of an episode, in steps of 1/60 s.
        iterations: Newton iterations in each of the two physics steps.
        line_search_iterations: number of points tried along each search direction.
    """
    model = load_model(model_text(), iterations, line_search_iterations, joint_forces=True)
    return robot_environment(
        "robots:Humanoid",
        _Humanoid(model.structure),
        HumanoidParams(in_float32(model.params)),
        observations=108,
        actions=JOINTS,
        model=model_text(),
        view=ViewAngle(3.5),
        max_steps=max_steps,
    )


class _Humanoid:
    """The functions of the task, for the structure of its robot."""

    def __init__(self, structure: physics.Structure):
        self.structure = structure
        ranges = [joint.range or (-np.pi, np.pi) for joint in structure.joints[1:]]
        self.low, self.high = np.array(ranges, np.float32).T
        gears = np.array([_gear(joint.name) for joint in structure.joints[1:]], np.float32)
        self.shares = gears / gears.max()
        """Torque of each joint as a share of the strongest."""

    def reset(self, key: Key, params: HumanoidParams) -> tuple[Float[Array, "108"], HumanoidState]:
        """Starts upright, with noise."""
        for_angles, for_rates = jax.random.split(key)
        angles = jnp.clip(uniform(for_angles, JOINTS, params.reset_angle), self.low, self.high)
        pose = jnp.asarray(self.structure.initial_positions[:7], jnp.float32)
        rates = jnp.concatenate([jnp.zeros(6), uniform(for_rates, JOINTS, params.reset_speed)])
        zeros = jnp.zeros(6 + JOINTS)
        robot = physics.RobotState(jnp.concatenate([pose, angles]), rates, zeros, jnp.zeros(READINGS))
        state = HumanoidState(robot, jnp.zeros(JOINTS))
        return self.observe(state, params), state

    def step(self, key: Key, state: HumanoidState, action: Float[Array, "21"], params: HumanoidParams) -> Timestep:
        """Advances the physics twice. Terminates if the humanoid falls."""
        action = jnp.clip(action, -1.0, 1.0)
        robot = advance(physics.Model(self.structure, params.robot), state.robot, action, SUBSTEPS)
        moved = HumanoidState(robot, action)
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

    def observe(self, state: HumanoidState, params: HumanoidParams) -> Float[Array, "108"]:
        """Returns posture, joints and the forces on them, forces on the feet, and the last action."""
        q, v, readings = state.robot.positions, state.robot.velocities, state.robot.sensors
        posture = observe_posture(q, v, params.target, 0.25)
        angles = (2.0 * q[7:] - (self.low + self.high)) / (self.high - self.low)
        joints = [angles, 0.1 * v[6:], 0.01 * readings[12:], 0.01 * readings[:12]]
        return jnp.concatenate([posture, *joints, state.action])

    def merits(
        self, observation: Float[Array, "108"], action: Float[Array, "21"], params: HumanoidParams
    ) -> Float[Array, ""]:
        """Returns the reward without the progress term, computed from the observation."""
        upright, heading, angles, rates = observation[10], observation[11], observation[12:33], observation[33:54]
        posture = params.up * jnp.where(upright > 0.93, 1.0, 0.0) + params.heading * jnp.minimum(
            heading / 0.8, 1.0
        )
        energy = jnp.sum(jnp.abs(action * rates) * self.shares)
        excess = (jnp.abs(angles) - 0.98) / 0.02 * self.shares
        limits = jnp.sum(jnp.where(jnp.abs(angles) > 0.98, excess, 0.0))
        costs = params.action_cost * jnp.sum(action * action) + params.energy_cost * energy
        return params.alive + posture - costs - params.limit_cost * limits
