"""Describes a robot by its structure, which programs contain, and by parameters that may differ between copies."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float

Triple: TypeAlias = tuple[float, float, float]
Rows: TypeAlias = tuple[Triple, Triple, Triple]

Numbers: TypeAlias = Array | np.ndarray
"""Array of a model: a NumPy array when the model is loaded, and a JAX array when it is traced."""

WORLD = -1
"""Index that stands for the body of all geoms that cannot move."""


@dataclass(frozen=True)
class Softness:
    """The MuJoCo parameters `solref` and `solimp` of a constraint, within their limits."""

    stiffness: float
    damping: float
    impedance: tuple[float, float, float, float, float]
    """d0, d_width, width, midpoint, power."""


@dataclass(frozen=True)
class Joint:
    """A joint between a body and its parent."""

    name: str
    kind: Literal["free", "ball", "slide", "hinge"]
    position: int
    """Index of its first coordinate in `RobotState.positions`."""
    velocity: int
    """Index of its first degree of freedom in `RobotState.velocities`."""
    anchor: Triple
    axis: Triple
    """Axis of the joint in the body's frame."""
    reference: float
    """Coordinate at which the joint is in its initial pose."""
    spring_reference: float
    range: tuple[float, float] | None
    margin: float
    softness: Softness
    """Softness of the joint's limits."""
    friction_softness: Softness
    """Softness of the joint's dry friction."""
    inverse_weight: float
    """Inverse weight that scales constraints on the joint (`dof_invweight0` in MuJoCo)."""
    force_range: tuple[float, float] | None
    """Bounds on the total force of all actuators on the joint."""

    @property
    def size(self) -> int:
        """Number of the joint's degrees of freedom."""
        return {"free": 6, "ball": 3}.get(self.kind, 1)


@dataclass(frozen=True)
class Body:
    """A moving body of a robot, including all bodies that are welded to it."""

    name: str
    parent: int
    position: Triple
    rotation: Rows
    """Orientation in the parent's frame before the joints move."""
    center: Triple
    """Centre of mass in the body's frame."""
    joints: tuple[Joint, ...]
    weightless: bool
    """Whether gravity is compensated for the whole tree of the body (`gravcomp` of 1 in MuJoCo)."""


@dataclass(frozen=True)
class Geom:
    """A shape of a robot or its surroundings that takes part in collisions."""

    name: str
    kind: Literal["plane", "sphere", "capsule", "cylinder", "box"]
    body: int
    size: Triple
    position: Triple
    rotation: Rows
    """Pose in the frame of its body, or in the world."""


@dataclass(frozen=True)
class Pair:
    """Two geoms that may touch. Their kinds are in the order plane, sphere, capsule, cylinder, box."""

    first: int
    second: int
    """Indices of both geoms in `Structure.geoms`."""
    margin: float
    """Distance of the two geoms at which their contact begins."""
    frictional: bool
    impulse_ratio: float
    """Ratio of frictional to normal impedance (`impratio` in MuJoCo)."""
    softness: Softness
    inverse_weight: float
    """Sum of both bodies' `body_invweight0` of translations."""


@dataclass(frozen=True)
class BodyEquality:
    """A `connect` or `weld` constraint of MuJoCo, which ties a point of a body, or its pose, to another body."""

    name: str
    bodies: tuple[int, int]
    """Indices of the two bodies. The first body moves, and the second may be the world."""
    anchors: tuple[Triple, Triple]
    """Position of the anchor in each body's frame, or in the world."""
    rotations: tuple[Rows, Rows] | None
    """Frames in both bodies that a `weld` keeps in the same orientation."""
    torque_scale: float
    softness: Softness
    inverse_weights: tuple[float, float]
    """Sums of both bodies' `body_invweight0` of translations and rotations."""


@dataclass(frozen=True)
class JointEquality:
    """A joint equality of MuJoCo: a coordinate is constant, or a polynomial of another coordinate."""

    name: str
    velocities: tuple[int, int]
    """Degrees of freedom of both joints. The second is -1 if the coordinate is constant."""
    positions: tuple[int, int]
    references: tuple[float, float]
    polynomial: tuple[float, float, float, float, float]
    softness: Softness
    inverse_weight: float
    """Sum of both joints' `dof_invweight0`."""


@dataclass(frozen=True)
class Tendon:
    """A fixed tendon of MuJoCo. Its length is a weighted sum of coordinates of hinges and slides."""

    name: str
    velocities: tuple[int, ...]
    """Degrees of freedom of the tendon's joints."""
    positions: tuple[int, ...]
    """Indices of the coordinates of the tendon's joints."""
    coefficients: tuple[float, ...]
    range: tuple[float, float] | None
    margin: float
    softness: Softness
    """Softness of the joint's limits."""
    inverse_weight: float
    """Inverse weight that scales the tendon's limit (`tendon_invweight0` in MuJoCo)."""
    stiffness: float
    spring_range: tuple[float, float]
    """Range of lengths in which the tendon's spring is slack."""
    damping: float


