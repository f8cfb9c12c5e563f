"""Ends the episodes of robots whose simulation becomes unstable, before values overflow.

A robot that tumbles or is driven hard can gain more speed in a step than the integrator can handle. This also
happens in MuJoCo. Within a few steps, the speed then grows until it overflows.
"""

from collections.abc import Callable
from operator import attrgetter

import jax.numpy as jnp
from jaxtyping import Array, Bool

from rollmill import physics
from rollmill.core.types import UNSTABLE, Environment, Key, Params, State, Timestep

MAX_SPEED = 1000.0
"""Greatest velocity (m/s or rad/s) of a stable simulation of the tasks' robots."""

MAX_NUMBER = 1e10
"""Largest value that a stable step returns. It is `mjMAXVAL` of MuJoCo, beyond which MuJoCo resets a robot."""

itself: Callable[[State], physics.RobotState] = lambda state: state
"""Returns a task's state unchanged, for tasks that have no state besides the robot."""

the_robot: Callable[[State], physics.RobotState] = attrgetter("robot")
"""Returns the robot of a task's state."""


def end_unstable(
    env: Environment, robot_of: Callable[[State], physics.RobotState] = the_robot, *, max_speed: float = MAX_SPEED
) -> Environment:
    """Terminates a robot's episode once a velocity or another value is too large, infinite or NaN.

    That step has a reward of 0, an observation of zeros, and `info["unstable_state"]`, which training counts as
    `episode/unstable`.

    Args:
        env: a robot's task, unbatched, without time limit.
        robot_of: function that returns the robot in a state of the task.
        max_speed: maximum velocity of a stable robot (m/s or rad/s).
    """

    def step(key: Key, state: State, action: Array, params: Params) -> Timestep:
        timestep = env.step(key, state, action, params)
        stable = _is_stable(robot_of(timestep.state), timestep, max_speed)
        return timestep._replace(
            observation=jnp.where(stable, timestep.observation, 0.0),
            reward=jnp.where(stable, timestep.reward, 0.0),
            terminated=timestep.terminated | ~stable,
            info={**timestep.info, UNSTABLE: ~stable},
        )

    return env._replace(step=step)


def _is_stable(robot: physics.RobotState, timestep: Timestep, max_speed: float) -> Bool[Array, ""]:
    """Returns whether all values of a step are within their limits. NaN never is."""
    numbers = (robot.positions, robot.accelerations, timestep.observation, timestep.reward)
    within = [jnp.all(jnp.abs(part) <= MAX_NUMBER) for part in numbers]
    return jnp.all(jnp.stack([jnp.all(jnp.abs(robot.velocities) <= max_speed), *within]))
