"""Finds contacts between geoms as MuJoCo does, with a fixed number for each pair, whether it touches or not."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rollmill.physics.algebra import cross, dot, pick, product, real, times, unit
from rollmill.physics.boxes import capsule_box, sphere_box
from rollmill.physics.kinematics import Frames
from rollmill.physics.model import WORLD, Geom, Model, Numbers, Pair, Structure
from rollmill.physics.shapes import PlacedGeoms, Points, contact_frames


class Contacts(NamedTuple):
    """Contacts between geoms: the points at which pairs of geoms are nearest to each other."""

    pairs: tuple[int, ...]
    """Index of each contact's pair in `Structure.pairs`."""
    distances: Float[Array, " contacts"]
    """Distance of each contact, which is negative if the geoms overlap (m)."""
    places: Float[Array, "contacts 3"]
    """Position of each contact, from the reference of the second geom's tree, or of the first geom's tree if the
    second geom cannot move."""
    frames: Float[Numbers, "contacts 3 3"]
    """Frame of each contact. Its rows are the normal from the first geom to the second, and two tangents, all
    reversed if the second geom cannot move. Fixed frames are NumPy arrays."""


def contacts(model: Model, placed: Frames) -> Contacts | None:
    """Returns the contacts of all pairs of geoms, or None if a robot has no pairs."""
    structure = model.structure
    kinds: dict[tuple[str, str], list[int]] = {}
    for index, pair in enumerate(structure.pairs):
        kinds.setdefault((structure.geoms[pair.first].kind, structure.geoms[pair.second].kind), []).append(index)
    found: list[Contacts] = []
    for kind, indices in kinds.items():
        pairs = [structure.pairs[i] for i in indices]
        measured = [measuring_body(structure, pair) for pair in pairs]
        first = _place(placed, measured, [structure.geoms[pair.first] for pair in pairs])
        second = _place(placed, measured, [structure.geoms[pair.second] for pair in pairs])
        for distances, places, directions in _FINDERS[kind](first, second):
            found.append(
                Contacts(tuple(indices), distances, places, _towards_moving(structure, pairs, directions))
            )
    if not found:
        return None
    distances = jnp.concatenate([part.distances for part in found])
    places = jnp.concatenate([part.places for part in found])
    directions = [part.frames for part in found]
    joined = np.concatenate if all(isinstance(part, np.ndarray) for part in directions) else jnp.concatenate
    return Contacts(tuple(i for part in found for i in part.pairs), distances, places, joined(directions))


def _towards_moving(
    structure: Structure, pairs: list[Pair], directions: Float[Numbers, "n 3 3"]
) -> Float[Numbers, "n 3 3"]:
    """Flips frames so that normals point to the moving geom, if only the first moves."""
    signs = np.array([-1.0 if structure.geoms[pair.second].body == WORLD else 1.0 for pair in pairs])
    return directions if np.all(signs == 1.0) else directions * real(signs)[:, None, None]


def measuring_body(structure: Structure, pair: Pair) -> int:
    """Returns the body whose tree's reference is the origin for a pair's contacts."""
    second = structure.geoms[pair.second].body
    return second if second != WORLD else structure.geoms[pair.first].body


def _place(placed: Frames, measured: list[int], geoms: list[Geom]) -> PlacedGeoms:
    """Returns geoms, each measured from the reference of another body's tree."""
    sizes = np.array([geom.size for geom in geoms])
    references = pick(placed.references, measured)
    own_positions, fixed = real([geom.position for geom in geoms]), np.array([geom.rotation for geom in geoms])
    if all(geom.body == WORLD for geom in geoms):
        return PlacedGeoms(own_positions - references, fixed, sizes)
    own_rotations = real(fixed)
    bodies = [geom.body for geom in geoms]
    rotations = _rows_or(placed.rotations, bodies, np.eye(3))
    shifts = _rows_or(placed.references, bodies, np.zeros(3)) + _rows_or(placed.positions, bodies, np.zeros(3))
    positions = shifts + times(rotations, own_positions) - references
    return PlacedGeoms(positions, product(rotations, own_rotations), sizes)


