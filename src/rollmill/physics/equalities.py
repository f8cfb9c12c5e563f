"""Adds equality constraints to the inertia matrix and the forces of a step.

The cost of an equality constraint is quadratic everywhere. Before the solver of all other constraints begins,
equality constraints are therefore added to the inertia, M + J'DJ, and to the forces, f + J'D a_ref.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rollmill.physics.algebra import (
    TINY,
    blocks,
    cross,
    pick,
    point_velocity,
    product,
    real,
    row,
    skew,
    spatial_vector,
    times,
    transpose_matrix,
)
from rollmill.physics.constraints import impedances
from rollmill.physics.kinematics import Frames, bias_accelerations, in_world
from rollmill.physics.masses import SparseMatrix, generalised_forces, with_diagonal, with_joining, with_stiffness
from rollmill.physics.model import WORLD, BodyEquality, JointEquality, Model, Structure
from rollmill.physics.sides import (
    ContactSides,
    added_stiffness,
    alone,
    between_sides,
    joining,
    on_bodies,
    scatter_rows,
    turn_columns,
    weighted_products,
)


class PointRows(NamedTuple):
    """Equality constraints that keep two points together, with three rows each, along the world's axes."""

    sides: tuple[ContactSides, ...]
    stiffness: Float[Array, " n"]
    wanted: Float[Array, "n 3"]


class TurnRows(NamedTuple):
    """Equality constraints that keep two orientations together, with three rows each."""

    sides: tuple[ContactSides, ...]
    maps: Float[Array, "n 3 3"]
    """Maps from the angular velocity of the first body relative to the second to the velocities of the rows."""
    stiffness: Float[Array, " n"]
    wanted: Float[Array, "n 3"]


class CoupledRows(NamedTuple):
    """Equality constraints with one row each, in which one coordinate follows another."""

    dofs: tuple[tuple[int, int], ...]
    slopes: Float[Array, " n"]
    """Derivative of the first coordinate by the second one."""
    stiffness: Float[Array, " n"]
    wanted: Float[Array, " n"]


class EqualityRows(NamedTuple):
    """All equality constraints of a robot in one configuration."""

    points: PointRows | None
    turns: TurnRows | None
    coupled: CoupledRows | None

    @property
    def are_none(self) -> bool:
        """Whether there are no equality constraints."""
        return self.points is None and self.coupled is None


def equality_rows(
    model: Model,
    placed: Frames,
    positions: Float[Array, " coordinates"],
    rates: Float[Array, " dofs"],
    motions: Float[Array, "bodies 6"],
) -> EqualityRows:
    """Returns the equality constraints of a robot in one configuration."""
    held, coupled = model.structure.body_equalities, model.structure.joint_equalities
    points, turns = None, None
    if held:
        turning = in_world(model.structure, placed, rates)
        upwards = spatial_vector(jnp.zeros(3), -jnp.asarray(model.params.gravity, float))
        biases = bias_accelerations(model, placed, turning, motions) - upwards[None]
        points, turns = _body_rows(placed, held, motions, biases)
    return EqualityRows(points, turns, _coupled_rows(coupled, positions, rates) if coupled else None)


def with_equalities(
    structure: Structure, placed: Frames, rows: EqualityRows, matrix: SparseMatrix, smooth: Float[Array, " dofs"]
) -> tuple[SparseMatrix, Float[Array, " dofs"]]:
    """Returns the inertia matrix and the forces with equality constraints added."""
    if rows.are_none:
        return matrix, smooth
    if (points := rows.points) is not None:
        stiffness = points.stiffness[:, None, None] * real(np.eye(3)[None])
        pulled = points.stiffness[:, None] * points.wanted
        smooth = smooth + generalised_forces(structure, placed, on_bodies(structure, points.sides, pulled))
        matrix = with_stiffness(structure, placed, matrix, added_stiffness(structure, points.sides, stiffness))
        matrix = with_joining(matrix, joining(structure, placed, points.sides, stiffness))
    if (turns := rows.turns) is not None:
        twisted = _torques(turns, turns.stiffness[:, None] * turns.wanted)
        smooth = smooth + generalised_forces(structure, placed, _twist(structure, turns.sides, twisted))
        stiffness = turns.stiffness[:, None, None] * product(transpose_matrix(turns.maps), turns.maps)
        matrix = with_stiffness(structure, placed, matrix, _add_turning(structure, turns.sides, stiffness))
        matrix = with_joining(matrix, _joining_turns(structure, placed, turns.sides, stiffness))
    if (coupled := rows.coupled) is not None:
        smooth = smooth + _coupled_forces(structure, coupled, coupled.stiffness * coupled.wanted)
        matrix = _with_coupled(structure, placed, matrix, coupled)
    return matrix, smooth


