"""Functions shared by robots that fly to a target: the first pose, the observation and the reward."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rollmill.envs.robots.substeps import uniform
from rollmill.physics.algebra import quaternion_matrix, times


def first_place(key: Array, spread: Float[Array, ""] | float) -> Float[Array, "7"]:
    """Returns a random upright pose of a flying robot, at a height from 0.8 to 2.5 m.

    Along x and y, it is within `spread` of the middle.
    """
    numbers = uniform(key, 3, 1.0)
    return jnp.concatenate([spread * numbers[:2], 1.65 + 0.85 * numbers[2:], jnp.array([1.0, 0.0, 0.0, 0.0])])


def observe_flight(
    positions: Float[Array, " n"], rates: Float[Array, " m"], target: Float[Array, "3"]
) -> Float[Array, "13"]:
    """Returns the observation of a flying robot, with all vectors in world coordinates.

    Args:
        positions: positions of all joints, beginning with the place (m) and the attitude, a quaternion (w, x, y,
            z).
        rates: velocities of all joints, beginning with the velocity in the world (m/s) and the spin in the robot's
            own axes (rad/s).
        target: the place to fly to (m).

    Returns:
        The vector to the target divided by 3, the attitude (x, y, z, w), the velocity divided by 2, and the spin
        divided by pi.
    """
    place, quaternion = positions[:3], positions[3:7]
    spin = times(quaternion_matrix(quaternion), rates[3:6])
    attitude = jnp.concatenate([quaternion[1:], quaternion[:1]])
    return jnp.concatenate([(target - place) / 3.0, attitude, rates[:3] / 2.0, spin / jnp.pi])


def distance_of(observation: Float[Array, " n"]) -> Float[Array, ""]:
    """Returns the distance of a flying robot to its target (m), from its observation."""
    away = 3.0 * observation[:3]
    return jnp.sqrt(jnp.sum(away * away))


def flight_reward(
    observation: Float[Array, " n"], distance: Float[Array, ""], upright: Float[Array, ""] | float
) -> Float[Array, ""]:
    """Returns the reward of a flying robot for being near the target, upright and without spin.

    Args:
        observation: result of `observe_flight`.
        distance: distance to the target (m).
        upright: weight of the attitude.
    """
    x, y = observation[3], observation[4]
    tilt, spin = 2.0 * (x * x + y * y), jnp.pi * observation[12]
    near = 1.0 / (1.0 + distance * distance)
    return near + near * (upright / (1.0 + tilt * tilt) + 1.0 / (1.0 + spin * spin))


def clip_action(action: Float[Array, " n"]) -> Float[Array, " n"]:
    """Clips an action to the range from -1 to 1."""
    return jax.lax.clamp(-1.0, action, 1.0)
