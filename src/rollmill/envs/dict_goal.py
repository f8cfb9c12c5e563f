"""DictGoal-v0: a point walks to one of four corners, and observes its position and the goal as a dictionary."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Float, Int

from rollmill.core.drawing import Drawing
from rollmill.core.types import Environment, Key, Timestep
from rollmill.envs.drawings.boards import draw_point
from rollmill.envs.physics import Scalar
from rollmill.envs.transforms import time_limit

CORNERS = np.array([[-1, -1], [-1, 1], [1, -1], [1, 1]], np.float32) * np.float32(0.75)
"""Position of each goal, in the row of its number."""

MOVES = np.array([[-1, 0], [1, 0], [0, -1], [0, 1]], np.float32)
"""Direction of each action."""


class DictGoalState(eqx.Module):
    """Position of the point, with coordinates within [-1, 1], and the index of the goal corner."""

    position: Float[Array, "2"]
    goal: Int[Array, ""]


class DictGoalParams(eqx.Module):
    """Lengths in DictGoal, relative to half the square's side. A field may hold one value per environment."""

    stride: Scalar = 0.25
    goal_radius: Scalar = 0.3
    reset_bound: Scalar = 0.25
    """Bound of the initial position, whose coordinates are uniform between minus and plus this value."""


def dict_goal(*, max_steps: int = 32) -> Environment:
    """A point walks to the corner that the observation names: a Dict of a Box and a Discrete, 4 actions.

    The reward is the decrease of the distance, plus 1 on arrival, which terminates. The direct path has a return
    between 1.5 and 2.1. Episodes are truncated after `max_steps` steps.
    """
    env = Environment(
        name="DictGoal-v0",
        reset=reset,
        step=step,
        observation_space=spaces.Dict(
            {"goal": spaces.Discrete(4), "position": spaces.Box(-1.0, 1.0, (2,), np.float32)}
        ),
        action_space=spaces.Discrete(4),
        params=DictGoalParams(),
        draw=_draw,
    )
    return time_limit(env, max_steps)


def reset(key: Key, params: DictGoalParams) -> tuple[dict[str, Array], DictGoalState]:
    """Starts an episode of DictGoal near the centre, with a random goal.

    The observation is `{"goal": [], "position": [2]}`.
    """
    position_key, goal_key = jax.random.split(key)
    state = DictGoalState(
        position=params.reset_bound * jax.random.uniform(position_key, (2,), minval=-1.0, maxval=1.0),
        goal=jax.random.randint(goal_key, (), 0, 4),
    )
    return _observe(state), state


def step(key: Key, state: DictGoalState, action: Int[Array, ""], params: DictGoalParams) -> Timestep:
    """Moves the point by one stride: left (0), right (1), down (2) or up (3). Walls stop the point."""
    goal = jnp.asarray(CORNERS)[state.goal]
    target = state.position + params.stride * jnp.asarray(MOVES)[action]
    moved = DictGoalState(position=jnp.clip(target, -1.0, 1.0), goal=state.goal)
    before, after = (jnp.linalg.norm(position - goal) for position in (state.position, moved.position))
    terminated = after < params.goal_radius
    return Timestep(
        observation=_observe(moved),
        state=moved,
        reward=before - after + terminated.astype(jnp.float32),
        terminated=terminated,
        truncated=jnp.zeros((), bool),
        info={},
    )


def _draw(state: DictGoalState, params: DictGoalParams) -> Drawing:
    (x, y), (goal_x, goal_y) = np.asarray(state.position).tolist(), CORNERS[int(state.goal)].tolist()
    return draw_point((x, y), (goal_x, goal_y), radius=float(params.goal_radius))


def _observe(state: DictGoalState) -> dict[str, Array]:
    return {"goal": state.goal, "position": state.position}
