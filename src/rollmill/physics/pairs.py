"""Finds the pairs of geoms that may touch, and the parameters of their contacts, by the rules of MuJoCo."""

from itertools import combinations
from typing import Any

import numpy as np

from rollmill.core.errors import UsageError
from rollmill.physics.model import WORLD, Geom, Pair
from rollmill.physics.reader import Reader, as_rows, margins_add

KINDS: dict[str, Any] = {
    "PLANE": "plane",
    "SPHERE": "sphere",
    "CAPSULE": "capsule",
    "CYLINDER": "cylinder",
    "BOX": "box",
}
COVERED = {
    ("plane", "sphere"),
    ("plane", "capsule"),
    ("plane", "box"),
    ("sphere", "sphere"),
    ("sphere", "capsule"),
    ("sphere", "cylinder"),
    ("sphere", "box"),
    ("capsule", "capsule"),
    ("capsule", "box"),
}
"""Kinds of geoms between which contacts are found."""


def pairs_of(read: Reader) -> tuple[list[Geom], list[Pair], list[float]]:
    """Returns the geoms that may touch others, the pairs of them, and the friction of each pair.

    Raises:
        UsageError: contacts between two of the geoms are not supported.
    """
    if not read.contacts:
        return [], [], []
    colliding = [pair for pair in combinations(range(read.compiled.ngeom), 2) if _may_touch(read, *pair)]
    colliding = [
        tuple(sorted(pair, key=lambda index: (read.compiled.geom_type[index], index))) for pair in colliding
    ]
    for first, second in colliding:
        _refuse_uncovered(read, first, second)
    used = sorted({index for pair in colliding for index in pair})
    number = {index: position for position, index in enumerate(used)}
    pairs = [_pair(read, first, second, number) for first, second in colliding]
    friction = [_friction(read, first, second) for first, second in colliding]
    return [_geom(read, index) for index in used], pairs, friction


def _may_touch(read: Reader, a: int, b: int) -> bool:
    """Returns whether MuJoCo looks for contacts of two geoms."""
    m = read.compiled
    owners = [read.owner_body(int(m.geom_bodyid[index])) for index in (a, b)]
    if owners[0] == owners[1]:
        return False
    parents = [read.owner_body(int(m.body_parentid[owner])) for owner in owners]
    are_next = parents[0] == owners[1] or parents[1] == owners[0]
    if are_next and 0 not in owners and not read.is_disabled("FILTERPARENT"):
        return False
    low, high = sorted(int(m.geom_bodyid[index]) for index in (a, b))
    if ((low + 1) << 16) + high + 1 in _read_excluded(read) or (low << 16) + high in _read_excluded(read):
        return False
    types, affinities = m.geom_contype, m.geom_conaffinity
    return bool((types[a] & affinities[b]) | (types[b] & affinities[a]))


def _read_excluded(read: Reader) -> set[int]:
    return {int(signature) for signature in read.compiled.exclude_signature}


def _refuse_uncovered(read: Reader, first: int, second: int) -> None:
    m = read.compiled
    names = " and ".join(repr(read.name("GEOM", index)) for index in (first, second))
    types = [
        read.mujoco.mjtGeom(int(m.geom_type[index])).name.removeprefix("mjGEOM_") for index in (first, second)
    ]
    way_out = "hint: disable these contacts with contype and conaffinity or with an exclude, or use other shapes."
    if tuple(KINDS.get(kind) for kind in types) not in COVERED:
        kinds = " and a ".join(kind.lower() for kind in types)
        raise UsageError(f"contacts between the geoms {names}, a {kinds}, are not supported. {way_out}")
    if m.geom_type[first] == read.mujoco.mjtGeom.mjGEOM_PLANE and read.owner(int(m.geom_bodyid[first])) != WORLD:
        raise UsageError(f"the plane {read.name('GEOM', first)!r} moves, which is not supported. {way_out}")
    dimension = _dimension(read, first, second)
    if dimension not in (1, 3):
        raise UsageError(
            f"contacts between the geoms {names} have condim={dimension} (torsional or rolling friction), which "
            "is not supported. hint: use condim 1 or 3."
        )


def _geom(read: Reader, index: int) -> Geom:
    m = read.compiled
    body = int(m.geom_bodyid[index])
    position, rotation = read.pose_in_owner(body, m.geom_pos[index], m.geom_quat[index])
    x, y, z = (float(value) for value in position)
    a, b, c = (float(value) for value in m.geom_size[index])
    kind = KINDS[read.mujoco.mjtGeom(int(m.geom_type[index])).name.removeprefix("mjGEOM_")]
    return Geom(read.name("GEOM", index), kind, read.owner(body), (a, b, c), (x, y, z), as_rows(rotation))


def _dimension(read: Reader, a: int, b: int) -> int:
    m = read.compiled
    return int(m.geom_condim[_prior(read, a, b)]) if _differ(read, a, b) else int(max(m.geom_condim[[a, b]]))


def _friction(read: Reader, a: int, b: int) -> float:
    m = read.compiled
    chosen = _prior(read, a, b) if _differ(read, a, b) else [a, b]
    return max(1e-5, float(np.max(m.geom_friction[chosen, 0])))


def _differ(read: Reader, a: int, b: int) -> bool:
    return bool(read.compiled.geom_priority[a] != read.compiled.geom_priority[b])


def _prior(read: Reader, a: int, b: int) -> int:
    return a if read.compiled.geom_priority[a] > read.compiled.geom_priority[b] else b


def _pair(read: Reader, a: int, b: int, number: dict[int, int]) -> Pair:
    m = read.compiled
    margins, gaps = m.geom_margin[[a, b]], m.geom_gap[[a, b]]
    combine = np.sum if margins_add() else np.max
    bodies = m.geom_bodyid[[a, b]]
    reference, impedance = _mix(read, a, b)
    return Pair(
        first=number[a],
        second=number[b],
        margin=float(combine(margins) - combine(gaps)),
        frictional=_dimension(read, a, b) == 3,
        impulse_ratio=float(m.opt.impratio),
        softness=read.softness(reference, impedance),
        inverse_weight=float(m.body_invweight0[bodies, 0].sum()),
    )


def _mix(read: Reader, a: int, b: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns `solref` and `solimp` of a contact: of the geom of higher priority, or mixed by `solmix`."""
    m = read.compiled
    if _differ(read, a, b):
        chosen = _prior(read, a, b)
        return m.geom_solref[chosen], m.geom_solimp[chosen]
    one, other = (float(value) for value in m.geom_solmix[[a, b]])
    tiny = 1e-15
    if one >= tiny and other >= tiny:
        share = one / (one + other)
    else:
        share = 0.5 if one < tiny and other < tiny else float(one >= tiny)
    references = m.geom_solref[[a, b]]
    if np.all(references[:, 0] > 0):
        reference = share * references[0] + (1 - share) * references[1]
    else:
        reference = np.minimum(references[0], references[1])
    return reference, share * m.geom_solimp[a] + (1 - share) * m.geom_solimp[b]