def _rows_or(values: Array, indices: list[int], default: np.ndarray) -> Array:
    """Returns rows by fixed indices, with a default for missing rows."""
    if WORLD not in indices:
        return pick(values, indices)
    fixed = real(default)[None]
    return jnp.concatenate([values[i : i + 1] if i != WORLD else fixed for i in indices])


def _plane_sphere(planes: PlacedGeoms, spheres: PlacedGeoms) -> list[Points]:
    return [_plane_balls(planes, spheres.positions, spheres.sizes[:, 0], _fixed_frames(planes))]


def _plane_balls(
    planes: PlacedGeoms, centers: Float[Array, "n 3"], radii: Float[np.ndarray, " n"], directions: Numbers
) -> Points:
    normals = np.asarray(planes.rotations)[..., 2]
    distances = dot(centers - planes.positions, normals) - real(radii)
    depths = 0.5 * distances + real(radii)
    return distances, centers - depths[:, None] * real(normals), directions


def _plane_capsule(planes: PlacedGeoms, capsules: PlacedGeoms) -> list[Points]:
    """Returns a contact at each end, whose tangents are along and across the capsule."""
    normals, axes = real(planes.rotations[..., 2]), jnp.asarray(capsules.rotations[..., 2])
    tangents = unit(axes - dot(axes, normals)[:, None] * normals)
    directions = jnp.stack([normals, tangents, cross(normals, tangents)], axis=1)
    halves = real(capsules.sizes[:, 1:2])
    ends = [capsules.positions + halves * axes, capsules.positions - halves * axes]
    return [_plane_balls(planes, end, capsules.sizes[:, 0], directions) for end in ends]


def _plane_box(planes: PlacedGeoms, boxes: PlacedGeoms) -> list[Points]:
    """Returns a contact for each of the four pairs of opposite corners: the one that is nearer to the plane."""
    normals, directions = real(planes.rotations[..., 2]), _fixed_frames(planes)
    middles = dot(boxes.positions - planes.positions, normals)
    result: list[Points] = []
    for signs in ((1, 1, 1), (1, 1, -1), (1, -1, 1), (1, -1, -1)):
        corners = times(boxes.rotations, real(boxes.sizes * np.array(signs)))
        heights = dot(corners, normals)
        distances = middles - jnp.abs(heights)
        lower = jnp.where(heights > 0, -1.0, 1.0)[:, None] * corners
        result.append((distances, boxes.positions + lower - 0.5 * distances[:, None] * normals, directions))
    return result


def _sphere_sphere(first: PlacedGeoms, second: PlacedGeoms) -> list[Points]:
    return [_balls(first.positions, first.sizes, second.positions, second.sizes)]


def _sphere_capsule(spheres: PlacedGeoms, capsules: PlacedGeoms) -> list[Points]:
    axes = jnp.asarray(capsules.rotations[..., 2])
    along = _clamp_to_axis(dot(spheres.positions - capsules.positions, axes), capsules)
    nearest = capsules.positions + along[:, None] * axes
    return [_balls(spheres.positions, spheres.sizes, nearest, capsules.sizes)]


