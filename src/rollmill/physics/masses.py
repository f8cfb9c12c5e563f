"""Factors matrices over a robot's degrees of freedom, which are sparse because the robot is a tree.

A matrix is a list of rows. The row of a degree of freedom has entries for itself and for the degrees of freedom
that carry it. Parents come before their children, so elimination from the last row to the first adds no entries
(Featherstone, "Rigid Body Dynamics Algorithms", 2008, 6.5). If contacts join two branches, rows hold all entries
before the diagonal instead.
"""

from collections.abc import Collection
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from rollmill.physics.algebra import blocks, dot, pick, real, row, skew, times
from rollmill.physics.kinematics import Frames, Inertias, per_dof
from rollmill.physics.model import WORLD, Model, Structure

LARGE = 24
"""Number of degrees of freedom from which a dense matrix is factored by the library of XLA. Single operations
would take minutes to compile, and kernels have no space for such a matrix."""


class SparseMatrix(NamedTuple):
    """A symmetric matrix over a robot's degrees of freedom, stored as sparse rows."""

    rows: list[Float[Array, " n"]]
    columns: list[tuple[int, ...]]
    """Columns of each row, with the diagonal last. If a lower row has an entry in the column of a row, its columns
    begin with the columns of that row."""


def mass_matrix(model: Model, placed: Frames) -> SparseMatrix:
    """Computes the inertia matrix, including armatures, by the composite-rigid-body algorithm."""
    structure, inertias = model.structure, placed.inertias
    composites = Inertias(*(summed_outwards(structure, part) for part in inertias))
    wrenches = Inertias(*(per_dof(structure, part) for part in composites)).times(placed.axes)
    of_free: dict[int, Array] = {}
    for start in structure.free_joint_dofs:
        body = structure.dof_bodies[start]
        shifts = skew(composites.moments[body])
        upright = composites.masses[body] * real(np.eye(3))
        of_free[start] = blocks(composites.rotational[body], shifts, upright)
    matrix = SparseMatrix(*_project(structure, placed, wrenches, of_free))
    return with_diagonal(structure, placed, matrix, jnp.asarray(model.params.armature, float))


def with_stiffness(
    structure: Structure, placed: Frames, matrix: SparseMatrix, stiffness: Float[Array, "bodies 6 6"] | None
) -> SparseMatrix:
    """Adds the stiffness of each body, the derivative of its forces with respect to its motion, to a matrix."""
    if stiffness is None:
        return matrix
    composites = summed_outwards(structure, stiffness)
    wrenches = times(per_dof(structure, composites), placed.axes)
    of_free = {start: composites[structure.dof_bodies[start]] for start in structure.free_joint_dofs}
    rows, columns = _project(structure, placed, wrenches, of_free)
    wide = [
        row if own == all_columns else _spread(row, own)
        for row, own, all_columns in zip(rows, columns, matrix.columns, strict=True)
    ]
    return matrix._replace(rows=[old + new for old, new in zip(matrix.rows, wide, strict=True)])


def _project(
    structure: Structure, placed: Frames, wrenches: Float[Array, "dofs 6"], of_free: dict[int, Float[Array, "6 6"]]
) -> tuple[list[Float[Array, " n"]], list[tuple[int, ...]]]:
    """Returns rows and columns of a matrix from the wrench that each degree of freedom makes on all beyond it.

    Free joints move along axes of their own, so that entries with them come from the wrenches.
    """
    rows: list[Array] = []
    columns: list[tuple[int, ...]] = []
    for i, owner in enumerate(structure.dof_bodies):
        path = tuple(j for j in structure.dof_paths[owner] if j <= i)
        start, wrench = path[0], row(wrenches, i)
        parts, rest = [], path
        if start in of_free:
            wrench = of_free[start][(i - start + 3) % 6] if i < start + 6 else wrench
            parts, rest = [jnp.concatenate([wrench[3:], wrench[:3]])[: i + 1 - start]], path[6:]
        if rest:
            parts.append(dot(pick(placed.axes, rest), jnp.broadcast_to(wrench[None], (len(rest), 6))))
        rows.append(jnp.concatenate(parts))
        columns.append(path)
    return rows, columns


