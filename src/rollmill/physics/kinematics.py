"""Computes forward kinematics: poses of a robot's bodies, and motions of its degrees of freedom.

All bodies of a tree are measured from one point in the world, the tree's reference. It is the origin of a free
body, or a fixed point if the tree has no free body. Coordinates then stay small, wherever the robot walks.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from rollmill.physics.algebra import (
    cross,
    dot,
    pick,
    product,
    quaternion_matrix,
    real,
    rotate_about_axis,
    row,
    spatial_cross,
    spatial_vector,
    symmetric,
    times,
    transpose_matrix,
)
from rollmill.physics.model import WORLD, Body, Joint, Model, Structure


class Inertias(NamedTuple):
    """Mass, first moment and rotational inertia of bodies, about the references of their trees."""

    masses: Float[Array, " bodies"]
    moments: Float[Array, "bodies 3"]
    rotational: Float[Array, "bodies 3 3"]

    def times(self, motions: Float[Array, "bodies 6"]) -> Float[Array, "bodies 6"]:
        """Returns the momenta of motions, or the wrenches that cause accelerations."""
        angular, linear = motions[..., :3], motions[..., 3:]
        torque = times(self.rotational, angular) + cross(self.moments, linear)
        return spatial_vector(torque, self.masses[:, None] * linear - cross(self.moments, angular))


class Frames(NamedTuple):
    """Poses of a robot's bodies in one configuration."""

    references: Float[Array, "bodies 3"]
    """Reference of each body's tree, in the world."""
    positions: Float[Array, "bodies 3"]
    """Position of each body, from the reference of its tree."""
    rotations: Float[Array, "bodies 3 3"]
    axes: Float[Array, "dofs 6"]
    """Motion of each degree of freedom at unit velocity. Free bodies turn about the world's axes here, but about
    their own axes in `RobotState`. `in_world` and `in_bodies` convert between them."""
    inertias: Inertias


IDENTITY = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))

_Pose = tuple[Float[Array, "3"], Float[Array, "3 3"]]


def frames(model: Model, coordinates: Float[Array, " coordinates"]) -> Frames:
    """Returns the poses of a robot's bodies at the given coordinates."""
    references: list[Array] = []
    poses: list[_Pose] = []
    axes: list[Array] = []
    for body in model.structure.bodies:
        reference, pose = _before_joints(body, coordinates, references, poses)
        for joint in body.joints:
            pose, moved = _move(joint, pose, coordinates)
            axes.append(moved)
        references.append(reference)
        poses.append(pose)
    positions, rotations = (jnp.stack(part) for part in zip(*poses, strict=True))
    inertias = _inertias(model, positions, rotations)
    return Frames(jnp.stack(references), positions, rotations, jnp.concatenate(axes), inertias)


def _inertias(
    model: Model, positions: Float[Array, "bodies 3"], rotations: Float[Array, "bodies 3 3"]
) -> Inertias:
    """Returns the inertias of the bodies about their references."""
    centers = positions + times(rotations, real([body.center for body in model.structure.bodies]))
    masses, own = jnp.asarray(model.params.mass, float), jnp.asarray(model.params.inertia, float)
    halves = product(rotations, symmetric(own[:, (0, 3, 4)], own[:, (1, 5)], own[:, (2,)]))
    moments = masses[:, None] * centers

    def entries(row: int) -> Float[Array, "bodies columns"]:
        """Returns a row from the diagonal on."""
        central = jnp.sum(halves[:, row : row + 1] * rotations[:, row:], axis=-1)
        return central - moments[:, row : row + 1] * centers[:, row:]

    squares = dot(moments, centers)[:, None]
    rows = [entries(row) for row in range(3)]
    rows = [jnp.concatenate([entry[:, :1] + squares, entry[:, 1:]], axis=1) for entry in rows]
    return Inertias(masses, moments, symmetric(*rows))


def _before_joints(
    body: Body, coordinates: Array, references: list[Array], poses: list[_Pose]
) -> tuple[Float[Array, "3"], _Pose]:
    """Returns a body's reference, and its pose before its joints move."""
    own = real(body.rotation)
    if body.parent != WORLD:
        position, rotation = poses[body.parent]
        moved = position + times(rotation, real(body.position)) if any(body.position) else position
        oriented = rotation if body.rotation == IDENTITY else product(rotation, own)
        return references[body.parent], (moved, oriented)
    first = body.joints[0]
    is_free = first.kind == "free"
    reference = (
        lax.slice_in_dim(coordinates, first.position, first.position + 3) if is_free else real(body.position)
    )
    return reference, (jnp.zeros(3), own)


def _move(joint: Joint, pose: _Pose, coordinates: Array) -> tuple[_Pose, Float[Array, "size 6"]]:
    """Returns a body's pose after a joint has moved, and the motions of the joint."""
    position, rotation = pose
    at = joint.position
    if joint.kind == "free":
        rotation = quaternion_matrix(lax.slice_in_dim(coordinates, at + 3, at + 7))
        return (position, rotation), real(np.eye(6)[[3, 4, 5, 0, 1, 2]])
    anchor = position + times(rotation, real(joint.anchor)) if any(joint.anchor) else position
    if joint.kind == "ball":
        after = product(rotation, quaternion_matrix(lax.slice_in_dim(coordinates, at, at + 4)))
        columns = transpose_matrix(after)
        axes = spatial_vector(columns, cross(jnp.broadcast_to(anchor[None], (3, 3)), columns))
        return (_about(anchor, after, joint), after), axes
    axis = times(rotation, real(joint.axis))
    change = row(coordinates, at) - joint.reference
    if joint.kind == "slide":
        return (position + change * axis, rotation), spatial_vector(jnp.zeros(3), axis)[None]
    after = rotate_about_axis(rotation, joint.axis, axis, change)
    return (_about(anchor, after, joint), after), spatial_vector(axis, cross(anchor, axis))[None]


