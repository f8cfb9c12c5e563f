"""Pendulum-v1: a pendulum swung up and held there by a torque too weak to lift it directly.

The parameters follow `Pendulum-v1` of Gymnasium. In float32, observations and rewards are equal step by step.
Episodes never terminate, but the time limit truncates them.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Float

from rollmill.core.types import Environment, Key, Timestep
from rollmill.envs.drawings.classic import draw_pendulum
from rollmill.envs.physics import Scalar, wrap_angle
from rollmill.envs.transforms import time_limit


class PendulumState(eqx.Module):
    """Angle of a pendulum from upright (rad, within one turn) and its angular velocity (rad/s).

    Gymnasium lets the angle grow without bound. Here it is wrapped, which keeps its precision in float32.
    """

    angle: Float[Array, ""]
    angular_velocity: Float[Array, ""]


class PendulumParams(eqx.Module):
    """Physical parameters of Pendulum, in SI units. Each field may hold one value for each environment."""

    gravity: Scalar = 10.0
    mass: Scalar = 1.0
    length: Scalar = 1.0
    time_step: Scalar = 0.05
    max_speed: Scalar = 8.0
    max_torque: Scalar = 2.0
    reset_angle: Scalar = math.pi
    """Bound of the initial angle, which is uniform between minus and plus this value."""
    reset_speed: Scalar = 1.0
    """Bound of the initial angular velocity, which is uniform between minus and plus this value."""


def pendulum(*, max_steps: int = 200) -> Environment:
    """A pendulum swung up by a weak torque, 1 continuous action (Pendulum-v1 of Gymnasium).

    Episodes are truncated after `max_steps` steps.
    """
    high = np.array([1.0, 1.0, 8.0], np.float32)
    env = Environment(
        name="Pendulum-v1",
        reset=reset,
        step=step,
        observation_space=spaces.Box(-high, high, dtype=np.float32),
        action_space=spaces.Box(-2.0, 2.0, (1,), np.float32),
        params=PendulumParams(),
        draw=lambda state, params: draw_pendulum(float(state.angle), length=float(params.length)),
    )
    return time_limit(env, max_steps)


def reset(key: Key, params: PendulumParams) -> tuple[Float[Array, "3"], PendulumState]:
    """Starts an episode of Pendulum at a random angle, with a small angular velocity.

    The observation is `[cos angle, sin angle, angular velocity]`.
    """
    angle, speed = jax.random.uniform(key, (2,), minval=-1.0, maxval=1.0)
    state = PendulumState(
        angle=wrap_angle(params.reset_angle * angle), angular_velocity=params.reset_speed * speed
    )
    return _observe(state), state


def step(key: Key, state: PendulumState, action: Float[Array, "1"], params: PendulumParams) -> Timestep:
    """Advances Pendulum by one semi-implicit Euler step.

    The reward is -(angle² + rate² / 10 + torque² / 1000), from the state before the step.
    """
    torque = jnp.clip(action[0], -params.max_torque, params.max_torque)
    cost = jnp.square(state.angle) + 0.1 * jnp.square(state.angular_velocity) + 0.001 * jnp.square(torque)
    gravity_term = 3 * params.gravity / (2 * params.length) * jnp.sin(state.angle)
    torque_term = 3.0 / (params.mass * params.length**2) * torque
    speed = state.angular_velocity + (gravity_term + torque_term) * params.time_step
    speed = jnp.clip(speed, -params.max_speed, params.max_speed)
    moved = PendulumState(angle=wrap_angle(state.angle + speed * params.time_step), angular_velocity=speed)
    return Timestep(
        observation=_observe(moved),
        state=moved,
        reward=-cost,
        terminated=jnp.zeros((), bool),
        truncated=jnp.zeros((), bool),
        info={},
    )


def _observe(state: PendulumState) -> Float[Array, "3"]:
    return jnp.stack([jnp.cos(state.angle), jnp.sin(state.angle), state.angular_velocity])
