"""Builds the environment of a robot task from its model and its functions."""

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

from rollmill import physics
from rollmill.core.types import Environment, State
from rollmill.envs.robots.pictures import ViewAngle, drawing_of
from rollmill.envs.robots.stability import end_unstable, the_robot
from rollmill.envs.robots.substeps import checked_count
from rollmill.envs.transforms import time_limit


def load_model(
    text: str,
    iterations: int = physics.ITERATIONS,
    line_search_iterations: int = physics.ITERATIONS,
    *,
    joint_forces: bool = False,
) -> physics.Model:
    """Returns the model of an MJCF text. Raises a `UsageError` unless both numbers of iterations are positive."""
    return physics.load(
        text,
        iterations=checked_count("iterations", iterations),
        line_search_iterations=checked_count("line_search_iterations", line_search_iterations),
        joint_forces=joint_forces,
    )


def robot_environment(
    name: str,
    functions: Any,
    params: Any,
    *,
    observations: int,
    actions: int,
    model: str,
    view: ViewAngle,
    max_steps: int,
    robot_of: Callable[[State], physics.RobotState] = the_robot,
) -> Environment:
    """Returns the environment of a robot task. An episode ends if the simulation becomes unstable.

    Args:
        name: name of the environment.
        functions: an object with the functions `reset` and `step` of the environment.
        params: parameters of the robot and the task.
        observations: number of observations, which have no bounds.
        actions: number of actions, each between -1 and 1.
        model: MJCF of the robot, for drawings.
        view: the position of the camera in drawings.
        max_steps: time limit of an episode, in steps.
        robot_of: returns the robot of a task's state.
    """
    env = Environment(
        name=name,
        reset=functions.reset,
        step=functions.step,
        observation_space=spaces.Box(-np.inf, np.inf, (observations,), np.float32),
        action_space=spaces.Box(-1.0, 1.0, (actions,), np.float32),
        params=params,
        draw=drawing_of(model, view),
    )
    return time_limit(end_unstable(env, robot_of), max_steps)
