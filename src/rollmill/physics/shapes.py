"""Places geoms in the world, and computes the frames of contacts between them."""

from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rollmill.physics.algebra import cross, dot, real, unit
from rollmill.physics.model import Numbers


class PlacedGeoms(NamedTuple):
    """Positions of geoms relative to the references of their trees, and their orientations, in world axes."""

    positions: Float[Array, "n 3"]
    rotations: Float[Numbers, "n 3 3"]
    """Orientations of the geoms. They are NumPy arrays for geoms that cannot move."""
    sizes: Float[np.ndarray, "n 3"]


Points: TypeAlias = tuple[Float[Array, " n"], Float[Array, "n 3"], Float[Numbers, "n 3 3"]]
"""Distances, positions and frames of contacts."""


def contact_frames(normals: Float[Array, "n 3"]) -> Float[Array, "n 3 3"]:
    """Returns orthonormal contact frames, with the normal and two tangents as rows.

    The first tangent is the y axis projected onto the contact plane, or the z axis if the normal is within 60
    degrees of the y axis.
    """
    is_far = jnp.abs(normals[:, 1:2]) < 0.5
    second = jnp.where(is_far, real([[0.0, 1.0, 0.0]]), real([[0.0, 0.0, 1.0]]))
    tangents = unit(second - dot(second, normals)[:, None] * normals)
    return jnp.stack([normals, tangents, cross(normals, tangents)], axis=1)
