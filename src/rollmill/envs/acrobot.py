"""Acrobot-v1: two hanging links, swung up by driving only the joint between them.

Sutton, "Generalization in reinforcement learning: successful examples using sparse coarse coding" (1996), with the
book's equations and the constants of `Acrobot-v1` in Gymnasium. Observations, rewards and flags are equal step by
step in float32.
"""

import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Float, Int

from rollmill.core.types import Environment, Key, Timestep
from rollmill.envs.drawings.classic import draw_acrobot
from rollmill.envs.physics import Scalar, wrap_angle
from rollmill.envs.transforms import time_limit


class AcrobotState(eqx.Module):
    """Angles and angular velocities of the two links of an acrobot.

    The first angle is measured from the hanging position, and the second from the first link (rad). Velocities are
    in rad/s.
    """

    angle_1: Float[Array, ""]
    angle_2: Float[Array, ""]
    speed_1: Float[Array, ""]
    speed_2: Float[Array, ""]


class AcrobotParams(eqx.Module):
    """Physical parameters of an acrobot, in SI units. Each field may hold one value for each environment."""

    gravity: Scalar = 9.8
    length_1: Scalar = 1.0
    mass_1: Scalar = 1.0
    mass_2: Scalar = 1.0
    centre_1: Scalar = 0.5
    centre_2: Scalar = 0.5
    inertia: Scalar = 1.0
    """Moment of inertia of either link."""
    torque: Scalar = 1.0
    time_step: Scalar = 0.2
    max_speed_1: Scalar = 4 * math.pi
    max_speed_2: Scalar = 9 * math.pi
    reset_bound: Scalar = 0.1
    """Bound of the initial state, whose components are uniform between minus and plus this value."""


class Directions(NamedTuple):
    """Cosines and sines of both angles of an acrobot, which dynamics, observation and goal share."""

    cos_1: Float[Array, ""]
    sin_1: Float[Array, ""]
    cos_2: Float[Array, ""]
    sin_2: Float[Array, ""]


def acrobot(*, max_steps: int = 500) -> Environment:
    """Two links swung up by the joint between them, 3 actions (Acrobot-v1 of Gymnasium).

    Episodes are truncated after `max_steps` steps.
    """
    high = np.array([1.0, 1.0, 1.0, 1.0, 4 * math.pi, 9 * math.pi], np.float32)
    env = Environment(
        name="Acrobot-v1",
        reset=reset,
        step=step,
        observation_space=spaces.Box(-high, high, dtype=np.float32),
        action_space=spaces.Discrete(3),
        params=AcrobotParams(),
        draw=lambda state, params: draw_acrobot(
            float(state.angle_1), float(state.angle_2), length_1=float(params.length_1)
        ),
    )
    return time_limit(env, max_steps)


def reset(key: Key, params: AcrobotParams) -> tuple[Float[Array, "6"], AcrobotState]:
    """Starts an episode of Acrobot with the links hanging, nearly at rest.

    The observation is `[cos, sin, cos, sin, speed, speed]`, for the angles and angular velocities of both links.
    """
    state = AcrobotState(*(params.reset_bound * jax.random.uniform(key, (4,), minval=-1.0, maxval=1.0)))
    return _observe(state, _directions(state)), state


def step(key: Key, state: AcrobotState, action: Int[Array, ""], params: AcrobotParams) -> Timestep:
    """Applies a torque of -1, 0 or 1 to the joint for one time step.

    The episode terminates when the tip is one link length above the axle.
    """
    torque = (action - 1).astype(jnp.float32) * params.torque
    moved = _bound(_runge_kutta_step(state, torque, params), params)
    directions = _directions(moved)
    height = -directions.cos_1 - (directions.cos_1 * directions.cos_2 - directions.sin_1 * directions.sin_2)
    terminated = height > 1.0
    return Timestep(
        observation=_observe(moved, directions),
        state=moved,
        reward=jnp.where(terminated, jnp.float32(0.0), jnp.float32(-1.0)),
        terminated=terminated,
        truncated=jnp.zeros((), bool),
        info={},
    )


def _runge_kutta_step(state: AcrobotState, torque: Float[Array, ""], params: AcrobotParams) -> AcrobotState:
    dt = params.time_step
    rate_1 = _rates(state, torque, params)
    rate_2 = _rates(_along(state, rate_1, dt / 2), torque, params)
    rate_3 = _rates(_along(state, rate_2, dt / 2), torque, params)
    rate_4 = _rates(_along(state, rate_3, dt), torque, params)
    mean = jax.tree.map(lambda a, b, c, d: (a + 2 * b + 2 * c + d) / 6, rate_1, rate_2, rate_3, rate_4)
    return _along(state, mean, dt)


def _rates(state: AcrobotState, torque: Float[Array, ""], params: AcrobotParams) -> AcrobotState:
    """Time derivative of the state. Each field is the rate of change of the field with its name."""
    cos_1, sin_1, cos_2, sin_2 = _directions(state)
    m_2, l_1, c_2 = params.mass_2, params.length_1, params.centre_2
    coupling = m_2 * l_1 * c_2
    inertia_1 = params.mass_1 * params.centre_1**2 + m_2 * l_1**2 + params.inertia
    inertia_2 = m_2 * c_2**2 + params.inertia
    d_1 = inertia_1 + inertia_2 + 2 * coupling * cos_2
    d_2 = inertia_2 + coupling * cos_2
    phi_2 = m_2 * c_2 * params.gravity * (sin_1 * cos_2 + cos_1 * sin_2)
    phi_1 = (
        -coupling * sin_2 * state.speed_2 * (state.speed_2 + 2 * state.speed_1)
        + (params.mass_1 * params.centre_1 + m_2 * l_1) * params.gravity * sin_1
        + phi_2
    )
    ratio = d_2 / d_1
    drive = torque + ratio * phi_1 - coupling * jnp.square(state.speed_1) * sin_2 - phi_2
    acceleration_2 = drive / (inertia_2 - d_2 * ratio)
    acceleration_1 = -(d_2 * acceleration_2 + phi_1) / d_1
    return AcrobotState(state.speed_1, state.speed_2, acceleration_1, acceleration_2)


def _along(state: AcrobotState, rate: AcrobotState, duration: Scalar) -> AcrobotState:
    return jax.tree.map(lambda value, slope: value + duration * slope, state, rate)


def _bound(state: AcrobotState, params: AcrobotParams) -> AcrobotState:
    return AcrobotState(
        angle_1=wrap_angle(state.angle_1),
        angle_2=wrap_angle(state.angle_2),
        speed_1=jnp.clip(state.speed_1, -params.max_speed_1, params.max_speed_1),
        speed_2=jnp.clip(state.speed_2, -params.max_speed_2, params.max_speed_2),
    )


def _directions(state: AcrobotState) -> Directions:
    return Directions(
        jnp.cos(state.angle_1), jnp.sin(state.angle_1), jnp.cos(state.angle_2), jnp.sin(state.angle_2)
    )


def _observe(state: AcrobotState, directions: Directions) -> Float[Array, "6"]:
    return jnp.stack([*directions, state.speed_1, state.speed_2])
