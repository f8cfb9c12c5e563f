"""CartPole-v1: a pole balanced on a cart pushed left or right.

Barto, Sutton and Anderson, "Neuronlike adaptive elements that can solve difficult learning control problems"
(1983), with the constants of `CartPole-v1` in Gymnasium. Observations, rewards and flags are equal step by step in
float32.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Float, Int

from rollmill.core.types import Environment, Key, Timestep
from rollmill.envs.drawings.classic import draw_cartpole
from rollmill.envs.physics import Scalar
from rollmill.envs.transforms import time_limit


class CartPoleState(eqx.Module):
    """Position (m) and velocity (m/s) of a cart, angle (rad, 0 is upright) and its rate (rad/s) of a pole."""

    position: Float[Array, ""]
    velocity: Float[Array, ""]
    angle: Float[Array, ""]
    angular_velocity: Float[Array, ""]


class CartPoleParams(eqx.Module):
    """Physical parameters of CartPole, in SI units. Each field may hold one value for each environment."""

    gravity: Scalar = 9.8
    cart_mass: Scalar = 1.0
    pole_mass: Scalar = 0.1
    pole_half_length: Scalar = 0.5
    force: Scalar = 10.0
    time_step: Scalar = 0.02
    position_limit: Scalar = 2.4
    angle_limit: Scalar = 12 * 2 * math.pi / 360
    reset_bound: Scalar = 0.05
    """Bound of the initial state, whose components are uniform between minus and plus this value."""


def cartpole(*, max_steps: int = 500) -> Environment:
    """A pole balanced on a cart, 2 actions, with reward 1 a step (CartPole-v1 of Gymnasium).

    Episodes are truncated after `max_steps` steps.
    """
    params = CartPoleParams()
    high = np.array([2 * 2.4, np.inf, 2 * 12 * 2 * math.pi / 360, np.inf], np.float32)
    env = Environment(
        name="CartPole-v1",
        reset=reset,
        step=step,
        observation_space=spaces.Box(-high, high, dtype=np.float32),
        action_space=spaces.Discrete(2),
        params=params,
        draw=lambda state, params: draw_cartpole(float(state.position), float(state.angle), params),
    )
    return time_limit(env, max_steps)


def reset(key: Key, params: CartPoleParams) -> tuple[Float[Array, "4"], CartPoleState]:
    """Starts an episode of CartPole near the centre, with the pole nearly upright.

    The observation is `[position, velocity, angle, angular velocity]`.
    """
    start = params.reset_bound * jax.random.uniform(key, (4,), minval=-1.0, maxval=1.0)
    return start, CartPoleState(*start)


def step(key: Key, state: CartPoleState, action: Int[Array, ""], params: CartPoleParams) -> Timestep:
    """Advances CartPole by one Euler step. Action 1 pushes the cart to the right, and action 0 to the left.

    The episode terminates if the cart or the pole leaves its limits.
    """
    moved = _euler_step(state, jnp.where(action == 1, params.force, -params.force), params)
    return Timestep(
        observation=jnp.stack([moved.position, moved.velocity, moved.angle, moved.angular_velocity]),
        state=moved,
        reward=jnp.ones((), jnp.float32),
        terminated=(jnp.abs(moved.position) > params.position_limit) | (jnp.abs(moved.angle) > params.angle_limit),
        truncated=jnp.zeros((), bool),
        info={},
    )


def _euler_step(state: CartPoleState, force: Float[Array, ""], params: CartPoleParams) -> CartPoleState:
    cos, sin = jnp.cos(state.angle), jnp.sin(state.angle)
    total_mass = params.cart_mass + params.pole_mass
    pole_moment = params.pole_mass * params.pole_half_length
    push = (force + pole_moment * jnp.square(state.angular_velocity) * sin) / total_mass
    inertia = params.pole_half_length * (4.0 / 3.0 - params.pole_mass * jnp.square(cos) / total_mass)
    angular_acceleration = (params.gravity * sin - cos * push) / inertia
    acceleration = push - pole_moment * angular_acceleration * cos / total_mass
    return CartPoleState(
        position=state.position + params.time_step * state.velocity,
        velocity=state.velocity + params.time_step * acceleration,
        angle=state.angle + params.time_step * state.angular_velocity,
        angular_velocity=state.angular_velocity + params.time_step * angular_acceleration,
    )