def equality_wrenches(
    structure: Structure, rows: EqualityRows, accelerations: Float[Array, "bodies 6"]
) -> Float[Array, "bodies 6"] | None:
    """Returns the wrenches that equality constraints exert on bodies with the given accelerations.

    Returns None if `rows` contains no constraints.
    """
    total: Array | None = None
    if (points := rows.points) is not None:
        lacking = points.wanted - between_sides(points.sides, accelerations)
        total = on_bodies(structure, points.sides, points.stiffness[:, None] * lacking)
    if (turns := rows.turns) is not None:
        lacking = turns.wanted - times(turns.maps, _turning(turns.sides, accelerations))
        twisted = _twist(structure, turns.sides, _torques(turns, turns.stiffness[:, None] * lacking))
        total = twisted if total is None else total + twisted
    return total


def equality_forces(
    structure: Structure,
    placed: Frames,
    rows: EqualityRows,
    x: Float[Array, " dofs"],
    accelerations: Float[Array, "bodies 6"],
) -> Float[Array, " dofs"]:
    """Returns the forces of equality constraints on the degrees of freedom, given their accelerations."""
    total = jnp.zeros_like(x)
    if (wrenches := equality_wrenches(structure, rows, accelerations)) is not None:
        total = total + generalised_forces(structure, placed, wrenches)
    if (coupled := rows.coupled) is not None:
        lacking = coupled.wanted - _follow(coupled, x)
        total = total + _coupled_forces(structure, coupled, coupled.stiffness * lacking)
    return total


# --- points and orientations of bodies ----------------------------------------------------------------


def _body_rows(
    placed: Frames,
    held: tuple[BodyEquality, ...],
    motions: Float[Array, "bodies 6"],
    biases: Float[Array, "bodies 6"],
) -> tuple[PointRows, TurnRows | None]:
    """Returns rows whose target also compensates the accelerations at constant velocities."""
    sides = _sides(placed, held)
    apart = _apart(placed, held, sides)
    squares = jnp.sum(apart * apart, axis=1)
    welds = tuple(i for i, one in enumerate(held) if one.rotations is not None)
    errors, maps = _turn_apart(placed, [held[i] for i in welds]) if welds else (None, None)
    if errors is not None:
        squares = squares + scatter_rows(jnp.sum(errors * errors, axis=1), welds, len(held))
    softness = [one.softness for one in held]
    impedance = impedances(softness, jnp.sqrt(squares))
    damping, pulling = (real([getattr(one, name) for one in softness]) for name in ("damping", "stiffness"))
    weights = real([one.inverse_weights for one in held])
    stiffness = 1.0 / jnp.maximum(((1.0 - impedance) / impedance)[:, None] * weights, TINY)
    pulls = (pulling * impedance)[:, None]
    moving = between_sides(sides, motions)
    wanted = -damping[:, None] * moving - pulls * apart - _drifting(sides, motions, biases)
    points = PointRows(sides, stiffness[:, 0], wanted)
    if errors is None or maps is None:
        return points, None
    of_welds = _sides(placed, tuple(held[i] for i in welds))
    rates = times(maps, _turning(of_welds, motions))
    drift = _turning_drift(of_welds, [held[i] for i in welds], motions, biases, errors, maps)
    wanted = -pick(damping, welds)[:, None] * rates - pick(pulls, welds) * errors - drift
    return points, TurnRows(of_welds, maps, pick(stiffness[:, 1], welds), wanted)


def _sides(placed: Frames, held: tuple[BodyEquality, ...]) -> tuple[ContactSides, ...]:
    first = ContactSides(
        tuple(range(len(held))),
        tuple(one.bodies[0] for one in held),
        jnp.stack([_arm(placed, one.bodies[0], one.anchors[0]) for one in held]),
        1.0,
    )
    both = tuple(i for i, one in enumerate(held) if one.bodies[1] != WORLD)
    if not both:
        return (first,)
    arms = jnp.stack([_arm(placed, held[i].bodies[1], held[i].anchors[1]) for i in both])
    return first, ContactSides(both, tuple(held[i].bodies[1] for i in both), arms, -1.0)


def _arm(placed: Frames, body: int, anchor: tuple[float, float, float]) -> Float[Array, "3"]:
    """Returns a body's point from the reference of its tree."""
    own = row(placed.positions, body)
    return own + times(row(placed.rotations, body), real(anchor)) if any(anchor) else own


