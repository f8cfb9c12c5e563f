"""`robots:ID`: tasks of robots, simulated by `rollmill.physics` or by C MuJoCo."""

from collections.abc import Callable
from typing import Any

from rollmill.core.errors import UsageError, unknown_name
from rollmill.core.types import Environment, HostEnvironment
from rollmill.envs.options import keyword_names, unknown_option
from rollmill.envs.robots import (
    ant,
    anymal,
    ball_balance,
    cartpole,
    franka_cabinet,
    hand_model,
    humanoid,
    ingenuity,
    quadcopter,
    shadow_hand,
)
from rollmill.envs.robots.in_mujoco import in_mujoco

TASKS = {
    "Ant": ant.ant,
    "Anymal": anymal.anymal,
    "BallBalance": ball_balance.ball_balance,
    "Cartpole": cartpole.cartpole,
    "FrankaCabinet": franka_cabinet.franka_cabinet,
    "Humanoid": humanoid.humanoid,
    "Ingenuity": ingenuity.ingenuity,
    "Quadcopter": quadcopter.quadcopter,
    "ShadowHand": shadow_hand.shadow_hand,
}


MODELS: dict[str, Callable[[], str]] = {
    "Ant": ant.model_text,
    "Anymal": anymal.model_text,
    "BallBalance": ball_balance.model_text,
    "Cartpole": lambda: cartpole.MODEL,
    "FrankaCabinet": franka_cabinet.model_text,
    "Humanoid": humanoid.model_text,
    "Ingenuity": lambda: ingenuity.MODEL,
    "Quadcopter": quadcopter.model_text,
    "ShadowHand": hand_model.model_text,
}
"""Functions that return the MJCF of each task's robot."""

SOLVER = ("iterations", "line_search_iterations")
"""Options of the solver of this package's physics."""


def make(name: str, *, physics: str = "jax", **options: Any) -> Environment | HostEnvironment:
    """Creates the task of a robot from its id.

    Args:
        name: an id, such as `Ant`.
        physics: `jax` for `rollmill.physics`, compiled by XLA or in kernels, or `mujoco` for C MuJoCo on the CPU
            of the host.
        **options: arguments of the task, such as `max_steps=500`.

    Raises:
        UsageError: there is no such task, option or physics, or MuJoCo, which reads the robot's model, is not
            installed.
    """
    if name not in TASKS:
        raise unknown_name("robot", name, TASKS)
    _check_physics(name, physics, options)
    known = keyword_names(TASKS[name])
    for option in options:
        if option not in known:
            raise unknown_option(f"robots:{name}", option, [*known, "physics"])
    env = TASKS[name](**options)
    return in_mujoco(env, MODELS[name]()) if physics == "mujoco" else env


def _check_physics(name: str, physics: str, options: dict[str, Any]) -> None:
    if physics == "warp":
        raise UsageError(
            f"robots:{name}: MuJoCo Warp is not supported. hint: physics='jax', the default, computes on GPUs, "
            "and physics='mujoco' is C MuJoCo on the host's cores."
        )
    if physics not in ("jax", "mujoco"):
        raise UsageError(
            f"robots:{name} has no physics {physics!r}: it is 'jax', this package's physics, by XLA or in "
            "kernels, or 'mujoco', C MuJoCo on the host's cores."
        )
    for option in SOLVER:
        if physics == "mujoco" and option in options:
            raise UsageError(
                f"robots:{name}: {option}={options[option]} applies only to the solver of physics='jax', because "
                "MuJoCo iterates until it has converged. hint: leave it out."
            )
