"""Reads a compiled MuJoCo model. Bodies without joints become parts of the bodies that carry them."""

import importlib
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from rollmill.physics.model import WORLD, Rows, Softness, Triple

_TINY = 1e-15
"""The constant `mjMINVAL` of MuJoCo."""


class Reader:
    """A compiled MuJoCo model, with functions that several parts of the loader use."""

    def __init__(self, mujoco: Any, compiled: Any):
        self.mujoco = mujoco
        self.compiled = compiled
        self.moving = [i for i in range(1, compiled.nbody) if compiled.body_jntnum[i] > 0]
        self._index = {body: index for index, body in enumerate(self.moving)}

    def name(self, kind: str, index: int) -> str:
        """Returns the name of a part of the model, for messages."""
        return name_of(self.mujoco, self.compiled, kind, index)

    def is_disabled(self, *flags: str) -> bool:
        """Returns whether a MuJoCo feature, named as in `mjtDisableBit`, is disabled."""
        bits = [getattr(self.mujoco.mjtDisableBit, f"mjDSBL_{flag}", 0) for flag in flags]
        return any(int(self.compiled.opt.disableflags) & int(bit) for bit in bits)

    @property
    def gravity(self) -> bool:
        """Whether gravity acts in the model."""
        return not self.is_disabled("GRAVITY")

    @property
    def springs(self) -> bool:
        """Whether the springs of joints and tendons are enabled in the model."""
        return not self.is_disabled("SPRING", "PASSIVE")

    @property
    def dampers(self) -> bool:
        """Whether the dampers of joints and tendons are enabled in the model."""
        return not self.is_disabled("DAMPER", "PASSIVE")

    @property
    def compensates_gravity(self) -> bool:
        """Whether `gravcomp` acts. MuJoCo disables it together with springs and dampers."""
        return self.springs or self.dampers

    def is_driven(self, actuator: int) -> bool:
        """Returns whether an actuator acts, because neither all actuators nor its group are disabled."""
        group = int(self.compiled.actuator_group[actuator])
        in_group = 0 <= group < 31 and int(self.compiled.opt.disableactuator) & (1 << group)
        return self.actuation and not in_group

    @property
    def actuation(self) -> bool:
        """Whether actuators are enabled in the model."""
        return not self.is_disabled("ACTUATION")

    @property
    def limits(self) -> bool:
        """Whether the limits of joints are enabled in the model."""
        return not self.is_disabled("LIMIT", "CONSTRAINT")

    @property
    def friction_loss(self) -> bool:
        """Whether the dry friction of joints is enabled in the model."""
        return not self.is_disabled("FRICTIONLOSS", "CONSTRAINT")

    @property
    def contacts(self) -> bool:
        """Whether contacts are enabled in the model."""
        return not self.is_disabled("CONTACT", "CONSTRAINT")

    @property
    def equalities(self) -> bool:
        """Whether equality constraints are enabled in the model."""
        return not self.is_disabled("EQUALITY", "CONSTRAINT")

    @property
    def clamps_controls(self) -> bool:
        """Whether the model clamps controls to their ranges."""
        return not self.is_disabled("CLAMPCTRL")

    @property
    def implicit(self) -> Any:
        """Which forces the model's integrator treats implicitly, as in `Structure`."""
        if self.compiled.opt.integrator == self.mujoco.mjtIntegrator.mjINT_IMPLICITFAST:
            return "velocity"
        damped = self.dampers and bool(np.any(self.compiled.dof_damping != 0))
        return "damping" if damped and not self.is_disabled("EULERDAMP") else "none"

    def owner_body(self, body: int) -> int:
        """Returns the MuJoCo index of the jointed body that carries a body, or 0 if none does."""
        while body != 0 and self.compiled.body_jntnum[body] == 0:
            body = int(self.compiled.body_parentid[body])
        return body

    def owner(self, body: int) -> int:
        """Returns the index in `Structure.bodies` of the body that carries a MuJoCo body."""
        return self._index.get(self.owner_body(body), WORLD)

    def pose_in_owner(self, body: int, position: Any, quaternion: Any) -> tuple[np.ndarray, np.ndarray]:
        """Returns a pose, given in a body's frame, in the frame of the body that carries it."""
        position, rotation = np.array(position, float), self._matrix(quaternion)
        while body != 0 and self.compiled.body_jntnum[body] == 0:
            turn = self._matrix(self.compiled.body_quat[body])
            position = np.array(self.compiled.body_pos[body]) + turn @ position
            rotation = turn @ rotation
            body = int(self.compiled.body_parentid[body])
        return position, rotation

    def site(self, index: int) -> tuple[int, np.ndarray, np.ndarray]:
        """Returns the body that carries a site, and the pose of the site in that body's frame."""
        m = self.compiled
        body = int(m.site_bodyid[index])
        return self.owner(body), *self.pose_in_owner(body, m.site_pos[index], m.site_quat[index])

    def composite(self, index: int) -> tuple[float, np.ndarray, np.ndarray]:
        """Returns mass, centre and inertia (xx, yy, zz, xy, xz, yz) of a body with everything that it carries."""
        return self._composites[index]

    @cached_property
    def _composites(self) -> dict[int, tuple[float, np.ndarray, np.ndarray]]:
        return {index: self._composite(index) for index in self.moving}

    def _composite(self, index: int) -> tuple[float, np.ndarray, np.ndarray]:
        m = self.compiled
        parts = [body for body in range(1, m.nbody) if self.owner_body(body) == index]
        poses = [
            self.pose_in_owner(b, m.body_ipos[b], m.body_iquat[b]) if b != index else self._inertial_frame(b)
            for b in parts
        ]
        masses = np.array([m.body_mass[b] for b in parts], float)
        mass = float(masses.sum())
        places = np.array([position for position, _ in poses])
        center = masses @ places / max(mass, _TINY)
        inertia = np.zeros((3, 3))
        for body, part_mass, (place, rotation) in zip(parts, masses, poses, strict=True):
            arm = place - center
            inertia += rotation @ np.diag(m.body_inertia[body]) @ rotation.T
            inertia += part_mass * (arm @ arm * np.eye(3) - np.outer(arm, arm))
        return mass, center, inertia[[0, 1, 2, 0, 0, 1], [0, 1, 2, 1, 2, 2]]

    def _inertial_frame(self, body: int) -> tuple[np.ndarray, np.ndarray]:
        m = self.compiled
        return np.array(m.body_ipos[body], float), self._matrix(m.body_iquat[body])

    def softness(self, reference: Any, impedance: Any) -> Softness:
        """Returns a constraint's stiffness and damping from its `solref` and `solimp`, limited as in MuJoCo."""
        low, high, width, midpoint, power = (float(value) for value in impedance)
        low, high, midpoint = (float(np.clip(value, 0.0001, 0.9999)) for value in (low, high, midpoint))
        first, second = (float(value) for value in reference)
        if first > 0:
            if not self.is_disabled("REFSAFE"):
                first = max(first, 2 * float(self.compiled.opt.timestep))
            stiffness = 1 / max(_TINY, (high * first * second) ** 2)
            damping = 2 / max(_TINY, high * first)
        else:
            stiffness, damping = -first / max(_TINY, high * high), -second / max(_TINY, high)
        return Softness(stiffness, damping, (low, high, max(0.0, width), midpoint, max(1.0, power)))

    def _matrix(self, quaternion: Any) -> np.ndarray:
        matrix = np.zeros(9)
        self.mujoco.mju_quat2Mat(matrix, np.array(quaternion, float))
        rounded = matrix.round()
        return np.where(np.abs(matrix - rounded) < 1e-15, rounded, matrix).reshape(3, 3)