def _apart(
    placed: Frames, held: tuple[BodyEquality, ...], sides: tuple[ContactSides, ...]
) -> Float[Array, "constraints 3"]:
    """Returns the first points as seen from the second ones."""
    first, *others = sides
    arms = {point: row(side.arms, k) for side in others for k, point in enumerate(side.points)}
    result: list[Array] = []
    for i, one in enumerate(held):
        reference = row(placed.references, one.bodies[0])
        if i in arms:
            reference = reference - row(placed.references, one.bodies[1])
        result.append(reference + row(first.arms, i) - (arms[i] if i in arms else real(one.anchors[1])))
    return jnp.stack(result)


def _drifting(
    sides: tuple[ContactSides, ...], motions: Float[Array, "bodies 6"], biases: Float[Array, "bodies 6"]
) -> Float[Array, "n 3"]:
    """Returns the accelerations of first points against second ones at constant velocities of the joints."""
    result = between_sides(sides, biases)
    for side in sides:
        moved = pick(motions, side.bodies)
        around = cross(moved[:, :3], point_velocity(moved, side.arms)) * side.sign
        result = result + scatter_rows(around, side.points, result.shape[0])
    return result


def _turning_drift(
    sides: tuple[ContactSides, ...],
    welds: list[BodyEquality],
    motions: Float[Array, "bodies 6"],
    biases: Float[Array, "bodies 6"],
    errors: Float[Array, "n 3"],
    maps: Float[Array, "n 3 3"],
) -> Float[Array, "n 3"]:
    """Returns the second derivatives of the errors of orientations at constant velocities of the joints."""
    turning = _turning(sides, motions)
    drift = _turning(sides, biases)
    for side in sides[1:]:
        carrying = pick(motions, side.bodies)[:, :3]
        drift = drift - scatter_rows(cross(carrying, pick(turning, side.points)), side.points, len(welds))
    return times(maps, drift) - 0.25 * jnp.sum(turning * turning, axis=1, keepdims=True) * errors


def _turn_apart(placed: Frames, welds: list[BodyEquality]) -> tuple[Float[Array, "n 3"], Float[Array, "n 3 3"]]:
    """Returns the vector parts of the quaternions between orientations, scaled, and the matrices that map angular
    velocities to their rates.

    The quaternion from the second orientation to the first changes by half the product of the angular velocity in
    the second orientation and the quaternion.
    """
    errors: list[Array] = []
    maps: list[Array] = []
    for weld in welds:
        if weld.rotations is None:
            raise AssertionError("a weld has rotations")
        first, second = (
            real(own) if body == WORLD else product(row(placed.rotations, body), real(own))
            for body, own in zip(weld.bodies, weld.rotations, strict=True)
        )
        between = product(transpose_matrix(second), first)
        w, vector = _quaternion(between)
        half = 0.5 * weld.torque_scale
        errors.append(weld.torque_scale * vector)
        maps.append(half * product(w * real(np.eye(3)) - skew(vector), transpose_matrix(second)))
    return jnp.stack(errors), jnp.stack(maps)


def _quaternion(rotation: Float[Array, "3 3"]) -> tuple[Float[Array, ""], Float[Array, "3"]]:
    """Returns the unit quaternion of a rotation by less than half a turn."""
    trace = rotation[0, 0] + rotation[1, 1] + rotation[2, 2]
    w = 0.5 * jnp.sqrt(jnp.maximum(1.0 + trace, 1e-6))
    around = [rotation[2, 1] - rotation[1, 2], rotation[0, 2] - rotation[2, 0], rotation[1, 0] - rotation[0, 1]]
    return w, jnp.stack(around) / (4.0 * w)


def _turning(sides: tuple[ContactSides, ...], motions: Float[Array, "bodies 6"]) -> Float[Array, "n 3"]:
    """Returns the angular velocities, or accelerations, of first bodies against second ones."""
    first, *others = sides
    result = pick(motions, first.bodies)[:, :3]
    for side in others:
        result = result - scatter_rows(pick(motions, side.bodies)[:, :3], side.points, result.shape[0])
    return result


def _torques(turns: TurnRows, forces: Float[Array, "n 3"]) -> Float[Array, "n 3"]:
    return times(transpose_matrix(turns.maps), forces)


def _twist(
    structure: Structure, sides: tuple[ContactSides, ...], torques: Float[Array, "n 3"]
) -> Float[Array, "bodies 6"]:
    """Returns torques between bodies as wrenches on them."""
    result = jnp.zeros((len(structure.bodies), 6))
    for side in sides:
        own = pick(torques, side.points) * side.sign
        result = result + scatter_rows(
            spatial_vector(own, jnp.zeros_like(own)), side.bodies, len(structure.bodies)
        )
    return result