@dataclass(frozen=True)
class Actuator:
    """An actuator of a joint or a tendon, or of a site, to which it applies a force and a torque."""

    name: str
    velocity: int
    """Degree of freedom of the actuator's joint, or -1 if it acts on something else."""
    position: int
    """Coordinate of the actuator's joint, or -1 if it acts on something else."""
    tendon: int
    """Index of the actuator's tendon, or -1 if it acts on something else."""
    body: int
    """Body of the actuator's site, or -1 if it acts on something else."""
    place: Triple
    rotation: Rows
    """Orientation of the actuator's site in its body's frame."""
    direction: tuple[float, float, float, float, float, float]
    """Force and torque per unit of control, in the frame of the site (`gear` in MuJoCo)."""
    control_range: tuple[float, float] | None
    force_range: tuple[float, float] | None


@dataclass(frozen=True)
class Sensor:
    """A sensor of the force or torque that a body receives from its parent, in the frame of a site.

    The reading includes all bodies beyond the body.
    """

    name: str
    kind: Literal["force", "torque"]
    body: int
    place: Triple
    rotation: Rows


@dataclass(frozen=True)
class Structure:
    """Everything about a robot that compiled programs contain, such as its bodies, joints and actuators."""

    bodies: tuple[Body, ...]
    geoms: tuple[Geom, ...]
    pairs: tuple[Pair, ...]
    body_equalities: tuple[BodyEquality, ...]
    joint_equalities: tuple[JointEquality, ...]
    tendons: tuple[Tendon, ...]
    actuators: tuple[Actuator, ...]
    sensors: tuple[Sensor, ...]
    force_readings: tuple[int, ...]
    """Degrees of freedom whose actuator and constraint forces are also read."""
    time_step: float
    implicit: Literal["none", "damping", "velocity"]
    """Forces that the integrator evaluates at the end of a step: none, those of dampers (Euler), or all that are
    linear in velocity (implicitfast)."""
    iterations: int
    line_search_iterations: int
    has_springs: bool
    has_dampers: bool
    has_servos: bool
    """Whether the force of an actuator depends on velocity."""
    frictional_dofs: tuple[int, ...]
    """Degrees of freedom with dry friction."""
    initial_positions: tuple[float, ...]
    other_readings: int = 0
    """Number of values that sensors return if MuJoCo itself steps the robot."""

    @cached_property
    def joints(self) -> tuple[Joint, ...]:
        """All joints of the robot, in the order of their coordinates."""
        return tuple(joint for body in self.bodies for joint in body.joints)

    @cached_property
    def num_velocities(self) -> int:
        """Number of the robot's degrees of freedom."""
        return sum(joint.size for joint in self.joints)

    @cached_property
    def num_readings(self) -> int:
        """Number of values that the robot's sensors return."""
        return 3 * len(self.sensors) + len(self.force_readings) + self.other_readings

    @cached_property
    def dof_bodies(self) -> tuple[int, ...]:
        """Index of the body that each degree of freedom moves."""
        return tuple(i for i, body in enumerate(self.bodies) for joint in body.joints for _ in range(joint.size))

    @cached_property
    def free_joint_dofs(self) -> tuple[int, ...]:
        """Index of the first degree of freedom of each free joint."""
        return tuple(joint.velocity for joint in self.joints if joint.kind == "free")

    @cached_property
    def has_free_joint_friction(self) -> bool:
        """Whether a free joint has dry friction."""
        return any(start <= dof < start + 6 for start in self.free_joint_dofs for dof in self.frictional_dofs)

    @cached_property
    def dof_paths(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the degrees of freedom that move each body, in order."""
        paths: list[tuple[int, ...]] = []
        for index, body in enumerate(self.bodies):
            own = tuple(dof for dof, owner in enumerate(self.dof_bodies) if owner == index)
            paths.append((paths[body.parent] if body.parent != WORLD else ()) + own)
        return tuple(paths)


class Params(eqx.Module):
    """Parameters of a robot that may differ between copies, such as masses and friction.

    Values that MuJoCo derives from them, such as inverse weights, do not change. Springs, dampers and dry friction
    cannot be added to a robot that does not have them.
    """

    gravity: Float[Numbers, "3"]
    mass: Float[Numbers, " bodies"]
    inertia: Float[Numbers, "bodies 6"]
    """Entries xx, yy, zz, xy, xz, yz about the centre of mass, in the body's frame."""
    armature: Float[Numbers, " dofs"]
    damping: Float[Numbers, " dofs"]
    stiffness: Float[Numbers, " dofs"]
    friction_loss: Float[Numbers, " dofs"]
    friction: Float[Numbers, " pairs"]
    """Coefficient of sliding friction of each pair of geoms."""
    gear: Float[Numbers, " actuators"]
    gain: Float[Numbers, " actuators"]
    """Force of each actuator per unit of control."""
    bias: Float[Numbers, "actuators 3"]
    """Force of each actuator at rest, per unit of length, and per unit of velocity."""


class Model(eqx.Module):
    """A robot: its structure and its parameters."""

    structure: Structure = eqx.field(static=True)
    params: Params


class RobotState(eqx.Module):
    """State of a robot: coordinates, velocities, and values that a step stores for the next step."""

    positions: Float[Array, " coordinates"]
    """Coordinates, as `qpos` in MuJoCo. Quaternions have length 1."""
    velocities: Float[Array, " dofs"]
    """Velocities, as `qvel` in MuJoCo."""
    accelerations: Float[Array, " dofs"]
    """Accelerations in the last step, from which the constraint solver starts."""
    sensors: Float[Array, " readings"]
    """Sensor readings of the last step: three values for each sensor, then the forces on joints."""
