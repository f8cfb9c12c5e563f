"""Contacts of spheres and capsules with boxes, by the rules of MuJoCo.

A capsule touches a box like one or two spheres on its axis. The first sphere is the nearest to the box. The second
is as far as possible from the first, over the same face or along the same edge of the box.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rollmill.physics.algebra import TINY, dot, real, times, transpose_matrix
from rollmill.physics.shapes import PlacedGeoms, Points, contact_frames

APART = 1e3
"""Distance of a contact that does not exist (m)."""

EDGES = [(axis, corner) for axis in range(3) for corner in np.ndindex(2, 2)]
"""Axis of each edge of a box, and the sides of its middle along the two others."""


class _Segment(NamedTuple):
    """The axis of each capsule in the frame of its box."""

    middles: Float[Array, "n 3"]
    halves: Float[Array, "n 3"]
    """From the middle to an end."""
    axes: Float[Array, "n 3"]
    sizes: Float[Array, "n 3"]
    """Of the boxes."""


class _Nearest(NamedTuple):
    """Where a segment is nearest to its box."""

    along: Float[Array, " n"]
    """Place on the segment, -1 to 1."""
    on_edge: Float[Array, " n"]
    """Place on the box's edge."""
    case: Int[Array, " n"]
    """0 for a face or the inside, 1 for the middle of an edge, 2 for a corner."""
    face: Int[Array, " n"]
    """Axis of the face, or -1 for the inside of the box."""
    edge: Int[Array, " n"]
    """Axis of the edge."""
    corner: Float[Array, "n 3"]
    """Signs of the corner. For an edge, the sign along its axis is -1."""


def sphere_box(spheres: PlacedGeoms, boxes: PlacedGeoms) -> list[Points]:
    """Returns the contact of each sphere with its box."""
    rotations = jnp.asarray(boxes.rotations)
    centers = times(transpose_matrix(rotations), spheres.positions - boxes.positions)
    return [_ball_in_box(centers, real(spheres.sizes[:, 0]), rotations, boxes)]


def capsule_box(capsules: PlacedGeoms, boxes: PlacedGeoms) -> list[Points]:
    """Returns two contacts of each capsule with its box. The second contact may be far away."""
    rotations = jnp.asarray(boxes.rotations)
    axes = times(transpose_matrix(rotations), jnp.asarray(capsules.rotations[..., 2]))
    halves = axes * real(capsules.sizes[:, 1:2])
    middles = times(transpose_matrix(rotations), capsules.positions - boxes.positions)
    segment = _Segment(middles, halves, axes, real(boxes.sizes))
    nearest = _nearest(segment, real(capsules.sizes[:, 1]))
    farther, has_second = _second(segment, nearest)
    radii = real(capsules.sizes[:, 0])
    ends = [nearest.along, nearest.along + farther]
    first, (distances, places, frames) = (
        _ball_in_box(middles + end[:, None] * halves, radii, rotations, boxes) for end in ends
    )
    return [first, (jnp.where(has_second, distances, APART), places, frames)]


def _ball_in_box(
    centers: Float[Array, "n 3"], radii: Float[Array, " n"], rotations: Float[Array, "n 3 3"], boxes: PlacedGeoms
) -> Points:
    """Returns contacts of balls, given their centres in the frames of boxes."""
    sizes = real(boxes.sizes)
    clamped = jnp.minimum(jnp.maximum(centers, -sizes), sizes)
    apart = clamped - centers
    outside = jnp.sqrt(dot(apart, apart))
    is_inside = outside <= TINY
    # Inside the box, the nearest face has the least depth. If depths are equal, the first axis counts, and the
    # lower face before the upper face.
    depths = jnp.concatenate([jnp.abs(-sizes - centers), jnp.abs(sizes - centers)], axis=1)
    depths = depths[:, np.array([0, 3, 1, 4, 2, 5])]
    which = jnp.argmin(depths, axis=1)
    inwards = _select_rows(which, real(np.repeat(np.eye(3), 2, axis=0) * np.array([[1.0], [-1.0]] * 3)))
    depth = jnp.min(depths, axis=1)
    normals = jnp.where(is_inside[:, None], inwards, apart / jnp.where(is_inside, 1.0, outside)[:, None])
    in_middle = centers + inwards * (0.5 * (radii - depth))[:, None]
    at_surface = 0.5 * (clamped + centers + normals * radii[:, None])
    places = jnp.where(is_inside[:, None], in_middle, at_surface)
    distances = jnp.where(is_inside, -depth, outside) - radii
    return distances, boxes.positions + times(rotations, places), contact_frames(times(rotations, normals))


def _select_rows(which: Int[Array, " n"], rows: Float[Array, "m k"]) -> Float[Array, "n k"]:
    """Returns rows of a table, without a gather."""
    picked = which[:, None] == jnp.arange(rows.shape[0])[None]
    return jnp.sum(jnp.where(picked[:, :, None], rows[None], 0.0), axis=1)


