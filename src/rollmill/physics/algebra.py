"""Operations on vectors, matrices and spatial vectors, which are the last axes of arrays.

Indices are fixed, so that kernels can use scalars. Sums of products are written as reductions, because XLA
computes a reduction once, whereas it would repeat scalar arithmetic wherever the result is used, and compile for
minutes. A motion contains angular and linear velocity, `[..., 6]`. A wrench contains torque and force. Both refer
to a reference point (Featherstone's spatial vectors). An inertia, or a stiffness, has the shape `[..., 6, 6]`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

TINY = 1e-15
"""The constant `mjMINVAL` of MuJoCo."""


def real(values: Any) -> Array:
    """Converts constants to an array of the default float type."""
    return jnp.asarray(np.asarray(values, jax.dtypes.canonicalize_dtype(np.float64)))


def pick(values: Float[Array, "n ..."], indices: Sequence[int]) -> Float[Array, "m ..."]:
    """Returns the rows of an array at fixed indices."""
    if tuple(indices) == tuple(range(indices[0], indices[0] + len(indices))):
        return lax.slice_in_dim(values, indices[0], indices[0] + len(indices))
    return lax.concatenate([lax.slice_in_dim(values, i, i + 1) for i in indices], 0)


def row(values: Float[Array, "n ..."], index: int) -> Float[Array, "..."]:
    """Returns one row of an array, at a fixed index."""
    return lax.index_in_dim(values, index, keepdims=False)


def times(matrix: Float[Array | np.ndarray, "... n m"], vector: Float[Array, "... m"]) -> Float[Array, "... n"]:
    """Returns the product of a matrix and a vector.

    A fixed matrix that only exchanges axes needs no multiplications.
    """
    if isinstance(matrix, np.ndarray):
        places = np.argmax(np.abs(matrix).reshape(-1, *matrix.shape[-2:]).max(axis=0), axis=-1)
        factors = np.take_along_axis(matrix, np.broadcast_to(places[:, None], (*matrix.shape[:-1], 1)), axis=-1)
        if np.count_nonzero(matrix) == np.count_nonzero(factors):
            return real(factors[..., 0]) * jnp.stack([vector[..., place] for place in places], axis=-1)
    return jnp.sum(matrix * vector[..., None, :], axis=-1)


def product(a: Float[Array, "... n m"], b: Float[Array, "... m k"]) -> Float[Array, "... n k"]:
    """Returns the product of two matrices."""
    return jnp.sum(a[..., :, :, None] * b[..., None, :, :], axis=-2)


def transpose_matrix(matrix: Float[Array, "... n m"]) -> Float[Array, "... m n"]:
    """Returns the transpose of a matrix."""
    return jnp.swapaxes(matrix, -1, -2)


def dot(a: Float[Array, "... n"], b: Float[Array | np.ndarray, "... n"]) -> Float[Array, "..."]:
    """Returns the inner product of two vectors. If one is fixed, its zero components are skipped."""
    if isinstance(b, np.ndarray):
        used = np.flatnonzero(np.any(b.reshape(-1, b.shape[-1]), axis=0))
        a, b = jnp.stack([a[..., i] for i in used], axis=-1), real(b[..., used])
    return jnp.sum(a * b, axis=-1)


def cross(a: Float[Array, "... 3"], b: Float[Array, "... 3"]) -> Float[Array, "... 3"]:
    """Returns the cross product of two vectors."""
    return _rotate_axes(a * _rotate_axes(b) - _rotate_axes(a) * b)


def _rotate_axes(a: Float[Array, "... 3"]) -> Float[Array, "... 3"]:
    """Returns y, z, x of x, y, z."""
    return jnp.concatenate([a[..., 1:], a[..., :1]], axis=-1)


def unit(a: Float[Array, "... 3"]) -> Float[Array, "... 3"]:
    """Scales a vector to length 1. If it is too short, the result is the x axis."""
    square = jnp.sum(a * a, axis=-1, keepdims=True)
    is_short = square < TINY * TINY
    scaled = a / jnp.sqrt(jnp.where(is_short, 1.0, square))
    return jnp.where(is_short, real(np.broadcast_to([1.0, 0.0, 0.0], a.shape)), scaled)


def quaternion_matrix(q: Float[Array, "4"]) -> Float[Array, "3 3"]:
    """Returns the rotation matrix of a unit quaternion (w, x, y, z)."""
    w, x, y, z = (row(q, i) for i in range(4))
    entries = [
        *(1.0 - 2.0 * (y * y + z * z), 2.0 * (x * y - w * z), 2.0 * (x * z + w * y)),
        *(2.0 * (x * y + w * z), 1.0 - 2.0 * (x * x + z * z), 2.0 * (y * z - w * x)),
        *(2.0 * (x * z - w * y), 2.0 * (y * z + w * x), 1.0 - 2.0 * (x * x + y * y)),
    ]
    return jnp.stack(entries).reshape(3, 3)


def rotate_about_axis(
    rotation: Float[Array, "3 3"], axis: Sequence[float], axis_in_world: Float[Array, "3"], angle: Float[Array, ""]
) -> Float[Array, "3 3"]:
    """Rotates a frame about a fixed unit axis of its own, by Rodrigues' formula."""
    x, y, z = (np.float64(number) for number in axis)
    first, second, third = (rotation[:, i] for i in range(3))
    aside = jnp.stack(
        [
            _combine((z, second), (-y, third)),
            _combine((-z, first), (x, third)),
            _combine((y, first), (-x, second)),
        ],
        axis=1,
    )
    along = jnp.stack([_combine((number, axis_in_world), like=first) for number in (x, y, z)], axis=1)
    return along + jnp.cos(angle) * (rotation - along) + jnp.sin(angle) * aside


