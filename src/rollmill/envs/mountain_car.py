"""MountainCar-v0 and MountainCarContinuous-v0: an underpowered car that must swing itself out of a valley.

Moore, "Efficient memory-based learning for robot control" (1990), with the constants of both environments in
Gymnasium. Observations, rewards and flags are equal step by step in float32.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Bool, Float, Int

from rollmill.core.types import Environment, Key, Timestep
from rollmill.envs.drawings.classic import draw_mountain_car
from rollmill.envs.physics import Scalar
from rollmill.envs.transforms import time_limit


class MountainCarState(eqx.Module):
    """Position along the valley, whose floor is near -0.5, and velocity in position units per step."""

    position: Float[Array, ""]
    velocity: Float[Array, ""]


class MountainCarParams(eqx.Module):
    """Parameters of MountainCar in units of position and steps. A field may hold one value per environment."""

    force: Scalar = 0.001
    gravity: Scalar = 0.0025
    min_position: Scalar = -1.2
    max_position: Scalar = 0.6
    max_speed: Scalar = 0.07
    goal_position: Scalar = 0.5
    goal_velocity: Scalar = 0.0
    reset_low: Scalar = -0.6
    """Lower bound of the first position, which is uniform between the two. The first velocity is zero."""
    reset_high: Scalar = -0.4
    """Upper bound of the first position."""


def mountain_car(*, max_steps: int = 200) -> Environment:
    """A weak car driven out of a valley, 3 actions, with reward -1 a step (MountainCar-v0 of Gymnasium).

    Episodes are truncated after `max_steps` steps.
    """
    return _environment("MountainCar-v0", step, spaces.Discrete(3), MountainCarParams(), max_steps)


def mountain_car_continuous(*, max_steps: int = 999) -> Environment:
    """A weak car driven out of a valley, 1 continuous action (MountainCarContinuous-v0 of Gymnasium).

    Episodes are truncated after `max_steps` steps.
    """
    params = MountainCarParams(force=0.0015, goal_position=0.45)
    pushes = spaces.Box(-1.0, 1.0, (1,), np.float32)
    return _environment("MountainCarContinuous-v0", step_continuous, pushes, params, max_steps)


def _environment(
    name: str, step: Callable[..., Timestep], actions: spaces.Space, params: MountainCarParams, max_steps: int
) -> Environment:
    env = Environment(
        name=name,
        reset=reset,
        step=step,
        observation_space=spaces.Box(np.array([-1.2, -0.07], np.float32), np.array([0.6, 0.07], np.float32)),
        action_space=actions,
        params=params,
        draw=lambda state, params: draw_mountain_car(float(state.position), params),
    )
    return time_limit(env, max_steps)


def reset(key: Key, params: MountainCarParams) -> tuple[Float[Array, "2"], MountainCarState]:
    """Starts an episode at rest near the valley's floor. The observation is `[position, velocity]`."""
    width = params.reset_high - params.reset_low
    state = MountainCarState(
        position=params.reset_low + width * jax.random.uniform(key), velocity=jnp.zeros((), jnp.float32)
    )
    return observe(state), state


def step(key: Key, state: MountainCarState, action: Int[Array, ""], params: MountainCarParams) -> Timestep:
    """Pushes the car left (0), not at all (1) or right (2) for one step. The episode terminates at the goal."""
    moved = accelerate(state, (action - 1).astype(jnp.float32) * params.force, params)
    return Timestep(
        observation=observe(moved),
        state=moved,
        reward=jnp.full((), -1.0, jnp.float32),
        terminated=at_goal(moved, params),
        truncated=jnp.zeros((), bool),
        info={},
    )


def step_continuous(
    key: Key, state: MountainCarState, action: Float[Array, "1"], params: MountainCarParams
) -> Timestep:
    """Pushes the car with the action, clipped to [-1, 1]. The reward is 100 at the goal, minus action² / 10.

    The cost is computed from the unclipped action, as in Gymnasium.
    """
    moved = accelerate(state, jnp.clip(action[0], -1.0, 1.0) * params.force, params)
    terminated = at_goal(moved, params)
    return Timestep(
        observation=observe(moved),
        state=moved,
        reward=jnp.where(terminated, 100.0, 0.0) - 0.1 * jnp.square(action[0]),
        terminated=terminated,
        truncated=jnp.zeros((), bool),
        info={},
    )


def accelerate(state: MountainCarState, push: Float[Array, ""], params: MountainCarParams) -> MountainCarState:
    """Advances the car by one step along the valley `sin(3 position)`, under `push`. The left wall stops it."""
    velocity = state.velocity + push - params.gravity * jnp.cos(3 * state.position)
    velocity = jnp.clip(velocity, -params.max_speed, params.max_speed)
    position = jnp.clip(state.position + velocity, params.min_position, params.max_position)
    at_wall = (position == params.min_position) & (velocity < 0)
    return MountainCarState(position=position, velocity=jnp.where(at_wall, 0.0, velocity))


def at_goal(state: MountainCarState, params: MountainCarParams) -> Bool[Array, ""]:
    """Returns whether the car has reached the goal position and is fast enough."""
    return (state.position >= params.goal_position) & (state.velocity >= params.goal_velocity)


def observe(state: MountainCarState) -> Float[Array, "2"]:
    """Returns the observation of MountainCar, `[position, velocity]`."""
    return jnp.stack([state.position, state.velocity])