def _of(which: Int[Array, " n"], values: Float[Array, "n m"]) -> Float[Array, " n"]:
    """Returns an entry of each row."""
    picked = which[:, None] == jnp.arange(values.shape[1])[None]
    return jnp.sum(jnp.where(picked, values, 0.0), axis=1)


def _nearest(segment: _Segment, half_lengths: Float[Array, " n"]) -> _Nearest:
    """Returns the point of each segment nearest to the box: an end above a face, or a point next to an edge."""
    faces = [_over_face(segment, sign) for sign in (-1.0, 1.0)]
    squares, along, on_edge, at_end = _next_to_edges(segment, half_lengths)
    every = jnp.concatenate([jnp.stack([face[0] for face in faces], axis=1), squares], axis=1)
    best = jnp.argmin(every, axis=1)
    edge = jnp.maximum(best - 2, 0)
    at_face, which = best < 2, jnp.stack([face[1] for face in faces], axis=1)
    face = jnp.where(best == 0, which[:, 0], which[:, 1])
    upper = _of(edge, jnp.where(at_end > 0, 1.0, 0.0)) > 0.5
    at_corner = _of(edge, jnp.where(at_end == 0, 0.0, 1.0)) > 0.5
    axis = _of(edge, real(np.broadcast_to([axis for axis, _ in EDGES], squares.shape))).astype(jnp.int32)
    corner = _select_rows(edge, real(_signs()))
    own = axis[:, None] == jnp.arange(3)[None]
    corner = jnp.where(own, jnp.where(upper, 1.0, -1.0)[:, None], corner)
    ends = jnp.where(best == 0, -1.0, 1.0)
    return _Nearest(
        along=jnp.where(at_face, ends, _of(edge, along)),
        on_edge=_of(edge, on_edge),
        case=jnp.where(at_face, 0, jnp.where(at_corner, 2, 1)),
        face=face,
        edge=axis,
        corner=corner,
    )


def _over_face(segment: _Segment, sign: float) -> tuple[Float[Array, " n"], Int[Array, " n"]]:
    """Returns the squared distance of an end to the face that it is over, and the axis of that face."""
    ends = segment.middles + sign * segment.halves
    apart = ends - jnp.minimum(jnp.maximum(ends, -segment.sizes), segment.sizes)
    beyond = jnp.abs(ends) > segment.sizes
    count = jnp.sum(jnp.where(beyond, 1, 0), axis=1)
    axis = jnp.where(count == 0, -1, jnp.sum(jnp.where(beyond, jnp.arange(3)[None], 0), axis=1))
    return jnp.where(count <= 1, dot(apart, apart), jnp.inf), axis


def _signs() -> np.ndarray:
    """Returns the signs of each edge's midpoint: 0 along the edge, and -1 or 1 along the other axes."""
    signs = np.zeros((len(EDGES), 3))
    for number, (axis, corner) in enumerate(EDGES):
        lower, upper = (other for other in range(3) if other != axis)
        signs[number, upper], signs[number, lower] = (2 * side - 1 for side in corner)
    return signs


def _next_to_edges(
    segment: _Segment, half_lengths: Float[Array, " n"]
) -> tuple[Float[Array, "n 12"], Float[Array, "n 12"], Float[Array, "n 12"], Float[Array, "n 12"]]:
    """Returns squared distances to edges, nearest points on segment and edge, and the signs of edge ends or 0."""
    signs, axes = _signs(), np.array([axis for axis, _ in EDGES])
    size = segment.sizes[:, axes]
    half = segment.halves[:, axes]
    middles = real(signs)[None] * segment.sizes[:, None, :]
    apart = middles - segment.middles[:, None, :]
    ma, mb = size * size, -size * half
    mc = jnp.broadcast_to((half_lengths * half_lengths)[:, None], ma.shape)
    u = -size * jnp.stack([apart[:, number, axis] for number, axis in enumerate(axes)], axis=1)
    v = dot(jnp.broadcast_to(segment.halves[:, None, :], apart.shape), apart)
    determinant = ma * mc - mb * mb
    flat = jnp.abs(determinant) < jnp.maximum(TINY, 8 * jnp.finfo(ma.dtype).eps * ma * mc)
    inverse = 1.0 / jnp.where(flat, 1.0, determinant)
    x1, x2 = (mc * u - mb * v) * inverse, (ma * v - mb * u) * inverse
    one = jnp.ones_like(x1)
    for_end1 = jnp.where(x1 > 1, (v - mb) / mc, (v + mb) / mc)
    is_beyond = jnp.abs(x1) > 1
    x1, x2 = jnp.where(is_beyond, jnp.sign(x1), x1), jnp.where(is_beyond, for_end1, x2)
    for_end2 = jnp.where(x2 > 1, (u - mb) / ma, (u + mb) / ma)
    is_past = jnp.abs(x2) > 1
    limited = jnp.minimum(jnp.maximum(for_end2, -one), one)
    at_end = jnp.where(is_beyond, jnp.sign(x1), 0.0)
    outside = jnp.where(jnp.abs(for_end2) > 1, jnp.sign(for_end2), at_end)
    at_end = jnp.where(is_past, outside, at_end)
    x1, x2 = jnp.where(is_past, limited, x1), jnp.where(is_past, jnp.sign(x2), x2)
    along_edge = real(np.eye(3)[axes])[None] * (size * x1)[:, :, None]
    between = apart - x2[:, :, None] * segment.halves[:, None, :] + along_edge
    return jnp.where(flat, jnp.inf, dot(between, between)), x2, x1, at_end


