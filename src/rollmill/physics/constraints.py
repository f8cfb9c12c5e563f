"""Computes the soft constraints of MuJoCo in one configuration: reference acceleration and stiffness of each row.

The reference acceleration of a row is a_ref = -b v - k d (r - margin), where r is the constraint's position, v its
velocity and d its impedance. The row pushes with the force D (a_ref - a) (MuJoCo documentation, "Computation",
Constraint model).
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rollmill.physics.algebra import TINY, pick, real, times
from rollmill.physics.collisions import Contacts, contacts, measuring_body
from rollmill.physics.kinematics import Frames
from rollmill.physics.model import WORLD, Joint, Model, Numbers, Softness, Structure, Tendon
from rollmill.physics.sides import ContactSides, between_sides
from rollmill.physics.tendons import lengths, rates_of


class ContactRows(NamedTuple):
    """Constraint rows of contacts: the four edges of each friction pyramid.

    Each edge is the normal plus or minus friction times a tangent.
    """

    sides: tuple[ContactSides, ...]
    frames: Float[Numbers, "contacts 3 3"]
    friction: Float[Array, " contacts"]
    """Friction of each contact. If it is 0, the four rows are equal, with a quarter of the stiffness each."""
    stiffness: Float[Array, " contacts"]
    """Stiffness D of each row, which is 0 if the geoms do not touch."""
    wanted: Float[Array, "contacts 3"]
    """Reference accelerations along the normal and the tangents."""


class JointRows(NamedTuple):
    """Constraint rows on single degrees of freedom: limits of joints and dry friction."""

    dofs: tuple[int, ...]
    stiffness: Float[Array, " rows"]
    wanted: Float[Array, " rows"]
    sign: Float[Array, " rows"]
    """Direction of each limit: 1 at the lower limit, and -1 at the upper limit."""
    bounds: Float[Array, " rows"]
    """Maximum force of each row with dry friction."""


class TendonRows(NamedTuple):
    """Constraint rows of tendon limits, one for each tendon."""

    stiffness: Float[Array, " tendons"]
    wanted: Float[Array, " tendons"]
    sign: Float[Array, " tendons"]
    """Direction of each limit: 1 at the lower limit, and -1 at the upper limit."""


class ConstraintRows(NamedTuple):
    """All constraint rows of a robot in one configuration, except equality constraints."""

    contacts: ContactRows | None
    limits: JointRows | None
    frictions: JointRows | None
    tendons: TendonRows | None

    @property
    def are_none(self) -> bool:
        """Whether there are no constraint rows."""
        return all(group is None for group in self)


def constraint_rows(
    model: Model,
    placed: Frames,
    positions: Float[Array, " coordinates"],
    rates: Float[Array, " dofs"],
    motions: Float[Array, "bodies 6"],
) -> ConstraintRows:
    """Returns the constraint rows of a robot in one configuration."""
    touching = contacts(model, placed)
    return ConstraintRows(
        None if touching is None else _contact_rows(model, placed, motions, touching),
        _limit_rows(model.structure, positions, rates),
        _friction_rows(model, rates),
        _tendon_rows(model.structure, positions, rates),
    )


def relative_velocities(rows: ContactRows, motions: Float[Array, "bodies 6"]) -> Float[Array, "contacts 3"]:
    """Returns the relative velocities, or accelerations, of contacts along their normals and tangents."""
    return times(rows.frames, between_sides(rows.sides, motions))


def _contact_rows(
    model: Model, placed: Frames, motions: Float[Array, "bodies 6"], touching: Contacts
) -> ContactRows:
    pairs = [model.structure.pairs[i] for i in touching.pairs]
    has_friction = real([pair.frictional for pair in pairs])
    friction = pick(jnp.asarray(model.params.friction, float), touching.pairs) * has_friction
    offsets = touching.distances - real([pair.margin for pair in pairs])
    impedance = impedances([pair.softness for pair in pairs], offsets)
    weight = real([pair.inverse_weight for pair in pairs]) * (1.0 + friction * friction)
    resistance = (1.0 - impedance) / impedance * weight
    pyramid = real([2.0 / pair.impulse_ratio for pair in pairs]) * friction * friction
    # A contact without friction has four equal rows instead of one.
    resistance = resistance * jnp.where(has_friction > 0, pyramid, 4.0)
    stiffness = jnp.where(offsets < 0, 1.0 / jnp.maximum(resistance, TINY), 0.0)
    sides = _sides(model.structure, placed, touching)
    damping = real([[pair.softness.damping] for pair in pairs])
    velocities = times(touching.frames, between_sides(sides, motions))
    pulls = real([pair.softness.stiffness for pair in pairs]) * impedance * offsets
    wanted = -damping * velocities - jnp.stack([pulls, jnp.zeros_like(pulls), jnp.zeros_like(pulls)], axis=1)
    return ContactRows(sides, touching.frames, friction, stiffness, wanted)


def _sides(structure: Structure, placed: Frames, touching: Contacts) -> tuple[ContactSides, ...]:
    """Returns the moving bodies of contacts: one of each contact, then the others of those that have two."""
    pairs = [structure.pairs[i] for i in touching.pairs]
    measured = [measuring_body(structure, pair) for pair in pairs]
    owners = [(structure.geoms[pair.second].body, structure.geoms[pair.first].body) for pair in pairs]
    result: list[ContactSides] = []
    result.append(ContactSides(tuple(range(len(pairs))), tuple(measured), touching.places, 1.0))
    both = tuple(i for i, pair in enumerate(owners) if WORLD not in pair)
    if both:
        bodies = tuple(owners[i][1] for i in both)
        references = pick(placed.references, [measured[i] for i in both])
        arms = pick(touching.places, both) + references - pick(placed.references, bodies)
        result.append(ContactSides(both, bodies, arms, -1.0))
    return tuple(result)


def _limit_rows(
    structure: Structure, positions: Float[Array, " coordinates"], rates: Float[Array, " dofs"]
) -> JointRows | None:
    joints = [joint for joint in structure.joints if joint.range is not None]
    if not joints:
        return None
    dofs = tuple(joint.velocity for joint in joints)
    at = pick(positions, [joint.position for joint in joints])
    rigid, wanted, sign = _compute_limits(joints, at, pick(rates, dofs))
    return JointRows(dofs, rigid, wanted, sign, jnp.full_like(sign, jnp.inf))


def _tendon_rows(
    structure: Structure, positions: Float[Array, " coordinates"], rates: Float[Array, " dofs"]
) -> TendonRows | None:
    tendons = structure.tendons
    if all(tendon.range is None for tendon in tendons):
        return None
    return TendonRows(*_compute_limits(tendons, lengths(structure, positions), rates_of(structure, rates)))


def _compute_limits(
    parts: Sequence[Joint | Tendon], at: Float[Array, " n"], rates: Float[Array, " n"]
) -> tuple[Float[Array, " n"], Float[Array, " n"], Float[Array, " n"]]:
    """Returns stiffness, wanted acceleration and sign of rows that keep coordinates within their ranges."""
    low, high = np.array([part.range or (-np.inf, np.inf) for part in parts]).T
    is_limited = np.isfinite(low)
    low, high = np.where(is_limited, [low, high], [[0.0], [1.0]])
    from_low, to_high = at - real(low), real(high) - at
    sign = jnp.where(from_low < to_high, 1.0, -1.0)
    offsets = jnp.minimum(from_low, to_high) - real([part.margin for part in parts])
    impedance = impedances([part.softness for part in parts], offsets)
    resistance = (1.0 - impedance) / impedance * real([part.inverse_weight for part in parts])
    damping, stiffness = (real([getattr(p.softness, name) for p in parts]) for name in ("damping", "stiffness"))
    wanted = -damping * sign * rates - stiffness * impedance * offsets
    is_active = offsets < 0 if is_limited.all() else (offsets < 0) & jnp.asarray(is_limited)
    return jnp.where(is_active, 1.0 / jnp.maximum(resistance, TINY), 0.0), wanted, sign


def _friction_rows(model: Model, rates: Float[Array, " dofs"]) -> JointRows | None:
    dofs = model.structure.frictional_dofs
    if not dofs:
        return None
    owners: dict[int, Joint] = {
        joint.velocity + k: joint for joint in model.structure.joints for k in range(joint.size)
    }
    joints = [owners[dof] for dof in dofs]
    impedance = np.array([joint.friction_softness.impedance[0] for joint in joints])
    weights = np.array([joint.inverse_weight for joint in joints])
    stiffness = impedance / np.maximum((1 - impedance) * weights, TINY)
    wanted = real([-joint.friction_softness.damping for joint in joints]) * pick(rates, dofs)
    bounds = pick(jnp.asarray(model.params.friction_loss, float), dofs)
    return JointRows(dofs, real(stiffness), wanted, jnp.ones_like(wanted), bounds)


def impedances(softness: list[Softness], offsets: Float[Array, " n"]) -> Float[Array, " n"]:
    """Returns the impedances d(r) of MuJoCo, at distances from the constraints' margins."""
    low, high, width, midpoint, power = np.array([one.impedance for one in softness]).T
    is_flat = (low == high) | (width <= TINY)
    x = jnp.minimum(jnp.abs(offsets) / real(np.where(is_flat, 1.0, width)), 1.0)
    rising = _powers(x, power) * real(midpoint ** (1 - power))
    falling = 1.0 - _powers(1.0 - x, power) * real((1 - midpoint) ** (1 - power))
    share = jnp.where(x <= real(midpoint), rising, falling)
    return jnp.where(is_flat, real(0.5 * (low + high)), real(low) + real(high - low) * share)


def _powers(x: Float[Array, " n"], power: np.ndarray) -> Float[Array, " n"]:
    if np.all(power == 2.0):
        return x * x
    return x if np.all(power == 1.0) else jnp.power(x, real(power))
