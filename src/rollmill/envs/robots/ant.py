"""robots:Ant: a torso on four legs of two joints that walks along the x axis.

Observation, reward, reset and termination follow Ant of Isaac Gym (Makoviychuk et al., "Isaac Gym: High
Performance GPU-Based Physics Simulation For Robot Learning", 2021; IsaacGymEnvs). MuJoCo replaces PhysX, angles
are within [-pi, pi], and force sensors measure the forces between a foot and its leg.
"""

from typing import Any

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

_LEG = """
<geom fromto="0 0 0 {x} {y} 0"/>
<body name="leg_{i}" pos="{x} {y} 0">
  <joint name="hip_{i}" axis="0 0 1" range="-40 40"/>
  <geom fromto="0 0 0 {x} {y} 0"/>
  <geom name="knee_{i}" class="touching" pos="{x} {y} 0"/>
  <body name="foot_{i}" pos="{x} {y} 0">
    <joint name="ankle_{i}" axis="{axis} 0" range="{range}"/>
    <geom fromto="0 0 0 {xx} {yy} 0"/>
    <geom name="foot_{i}" class="touching" pos="{xx} {yy} 0"/>
    <site name="foot_{i}"/>
  </body>
</body>"""


def model_text() -> str:
    """Returns the MJCF model of the ant, with the proportions of the ant of Isaac Gym.

    Its parts do not touch each other. Only knees and feet touch the floor, because the episode ends before other
    parts could reach it. A hip is never below its knee.
    """
    legs = [
        (0.2, 0.2, "-1 1", "30 100"),
        (-0.2, 0.2, "1 1", "-100 -30"),
        (-0.2, -0.2, "-1 1", "-100 -30"),
        (0.2, -0.2, "1 1", "30 100"),
    ]
    body = "".join(
        _LEG.format(i=i, x=x, y=y, xx=2 * x, yy=2 * y, axis=axis, range=span)
        for i, (x, y, axis, span) in enumerate(legs, 1)
    )
    joints = [f"{part}_{i}" for i in range(1, 5) for part in ("hip", "ankle")]
    motors = "".join(f'<motor joint="{joint}" gear="15" ctrlrange="-1 1"/>' for joint in joints)
    sensors = "".join(f'<force site="foot_{i}"/><torque site="foot_{i}"/>' for i in range(1, 5))
    return f"""
<mujoco model="ant">
  <compiler angle="degree" autolimits="true"/>
  <option timestep="{TIME_STEP / SUBSTEPS}" integrator="implicitfast"/>
  <default>
    <joint armature="0.01" damping="0.1"/>
    <geom type="capsule" size="0.08" density="5" friction="1" margin="0.01" contype="0" conaffinity="0"/>
    <default class="touching"><geom type="sphere" mass="0" conaffinity="1"/></default>
  </default>
  <worldbody>
    <geom name="floor" type="plane" size="0 0 1" contype="1"/>
    <body name="torso" pos="0 0 0.44">
      <freejoint/>
      <geom type="sphere" size="0.25"/>{body}
    </body>
  </worldbody>
  <actuator>{motors}</actuator>
  <sensor>{sensors}</sensor>
</mujoco>"""


class AntState(eqx.Module):
    """State of the ant task: the robot, and the last action."""

    robot: physics.RobotState
    action: Float[Array, "8"]


class AntParams(eqx.Module):
    """Parameters of the ant and its task. Each leaf may hold one value per environment."""

    robot: physics.Params
    target: Scalar = 1000.0
    """Position on the x axis that the ant walks to (m)."""
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


def ant(
    *,
    max_steps: int = 1000,
    iterations: int = physics.ITERATIONS,
    line_search_iterations: int = physics.ITERATIONS,
) -> Environment:
    """A torso on four legs that walks along the x axis, 8 continuous actions (Isaac Gym's Ant).

    Args:
        max_steps: time limit of an episode, in steps of 1/60 s.
        iterations: Newton iterations in each of the two physics steps.
        line_search_iterations: number of points tried along each search direction.
    """
    model = load_model(model_text(), iterations, line_search_iterations)
    return robot_environment(
        "robots:Ant",
        _Ant(model.structure),
        AntParams(in_float32(model.params)),
        observations=60,
        actions=8,
        model=model_text(),
        view=ViewAngle(3.0),
        max_steps=max_steps,
    )


class _Ant:
    """The functions of the task, for the structure of its robot."""

    def __init__(self, structure: physics.Structure):
        self.structure = structure
        ranges: list[Any] = [joint.range for joint in structure.joints[1:]]
        self.low, self.high = np.array(ranges, np.float32).T

    def reset(self, key: Key, params: AntParams) -> tuple[Float[Array, "60"], AntState]:
        """Starts in the pose nearest to straight legs that the joints allow, with noise."""
        for_angles, for_rates = jax.random.split(key)
        angles = np.clip(np.zeros_like(self.low), self.low, self.high) + uniform(for_angles, 8, params.reset_angle)
        angles = jnp.clip(angles, self.low, self.high)
        pose = jnp.asarray(self.structure.initial_positions[:7], jnp.float32)
        rates = jnp.concatenate([jnp.zeros(6), uniform(for_rates, 8, params.reset_speed)])
        zeros = jnp.zeros(14)
        robot = physics.RobotState(jnp.concatenate([pose, angles]), rates, zeros, jnp.zeros(24))
        state = AntState(robot, jnp.zeros(8))
        return self.observe(state, params), state

    def step(self, key: Key, state: AntState, action: Float[Array, "8"], params: AntParams) -> Timestep:
        """Advances the physics twice. Terminates if the ant falls."""
        action = jnp.clip(action, -1.0, 1.0)
        robot = advance(physics.Model(self.structure, params.robot), state.robot, action, SUBSTEPS)
        moved = AntState(robot, action)
        observation = self.observe(moved, params)
        fallen = observation[0] < params.fallen_height
        progress = progress_of(state.robot.positions, robot.positions, params.target, TIME_STEP)
        return Timestep(
            observation=observation,
            state=moved,
            reward=jnp.where(fallen, params.fallen, progress + _merits(observation, action, params)),
            terminated=fallen,
            truncated=jnp.zeros((), bool),
            info={},
        )

    def observe(self, state: AntState, params: AntParams) -> Float[Array, "60"]:
        """Returns the observation: the torso's pose and motion, the joints, the feet's forces, the last action."""
        q, v = state.robot.positions, state.robot.velocities
        posture = observe_posture(q, v, params.target, 1.0)
        angles = (2.0 * q[7:] - (self.low + self.high)) / (self.high - self.low)
        return jnp.concatenate([posture, angles, 0.2 * v[6:], 0.1 * state.robot.sensors, state.action])


def _merits(observation: Float[Array, "60"], action: Float[Array, "8"], params: AntParams) -> Float[Array, ""]:
    """Returns the reward without the progress term, computed from the observation."""
    upright, heading, angles, rates = observation[10], observation[11], observation[12:20], observation[20:28]
    posture = params.up * jnp.where(upright > 0.93, 1.0, 0.0) + params.heading * jnp.minimum(heading / 0.8, 1.0)
    costs = params.action_cost * jnp.sum(action * action) + params.energy_cost * jnp.sum(jnp.abs(action * rates))
    return params.alive + posture - costs - params.limit_cost * jnp.sum(jnp.where(angles > 0.99, 1.0, 0.0))