def _about(anchor: Array, rotation: Array, joint: Joint) -> Array:
    """Returns the position of a body's origin, given its rotation and the position of a joint's anchor."""
    return anchor - times(rotation, real(joint.anchor)) if any(joint.anchor) else anchor


def velocities(structure: Structure, placed: Frames, rates: Float[Array, " dofs"]) -> Float[Array, "bodies 6"]:
    """Returns the motion of each body, given the velocities of joints.

    Given accelerations of joints, it returns their part of each body's acceleration.
    """
    turning = placed.axes * rates[:, None]
    result: list[Array] = []
    for body in structure.bodies:
        start, size = body.joints[0].velocity, sum(joint.size for joint in body.joints)
        if body.joints[0].kind == "free":
            own = spatial_vector(rates[start + 3 : start + 6], rates[start : start + 3])
        else:
            own = jnp.sum(lax.slice_in_dim(turning, start, start + size), axis=0)
        result.append(own if body.parent == WORLD else own + result[body.parent])
    return jnp.stack(result)


def in_world(structure: Structure, placed: Frames, values: Float[Array, " dofs"]) -> Float[Array, " dofs"]:
    """Converts angular velocities or torques of free bodies from their own axes to the world's axes."""
    return _rotate(structure, placed.rotations, values)


def in_bodies(structure: Structure, placed: Frames, values: Float[Array, " dofs"]) -> Float[Array, " dofs"]:
    """Converts angular velocities or torques of free bodies from the world's axes to their own axes."""
    return _rotate(structure, transpose_matrix(placed.rotations), values)


def _rotate(
    structure: Structure, rotations: Float[Array, "bodies 3 3"], values: Float[Array, " dofs"]
) -> Float[Array, " dofs"]:
    parts: list[Array] = []
    end = 0
    for start in structure.free_joint_dofs:
        angular = values[start + 3 : start + 6]
        parts += [values[end : start + 3], times(row(rotations, structure.dof_bodies[start]), angular)]
        end = start + 6
    return jnp.concatenate([*parts, values[end:]]) if parts else values


def without_flight(structure: Structure, rates: Float[Array, " dofs"]) -> Float[Array, " dofs"]:
    """Returns velocities relative to frames that translate with the free bodies.

    Forces and torques are equal in these frames. In other frames, single precision would lose them among
    products of large linear velocities, such as the cross product of a body's velocity and its momentum.
    """
    parts: list[Array] = []
    end = 0
    for start in structure.free_joint_dofs:
        parts += [rates[end:start], jnp.zeros(3)]
        end = start + 3
    return jnp.concatenate([*parts, rates[end:]]) if parts else rates


def bias_accelerations(
    model: Model,
    placed: Frames,
    rates: Float[Array, " dofs"],
    motions: Float[Array, "bodies 6"],
    *,
    of_weightless: bool = True,
) -> Float[Array, "bodies 6"]:
    """Returns each body's acceleration if no joint accelerates. Gravity counts as upward acceleration.

    Args:
        model: the robot.
        placed: poses of the robot's bodies.
        rates: velocities of the robot, about the world's axes for free bodies.
        motions: motions of the robot's bodies.
        of_weightless: whether gravity also applies to bodies with gravity compensation.
    """
    structure = model.structure
    carrying = _carrying(structure, placed, rates, motions)
    upwards = spatial_vector(jnp.zeros(3), -jnp.asarray(model.params.gravity, float))
    result: list[Array] = []
    for index, body in enumerate(structure.bodies):
        lifted = upwards if of_weightless or not body.weightless else jnp.zeros(6)
        before = lifted if body.parent == WORLD else result[body.parent]
        start, size = body.joints[0].velocity, sum(joint.size for joint in body.joints)
        if body.joints[0].kind == "free":  # the linear velocity of a free body carries its rotation along
            flight, spin = rates[start : start + 3], rates[start + 3 : start + 6]
            result.append(before + spatial_vector(jnp.zeros(3), cross(flight, spin)))
            continue
        turning = placed.axes[start : start + size] * rates[start : start + size, None]
        result.append(before + jnp.sum(spatial_cross(carrying[index], turning), axis=0))
    return jnp.stack(result)


def _carrying(
    structure: Structure, placed: Frames, rates: Float[Array, " dofs"], motions: Float[Array, "bodies 6"]
) -> list[Float[Array, "size 6"]]:
    """Returns the motions that carry the axes of each body's joints, or nothing for a free body."""
    result: list[Array] = []
    for body in structure.bodies:
        motion = jnp.zeros(6) if body.parent == WORLD else row(motions, body.parent)
        own: list[Array] = []
        for joint in body.joints:
            own.append(jnp.broadcast_to(motion[None], (joint.size, 6)))
            if joint is not body.joints[-1]:
                first, last = joint.velocity, joint.velocity + joint.size
                motion = motion + jnp.sum(placed.axes[first:last] * rates[first:last, None], axis=0)
        result.append(jnp.concatenate(own))
    return result


def per_dof(structure: Structure, values: Float[Array, "bodies ..."]) -> Float[Array, "dofs ..."]:
    """Returns, for each degree of freedom, the value of the body that it moves."""
    return pick(values, structure.dof_bodies)
