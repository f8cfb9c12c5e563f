"""Computes fixed tendons, whose lengths are weighted sums of joint coordinates."""

from itertools import combinations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rollmill.physics.algebra import pick, real, row
from rollmill.physics.kinematics import Frames
from rollmill.physics.masses import SparseMatrix, with_diagonal, with_joining
from rollmill.physics.model import Structure
from rollmill.physics.sides import scatter_rows


def lengths(structure: Structure, positions: Float[Array, " coordinates"]) -> Float[Array, " tendons"]:
    """Returns the lengths of a robot's tendons."""
    return jnp.stack(
        [jnp.sum(pick(positions, one.positions) * real(one.coefficients)) for one in structure.tendons]
    )


def rates_of(structure: Structure, x: Float[Array, " dofs"]) -> Float[Array, " tendons"]:
    """Converts joint velocities, or accelerations, to the velocities or accelerations of tendon lengths."""
    return jnp.stack([jnp.sum(pick(x, one.velocities) * real(one.coefficients)) for one in structure.tendons])


def on_joints(structure: Structure, forces: Float[Array, " tendons"]) -> Float[Array, " dofs"]:
    """Converts forces along the tendons to forces on degrees of freedom."""
    dofs = tuple(dof for one in structure.tendons for dof in one.velocities)
    parts = [row(forces, i) * real(one.coefficients) for i, one in enumerate(structure.tendons)]
    return scatter_rows(jnp.concatenate(parts), dofs, structure.num_velocities)


def passive(
    structure: Structure, positions: Float[Array, " coordinates"], rates: Float[Array, " dofs"]
) -> Float[Array, " tendons"]:
    """Returns the forces of springs and dampers along a robot's tendons."""
    low, high = (real([one.spring_range[end] for one in structure.tendons]) for end in (0, 1))
    at = lengths(structure, positions)
    stretch = jnp.maximum(at - high, 0.0) + jnp.minimum(at - low, 0.0)
    stiffness, damping = (
        real([getattr(one, name) for one in structure.tendons]) for name in ("stiffness", "damping")
    )
    return -stiffness * stretch - damping * rates_of(structure, rates)


def with_tendons(
    structure: Structure, placed: Frames, matrix: SparseMatrix, weights: Float[Array, " tendons"]
) -> SparseMatrix:
    """Adds J'WJ of the tendons to a matrix, where W is diagonal."""
    tendons, size = structure.tendons, structure.num_velocities
    dofs = tuple(dof for one in tendons for dof in one.velocities)
    squares = [row(weights, i) * real(np.square(one.coefficients)) for i, one in enumerate(tendons)]
    matrix = with_diagonal(
        structure, placed, matrix, scatter_rows(jnp.concatenate(squares), dofs, size), set(dofs)
    )
    added: dict[tuple[int, int], Array] = {}
    for i, one in enumerate(tendons):
        for (a, x), (b, y) in combinations(zip(one.velocities, one.coefficients, strict=True), 2):
            place = (max(a, b), min(a, b))
            value = row(weights, i) * (x * y)
            added[place] = added[place] + value if place in added else value
    if all(j in matrix.columns[i] for i, j in added):
        rows = list(matrix.rows)
        for (i, j), value in added.items():
            at = matrix.columns[i].index(j)
            rows[i] = jnp.concatenate([rows[i][:at], (rows[i][at] + value)[None], rows[i][at + 1 :]])
        return matrix._replace(rows=rows)
    places = tuple(i * size + j for i, j in added)
    return with_joining(
        matrix, scatter_rows(jnp.stack([*added.values()]), places, size * size).reshape(size, size)
    )
