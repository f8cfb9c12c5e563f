"""Solves for the constrained acceleration, by Newton's method on the convex cost of MuJoCo with a fixed number of
iterations.

The cost is 1/2 (x - x0)' M (x - x0) + sum of s(row), where x0 is the acceleration without constraints and s is D/2
min(0, a - a_ref)^2 for limits and edges of contacts. The Jacobian is never formed. Instead, accelerations are
propagated outwards through the tree to the contacts, and forces are propagated back. The stiffness of a contact is
added to the inertia of its body, so the composite-rigid-body algorithm computes the Hessian.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from rollmill.physics.algebra import dot, pick, times, transpose_matrix
from rollmill.physics.constraints import ConstraintRows, ContactRows, JointRows, relative_velocities
from rollmill.physics.kinematics import Frames, in_bodies, in_world, velocities
from rollmill.physics.masses import (
    SparseMatrix,
    dense,
    generalised_forces,
    solve,
    solved_joined,
    with_diagonal,
    with_stiffness,
)
from rollmill.physics.model import Structure
from rollmill.physics.sides import added_stiffness, joining, on_bodies, scatter_rows
from rollmill.physics.tendons import on_joints, rates_of, with_tendons

_SMALLEST = 1e-30


class _Problem(NamedTuple):
    """Values shared by all iterations."""

    structure: Structure
    placed: Frames
    rows: ConstraintRows
    matrix: SparseMatrix
    """Of inertia."""
    inertia: Float[Array, "dofs dofs"]
    """All entries of `matrix`."""
    smooth: Float[Array, " dofs"]
    """All forces except constraint forces and inertial forces."""


class _Pushes(NamedTuple):
    """What contacts do at some acceleration, in the world."""

    forces: Float[Array, "contacts 3"]
    stiffness: Float[Array, "contacts 3 3"]


def constrained_accelerations(
    structure: Structure,
    placed: Frames,
    rows: ConstraintRows,
    matrix: SparseMatrix,
    smooth: Float[Array, " dofs"],
    start: Float[Array, " dofs"],
) -> tuple[Float[Array, " dofs"], Float[Array, " dofs"]]:
    """Returns accelerations and inertial forces of all degrees of freedom, of free bodies in world axes.

    Args:
        structure: structure of the robot.
        placed: poses of the robot's bodies.
        rows: constraint rows of the robot.
        matrix: inertia matrix of the robot.
        smooth: all forces except constraint forces and inertial forces.
        start: accelerations at which Newton's method begins.
    """
    if rows.are_none:
        return solve(matrix, smooth), smooth
    problem = _Problem(structure, placed, rows, matrix, dense(matrix), smooth)
    begin = (start, times(problem.inertia, start))
    return lax.fori_loop(0, structure.iterations, lambda _, now: _newton_step(problem, *now), begin)


def contact_wrenches(
    structure: Structure, rows: ConstraintRows, accelerations: Float[Array, "bodies 6"]
) -> Float[Array, "bodies 6"] | None:
    """Returns the wrenches of contacts on bodies with the given accelerations, or None without contacts."""
    if rows.contacts is None:
        return None
    return on_bodies(structure, rows.contacts.sides, _pushes(rows.contacts, accelerations).forces)


def _newton_step(
    problem: _Problem, x: Float[Array, " dofs"], inertial: Float[Array, " dofs"]
) -> tuple[Float[Array, " dofs"], Float[Array, " dofs"]]:
    """Returns better accelerations, and the forces of inertia that belong to them."""
    structure, placed, rows = problem.structure, problem.placed, problem.rows
    accelerations, own = velocities(structure, placed, x), in_bodies(structure, placed, x)
    missing = inertial - problem.smooth
    gradient, hessian, joined = missing, problem.matrix, None
    if rows.contacts is not None:
        pushes = _pushes(rows.contacts, accelerations)
        wrenches = on_bodies(structure, rows.contacts.sides, pushes.forces)
        gradient = gradient - generalised_forces(structure, placed, wrenches)
        sides = rows.contacts.sides
        hessian = with_stiffness(structure, placed, hessian, added_stiffness(structure, sides, pushes.stiffness))
        joined = joining(structure, placed, sides, pushes.stiffness)
    if rows.limits is not None or rows.frictions is not None:
        forces, stiffness = _joint_pushes(rows, own)
        gradient = gradient - (
            in_world(structure, placed, forces) if structure.has_free_joint_friction else forces
        )
        constrained = {dof for group in (rows.limits, rows.frictions) if group is not None for dof in group.dofs}
        hessian = with_diagonal(structure, placed, hessian, stiffness, constrained)
    if (tendons := rows.tendons) is not None:
        shortages = tendons.sign * rates_of(structure, own) - tendons.wanted
        active = jnp.where(shortages < 0, tendons.stiffness, 0.0)
        gradient = gradient - on_joints(structure, -active * shortages * tendons.sign)
        hessian = with_tendons(structure, placed, hessian, active)
    direction = -solved_joined(hessian, joined, gradient)
    changed = times(problem.inertia, direction)
    slope, curvature = dot(direction, missing), dot(direction, changed)
    changes = velocities(structure, placed, direction)
    lines = _lines(structure, rows, accelerations, changes, own, in_bodies(structure, placed, direction))
    step = _best_step(lines, slope, curvature, structure.line_search_iterations)
    return x + step * direction, inertial + step * changed


def _edges(rows: ContactRows, along: Float[Array, "contacts 3"]) -> Float[Array, "contacts 4"]:
    """Returns contacts' accelerations, or shortages, along the edges of their pyramids."""
    normal = along[:, :1]
    one, two = rows.friction[:, None] * along[:, 1:2], rows.friction[:, None] * along[:, 2:]
    return jnp.concatenate([normal + one, normal - one, normal + two, normal - two], axis=1)


