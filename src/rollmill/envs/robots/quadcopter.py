"""robots:Quadcopter: a chassis with four rotors, each tilted by two joints, that hovers at a target.

Observation, reward, reset and termination follow Quadcopter of Isaac Gym (Makoviychuk et al., "Isaac Gym: High
Performance GPU-Based Physics Simulation For Robot Learning", 2021; IsaacGymEnvs). MuJoCo replaces PhysX. The stiff
drives of the light rotors would not be stable here, so the servos have a stiffness of 10 N m/rad and a damper,
and the joints have an armature. There is no floor, because an episode ends above it.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rollmill import physics
from rollmill.core.types import Environment, Key, Timestep
from rollmill.envs.physics import Scalar
from rollmill.envs.robots.building import load_model, robot_environment
from rollmill.envs.robots.flying import clip_action, distance_of, first_place, flight_reward, observe_flight
from rollmill.envs.robots.pictures import ViewAngle
from rollmill.envs.robots.substeps import advance, in_float32, uniform

SUBSTEPS = 2
TIME_STEP = 0.01
TARGET = (0.0, 0.0, 1.0)
LARGEST_ANGLE = math.radians(30)
"""Bound of the rotors' joints (rad)."""

_ARM = """
<body name="arm_{i}" pos="{x} {y} 0" euler="0 0 {turn}">
  <joint name="pitch_{i}" axis="0 1 0"/>
  <geom type="sphere" size="0.01" density="200"/>
  <body name="rotor_{i}" pos="0.0425 0 0">
    <joint name="roll_{i}" axis="1 0 0"/>
    <geom type="cylinder" size="0.04 0.005" density="1000"/>
    <site name="rotor_{i}"/>
  </body>
</body>"""


def model_text() -> str:
    """Returns the MJCF model of the quadcopter, with servos of the eight joints and the thrust of each rotor."""
    turns = [0.25 * math.pi, 0.75 * math.pi, 1.25 * math.pi, 1.75 * math.pi]
    arms = "".join(
        _ARM.format(i=i, x=0.1025 * math.cos(turn), y=0.1025 * math.sin(turn), turn=turn)
        for i, turn in enumerate(turns)
    )
    servos = "".join(
        f'<position joint="{kind}_{i}" kp="10" kv="0.2"/>' for i in range(4) for kind in ("pitch", "roll")
    )
    thrusts = "".join(f'<motor site="rotor_{i}" gear="0 0 1 0 0 0" ctrlrange="0 2"/>' for i in range(4))
    return f"""
<mujoco model="quadcopter">
  <compiler angle="radian" autolimits="true"/>
  <option timestep="{TIME_STEP / SUBSTEPS}" integrator="implicitfast"/>
  <default>
    <geom contype="0" conaffinity="0"/>
    <joint armature="0.001" range="{-LARGEST_ANGLE} {LARGEST_ANGLE}"/>
  </default>
  <worldbody>
    <body name="chassis" pos="0 0 1">
      <freejoint/>
      <geom type="cylinder" size="0.1 0.015" density="50"/>{arms}
    </body>
  </worldbody>
  <actuator>{servos}{thrusts}</actuator>
</mujoco>"""


class QuadcopterState(eqx.Module):
    """State of Quadcopter: the robot, its servos' target angles (rad), and the thrust of its rotors (N)."""

    robot: physics.RobotState
    angles: Float[Array, "8"]
    thrusts: Float[Array, "4"]


class QuadcopterParams(eqx.Module):
    """Parameters of the robot and task of Quadcopter. Each leaf may hold one value per environment."""

    robot: physics.Params
    turn: Scalar = 8 * math.pi
    """Speed (rad/s) at which an action of 1 moves where a servo turns to."""
    climb: Scalar = 200.0
    """Rate (N/s) at which an action of 1 changes a rotor's thrust."""
    largest_thrust: Scalar = 2.0
    upright: Scalar = 1.0
    """Weight of the attitude in the reward."""
    reset_spread: Scalar = 1.5
    """Bound of the first place (m) along x and y."""
    reset_angle: Scalar = 0.2
    """Bound of the first angles (rad)."""
    farthest: Scalar = 3.0
    """Distance to the target (m) beyond which an episode ends."""
    lowest: Scalar = 0.3
    """Height (m) below which an episode ends."""


def quadcopter(*, max_steps: int = 500, iterations: int = physics.ITERATIONS) -> Environment:
    """Four rotors on joints that hover at a target, 12 continuous actions (Isaac Gym's Quadcopter).

    Args:
        max_steps: time limit of an episode, in steps of 0.01 s.
        iterations: Newton iterations in each of the two physics steps.
    """
    model = load_model(model_text(), iterations)
    return robot_environment(
        "robots:Quadcopter",
        _Quadcopter(model.structure),
        QuadcopterParams(in_float32(model.params)),
        observations=21,
        actions=12,
        model=model_text(),
        view=ViewAngle(2.5, height=1.0, follows=False),
        max_steps=max_steps,
    )


class _Quadcopter:
    """The functions of the task, for the structure of its robot."""

    def __init__(self, structure: physics.Structure):
        self.structure = structure

    def reset(self, key: Key, params: QuadcopterParams) -> tuple[Float[Array, "21"], QuadcopterState]:
        """Starts upright and at rest, somewhere near the target, with tilted rotors."""
        for_place, for_angles = jax.random.split(key)
        angles, zeros = uniform(for_angles, 8, params.reset_angle), jnp.zeros(14)
        place = first_place(for_place, params.reset_spread)
        robot = physics.RobotState(jnp.concatenate([place, angles]), zeros, zeros, jnp.zeros(0))
        return _observe(robot), QuadcopterState(robot, angles, jnp.zeros(4))

    def step(
        self, key: Key, state: QuadcopterState, action: Float[Array, "12"], params: QuadcopterParams
    ) -> Timestep:
        """Advances the physics twice. Terminates far from the target or near the ground."""
        action = clip_action(action)
        angles = state.angles + TIME_STEP * params.turn * action[:8]
        angles = jnp.clip(angles, -LARGEST_ANGLE, LARGEST_ANGLE)
        thrusts = state.thrusts + TIME_STEP * params.climb * action[8:]
        thrusts = jnp.clip(thrusts, 0.0, params.largest_thrust)
        control = jnp.concatenate([angles, thrusts])
        robot = advance(physics.Model(self.structure, params.robot), state.robot, control, SUBSTEPS)
        observation = _observe(robot)
        distance = distance_of(observation)
        return Timestep(
            observation=observation,
            state=QuadcopterState(robot, angles, thrusts),
            reward=flight_reward(observation, distance, params.upright),
            terminated=(distance > params.farthest) | (robot.positions[2] < params.lowest),
            truncated=jnp.zeros((), bool),
            info={},
        )


def _observe(robot: physics.RobotState) -> Float[Array, "21"]:
    flight = observe_flight(robot.positions, robot.velocities, jnp.array(TARGET))
    return jnp.concatenate([flight, robot.positions[7:]])
