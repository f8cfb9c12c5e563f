"""Where the bodies of a robot are, and the motions of its degrees of freedom.

All of a tree is measured from one point in the world, its reference: the origin of a free body, or a fixed
point of a robot that stands. Numbers then stay small wherever the robot walks to.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from rollmill.physics.algebra import (
    axis_rotation,
    body_inertia,
    carried,
    cross,
    joined,
    pick,
    product,
    quaternion_matrix,
    real,
    row,
    times,
    transposed,
)
from rollmill.physics.model import WORLD, Body, Joint, Model, Structure


class Frames(NamedTuple):
    """A robot's bodies in one configuration."""

    references: Float[Array, "bodies 3"]
    """Reference of each body's tree, in the world."""
    positions: Float[Array, "bodies 3"]
    """From the reference."""
    rotations: Float[Array, "bodies 3 3"]
    axes: Float[Array, "dofs 6"]
    """Motion of each degree of freedom at unit velocity."""
    inertias: Float[Array, "bodies 6 6"]


IDENTITY = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))

_Pose = tuple[Float[Array, "3"], Float[Array, "3 3"]]


def frames(model: Model, coordinates: Float[Array, " coordinates"]) -> Frames:
    """Returns the bodies at given coordinates."""
    references: list[Array] = []
    poses: list[_Pose] = []
    axes: list[Array] = []
    for body in model.structure.bodies:
        reference, pose = _before_joints(body, coordinates, references, poses)
        for joint in body.joints:
            pose, moved = _moved(joint, pose, coordinates)
            axes.append(moved)
        references.append(reference)
        poses.append(pose)
    positions, rotations = (jnp.stack(part) for part in zip(*poses, strict=True))
    inertias = _inertias(model, positions, rotations)
    return Frames(jnp.stack(references), positions, rotations, jnp.concatenate(axes), inertias)


def _inertias(
    model: Model, positions: Float[Array, "bodies 3"], rotations: Float[Array, "bodies 3 3"]
) -> Float[Array, "bodies 6 6"]:
    centers = positions + times(rotations, real([body.center for body in model.structure.bodies]))
    entries = jnp.asarray(model.params.inertia, float)
    parts = [lax.slice_in_dim(entries, i, i + 1, axis=1) for i in (0, 3, 4, 3, 1, 5, 4, 5, 2)]
    own = jnp.concatenate(parts, axis=1).reshape(-1, 3, 3)
    central = product(product(rotations, own), transposed(rotations))
    return body_inertia(jnp.asarray(model.params.mass, float), centers, central)


def _before_joints(
    body: Body, coordinates: Array, references: list[Array], poses: list[_Pose]
) -> tuple[Float[Array, "3"], _Pose]:
    """Returns a body's reference, and its pose before its joints move."""
    own = real(body.rotation)
    if body.parent != WORLD:
        position, rotation = poses[body.parent]
        moved = position + times(rotation, real(body.position)) if any(body.position) else position
        turned = rotation if body.rotation == IDENTITY else product(rotation, own)
        return references[body.parent], (moved, turned)
    first = body.joints[0]
    is_free = first.kind == "free"
    reference = (
        lax.slice_in_dim(coordinates, first.position, first.position + 3) if is_free else real(body.position)
    )
    return reference, (jnp.zeros(3), own)


def _moved(joint: Joint, pose: _Pose, coordinates: Array) -> tuple[_Pose, Float[Array, "size 6"]]:
    """Returns a body's pose after a joint has moved, and the motions of the joint."""
    position, rotation = pose
    at = joint.position
    if joint.kind == "free":
        rotation = quaternion_matrix(lax.slice_in_dim(coordinates, at + 3, at + 7))
        linear = real(np.eye(6)[3:])
        return (position, rotation), jnp.concatenate([linear, joined(transposed(rotation), jnp.zeros((3, 3)))])
    anchor = position + times(rotation, real(joint.anchor)) if any(joint.anchor) else position
    if joint.kind == "ball":
        turned = product(rotation, quaternion_matrix(lax.slice_in_dim(coordinates, at, at + 4)))
        columns = transposed(turned)
        axes = joined(columns, cross(jnp.broadcast_to(anchor[None], (3, 3)), columns))
        return (_about(anchor, turned, joint), turned), axes
    axis = times(rotation, real(joint.axis))
    change = row(coordinates, at) - joint.reference
    if joint.kind == "slide":
        return (position + change * axis, rotation), joined(jnp.zeros(3), axis)[None]
    turned = product(rotation, axis_rotation(joint.axis, change))
    return (_about(anchor, turned, joint), turned), joined(axis, cross(anchor, axis))[None]


def _about(anchor: Array, rotation: Array, joint: Joint) -> Array:
    """Returns where a body's origin is, given its rotation and the place of a joint's anchor."""
    return anchor - times(rotation, real(joint.anchor)) if any(joint.anchor) else anchor


def summed_by_body(structure: Structure, motions: Float[Array, "dofs 6"], first: Array | None = None) -> Array:
    """Returns for each body the sum of the motions of its own joints and of those that carry it, `[bodies, 6]`.

    Args:
        structure: the robot's.
        motions: of each degree of freedom.
        first: motion of the world.
    """
    result: list[Array] = []
    for body in structure.bodies:
        start, size = body.joints[0].velocity, sum(joint.size for joint in body.joints)
        own = jnp.sum(lax.slice_in_dim(motions, start, start + size), axis=0)
        before = first if body.parent == WORLD else result[body.parent]
        result.append(own if before is None else own + before)
    return jnp.stack(result)


def velocities(structure: Structure, placed: Frames, rates: Float[Array, " dofs"]) -> Float[Array, "bodies 6"]:
    """Returns the motion of each body, or the part of its acceleration that accelerations of joints make."""
    return summed_by_body(structure, placed.axes * rates[:, None])


def bias_accelerations(
    model: Model, placed: Frames, rates: Float[Array, " dofs"], motions: Float[Array, "bodies 6"]
) -> Float[Array, "bodies 6"]:
    """Returns the acceleration of each body if no joint accelerates, with gravity as an acceleration upwards."""
    structure = model.structure
    turning = placed.axes * rates[:, None]
    carrying = _carrying(structure, turning, motions)
    upwards = joined(jnp.zeros(3), -jnp.asarray(model.params.gravity, float))
    return summed_by_body(structure, carried(carrying, turning), upwards)


def _carrying(structure: Structure, turning: Float[Array, "dofs 6"], motions: Float[Array, "bodies 6"]) -> Array:
    """Returns the motion that carries each degree of freedom's axis, `[dofs, 6]`."""
    result: list[Array] = []
    for body in structure.bodies:
        motion = jnp.zeros(6) if body.parent == WORLD else row(motions, body.parent)
        for joint in body.joints:
            if joint.kind == "free":  # its linear axes stay, and its turning is carried by its flight
                result.append(jnp.zeros((3, 6)))
                motion = jnp.sum(lax.slice_in_dim(turning, joint.velocity, joint.velocity + 3), axis=0)
            size = 3 if joint.kind in ("free", "ball") else 1
            result.append(jnp.broadcast_to(motion[None], (size, 6)))
            last = joint.velocity + joint.size
            if joint is not body.joints[-1]:
                motion = motion + jnp.sum(lax.slice_in_dim(turning, last - size, last), axis=0)
    return jnp.concatenate(result)


def per_dof(structure: Structure, values: Float[Array, "bodies ..."]) -> Float[Array, "dofs ..."]:
    """Returns for each degree of freedom what belongs to its body."""
    return pick(values, structure.owners)
