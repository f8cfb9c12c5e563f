"""Advances a robot in time, in the formulation of MuJoCo."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from rollmill.core.errors import UsageError
from rollmill.physics.algebra import cross, pick, real, row, times, transpose_matrix
from rollmill.physics.constraints import ConstraintRows, constraint_rows
from rollmill.physics.equalities import (
    EqualityRows,
    equality_forces,
    equality_rows,
    equality_wrenches,
    with_equalities,
)
from rollmill.physics.forces import Actuation, actuation, body_wrenches, smooth_forces
from rollmill.physics.kinematics import (
    Frames,
    bias_accelerations,
    frames,
    in_bodies,
    in_world,
    velocities,
    without_flight,
)
from rollmill.physics.masses import SparseMatrix, mass_matrix, solve, summed_outwards, with_diagonal
from rollmill.physics.model import Model, RobotState, Sensor, Structure
from rollmill.physics.solver import constrained_accelerations, contact_wrenches
from rollmill.physics.tendons import on_joints, rates_of, with_tendons


def initial_state(
    model: Model,
    positions: Float[Array, " coordinates"] | np.ndarray | None = None,
    rates: Float[Array, " dofs"] | np.ndarray | None = None,
) -> RobotState:
    """Returns a state in the robot's first pose at rest, or at given coordinates and velocities.

    Args:
        model: the robot.
        positions: coordinates, as `qpos` in MuJoCo. Quaternions are scaled to length 1.
        rates: velocities, as `qvel` in MuJoCo.

    Raises:
        UsageError: the sizes of the arrays do not match the robot.
    """
    structure = model.structure
    given: dict[str, tuple[int, Any]] = {
        "positions": (len(structure.initial_positions), positions),
        "velocities": (structure.num_velocities, rates),
    }
    for name, (size, values) in given.items():
        if values is not None and np.shape(values) != (size,):
            raise UsageError(f"the robot has {size} {name}, but the array has shape {np.shape(values)}.")
    at = jnp.asarray(structure.initial_positions if positions is None else positions, float)
    moving = jnp.zeros(structure.num_velocities) if rates is None else jnp.asarray(rates, float)
    readings = jnp.zeros(structure.num_readings)
    return RobotState(_unit_quaternions(structure, at), moving, jnp.zeros_like(moving), readings)


def step(model: Model, state: RobotState, control: Float[Array, " actuators"]) -> RobotState:
    """Returns the state of a robot after one time step.

    Args:
        model: the robot.
        state: state of the robot.
        control: controls of the actuators, which are clamped to their ranges.
    """
    structure = model.structure
    positions, rates = state.positions, state.velocities
    placed = frames(model, positions)
    turning = in_world(structure, placed, rates)
    motions = velocities(structure, placed, turning)
    acted = actuation(model, placed, positions, rates, control)
    rows = constraint_rows(model, placed, positions, rates, motions)
    smooth = smooth_forces(model, placed, positions, rates, acted)
    matrix = mass_matrix(model, placed)
    start = in_world(structure, placed, state.accelerations)
    equal = equality_rows(model, placed, positions, rates, motions)
    held, driven = with_equalities(structure, placed, equal, matrix, smooth)
    accelerations, inertial = constrained_accelerations(structure, placed, rows, held, driven, start)
    changes = velocities(structure, placed, accelerations)
    readings: list[Array] = []
    if structure.sensors:
        pushed = _constraint_wrenches(structure, rows, equal, changes)
        readings.append(_readings(model, placed, pushed, turning, changes))
    if structure.force_readings:
        # The difference between inertial and other forces is the force of the constraints.
        forces = acted.forces + inertial - driven
        forces = (
            forces
            if equal.are_none
            else forces + equality_forces(structure, placed, equal, accelerations, changes)
        )
        readings.append(pick(forces, structure.force_readings))
    implicit = _implicit(model, placed, acted, matrix, accelerations)
    moved = rates + structure.time_step * in_bodies(structure, placed, implicit)
    accelerations = in_bodies(structure, placed, accelerations)
    read = jnp.concatenate(readings) if readings else state.sensors
    return RobotState(_move(structure, positions, moved), moved, accelerations, read)


def _implicit(
    model: Model, placed: Frames, acted: Actuation, matrix: SparseMatrix, accelerations: Float[Array, " dofs"]
) -> Float[Array, " dofs"]:
    """Returns accelerations where forces that are linear in velocity are those at the end of the step.

    With M a = f and forces that change by -B h a', it is a' = (M + h B)^-1 f = a - (M + h B)^-1 h B a.
    """
    structure = model.structure
    if structure.implicit == "none":
        return accelerations
    of_tendons = _tendon_damping(structure, acted)
    damping = jnp.asarray(model.params.damping, float)
    if structure.implicit == "velocity" and structure.has_servos:
        damping = damping - acted.slopes
    elif not structure.has_dampers and of_tendons is None:
        return accelerations
    slopes = structure.time_step * damping
    own = in_bodies(structure, placed, accelerations)
    forces = slopes * own
    damped = with_diagonal(structure, placed, matrix, slopes)
    if of_tendons is not None:
        pulled = structure.time_step * of_tendons
        forces = forces + on_joints(structure, pulled * rates_of(structure, own))
        damped = with_tendons(structure, placed, damped, pulled)
    return accelerations - solve(damped, in_world(structure, placed, forces))


def _tendon_damping(structure: Structure, acted: Actuation) -> Float[Array, " tendons"] | None:
    """Returns the damping of tendons that implicitfast evaluates at the end of a step, if there is any."""
    if structure.implicit != "velocity" or not structure.tendons:
        return None
    own = [tendon.damping for tendon in structure.tendons]
    if acted.tendon_slopes is not None and structure.has_servos:
        return real(own) - acted.tendon_slopes
    return real(own) if any(own) else None


def _constraint_wrenches(
    structure: Structure, rows: ConstraintRows, equal: EqualityRows, changes: Float[Array, "bodies 6"]
) -> Float[Array, "bodies 6"] | None:
    """Returns the wrenches of contacts and equality constraints on bodies, or None without constraints."""
    parts = [contact_wrenches(structure, rows, changes), equality_wrenches(structure, equal, changes)]
    present = [part for part in parts if part is not None]
    return sum(present[1:], present[0]) if present else None


def _readings(
    model: Model,
    placed: Frames,
    pushed: Float[Array, "bodies 6"] | None,
    rates: Float[Array, " dofs"],
    changes: Float[Array, "bodies 6"],
) -> Float[Array, " readings"]:
    """Returns the readings of the sensors: what each body and all beyond it take from its parent."""
    structure = model.structure
    rates = without_flight(structure, rates)
    motions = velocities(structure, placed, rates)
    biases = bias_accelerations(model, placed, rates, motions)
    wrenches = body_wrenches(placed, motions, changes + biases)
    if pushed is not None:
        wrenches = wrenches - pushed
    sums = summed_outwards(structure, wrenches)
    return jnp.concatenate([_reading(sensor, placed, row(sums, sensor.body)) for sensor in structure.sensors])


def _reading(sensor: Sensor, placed: Frames, wrench: Float[Array, "6"]) -> Float[Array, "3"]:
    rotation = row(placed.rotations, sensor.body)
    torque, force = wrench[:3], wrench[3:]
    if sensor.kind == "torque":
        arm = row(placed.positions, sensor.body) + times(rotation, real(sensor.place))
        force = torque - cross(arm, force)
    return times(real(np.array(sensor.rotation).T), times(transpose_matrix(rotation), force))


def _move(
    structure: Structure, positions: Float[Array, " coordinates"], rates: Float[Array, " dofs"]
) -> Float[Array, " coordinates"]:
    """Returns coordinates after a step at constant velocities, with quaternions scaled to length 1."""
    parts: list[Array] = []
    for joint in structure.joints:
        at, dof = joint.position, joint.velocity
        if joint.kind == "free":
            parts.append(positions[at : at + 3] + structure.time_step * rates[dof : dof + 3])
            at, dof = at + 3, dof + 3
        if joint.kind in ("free", "ball"):
            turned = _turn(positions[at : at + 4], rates[dof : dof + 3], structure.time_step)
            parts.append(turned / jnp.sqrt(_square(turned)))
        else:
            parts.append(positions[at : at + 1] + structure.time_step * rates[dof : dof + 1])
    return jnp.concatenate(parts)


def _turn(quaternion: Float[Array, "4"], rate: Float[Array, "3"], duration: float) -> Float[Array, "4"]:
    """Returns a quaternion after a rotation at constant angular velocity in the body's frame."""
    speed = jnp.sqrt(_square(rate))
    half = 0.5 * duration * speed
    is_slow = speed < 1e-10
    factor = jnp.where(is_slow, 0.5 * duration, jnp.sin(half) / jnp.where(is_slow, 1.0, speed))
    turn = factor * rate
    w, vector = quaternion[:1], quaternion[1:]
    real_part = w * jnp.cos(half) - jnp.sum(vector * turn, keepdims=True)
    return jnp.concatenate([real_part, w * turn + jnp.cos(half) * vector + cross(vector, turn)])


def _square(values: Float[Array, " n"]) -> Float[Array, ""]:
    """Returns the sum of squares."""
    return jnp.sum(values * values)


def _unit_quaternions(structure: Structure, positions: Float[Array, " coordinates"]) -> Array:
    """Returns coordinates with quaternions scaled to length 1."""
    for joint in structure.joints:
        if joint.kind in ("free", "ball"):
            at = joint.position + (3 if joint.kind == "free" else 0)
            quaternion = lax.slice_in_dim(positions, at, at + 4)
            scaled = quaternion / jnp.sqrt(_square(quaternion))
            positions = jnp.concatenate([positions[:at], scaled, positions[at + 4 :]])
    return positions
