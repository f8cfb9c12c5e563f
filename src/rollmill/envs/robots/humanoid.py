"""robots:Humanoid: a person of 21 joints that walks along the x axis.

Observation, reward, reset and termination follow Humanoid of Isaac Gym (Makoviychuk et al., "Isaac Gym: High
Performance GPU-Based Physics Simulation For Robot Learning", 2021; IsaacGymEnvs). MuJoCo replaces PhysX, angles
are within [-pi, pi], force sensors measure the forces between a foot and its shin, and parts of the body do not
touch each other.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rollmill import physics
from rollmill.core.types import Environment
from rollmill.envs.robots.building import load_model, robot_environment
from rollmill.envs.robots.pictures import ViewAngle
from rollmill.envs.robots.substeps import in_float32
from rollmill.envs.robots.walking import (
    SUBSTEPS,
    TIME_STEP,
    WalkerParams,
    WalkerState,
    WalkingTask,
    observe_posture,
    posture_reward,
)

JOINTS = 21

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
    params = WalkerParams(
        in_float32(model.params), alive=2.0, action_cost=0.01, limit_cost=0.25, fallen=-1.0, fallen_height=0.8
    )
    return robot_environment(
        "robots:Humanoid",
        _Humanoid(model.structure),
        params,
        observations=108,
        actions=JOINTS,
        model=model_text(),
        view=ViewAngle(3.5),
        max_steps=max_steps,
    )


class _Humanoid(WalkingTask):
    def __init__(self, structure: physics.Structure):
        WalkingTask.__init__(self, structure)
        gears = np.array([_gear(joint.name) for joint in structure.joints[1:]], np.float32)
        self.shares = gears / gears.max()
        """Torque of each joint as a share of the strongest."""

    def observe(self, state: WalkerState, params: WalkerParams) -> Float[Array, "108"]:
        """Returns posture, joints and the forces on them, forces on the feet, and the last action."""
        q, v, readings = state.robot.positions, state.robot.velocities, state.robot.sensors
        posture = observe_posture(q, v, params.target, 0.25)
        joints = [self.relative_angles(q), 0.1 * v[6:], 0.01 * readings[12:], 0.01 * readings[:12]]
        return jnp.concatenate([posture, *joints, state.action])

    def merits(
        self, observation: Float[Array, "108"], action: Float[Array, "21"], params: WalkerParams
    ) -> Float[Array, ""]:
        """Returns the reward without the progress term, computed from the observation."""
        angles, rates = observation[12:33], observation[33:54]
        energy = jnp.sum(jnp.abs(action * rates) * self.shares)
        excess = (jnp.abs(angles) - 0.98) / 0.02 * self.shares
        limits = jnp.sum(jnp.where(jnp.abs(angles) > 0.98, excess, 0.0))
        costs = params.action_cost * jnp.sum(action * action) + params.energy_cost * energy
        return params.alive + posture_reward(observation, params) - costs - params.limit_cost * limits
