"""Vectors, matrices and spatial vectors, as arrays whose last axes they are.

Indices are fixed, so that a kernel's compiler sees single numbers. Sums of products are reductions, which XLA
computes once: it fuses scalar arithmetic into all of its users, and programs of scalars compiled for minutes. A
motion is angular and linear velocity `[..., 6]`, a wrench torque and force, both about a reference point
(Featherstone's spatial vectors). An inertia, or a stiffness, is `[..., 6, 6]`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

TINY = 1e-15
"""MuJoCo's `mjMINVAL`."""


def real(values: Any) -> Array:
    """Returns fixed numbers as an array of JAX's default float type."""
    return jnp.asarray(np.asarray(values, jax.dtypes.canonicalize_dtype(np.float64)))


def pick(values: Float[Array, "n ..."], indices: Sequence[int]) -> Float[Array, "m ..."]:
    """Returns rows by fixed indices."""
    if tuple(indices) == tuple(range(indices[0], indices[0] + len(indices))):
        return lax.slice_in_dim(values, indices[0], indices[0] + len(indices))
    return lax.concatenate([lax.slice_in_dim(values, i, i + 1) for i in indices], 0)


def row(values: Float[Array, "n ..."], index: int) -> Float[Array, "..."]:
    """Returns one row."""
    return lax.index_in_dim(values, index, keepdims=False)


def times(matrix: Float[Array, "... n m"], vector: Float[Array, "... m"]) -> Float[Array, "... n"]:
    """Returns a matrix times a vector."""
    return jnp.sum(matrix * vector[..., None, :], axis=-1)


def product(a: Float[Array, "... n m"], b: Float[Array, "... m k"]) -> Float[Array, "... n k"]:
    """Returns the product of two matrices."""
    return jnp.sum(a[..., :, :, None] * b[..., None, :, :], axis=-2)


def transposed(matrix: Float[Array, "... n m"]) -> Float[Array, "... m n"]:
    """Returns the transpose of a matrix."""
    return jnp.swapaxes(matrix, -1, -2)


def dot(a: Float[Array, "... n"], b: Float[Array, "... n"]) -> Float[Array, "..."]:
    """Returns the inner product of two vectors."""
    return jnp.sum(a * b, axis=-1)


def cross(a: Float[Array, "... 3"], b: Float[Array, "... 3"]) -> Float[Array, "... 3"]:
    """Returns the cross product."""
    return _turned(a * _turned(b) - _turned(a) * b)


def _turned(a: Float[Array, "... 3"]) -> Float[Array, "... 3"]:
    """Returns y, z, x of x, y, z."""
    return jnp.concatenate([a[..., 1:], a[..., :1]], axis=-1)


def unit(a: Float[Array, "... 3"]) -> Float[Array, "... 3"]:
    """Returns a vector of length 1: the x axis for one that is too short."""
    square = jnp.sum(a * a, axis=-1, keepdims=True)
    is_short = square < TINY * TINY
    scaled = a / jnp.sqrt(jnp.where(is_short, 1.0, square))
    return jnp.where(is_short, real(np.broadcast_to([1.0, 0.0, 0.0], a.shape)), scaled)


def quaternion_matrix(q: Float[Array, "4"]) -> Float[Array, "3 3"]:
    """Returns the rotation of a unit quaternion w, x, y, z."""
    w, x, y, z = (row(q, i) for i in range(4))
    entries = [
        *(1.0 - 2.0 * (y * y + z * z), 2.0 * (x * y - w * z), 2.0 * (x * z + w * y)),
        *(2.0 * (x * y + w * z), 1.0 - 2.0 * (x * x + z * z), 2.0 * (y * z - w * x)),
        *(2.0 * (x * z - w * y), 2.0 * (y * z + w * x), 1.0 - 2.0 * (x * x + y * y)),
    ]
    return jnp.stack(entries).reshape(3, 3)


def axis_rotation(axis: Sequence[float], angle: Float[Array, ""]) -> Float[Array, "3 3"]:
    """Returns the rotation about a fixed unit axis, by Rodrigues' formula."""
    x, y, z = axis
    skew = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return real(np.eye(3)) + jnp.sin(angle) * real(skew) + (1.0 - jnp.cos(angle)) * real(skew @ skew)


def joined(angular: Float[Array, "... 3"], linear: Float[Array, "... 3"]) -> Float[Array, "... 6"]:
    """Returns a motion of its two parts, or a wrench of torque and force."""
    return jnp.concatenate([angular, linear], axis=-1)


def carried(by: Float[Array, "... 6"], motion: Float[Array, "... 6"]) -> Float[Array, "... 6"]:
    """Returns the rate at which a motion changes that is carried along by another one."""
    turning = cross(by[..., :3], motion[..., :3])
    return joined(turning, cross(by[..., :3], motion[..., 3:]) + cross(by[..., 3:], motion[..., :3]))


def carried_wrench(by: Float[Array, "... 6"], wrench: Float[Array, "... 6"]) -> Float[Array, "... 6"]:
    """Returns the rate at which a wrench changes that is carried along by a motion."""
    torque = cross(by[..., :3], wrench[..., :3]) + cross(by[..., 3:], wrench[..., 3:])
    return joined(torque, cross(by[..., :3], wrench[..., 3:]))


def point_velocity(motion: Float[Array, "... 6"], arm: Float[Array, "... 3"]) -> Float[Array, "... 3"]:
    """Returns the velocity of a body's point."""
    return motion[..., 3:] + cross(motion[..., :3], arm)


def point_force(force: Float[Array, "... 3"], arm: Float[Array, "... 3"]) -> Float[Array, "... 6"]:
    """Returns the wrench of a force at a point."""
    return joined(cross(arm, force), force)


def point_stiffness(stiffness: Float[Array, "... 3 3"], arm: Float[Array, "... 3"]) -> Float[Array, "... 6 6"]:
    """Returns P'WP, where P gives the velocity of a body's point and W is symmetric."""
    mixed = transposed(cross(jnp.broadcast_to(arm[..., None, :], stiffness.shape), stiffness))
    angular = cross(jnp.broadcast_to(arm[..., None, :], stiffness.shape), mixed)
    return blocks(angular, mixed, stiffness)


def blocks(
    angular: Float[Array, "... 3 3"], mixed: Float[Array, "... 3 3"], linear: Float[Array, "... 3 3"]
) -> Float[Array, "... 6 6"]:
    """Returns a symmetric matrix of its blocks, where `mixed` is from linear motion to torque."""
    upper = jnp.concatenate([angular, mixed], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([transposed(mixed), linear], axis=-1)], axis=-2)


def body_inertia(
    mass: Float[Array, " n"], center: Float[Array, "n 3"], central: Float[Array, "n 3 3"]
) -> Float[Array, "n 6 6"]:
    """Returns inertias about the reference of bodies with these centres of mass."""
    stiffness = mass[:, None, None] * real(np.eye(3))[None]
    around = point_stiffness(stiffness, center)
    zero = jnp.zeros_like(central)
    return around + blocks(central, zero, zero)
