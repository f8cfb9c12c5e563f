"""Maps between constraints that act at points of bodies, and the motions of these bodies."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rollmill.physics.algebra import (
    cross,
    pick,
    point_force,
    point_stiffness,
    point_velocity,
    product,
    real,
    times,
    transpose_matrix,
)
from rollmill.physics.kinematics import Frames
from rollmill.physics.model import Structure

MANY = 8
"""Minimum number of points between two moving bodies for which one matrix product handles all of them."""


class ContactSides(NamedTuple):
    """Bodies that take part in point constraints, and the points, measured from the references of their trees.

    The first side of a constraint is a moving body. A second side exists only if the constraint is between two
    moving bodies.
    """

    points: tuple[int, ...]
    """Index of each side's constraint."""
    bodies: tuple[int, ...]
    arms: Float[Array, "sides 3"]
    sign: float
    """1 if a contact's normal points to the body, and -1 if it points away from the body."""


def scatter_rows(values: Float[Array, "n ..."], places: tuple[int, ...], size: int) -> Float[Array, "m ..."]:
    """Scatters rows to fixed indices of a zero array. Rows with equal indices are summed."""
    if places == tuple(range(size)):
        return values
    zero = jnp.zeros((1, *values.shape[1:]))
    parts: list[Array] = []
    for place in range(size):
        own = [i for i, other in enumerate(places) if other == place]
        parts.append(jnp.sum(pick(values, own), axis=0, keepdims=True) if own else zero)
    return jnp.concatenate(parts)


def between_sides(sides: tuple[ContactSides, ...], motions: Float[Array, "bodies 6"]) -> Float[Array, "points 3"]:
    """Returns velocities or accelerations of the first points relative to the second points, in world axes."""
    first, *others = sides
    result = point_velocity(pick(motions, first.bodies), first.arms) * first.sign
    for side in others:
        more = point_velocity(pick(motions, side.bodies), side.arms) * side.sign
        result = result + scatter_rows(more, side.points, result.shape[0])
    return result


def on_bodies(
    structure: Structure, sides: tuple[ContactSides, ...], forces: Float[Array, "points 3"]
) -> Float[Array, "bodies 6"]:
    """Returns the wrenches that forces between points exert on the bodies."""
    result = jnp.zeros((len(structure.bodies), 6))
    for side in sides:
        wrenches = point_force(pick(forces, side.points) * side.sign, side.arms)
        result = result + scatter_rows(wrenches, side.bodies, len(structure.bodies))
    return result


def alone(sides: tuple[ContactSides, ...]) -> tuple[int, ...]:
    """Selects the constraints that act on a single moving body."""
    first, *others = sides
    joint = [i for side in others for i in side.points]
    return tuple(i for i in first.points if i not in joint)


def added_stiffness(
    structure: Structure, sides: tuple[ContactSides, ...], stiffness: Float[Array, "points 3 3"]
) -> Float[Array, "bodies 6 6"] | None:
    """Returns the stiffness that constraints between bodies and the world add to the bodies' inertias."""
    single, first = alone(sides), sides[0]
    if not single:
        return None
    added = point_stiffness(pick(stiffness, single), pick(first.arms, single))
    return scatter_rows(added, tuple(first.bodies[i] for i in single), len(structure.bodies))


def joining(
    structure: Structure, placed: Frames, sides: tuple[ContactSides, ...], stiffness: Float[Array, "points 3 3"]
) -> Float[Array, "dofs dofs"] | None:
    """Returns the terms J'WJ that constraints between two moving bodies add to the Hessian."""
    if len(sides) < 2:
        return None
    first, second = sides
    if len(second.points) > MANY:
        return _joining_many(structure, placed, first, second, stiffness)
    total = jnp.zeros((structure.num_velocities, structure.num_velocities))
    for position, point in enumerate(second.points):
        one = point_columns(structure, placed, first.arms[point], first.bodies[point])
        other = point_columns(structure, placed, second.arms[position], second.bodies[position])
        total = total + weighted_products(one - other, stiffness[point])
    return total


def _joining_many(
    structure: Structure,
    placed: Frames,
    first: ContactSides,
    second: ContactSides,
    stiffness: Float[Array, "points 3 3"],
) -> Float[Array, "dofs dofs"]:
    """Returns what `joining` does, by one product."""
    arms, weights = pick(first.arms, second.points), pick(stiffness, second.points)
    one = _many_columns(structure, placed, arms, [first.bodies[point] for point in second.points])
    columns = one - _many_columns(structure, placed, second.arms, list(second.bodies))
    pushed = jnp.sum(weights[:, None] * columns[:, :, None, :], axis=-1)
    return jnp.einsum("nax,nbx->ab", columns, pushed, precision="highest")


def _many_columns(
    structure: Structure, placed: Frames, arms: Float[Array, "n 3"], bodies: list[int]
) -> Float[Array, "n dofs 3"]:
    """Returns `point_columns` of many points."""
    shape = (len(bodies), structure.num_velocities, 3)
    angular, linear = (jnp.broadcast_to(part[None], shape) for part in (placed.axes[:, :3], placed.axes[:, 3:]))
    moving = real(np.stack([_moving(structure, body) for body in bodies]))
    return moving * (linear + cross(angular, jnp.broadcast_to(arms[:, None], shape)))


def weighted_products(columns: Float[Array, "dofs 3"], weights: Float[Array, "3 3"]) -> Float[Array, "dofs dofs"]:
    """Returns J'WJ of three-row constraints, given the columns of J."""
    pushed = times(jnp.broadcast_to(weights[None], (columns.shape[0], 3, 3)), columns)
    return product(columns, transpose_matrix(pushed))


def point_columns(
    structure: Structure, placed: Frames, arm: Float[Array, "3"], body: int
) -> Float[Array, "dofs 3"]:
    """Returns the velocity of a point of a body for unit velocity of each degree of freedom."""
    turning = cross(placed.axes[:, :3], jnp.broadcast_to(arm[None], (structure.num_velocities, 3)))
    return real(_moving(structure, body)) * (placed.axes[:, 3:] + turning)


def turn_columns(structure: Structure, placed: Frames, body: int) -> Float[Array, "dofs 3"]:
    """Returns the angular velocity of a body for unit velocity of each degree of freedom."""
    return real(_moving(structure, body)) * placed.axes[:, :3]


def _moving(structure: Structure, body: int) -> np.ndarray:
    mask = np.zeros((structure.num_velocities, 1))
    mask[list(structure.dof_paths[body])] = 1.0
    return mask
