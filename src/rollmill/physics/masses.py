"""Matrices of a robot's degrees of freedom, sparse as its trees are, and their factors.

A matrix is a list of rows: the entries of each degree of freedom with those that carry it and with itself.
Parents come before their children, so that elimination from the last to the first fills nothing in
(Featherstone, "Rigid Body Dynamics Algorithms", 2008, 6.5). Where contacts join two branches, rows hold all
entries before the diagonal instead.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from rollmill.physics.algebra import dot, pick, row, times
from rollmill.physics.kinematics import Frames, per_dof
from rollmill.physics.model import WORLD, Structure


class SparseMatrix(NamedTuple):
    """A symmetric matrix by rows."""

    rows: list[Float[Array, " n"]]
    columns: list[tuple[int, ...]]
    """Columns of each row, the diagonal last. Those of a row are the first ones of any row below that meets it."""


def generalised(
    structure: Structure,
    placed: Frames,
    inertias: Float[Array, "bodies 6 6"],
    diagonal: Float[Array, " dofs"],
    joining: Float[Array, "dofs dofs"] | None = None,
) -> SparseMatrix:
    """Returns the matrix of degrees of freedom from inertias of bodies, by composite rigid bodies.

    Args:
        structure: the robot's.
        placed: its bodies.
        inertias: of each body.
        diagonal: what is added to the diagonal.
        joining: what is added to all entries, where branches are joined.
    """
    composites = per_dof(structure, summed_outwards(structure, inertias))
    wrenches = times(composites, placed.axes)
    rows: list[Array] = []
    columns: list[tuple[int, ...]] = []
    for i, owner in enumerate(structure.owners):
        path = tuple(j for j in structure.paths[owner] if j <= i)
        entries = dot(pick(placed.axes, path), jnp.broadcast_to(row(wrenches, i)[None], (len(path), 6)))
        last = jnp.concatenate([entries[:-1], entries[-1:] + lax.slice_in_dim(diagonal, i, i + 1)])
        if joining is not None:
            last = _spread(last, path) + joining[i, : i + 1]
            path = tuple(range(i + 1))
        rows.append(last)
        columns.append(path)
    return SparseMatrix(rows, columns)


def _spread(values: Float[Array, " n"], columns: tuple[int, ...]) -> Array:
    """Returns entries in a row that has all columns up to the diagonal."""
    position = {column: k for k, column in enumerate(columns)}
    zero = jnp.zeros(1)
    parts = [values[position[k] : position[k] + 1] if k in position else zero for k in range(columns[-1] + 1)]
    return jnp.concatenate(parts)


def summed_outwards(structure: Structure, values: Float[Array, "bodies ..."]) -> Float[Array, "bodies ..."]:
    """Returns for each body the sum over it and all bodies beyond it."""
    sums = [row(values, index) for index in range(len(structure.bodies))]
    for index in range(len(sums) - 1, -1, -1):
        if (parent := structure.bodies[index].parent) != WORLD:
            sums[parent] = sums[parent] + sums[index]
    return jnp.stack(sums)


def generalised_forces(
    structure: Structure, placed: Frames, wrenches: Float[Array, "bodies 6"]
) -> Float[Array, " dofs"]:
    """Returns the force of each degree of freedom that balances wrenches on the bodies."""
    return dot(placed.axes, per_dof(structure, summed_outwards(structure, wrenches)))


def solved(matrix: SparseMatrix, right: Float[Array, " dofs"]) -> Float[Array, " dofs"]:
    """Returns the solution of A x = b for a positive definite A, by Cholesky's method from the last row upwards.

    The right side is the first entry of each row, and is eliminated with it.
    """
    size = len(matrix.rows)
    factors: list[Array] = [jnp.zeros(1)] * size
    inverses: list[Array] = [jnp.zeros(())] * size
    for k in range(size - 1, -1, -1):
        entries = jnp.concatenate([lax.slice_in_dim(right, k, k + 1), matrix.rows[k]])
        parts = []
        for below in range(k + 1, size):
            if k in matrix.columns[below]:
                place = matrix.columns[below].index(k) + 1
                factor = factors[below]
                parts.append(lax.slice_in_dim(factor, 0, place + 1) * lax.slice_in_dim(factor, place, place + 1))
        if parts:
            entries = entries - jnp.sum(jnp.stack(parts), axis=0)
        inverses[k] = lax.rsqrt(row(entries, len(matrix.columns[k])))
        factors[k] = entries * inverses[k]
    x: list[Array] = []
    for k in range(size):
        value = row(factors[k], 0)
        before = matrix.columns[k][:-1]
        if before:
            value = value - jnp.sum(factors[k][1:-1] * jnp.stack([x[i] for i in before]))
        x.append(value * inverses[k])
    return jnp.stack(x)
