"""Functions shared by robots that walk to a distant place: the observed posture, and progress."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from rollmill.envs.physics import Scalar, wrap_angle
from rollmill.physics.algebra import quaternion_matrix


def observe_posture(
    positions: Float[Array, " n"], rates: Float[Array, " m"], target: Scalar, spin_scale: float
) -> Float[Array, "12"]:
    """Returns the observed posture of a walking robot.

    The result contains its height, its velocity and spin in the torso's frame, yaw, roll, and the angle to the
    target. The last two values, which are at most 1, say how upright the torso is and how well it points to the
    target.
    """
    rotation = quaternion_matrix(positions[3:7])
    away_x, away_y = target - positions[0], -positions[1]
    yaw = jnp.arctan2(rotation[1, 0], rotation[0, 0])
    roll = jnp.arctan2(rotation[2, 1], rotation[2, 2])
    aside = wrap_angle(jnp.arctan2(away_y, away_x) - yaw)
    distance = jnp.sqrt(away_x * away_x + away_y * away_y)
    heading = (rotation[0, 0] * away_x + rotation[1, 0] * away_y) / distance
    local = jnp.sum(rotation * rates[:3, None], axis=0)
    pose = jnp.stack([yaw, roll, aside, rotation[2, 2], heading])
    return jnp.concatenate([positions[2:3], local, spin_scale * rates[3:6], pose])


def progress_of(
    before: Float[Array, " n"], after: Float[Array, " n"], target: Scalar, duration: float
) -> Float[Array, ""]:
    """Returns the speed of a walking robot towards its target (m/s).

    It is computed without the difference of two large distances, to keep precision.
    """
    x0, x1, y0, y1 = target - before[0], target - after[0], before[1], after[1]
    gained = (after[0] - before[0]) * (x0 + x1) + (y0 - y1) * (y0 + y1)
    return gained / (jnp.sqrt(x0 * x0 + y0 * y0) + jnp.sqrt(x1 * x1 + y1 * y1)) / duration