def _sphere_cylinder(spheres: PlacedGeoms, cylinders: PlacedGeoms) -> list[Points]:
    """Returns the contact with the side of a cylinder, with one of its ends, or with the edge between them."""
    axes = jnp.asarray(cylinders.rotations[..., 2])
    radii, halves = real(cylinders.sizes[:, 0]), real(cylinders.sizes[:, 1])
    apart = spheres.positions - cylinders.positions
    along = dot(apart, axes)
    aside = apart - along[:, None] * axes
    width, height = jnp.sqrt(dot(aside, aside)), jnp.abs(along)
    beside, above = height < halves, width < radii
    at_end = above & (~beside | (halves - height < radii - width))
    at_side = beside & ~at_end
    signs = jnp.where(along > 0, 1.0, -1.0)[:, None]
    to_edge = signs * halves[:, None] * axes + radii[:, None] * unit(aside) - apart
    between = jnp.where(at_side[:, None], -aside, to_edge)
    to_surface = jnp.sqrt(dot(between, between)) - jnp.where(at_side, radii, 0.0)
    distances = jnp.where(at_end, height - halves, to_surface) - real(spheres.sizes[:, 0])
    normals = jnp.where(at_end[:, None], -signs * axes, unit(between))
    depths = 0.5 * distances + real(spheres.sizes[:, 0])
    return [(distances, spheres.positions + depths[:, None] * normals, contact_frames(normals))]


def _capsule_capsule(first: PlacedGeoms, second: PlacedGeoms) -> list[Points]:
    """Returns the contact between the nearest points of two capsules' axes."""
    axes1, axes2 = jnp.asarray(first.rotations[..., 2]), jnp.asarray(second.rotations[..., 2])
    between = first.positions - second.positions
    cosines, u, v = dot(axes1, axes2), -dot(axes1, between), dot(axes2, between)
    along1 = _clamp_to_axis((u + cosines * v) / jnp.maximum(1.0 - cosines * cosines, 1e-9), first)
    along2 = _clamp_to_axis(cosines * along1 + v, second)
    along1 = _clamp_to_axis(cosines * along2 + u, first)
    nearest1, nearest2 = first.positions + along1[:, None] * axes1, second.positions + along2[:, None] * axes2
    return [_balls(nearest1, first.sizes, nearest2, second.sizes)]


def _clamp_to_axis(along: Float[Array, " n"], capsules: PlacedGeoms) -> Float[Array, " n"]:
    """Clamps positions along capsules' axes to the ends of the axes."""
    halves = real(capsules.sizes[:, 1])
    return jnp.minimum(jnp.maximum(along, -halves), halves)


def _balls(
    centers1: Float[Array, "n 3"],
    sizes1: Float[np.ndarray, "n 3"],
    centers2: Float[Array, "n 3"],
    sizes2: Float[np.ndarray, "n 3"],
) -> Points:
    between = centers2 - centers1
    normals = unit(between)
    distances = jnp.sqrt(dot(between, between)) - real(sizes1[:, 0] + sizes2[:, 0])
    depths = 0.5 * distances + real(sizes1[:, 0])
    return distances, centers1 + depths[:, None] * normals, contact_frames(normals)


def _fixed_frames(planes: PlacedGeoms) -> Float[np.ndarray, "n 3 3"]:
    """Returns the frames of contacts with planes that do not move, as `contact_frames` does."""
    normals = np.asarray(planes.rotations)[..., 2]
    second = np.where(np.abs(normals[:, 1:2]) < 0.5, [[0.0, 1.0, 0.0]], [[0.0, 0.0, 1.0]])
    tangents = second - np.sum(second * normals, axis=-1, keepdims=True) * normals
    tangents = tangents / np.linalg.norm(tangents, axis=-1, keepdims=True)
    return np.stack([normals, tangents, np.cross(normals, tangents)], axis=1)


_FINDERS: dict[tuple[str, str], Callable[[PlacedGeoms, PlacedGeoms], list[Points]]] = {
    ("plane", "sphere"): _plane_sphere,
    ("plane", "capsule"): _plane_capsule,
    ("plane", "box"): _plane_box,
    ("sphere", "sphere"): _sphere_sphere,
    ("sphere", "capsule"): _sphere_capsule,
    ("sphere", "cylinder"): _sphere_cylinder,
    ("sphere", "box"): sphere_box,
    ("capsule", "capsule"): _capsule_capsule,
    ("capsule", "box"): capsule_box,
}
