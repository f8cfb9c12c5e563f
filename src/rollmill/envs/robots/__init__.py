"""`robots:ID`: tasks of robots, simulated by `rollmill.physics`, by MuJoCo Warp or by C MuJoCo."""

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
from rollmill.envs.robots.mujoco_batch import to_mujoco
from rollmill.envs.robots.substeps import PHYSICS
from rollmill.physics import ITERATIONS

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
"""Options of the solver, which C MuJoCo does not have."""

ROOM = ("contacts", "rows")
"""Options that set the buffer sizes of MuJoCo Warp."""


def make(name: str, *, physics: str = "jax", **options: Any) -> Environment | HostEnvironment:
    """Creates the task of a robot from its id.

    Args:
        name: an id, such as `Ant`.
        physics: `jax` for `rollmill.physics`, compiled by XLA or in kernels, `warp` for MuJoCo Warp, or `mujoco`
            for C MuJoCo on the CPU of the host.
        **options: arguments of the task, such as `max_steps=500`. With MuJoCo Warp, `contacts` and `rows` set the
            sizes of its buffers.

    Raises:
        UsageError: there is no such task, option or physics, or a package that it needs is not installed.
    """
    if name not in TASKS:
        raise unknown_name("robot", name, TASKS)
    _check_physics(name, physics, options)
    known = keyword_names(TASKS[name])
    for option in options:
        if option not in known and option not in ROOM:
            raise unknown_option(f"robots:{name}", option, [*known, "physics"])
    room = {option: options.pop(option) for option in ROOM if option in options}
    env = TASKS[name](**options)
    if physics == "warp":
        from rollmill.envs.robots.warp_task import to_warp  # imports a large package

        solver = {option: options.get(option, ITERATIONS) for option in SOLVER}
        return to_warp(env, MODELS[name](), **solver, **room)
    return to_mujoco(env, MODELS[name]()) if physics == "mujoco" else env


def _check_physics(name: str, physics: str, options: dict[str, Any]) -> None:
    if physics == "auto":
        raise UsageError(
            f"robots:{name}: only `rollmill train` supports physics='auto', which chooses between jax and warp by "
            "short training runs. hint: use physics='jax' or physics='warp'."
        )
    if physics not in PHYSICS:
        raise UsageError(
            f"robots:{name} does not support physics={physics!r}. Supported: 'jax' (Rollmill's physics, by XLA "
            "or in kernels), 'warp' (MuJoCo Warp) and 'mujoco' (C MuJoCo on the host)."
        )
    for option in SOLVER:
        if physics == "mujoco" and option in options:
            raise UsageError(
                f"robots:{name}: {option}={options[option]} does not apply to physics='mujoco', because MuJoCo "
                "iterates until it has converged. hint: leave it out."
            )
    for option in ROOM:
        if physics != "warp" and option in options:
            raise UsageError(
                f"robots:{name}: {option}={options[option]} sets the size of a MuJoCo Warp buffer, but "
                f"physics={physics!r} has no such buffer. hint: leave it out."
            )