def _pushes(rows: ContactRows, accelerations: Float[Array, "bodies 6"]) -> _Pushes:
    shortages = _edges(rows, relative_velocities(rows, accelerations) - rows.wanted)
    stiffness = jnp.broadcast_to(rows.stiffness[:, None], shortages.shape)
    active = jnp.where(shortages < 0, stiffness, 0.0)
    forces, mu = -active * shortages, rows.friction
    along = jnp.stack(
        [jnp.sum(forces, axis=1), mu * (forces[:, 0] - forces[:, 1]), mu * (forces[:, 2] - forces[:, 3])], axis=1
    )
    skew1, skew2 = mu * (active[:, 0] - active[:, 1]), mu * (active[:, 2] - active[:, 3])
    square1, square2 = mu * mu * (active[:, 0] + active[:, 1]), mu * mu * (active[:, 2] + active[:, 3])
    zero = jnp.zeros_like(mu)
    entries = [jnp.sum(active, axis=1), skew1, skew2, skew1, square1, zero, skew2, zero, square2]
    inner = jnp.stack(entries, axis=1).reshape(-1, 3, 3)
    back = (
        np.swapaxes(rows.frames, -1, -2) if isinstance(rows.frames, np.ndarray) else transpose_matrix(rows.frames)
    )
    half = times(back[:, None], inner)  # product with each row
    return _Pushes(times(back, along), times(back[:, None], transpose_matrix(half)))


def _joint_pushes(
    rows: ConstraintRows, x: Float[Array, " dofs"]
) -> tuple[Float[Array, " dofs"], Float[Array, " dofs"]]:
    """Returns forces and stiffness of the rows of single degrees of freedom."""
    forces, stiffness = jnp.zeros_like(x), jnp.zeros_like(x)
    if (limits := rows.limits) is not None:
        shortages = limits.sign * pick(x, limits.dofs) - limits.wanted
        active = jnp.where(shortages < 0, limits.stiffness, 0.0)
        forces = forces + scatter_rows(-active * shortages * limits.sign, limits.dofs, len(x))
        stiffness = stiffness + scatter_rows(active, limits.dofs, len(x))
    if (frictions := rows.frictions) is not None:
        pulls = -frictions.stiffness * (pick(x, frictions.dofs) - frictions.wanted)
        bounded = jnp.minimum(jnp.maximum(pulls, -frictions.bounds), frictions.bounds)
        active = jnp.where(jnp.abs(pulls) < frictions.bounds, frictions.stiffness, 0.0)
        forces = forces + scatter_rows(bounded, frictions.dofs, len(x))
        stiffness = stiffness + scatter_rows(active, frictions.dofs, len(x))
    return forces, stiffness


