"""`robots:ID`: robots in our own physics, with tasks by their published definitions."""

from typing import Any

from rollmill.core.errors import unknown_name
from rollmill.core.types import Environment
from rollmill.envs.options import keyword_names, unknown_option
from rollmill.envs.robots import (
    ant,
    anymal,
    ball_balance,
    cartpole,
    franka_cabinet,
    humanoid,
    ingenuity,
    quadcopter,
    shadow_hand,
)

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


def make(name: str, **options: Any) -> Environment:
    """Makes the robot's task of an id.

    Args:
        name: an id, such as `Ant`.
        **options: arguments of the task, such as `max_steps=500`.

    Raises:
        UsageError: there is no such task or option, or MuJoCo, which reads the robot's model, is not installed.
    """
    if name not in TASKS:
        raise unknown_name("robot", name, TASKS)
    known = keyword_names(TASKS[name])
    for option in options:
        if option not in known:
            raise unknown_option(f"robots:{name}", option, known)
    return TASKS[name](**options)