def _combine(*terms: tuple[float, Array], like: Array | None = None) -> Array:
    """Returns a sum of vectors times fixed factors, without those whose factor is zero."""
    parts = [vector if factor == 1.0 else real(factor) * vector for factor, vector in terms if factor]
    if not parts:
        return jnp.zeros_like(terms[0][1] if like is None else like)
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def spatial_vector(angular: Float[Array, "... 3"], linear: Float[Array, "... 3"]) -> Float[Array, "... 6"]:
    """Joins angular and linear velocity to a motion, or torque and force to a wrench."""
    return jnp.concatenate([angular, linear], axis=-1)


def spatial_cross(by: Float[Array, "... 6"], motion: Float[Array, "... 6"]) -> Float[Array, "... 6"]:
    """Returns the spatial cross product: how fast `motion` changes if fixed to a body with the motion `by`."""
    turning = cross(by[..., :3], motion[..., :3])
    return spatial_vector(turning, cross(by[..., :3], motion[..., 3:]) + cross(by[..., 3:], motion[..., :3]))


def carried_wrench(by: Float[Array, "... 6"], wrench: Float[Array, "... 6"]) -> Float[Array, "... 6"]:
    """Returns how fast `wrench` changes if fixed to a body with the motion `by`."""
    torque = cross(by[..., :3], wrench[..., :3]) + cross(by[..., 3:], wrench[..., 3:])
    return spatial_vector(torque, cross(by[..., :3], wrench[..., 3:]))


def point_velocity(motion: Float[Array, "... 6"], arm: Float[Array, "... 3"]) -> Float[Array, "... 3"]:
    """Returns the velocity of a point of a body, given the body's motion."""
    return motion[..., 3:] + cross(motion[..., :3], arm)


def point_force(force: Float[Array, "... 3"], arm: Float[Array, "... 3"]) -> Float[Array, "... 6"]:
    """Returns the wrench of a force that acts at a point."""
    return spatial_vector(cross(arm, force), force)


def point_stiffness(stiffness: Float[Array, "... 3 3"], arm: Float[Array, "... 3"]) -> Float[Array, "... 6 6"]:
    """Returns P'WP, where P maps a body's motion to the velocity of a point of the body, and W is symmetric."""
    arms = jnp.broadcast_to(arm[..., None, :], stiffness.shape)
    mixed = transpose_matrix(cross(arms, stiffness))
    return blocks(complete_symmetric(cross(arms, mixed)), mixed, complete_symmetric(stiffness))


def complete_symmetric(matrix: Float[Array, "... 3 3"]) -> Float[Array, "... 3 3"]:
    """Completes a symmetric matrix from the entries on and above its diagonal."""
    return symmetric(matrix[..., 0, :], matrix[..., 1, 1:], matrix[..., 2, 2:])


def symmetric(
    first: Float[Array, "... 3"], second: Float[Array, "... 2"], third: Float[Array, "... 1"]
) -> Float[Array, "... 3 3"]:
    """Builds a symmetric matrix from the entries of each row on and to the right of the diagonal."""
    rows = [
        first,
        jnp.concatenate([first[..., 1:2], second], axis=-1),
        jnp.concatenate([first[..., 2:3], second[..., 1:2], third], axis=-1),
    ]
    return jnp.stack(rows, axis=-2)


def skew(a: Float[Array, "... 3"]) -> Float[Array, "... 3 3"]:
    """Returns the matrix whose product with a vector is the cross product of `a` and that vector."""
    x, y, z = a[..., 0], a[..., 1], a[..., 2]
    zero = jnp.zeros_like(x)
    entries = jnp.stack([zero, -z, y, z, zero, -x, -y, x, zero], axis=-1)
    return entries.reshape(*a.shape[:-1], 3, 3)


def blocks(
    angular: Float[Array, "... 3 3"], mixed: Float[Array, "... 3 3"], linear: Float[Array, "... 3 3"]
) -> Float[Array, "... 6 6"]:
    """Builds a symmetric 6 x 6 matrix from its blocks, where `mixed` maps linear motion to torque."""
    upper = jnp.concatenate([angular, mixed], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([transpose_matrix(mixed), linear], axis=-1)], axis=-2)
