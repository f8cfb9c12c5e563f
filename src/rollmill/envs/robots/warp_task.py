"""Runs the tasks of robots in MuJoCo Warp, as JAX environments."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

from rollmill import physics
from rollmill.core.types import OVERFLOW, Environment, Key, Observation, Params, State, Timestep
from rollmill.envs.robots.substeps import advanced_by, checked_count
from rollmill.physics.warp_robots import WarpRobots


def to_warp(
    env: Environment,
    source: Any,
    *,
    iterations: int,
    line_search_iterations: int,
    contacts: int | None = None,
    rows: int | None = None,
) -> Environment:
    """Returns a robot's task whose physics MuJoCo Warp computes.

    The task's parameters do not include the robot's parameters, because all robots of a batch are equal in
    MuJoCo Warp. The task's options include the sizes of the buffers.

    Args:
        env: the task, with its time limit.
        source: MJCF model of the robot.
        iterations: number of iterations of the constraint solver in every step.
        line_search_iterations: maximum number of points tried along each search direction.
        contacts: number of contacts per robot that there is room for. Default: at least four times the
            largest number in C MuJoCo under random controls.
        rows: number of constraint rows per robot that there is room for. Default: as for `contacts`.
    """
    robots = WarpRobots(
        source,
        iterations=iterations,
        line_search_iterations=line_search_iterations,
        contacts=None if contacts is None else checked_count("contacts", contacts),
        rows=None if rows is None else checked_count("rows", rows),
    )
    own = env.params.robot

    def complete(params: Params) -> Params:
        return eqx.tree_at(lambda p: p.robot, params, own, is_leaf=lambda leaf: leaf is None)

    def reset(key: Key, params: Params) -> tuple[Observation, State]:
        return env.reset(key, complete(params))

    def step(key: Key, state: State, action: Array, params: Params) -> Timestep:
        overflows: list[Array] = []

        def advance(robot: physics.RobotState, control: Array, count: int) -> physics.RobotState:
            moved, overflow = robots.advance(robot, control, count)
            overflows.append(overflow)
            return moved

        with advanced_by(advance):
            timestep = env.step(key, state, action, complete(params))
        return timestep._replace(info={**timestep.info, OVERFLOW: jnp.any(jnp.stack(overflows))})

    without = eqx.tree_at(lambda p: p.robot, env.params, None)
    return env._replace(reset=reset, step=step, params=without, compare=None, options=robots.sizes._asdict())