def _second(segment: _Segment, nearest: _Nearest) -> tuple[Float[Array, " n"], Bool[Array, " n"]]:
    """Returns how far along the segment the second contact is from the first, and whether there is one."""
    at_corner, has_corner = _from_corner(segment, nearest)
    at_edge, has_edge = _from_edge(segment, nearest)
    at_face = _from_face(segment, nearest)
    by_case = [at_face, at_edge, at_corner]
    exists = [nearest.face >= 0, has_edge, has_corner]
    result, has_second = by_case[2], exists[2]
    for case in (0, 1):
        result = jnp.where(nearest.case == case, by_case[case], result)
        has_second = jnp.where(nearest.case == case, exists[case], has_second)
    return result, has_second


def _spans(segment: _Segment) -> Float[Array, "n 3"]:
    """Returns how far along the segment both faces of each axis are apart."""
    return 2.0 * segment.sizes / jnp.abs(segment.halves)


def _differing(segment: _Segment, nearest: _Nearest) -> Bool[Array, "n 3"]:
    """Returns whether the segment points to the other side than the corner, for each axis."""
    return (segment.halves > 0) != (nearest.corner > 0)


def _from_corner(segment: _Segment, nearest: _Nearest) -> tuple[Float[Array, " n"], Bool[Array, " n"]]:
    differing = _differing(segment, nearest)
    count = jnp.sum(jnp.where(differing, 1, 0), axis=1)
    # the axis whose sign differs from the two others
    is_odd = jnp.where((count == 1)[:, None], differing, ~differing)
    direction = jnp.where(count == 1, 1.0, -1.0)
    spans = _spans(segment)
    along = jnp.minimum(1.0 - direction * nearest.along, _least(spans, is_odd))
    across = jnp.minimum(1.0 + direction * nearest.along, _least(spans, ~is_odd))
    steep = jnp.sum(jnp.where(is_odd, segment.axes * segment.axes, 0.0), axis=1) > 0.5
    return jnp.where(steep, direction * along, -direction * across), (count == 1) | (count == 2)


def _least(values: Float[Array, "n 3"], where: Bool[Array, "n 3"]) -> Float[Array, " n"]:
    return jnp.min(jnp.where(where, values, jnp.inf), axis=1)


def _from_edge(segment: _Segment, nearest: _Nearest) -> tuple[Float[Array, " n"], Bool[Array, " n"]]:
    own = nearest.edge[:, None] == jnp.arange(3)[None]
    differing = _differing(segment, nearest) & ~own
    exists = jnp.sum(jnp.where(differing, 1, 0), axis=1) == 1
    lengths = jnp.abs(segment.axes)
    # Of the two other axes, the axis along which the segment is longer. If they are equal, the second after the
    # edge's axis.
    after, second = ((nearest.edge + k) % 3 for k in (1, 2))
    longer = jnp.where(_of(after, lengths) > _of(second, lengths), after, second)
    turns = _of(longer, jnp.where(differing, 1.0, 0.0)) > 0.5
    direction = jnp.where(turns, 1.0, -1.0)
    points_up = _of(nearest.edge, jnp.where(segment.halves > 0, 1.0, 0.0)) > 0.5
    left = jnp.where(points_up == turns, 1.0 - nearest.on_edge, 1.0 + nearest.on_edge)
    along_edge = jnp.maximum(jnp.abs(_of(nearest.edge, segment.halves)), TINY)
    over_edge = _of(nearest.edge, segment.sizes) * left / along_edge
    far = jnp.minimum(1.0 - direction * nearest.along, _of(longer, _spans(segment)))
    return direction * jnp.minimum(far, over_edge), exists


def _from_face(segment: _Segment, nearest: _Nearest) -> Float[Array, " n"]:
    """Returns the way from an end to where the segment leaves the space over the face, or to its other end."""
    ends = segment.middles + nearest.along[:, None] * segment.halves
    is_other = nearest.face[:, None] != jnp.arange(3)[None]
    inwards = -nearest.along[:, None]
    exits = jnp.full(nearest.along.shape, 2.0)
    for sign in (1.0, -1.0):
        ways = (sign * segment.sizes - ends) / segment.halves * inwards
        exits = jnp.minimum(exits, _least(ways, is_other & (ways > 0)))
    return -nearest.along * exits