def as_triple(values: Any) -> Triple:
    """Converts a vector to a tuple of three floats, as `Structure` holds it."""
    x, y, z = (float(value) for value in values)
    return x, y, z


def as_rows(matrix: np.ndarray) -> Rows:
    """Converts a rotation to a tuple of rows, as `Structure` holds it."""
    a, b, c = (as_triple(row) for row in matrix)
    return a, b, c


def name_of(mujoco: Any, compiled: Any, kind: str, index: int) -> str:
    """Returns the name of a part of a MuJoCo model, or its kind and number if it has no name."""
    name = mujoco.mj_id2name(compiled, getattr(mujoco.mjtObj, f"mjOBJ_{kind}"), index)
    return name or f"{kind.lower()} {index}"


@lru_cache(maxsize=1)
def margins_add() -> bool:
    """Returns whether this version of MuJoCo adds the margins of two geoms, instead of taking the larger one."""
    mujoco: Any = importlib.import_module("mujoco")
    ball = '<body pos="{} 0 0"><freejoint/><geom size="1" margin="0.1"/></body>'
    compiled = mujoco.MjModel.from_xml_string(
        f"<mujoco><worldbody>{ball.format(0)}{ball.format(2.05)}</worldbody></mujoco>"
    )
    data: Any = mujoco.MjData(compiled)
    mujoco.mj_forward(compiled, data)
    return float(data.contact.includemargin[0]) > 0.15