def _add_turning(
    structure: Structure, sides: tuple[ContactSides, ...], stiffness: Float[Array, "n 3 3"]
) -> Float[Array, "bodies 6 6"] | None:
    single = alone(sides)
    if not single:
        return None
    own = pick(stiffness, single)
    added = blocks(own, jnp.zeros_like(own), jnp.zeros_like(own))
    return scatter_rows(added, tuple(sides[0].bodies[i] for i in single), len(structure.bodies))


def _joining_turns(
    structure: Structure, placed: Frames, sides: tuple[ContactSides, ...], stiffness: Float[Array, "n 3 3"]
) -> Float[Array, "dofs dofs"] | None:
    if len(sides) < 2:
        return None
    total = jnp.zeros((structure.num_velocities, structure.num_velocities))
    for position, point in enumerate(sides[1].points):
        columns = turn_columns(structure, placed, sides[0].bodies[point])
        columns = columns - turn_columns(structure, placed, sides[1].bodies[position])
        total = total + weighted_products(columns, stiffness[point])
    return total


# --- joints -------------------------------------------------------------------------------------------


def _coupled_rows(
    equalities: tuple[JointEquality, ...], positions: Float[Array, " coordinates"], rates: Float[Array, " dofs"]
) -> CoupledRows:
    first = pick(positions, [one.positions[0] for one in equalities])
    zero = jnp.zeros(1)
    second = jnp.concatenate(
        [positions[i : i + 1] if i >= 0 else zero for _, i in (e.positions for e in equalities)]
    )
    x = second - real([one.references[1] for one in equalities])
    a, b, c, d, e = (real([one.polynomial[k] for one in equalities]) for k in range(5))
    followed = a + x * (b + x * (c + x * (d + x * e)))
    has_second = real([1.0 if one.velocities[1] >= 0 else 0.0 for one in equalities])
    slopes = has_second * (b + x * (2.0 * c + x * (3.0 * d + x * 4.0 * e)))
    apart = first - real([one.references[0] for one in equalities]) - followed
    softness = [one.softness for one in equalities]
    impedance = impedances(softness, apart)
    weights = real([one.inverse_weight for one in equalities])
    stiffness = 1.0 / jnp.maximum((1.0 - impedance) / impedance * weights, TINY)
    damping, pulling = (real([getattr(one, name) for one in softness]) for name in ("damping", "stiffness"))
    rows = CoupledRows(tuple(one.velocities for one in equalities), slopes, stiffness, jnp.zeros_like(apart))
    return rows._replace(wanted=-damping * _follow(rows, rates) - pulling * impedance * apart)


def _follow(rows: CoupledRows, x: Float[Array, " dofs"]) -> Float[Array, " n"]:
    """Returns rates, or accelerations, of coordinates against those that they follow."""
    zero = jnp.zeros(1)
    second = jnp.concatenate([x[i : i + 1] if i >= 0 else zero for _, i in rows.dofs])
    return pick(x, [i for i, _ in rows.dofs]) - rows.slopes * second


def _coupled_forces(structure: Structure, rows: CoupledRows, forces: Float[Array, " n"]) -> Float[Array, " dofs"]:
    total = scatter_rows(forces, tuple(i for i, _ in rows.dofs), structure.num_velocities)
    both = [k for k, (_, second) in enumerate(rows.dofs) if second >= 0]
    if not both:
        return total
    others = tuple(rows.dofs[k][1] for k in both)
    return total - scatter_rows(pick(rows.slopes * forces, both), others, structure.num_velocities)


def _with_coupled(structure: Structure, placed: Frames, matrix: SparseMatrix, rows: CoupledRows) -> SparseMatrix:
    """Returns a matrix to which J'DJ of coupled coordinates is added."""
    size = structure.num_velocities
    diagonal = scatter_rows(rows.stiffness, tuple(i for i, _ in rows.dofs), size)
    both = [k for k, (_, second) in enumerate(rows.dofs) if second >= 0]
    if not both:
        return with_diagonal(structure, placed, matrix, diagonal, {i for i, _ in rows.dofs})
    others = tuple(rows.dofs[k][1] for k in both)
    slopes, stiffness = pick(rows.slopes, both), pick(rows.stiffness, both)
    diagonal = diagonal + scatter_rows(stiffness * slopes * slopes, others, size)
    matrix = with_diagonal(structure, placed, matrix, diagonal, {i for pair in rows.dofs for i in pair if i >= 0})
    places = tuple(max(rows.dofs[k]) * size + min(rows.dofs[k]) for k in both)
    return with_joining(matrix, scatter_rows(-stiffness * slopes, places, size * size).reshape(size, size))
