"""robots:Ingenuity: a helicopter of two rotors that flies to targets on Mars.

Observation, reward, reset and termination follow Ingenuity of Isaac Gym (Makoviychuk et al., "Isaac Gym: High
Performance GPU-Based Physics Simulation For Robot Learning", 2021; IsaacGymEnvs). MuJoCo replaces PhysX, and the
rotors do not turn against the chassis, because only their thrust matters. There is no floor, because an episode
ends above it.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rollmill import physics
from rollmill.core.types import Environment, Key, Timestep
from rollmill.envs.physics import Scalar
from rollmill.envs.robots.building import load_model, robot_environment
from rollmill.envs.robots.flying import clip_action, distance_of, first_place, flight_reward, observe_flight
from rollmill.envs.robots.pictures import ViewAngle
from rollmill.envs.robots.substeps import advance, in_float32

SUBSTEPS = 2
TIME_STEP = 0.01
FORCES = "".join(
    f'<motor site="rotor_{i}" gear="{gear} 0 0 0"/>' for i in range(2) for gear in ("1 0 0", "0 1 0", "0 0 1")
)

MODEL = f"""
<mujoco model="ingenuity">
  <option timestep="{TIME_STEP / SUBSTEPS}" integrator="implicitfast" gravity="0 0 -3.721"/>
  <default><geom contype="0" conaffinity="0"/></default>
  <worldbody>
    <body name="chassis" pos="0 0 1">
      <freejoint/>
      <geom type="box" size="0.06 0.06 0.06" density="50"/>
      <geom type="cylinder" size="0.15 0.005" density="1000"/>
      <geom type="cylinder" size="0.15 0.005" density="1000" pos="0 0 0.025"/>
      <site name="rotor_0"/>
      <site name="rotor_1" pos="0 0 0.025"/>
    </body>
  </worldbody>
  <actuator>{FORCES}</actuator>
</mujoco>"""
"""A chassis under two rotors, with a force along each axis of each rotor."""


class IngenuityState(eqx.Module):
    """State of the Ingenuity task: the robot, the target, and the number of steps of the episode."""

    robot: physics.RobotState
    target: Float[Array, "3"]
    age: Int[Array, ""]


class IngenuityParams(eqx.Module):
    """Parameters of the robot and task of Ingenuity. Each leaf may hold one value per environment."""

    robot: physics.Params
    thrust: Scalar = 20.0
    """Thrust (N) of a rotor at an action of 1."""
    lateral: Scalar = 0.2
    """Maximum share of the thrust along each of the other axes."""
    upright: Scalar = 5.0
    """Weight of the attitude in the reward."""
    reset_spread: Scalar = 1.5
    """Bound of the first place (m) along x and y."""
    target_spread: Scalar = 5.0
    """Bound of targets (m) along x and y."""
    target_steps: Scalar = 500.0
    """Steps between two targets."""
    farthest: Scalar = 8.0
    """Distance to the target (m) beyond which an episode ends."""
    lowest: Scalar = 0.5
    """Height (m) below which an episode ends."""


def ingenuity(*, max_steps: int = 2000) -> Environment:
    """A helicopter that flies to targets on Mars, 6 continuous actions (Isaac Gym's Ingenuity).

    Args:
        max_steps: time limit of an episode, in steps of 0.01 s.
    """
    model = load_model(MODEL)
    return robot_environment(
        "robots:Ingenuity",
        _Ingenuity(model.structure),
        IngenuityParams(in_float32(model.params)),
        observations=13,
        actions=6,
        model=MODEL,
        view=ViewAngle(4.0, height=1.2),
        max_steps=max_steps,
    )


class _Ingenuity:
    """The functions of the task, for the structure of its robot."""

    def __init__(self, structure: physics.Structure):
        self.structure = structure

    def reset(self, key: Key, params: IngenuityParams) -> tuple[Float[Array, "13"], IngenuityState]:
        """Starts upright and at rest, somewhere near the middle."""
        for_place, for_target = jax.random.split(key)
        zeros = jnp.zeros(6)
        robot = physics.RobotState(first_place(for_place, params.reset_spread), zeros, zeros, jnp.zeros(0))
        state = IngenuityState(robot, _target(for_target, params), jnp.int32(0))
        return observe_flight(robot.positions, robot.velocities, state.target), state

    def step(
        self, key: Key, state: IngenuityState, action: Float[Array, "6"], params: IngenuityParams
    ) -> Timestep:
        """Advances the physics twice. Terminates far from the target or near the ground."""
        action = clip_action(action)
        robot = advance(
            physics.Model(self.structure, params.robot), state.robot, _forces(action, params), SUBSTEPS
        )
        age = state.age + 1
        is_due = (age.astype(jnp.float32) % params.target_steps) == 0
        target = jnp.where(is_due, _target(key, params), state.target)
        observation = observe_flight(robot.positions, robot.velocities, target)
        # The reward depends on the target to which the robot flew in this step, not on a new target.
        flown = observe_flight(robot.positions, robot.velocities, state.target)
        distance = distance_of(flown)
        return Timestep(
            observation=observation,
            state=IngenuityState(robot, target, age),
            reward=flight_reward(flown, distance, params.upright),
            terminated=(distance > params.farthest) | (robot.positions[2] < params.lowest),
            truncated=jnp.zeros((), bool),
            info={},
        )


def _forces(action: Float[Array, "6"], params: IngenuityParams) -> Float[Array, "6"]:
    """Returns the forces (N) of both rotors along the chassis' axes: shares of the thrust, and the thrust."""
    parts: list[Array] = []
    for aside, thrust in ((action[0:2], action[2:3]), (action[3:5], action[5:6])):
        push = params.thrust * thrust
        parts += [push * jnp.clip(aside, -params.lateral, params.lateral), push]
    return jnp.concatenate(parts)


def _target(key: Key, params: IngenuityParams) -> Float[Array, "3"]:
    place = jax.random.uniform(key, (3,), jnp.float32, -1.0, 1.0)
    return jnp.concatenate([params.target_spread * place[:2], 1.5 + 0.5 * place[2:]])