class _Lines(NamedTuple):
    """Rows along a direction: shortages at its beginning, their changes for a step of 1, and stiffness."""

    one_sided: tuple[Array, Array, Array]
    two_sided: tuple[Array, Array, JointRows] | None


def _lines(
    structure: Structure,
    rows: ConstraintRows,
    accelerations: Float[Array, "bodies 6"],
    changes: Float[Array, "bodies 6"],
    x: Float[Array, " dofs"],
    direction: Float[Array, " dofs"],
) -> _Lines:
    parts: list[tuple[Array, Array, Array]] = []
    if (touching := rows.contacts) is not None:
        shortages = _edges(touching, relative_velocities(touching, accelerations) - touching.wanted)
        moved = _edges(touching, relative_velocities(touching, changes))
        stiffness = jnp.broadcast_to(touching.stiffness[:, None], moved.shape)
        parts.append((shortages.reshape(-1), moved.reshape(-1), stiffness.reshape(-1)))
    if (limits := rows.limits) is not None:
        shortages = limits.sign * pick(x, limits.dofs) - limits.wanted
        parts.append((shortages, limits.sign * pick(direction, limits.dofs), limits.stiffness))
    if (tendons := rows.tendons) is not None:
        shortages = tendons.sign * rates_of(structure, x) - tendons.wanted
        parts.append((shortages, tendons.sign * rates_of(structure, direction), tendons.stiffness))
    if not parts:
        parts.append((jnp.zeros(1), jnp.zeros(1), jnp.zeros(1)))
    shortages, moved, stiffness = (jnp.concatenate(part) for part in zip(*parts, strict=True))
    if (frictions := rows.frictions) is None:
        return _Lines((shortages, moved, stiffness), None)
    lacking = pick(x, frictions.dofs) - frictions.wanted
    return _Lines((shortages, moved, stiffness), (lacking, pick(direction, frictions.dofs), frictions))


def _best_step(
    lines: _Lines, slope: Float[Array, ""], curvature: Float[Array, ""], iterations: int
) -> Float[Array, ""]:
    """Returns the step at which the cost is least, by Newton's method within a bracket."""

    def improved(_: Array, carried: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        at, low, high = carried
        rise, bend = _derivatives(lines, at)
        rise, bend = slope + at * curvature + rise, curvature + bend
        low, high = jnp.where(rise < 0, at, low), jnp.where(rise < 0, high, at)
        proposed = at - rise / jnp.maximum(bend, _SMALLEST)
        inside = (proposed >= low) & (proposed <= high)
        return jnp.where(inside, proposed, 0.5 * (low + high)), low, high

    one = jnp.ones_like(slope)
    return lax.fori_loop(0, iterations, improved, (one, jnp.zeros_like(one), jnp.full_like(one, jnp.inf)))[0]


def _derivatives(lines: _Lines, at: Float[Array, ""]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns slope and curvature of the rows' cost at a step."""
    shortages, changes, stiffness = lines.one_sided
    values = shortages + at * changes
    weighted = jnp.where(values < 0, stiffness * changes, 0.0)
    rise, bend = dot(weighted, values), dot(weighted, changes)
    if lines.two_sided is not None:
        lacking, changes, rows = lines.two_sided
        forces = rows.stiffness * (lacking + at * changes)
        bounded = jnp.minimum(jnp.maximum(forces, -rows.bounds), rows.bounds)
        elastic = jnp.where(jnp.abs(forces) < rows.bounds, rows.stiffness, 0.0)
        rise, bend = rise + dot(changes, bounded), bend + dot(elastic * changes, changes)
    return rise, bend
