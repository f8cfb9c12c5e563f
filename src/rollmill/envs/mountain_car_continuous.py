"""MountainCarContinuous-v0: the valley of MountainCar with a continuous push that costs energy.

The parameters follow `MountainCarContinuous-v0` of Gymnasium. In float32, observations, rewards and flags are
equal step by step.
"""

import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Float

from rollmill.core.types import Environment, Key, Timestep
from rollmill.envs import mountain_car as valley
from rollmill.envs.drawings.classic import draw_mountain_car
from rollmill.envs.mountain_car import MountainCarParams, MountainCarState
from rollmill.envs.transforms import time_limit


def mountain_car_continuous(*, max_steps: int = 999) -> Environment:
    """A weak car driven out of a valley, 1 continuous action (MountainCarContinuous-v0 of Gymnasium).

    Episodes are truncated after `max_steps` steps.
    """
    env = Environment(
        name="MountainCarContinuous-v0",
        reset=valley.reset,
        step=step,
        observation_space=valley.observation_space(),
        action_space=spaces.Box(-1.0, 1.0, (1,), np.float32),
        params=MountainCarParams(force=0.0015, goal_position=0.45),
        draw=lambda state, params: draw_mountain_car(float(state.position), params),
    )
    return time_limit(env, max_steps)


def step(key: Key, state: MountainCarState, action: Float[Array, "1"], params: MountainCarParams) -> Timestep:
    """Pushes the car with the action, clipped to [-1, 1]. The reward is 100 at the goal, minus action² / 10.

    The cost is computed from the unclipped action, as in Gymnasium.
    """
    push = jnp.clip(action[0], -1.0, 1.0) * params.force
    moved = valley.accelerate(state, push, params)
    terminated = valley.at_goal(moved, params)
    return Timestep(
        observation=valley.observe(moved),
        state=moved,
        reward=jnp.where(terminated, 100.0, 0.0) - 0.1 * jnp.square(action[0]),
        terminated=terminated,
        truncated=jnp.zeros((), bool),
        info={},
    )
