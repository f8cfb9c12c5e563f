"""Computes the forces on a robot's degrees of freedom, except constraint forces."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rollmill.physics.algebra import carried_wrench, cross, pick, real, row, spatial_vector, times
from rollmill.physics.kinematics import Frames, bias_accelerations, in_world, velocities, without_flight
from rollmill.physics.masses import generalised_forces
from rollmill.physics.model import Model
from rollmill.physics.tendons import lengths, on_joints, passive, rates_of


class Actuation(NamedTuple):
    """Forces of a robot's actuators, and their derivatives."""

    forces: Float[Array, " dofs"]
    wrenches: Float[Array, "bodies 6"] | None
    """Wrenches of actuators at sites, or None if there are none."""
    slopes: Float[Array, " dofs"]
    """Derivative of each degree of freedom's force by its velocity."""
    tendon_slopes: Float[Array, " tendons"] | None
    """Derivative of each tendon's force by the rate of its length, or None if no actuator acts on a tendon."""


def body_wrenches(
    placed: Frames, motions: Float[Array, "bodies 6"], accelerations: Float[Array, "bodies 6"]
) -> Float[Array, "bodies 6"]:
    """Returns the wrench that each body needs for its motion and acceleration."""
    momenta = placed.inertias.times(motions)
    return placed.inertias.times(accelerations) + carried_wrench(motions, momenta)


def smooth_forces(
    model: Model,
    placed: Frames,
    positions: Float[Array, " coordinates"],
    rates: Float[Array, " dofs"],
    acted: Actuation,
) -> Float[Array, " dofs"]:
    """Returns all forces except constraint forces: actuators, springs, dampers, gravity and inertial forces.

    Gravity and inertial forces are computed by the recursive Newton-Euler algorithm. Forces on free bodies refer
    to the world's axes.
    """
    turning = without_flight(model.structure, in_world(model.structure, placed, rates))
    motions = velocities(model.structure, placed, turning)
    accelerations = bias_accelerations(model, placed, turning, motions, of_weightless=False)
    wrenches = body_wrenches(placed, motions, accelerations)
    if acted.wrenches is not None:
        wrenches = wrenches - acted.wrenches
    bias = generalised_forces(model.structure, placed, wrenches)
    driven = acted.forces + passive_forces(model, positions, rates)
    if any(tendon.stiffness or tendon.damping for tendon in model.structure.tendons):
        driven = driven + on_joints(model.structure, passive(model.structure, positions, rates))
    return in_world(model.structure, placed, driven) - bias


def passive_forces(model: Model, positions: Float[Array, " coordinates"], rates: Float[Array, " dofs"]) -> Array:
    """Returns the forces of the joints' springs and dampers, `[dofs]`."""
    forces = -jnp.asarray(model.params.damping, float) * rates
    if not model.structure.has_springs:
        return forces
    stiffness = model.params.stiffness
    stretches: list[Array] = []
    for joint in model.structure.joints:
        is_scalar = joint.kind in ("hinge", "slide")
        stretch = (
            (row(positions, joint.position) - joint.spring_reference)[None] if is_scalar else jnp.zeros(joint.size)
        )
        stretches.append(stretch)
    return forces - jnp.asarray(stiffness, float) * jnp.concatenate(stretches)


def actuation(
    model: Model,
    placed: Frames,
    positions: Float[Array, " coordinates"],
    rates: Float[Array, " dofs"],
    control: Float[Array, " actuators"],
) -> Actuation:
    """Returns the forces of a robot's actuators, and their derivatives."""
    actuators, params = model.structure.actuators, model.params
    if not actuators:
        return Actuation(jnp.zeros_like(rates), None, jnp.zeros_like(rates), None)
    gear, bias = jnp.asarray(params.gear, float), jnp.asarray(params.bias, float)
    tendons = [actuator.tendon for actuator in actuators]
    has_tendons = any(index >= 0 for index in tendons)
    zero = jnp.zeros(1)

    def chosen(values: Array, indices: list[int]) -> Array:
        return jnp.concatenate([values[i : i + 1] if i >= 0 else zero for i in indices])

    reach = chosen(positions, [actuator.position for actuator in actuators])
    speeds = chosen(rates, [actuator.velocity for actuator in actuators])
    if has_tendons:
        reach = reach + chosen(lengths(model.structure, positions), tendons)
        speeds = speeds + chosen(rates_of(model.structure, rates), tendons)
    reach, speeds = gear * reach, gear * speeds
    clamped = _clamp(control, [actuator.control_range for actuator in actuators])
    force = jnp.asarray(params.gain, float) * clamped + bias[:, 0] + bias[:, 1] * reach + bias[:, 2] * speeds
    bounded = _clamp(force, [actuator.force_range for actuator in actuators])
    slopes = jnp.where(force == bounded, bias[:, 2] * gear * gear, 0.0)
    forces = _by_dof(model, gear * bounded)
    tendon_slopes = None
    if has_tendons:
        forces = forces + on_joints(model.structure, _by_tendon(model, gear * bounded))
        tendon_slopes = _by_tendon(model, slopes)
    has_sites = any(actuator.body >= 0 for actuator in actuators)
    wrenches = _site_wrenches(model, placed, gear * bounded) if has_sites else None
    return Actuation(_clamp(forces, _joint_bounds(model)), wrenches, _by_dof(model, slopes), tendon_slopes)


def _clamp(values: Float[Array, " n"], bounds: list[tuple[float, float] | None]) -> Array:
    """Clips values to optional bounds."""
    if not any(bounds):
        return values
    low, high = np.array([bound or (-np.inf, np.inf) for bound in bounds]).T
    return jnp.minimum(jnp.maximum(values, real(low)), real(high))


def _joint_bounds(model: Model) -> list[tuple[float, float] | None]:
    return [joint.force_range for joint in model.structure.joints for _ in range(joint.size)]


def _by_dof(model: Model, values: Float[Array, " actuators"]) -> Float[Array, " dofs"]:
    """Returns for each degree of freedom the sum over the actuators of its joint."""
    targets = [actuator.velocity for actuator in model.structure.actuators]
    return _sums(values, targets, model.structure.num_velocities)


def _by_tendon(model: Model, values: Float[Array, " actuators"]) -> Float[Array, " tendons"]:
    """Returns for each tendon the sum over its actuators."""
    targets = [actuator.tendon for actuator in model.structure.actuators]
    return _sums(values, targets, len(model.structure.tendons))


def _sums(values: Float[Array, " n"], targets: list[int], size: int) -> Float[Array, " m"]:
    """Returns sums of values by their targets."""
    sums: list[Array] = []
    for target in range(size):
        own = [i for i, each in enumerate(targets) if each == target]
        sums.append(jnp.sum(pick(values, own), keepdims=True) if own else jnp.zeros(1))
    return jnp.concatenate(sums)


def _site_wrenches(model: Model, placed: Frames, forces: Float[Array, " actuators"]) -> Float[Array, "bodies 6"]:
    sums = [jnp.zeros(6)] * len(model.structure.bodies)
    for i, actuator in enumerate(model.structure.actuators):
        if actuator.body >= 0:
            rotation = row(placed.rotations, actuator.body)
            arm = row(placed.positions, actuator.body) + times(rotation, real(actuator.place))
            own = np.array(actuator.rotation)
            push = times(rotation, real(own @ actuator.direction[:3])) * row(forces, i)
            twist = times(rotation, real(own @ actuator.direction[3:])) * row(forces, i)
            sums[actuator.body] = sums[actuator.body] + spatial_vector(twist + cross(arm, push), push)
    return jnp.stack(sums)