def with_diagonal(
    structure: Structure,
    placed: Frames,
    matrix: SparseMatrix,
    diagonal: Float[Array, " dofs"],
    dofs: Collection[int] | None = None,
) -> SparseMatrix:
    """Adds one value for each degree of freedom to a matrix. For free bodies, values refer to their own axes.

    Args:
        structure: structure of the robot.
        placed: poses of the robot's bodies.
        matrix: matrix to add to.
        diagonal: values to add.
        dofs: degrees of freedom whose values are not zero. Default: all.
    """
    rows: list[Array] = []
    for i, entries in enumerate(matrix.rows):
        if dofs is not None and i not in dofs:
            rows.append(entries)
            continue
        start = next((start for start in structure.free_joint_dofs if start + 3 <= i < start + 6), None)
        if start is None:
            added = lax.slice_in_dim(diagonal, i, i + 1)
        else:
            rotation = placed.rotations[structure.dof_bodies[i]]
            around, place = diagonal[start + 3 : start + 6], i - start - 3
            added = times(rotation[: place + 1], rotation[place] * around)
        count = len(entries) - len(added)
        rows.append(jnp.concatenate([entries[:count], entries[count:] + added]))
    return matrix._replace(rows=rows)


def with_joining(matrix: SparseMatrix, joining: Float[Array, "dofs dofs"] | None) -> SparseMatrix:
    """Adds a dense matrix to a sparse matrix, if contacts join branches of the robot."""
    if joining is None:
        return matrix
    size = range(len(matrix.rows))
    rows = [_spread(matrix.rows[i], matrix.columns[i]) + joining[i, : i + 1] for i in size]
    return SparseMatrix(rows, [tuple(range(i + 1)) for i in size])


def dense(matrix: SparseMatrix) -> Float[Array, "dofs dofs"]:
    """Returns all entries of a symmetric sparse matrix."""
    size, end = range(len(matrix.rows)), sum(map(len, matrix.columns))
    pairs = [(i, j) for i, columns in enumerate(matrix.columns) for j in columns]
    place = {pair: k for k, pair in enumerate(pairs)}
    places = np.array([[place.get((max(i, j), min(i, j)), end) for j in size] for i in size])
    return jnp.concatenate([*matrix.rows, jnp.zeros(1)])[places]


def _spread(values: Float[Array, " n"], columns: tuple[int, ...]) -> Array:
    """Returns entries in a row that has all columns up to the diagonal."""
    position = {column: k for k, column in enumerate(columns)}
    zero = jnp.zeros(1)
    parts = [values[position[k] : position[k] + 1] if k in position else zero for k in range(columns[-1] + 1)]
    return jnp.concatenate(parts)


def summed_outwards(structure: Structure, values: Float[Array, "bodies ..."]) -> Float[Array, "bodies ..."]:
    """Returns, for each body, the sum of a value over the body and all bodies beyond it."""
    sums = [row(values, index) for index in range(len(structure.bodies))]
    for index in range(len(sums) - 1, -1, -1):
        if (parent := structure.bodies[index].parent) != WORLD:
            sums[parent] = sums[parent] + sums[index]
    return jnp.stack(sums)


def generalised_forces(
    structure: Structure, placed: Frames, wrenches: Float[Array, "bodies 6"]
) -> Float[Array, " dofs"]:
    """Returns the forces on the degrees of freedom that balance the given wrenches on the bodies."""
    sums = summed_outwards(structure, wrenches)
    forces = dot(placed.axes, per_dof(structure, sums))
    parts: list[Array] = []
    end = 0
    for start in structure.free_joint_dofs:
        wrench = sums[structure.dof_bodies[start]]
        parts += [forces[end:start], wrench[3:], wrench[:3]]
        end = start + 6
    return jnp.concatenate([*parts, forces[end:]]) if parts else forces


def solve(matrix: SparseMatrix, right: Float[Array, " dofs"]) -> Float[Array, " dofs"]:
    """Solves A x = b for a positive definite matrix A, by Cholesky's method from the last row upwards.

    The right side b is the first entry of each row, and is eliminated together with the row.
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


def solved_joined(
    matrix: SparseMatrix, joining: Float[Array, "dofs dofs"] | None, right: Float[Array, " dofs"]
) -> Float[Array, " dofs"]:
    """Solves (A + B) x = b, where A is sparse and B is dense."""
    if joining is None or len(matrix.rows) < LARGE:
        return solve(with_joining(matrix, joining), right)
    factor = lax.linalg.cholesky(dense(matrix) + joining)
    half = lax.linalg.triangular_solve(factor, right[:, None], left_side=True, lower=True)
    whole = lax.linalg.triangular_solve(factor, half, left_side=True, lower=True, transpose_a=True)
    return whole[:, 0]
