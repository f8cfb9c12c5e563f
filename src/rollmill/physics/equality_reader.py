"""Reads the equality constraints of a compiled MuJoCo model."""

import numpy as np

from rollmill.core.errors import UsageError
from rollmill.physics.model import WORLD, BodyEquality, JointEquality
from rollmill.physics.reader import Reader, as_rows, as_triple

UPRIGHT = (1.0, 0.0, 0.0, 0.0)


def body_equalities_of(read: Reader) -> tuple[BodyEquality, ...]:
    """Returns the active `connect` and `weld` constraints of a MuJoCo model."""
    m, kinds = read.compiled, read.mujoco.mjtEq
    return tuple(
        _body_equality(read, index, is_weld=bool(m.eq_type[index] == kinds.mjEQ_WELD))
        for index in _active(read)
        if m.eq_type[index] in (int(kinds.mjEQ_CONNECT), int(kinds.mjEQ_WELD))
    )


def joint_equalities_of(read: Reader) -> tuple[JointEquality, ...]:
    """Returns the active equality constraints between joints of a MuJoCo model."""
    kind = read.mujoco.mjtEq.mjEQ_JOINT
    return tuple(
        _joint_equality(read, index) for index in _active(read) if read.compiled.eq_type[index] == int(kind)
    )


def _active(read: Reader) -> list[int]:
    if not read.equalities:
        return []
    return [index for index in range(read.compiled.neq) if read.compiled.eq_active0[index]]


def _body_equality(read: Reader, index: int, *, is_weld: bool) -> BodyEquality:
    m = read.compiled
    name = read.name("EQUALITY", index)
    sides = _sides(read, index, is_weld=is_weld)
    owners = [read.owner(body) for body, _, _ in sides]
    # the world must be the second side, and exchanging both sides gives the same constraint
    if owners[0] == WORLD:
        sides, owners = sides[::-1], owners[::-1]
    if owners[0] == WORLD:
        raise UsageError(
            f"the equality constraint {name!r} connects two bodies that cannot move. hint: remove it."
        )
    bodies = [body for body, _, _ in sides]
    weights = m.body_invweight0[bodies].sum(axis=0)
    first, second = sides
    return BodyEquality(
        name=name,
        bodies=(owners[0], owners[1]),
        anchors=(as_triple(first[1]), as_triple(second[1])),
        rotations=(as_rows(first[2]), as_rows(second[2])) if is_weld else None,
        torque_scale=float(m.eq_data[index, 10]),
        softness=read.softness(m.eq_solref[index], m.eq_solimp[index]),
        inverse_weights=(float(weights[0]), float(weights[1])),
    )


def _sides(read: Reader, index: int, *, is_weld: bool) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """Returns the MuJoCo index of both bodies, and the pose of each in the body that carries it."""
    m = read.compiled
    objects, data = (int(m.eq_obj1id[index]), int(m.eq_obj2id[index])), m.eq_data[index]
    if m.eq_objtype[index] == read.mujoco.mjtObj.mjOBJ_SITE:
        return [(int(m.site_bodyid[one]), *read.site(one)[1:]) for one in objects]
    if is_weld:  # the anchor is given in the second body, and the pose of the second body in the first body
        anchors, turns = (data[3:6], data[:3]), (data[6:10], UPRIGHT)
    else:
        anchors, turns = (data[:3], data[3:6]), (UPRIGHT, UPRIGHT)
    return [
        (body, *read.pose_in_owner(body, anchor, turn))
        for body, anchor, turn in zip(objects, anchors, turns, strict=True)
    ]


def _joint_equality(read: Reader, index: int) -> JointEquality:
    m = read.compiled
    first, second = int(m.eq_obj1id[index]), int(m.eq_obj2id[index])
    joints = [first] if second < 0 else [first, second]
    velocities = [int(m.jnt_dofadr[joint]) for joint in joints]
    positions = [int(m.jnt_qposadr[joint]) for joint in joints]
    references = [float(m.qpos0[position]) for position in positions]
    a, b, c, d, e = (float(value) for value in m.eq_data[index, :5])
    return JointEquality(
        name=read.name("EQUALITY", index),
        velocities=(velocities[0], velocities[1] if len(joints) > 1 else -1),
        positions=(positions[0], positions[1] if len(joints) > 1 else -1),
        references=(references[0], references[1] if len(joints) > 1 else 0.0),
        polynomial=(a, b, c, d, e),
        softness=read.softness(m.eq_solref[index], m.eq_solimp[index]),
        inverse_weight=float(m.dof_invweight0[velocities].sum()),
    )
