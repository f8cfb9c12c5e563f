"""robots:Cartpole: a pole that is balanced on a cart by a continuous force.

Observation, reward, reset and termination follow Cartpole of Isaac Gym (Makoviychuk et al., "Isaac Gym: High
Performance GPU-Based Physics Simulation For Robot Learning", 2021; IsaacGymEnvs). MuJoCo replaces PhysX. The ends
of the rail, at 4 m, are left out, because an episode ends at 3 m.
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
from rollmill.envs.robots.pictures import ViewAngle
from rollmill.envs.robots.stability import itself
from rollmill.envs.robots.substeps import advance, in_float32, uniform

SUBSTEPS = 2
TIME_STEP = 1 / 60

MODEL = f"""
<mujoco model="cartpole">
  <option timestep="{TIME_STEP / SUBSTEPS}" integrator="implicitfast"/>
  <default><geom type="box" contype="0" conaffinity="0"/></default>
  <worldbody>
    <body name="cart" pos="0 0 2">
      <joint name="slider" type="slide" axis="0 1 0"/>
      <geom size="0.1 0.125 0.1" mass="1"/>
      <body name="pole">
        <joint name="hinge" axis="1 0 0"/>
        <geom size="0.02 0.03 0.5" pos="0 0 0.47" mass="1"/>
      </body>
    </body>
  </worldbody>
  <actuator><motor joint="slider" gear="400" ctrlrange="-1 1"/></actuator>
</mujoco>"""
"""The cart on its rail, and the pole, of 1 kg each."""


class CartpoleParams(eqx.Module):
    """Parameters of the robot and task of robots:Cartpole. Each leaf may hold one value per environment."""

    robot: physics.Params
    position_limit: Scalar = 3.0
    angle_limit: Scalar = math.pi / 2
    """Bounds (m, rad) beyond which an episode ends."""
    outside: Scalar = -2.0
    """Reward of the step in which the cart or the pole exceeds its bound."""
    reset_position: Scalar = 0.1
    reset_speed: Scalar = 0.25
    """Bounds of the first coordinates (m, rad) and of their rates (m/s, rad/s)."""


def cartpole(*, max_steps: int = 500) -> Environment:
    """A pole balanced on a cart, 1 continuous action (Isaac Gym's Cartpole).

    Args:
        max_steps: time limit of an episode, in steps of 1/60 s.
    """
    model = load_model(MODEL)
    return robot_environment(
        "robots:Cartpole",
        _Cartpole(model.structure),
        CartpoleParams(in_float32(model.params)),
        observations=4,
        actions=1,
        model=MODEL,
        view=ViewAngle(5.0, azimuth=180.0, elevation=-10.0, height=2.2, follows=False),
        max_steps=max_steps,
        robot_of=itself,
    )


class _Cartpole:
    """The functions of the task, for the structure of its robot."""

    def __init__(self, structure: physics.Structure):
        self.structure = structure

    def reset(self, key: Key, params: CartpoleParams) -> tuple[Float[Array, "4"], physics.RobotState]:
        """Starts nearly upright at the centre. Observes position and speed, angle and angular velocity."""
        for_positions, for_rates = jax.random.split(key)
        positions = uniform(for_positions, 2, params.reset_position)
        state = physics.RobotState(
            positions, uniform(for_rates, 2, params.reset_speed), jnp.zeros(2), jnp.zeros(0)
        )
        return _observe(state), state

    def step(
        self, key: Key, state: physics.RobotState, action: Float[Array, "1"], params: CartpoleParams
    ) -> Timestep:
        """Advances the physics twice. Terminates if cart or pole leave their bounds."""
        moved = advance(physics.Model(self.structure, params.robot), state, jnp.clip(action, -1.0, 1.0), SUBSTEPS)
        observation = _observe(moved)
        position, speed, angle, rate = observation
        outside = (jnp.abs(position) > params.position_limit) | (jnp.abs(angle) > params.angle_limit)
        inside = 1.0 - angle * angle - 0.01 * jnp.abs(speed) - 0.005 * jnp.abs(rate)
        return Timestep(
            observation=observation,
            state=moved,
            reward=jnp.where(outside, params.outside, inside),
            terminated=outside,
            truncated=jnp.zeros((), bool),
            info={},
        )


def _observe(state: physics.RobotState) -> Float[Array, "4"]:
    positions, rates = state.positions, state.velocities
    return jnp.stack([positions[0], rates[0], positions[1], rates[1]])
