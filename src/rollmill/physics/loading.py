"""Loads robots from MJCF or URDF files with the MuJoCo compiler."""

import os
import platform
from pathlib import Path
from typing import Any

import numpy as np

from rollmill.core.errors import UsageError, first_line
from rollmill.core.installation import install_command
from rollmill.physics.equality_reader import body_equalities_of, joint_equalities_of
from rollmill.physics.model import WORLD, Actuator, Body, Joint, Model, Params, Sensor, Structure, Tendon
from rollmill.physics.pairs import pairs_of
from rollmill.physics.reader import Reader, as_rows, as_triple
from rollmill.physics.unsupported_parts import refuse_other_states, refuse_uncovered


class UnsupportedModel(UsageError):
    """Raised if a model has a part that only MuJoCo itself simulates."""


ITERATIONS = 4
"""Default number of Newton iterations in a step. MuJoCo needs 1.9 on average, for an ant under random controls."""


def load(
    source: Any,
    *,
    iterations: int = ITERATIONS,
    line_search_iterations: int = ITERATIONS,
    sensors: bool = True,
    joint_forces: bool = False,
) -> Model:
    """Loads a robot from an MJCF or URDF model.

    Args:
        source: MJCF or URDF as a string, the path of such a file, or a `mujoco.MjModel`.
        iterations: number of iterations of the constraint solver in every step.
        line_search_iterations: number of points tried along each search direction.
        sensors: whether to keep force and torque sensors.
        joint_forces: whether to also read the forces of actuators and constraints on each hinge and slide
            (`qfrc_actuator` and `qfrc_constraint` in MuJoCo).

    Returns:
        The robot, with all parameters as NumPy arrays.

    Raises:
        UsageError: MuJoCo is not installed or rejects the source, or a part is not supported.
    """
    for name, count in (("iterations", iterations), ("line_search_iterations", line_search_iterations)):
        if not 1 <= count <= 100:
            raise UsageError(f"{name} must be between 1 and 100, got {count}.")
    mujoco, compiled = compile_source(source)
    read = Reader(mujoco, compiled)
    try:
        refuse_uncovered(mujoco, compiled, sensors=sensors)
        geoms, pairs, friction = pairs_of(read)
    except UsageError as error:
        raise UnsupportedModel(str(error)) from None
    params = _params(read, friction)
    structure = Structure(
        bodies=tuple(_body(read, index) for index in read.moving),
        geoms=tuple(geoms),
        pairs=tuple(pairs),
        body_equalities=body_equalities_of(read),
        joint_equalities=joint_equalities_of(read),
        tendons=tuple(_tendon(read, i) for i in range(compiled.ntendon)),
        actuators=tuple(_actuator(read, i) for i in range(compiled.nu)),
        sensors=tuple(_sensor(read, i) for i in range(compiled.nsensor)) if sensors else (),
        force_readings=scalar_dofs(compiled) if joint_forces else (),
        time_step=float(compiled.opt.timestep),
        implicit=read.implicit,
        iterations=iterations,
        line_search_iterations=line_search_iterations,
        has_springs=bool(params.stiffness.any()),
        has_dampers=bool(params.damping.any()),
        has_servos=bool(params.bias[:, 2].any()),
        frictional_dofs=tuple(int(dof) for dof in np.nonzero(params.friction_loss)[0]),
        initial_positions=tuple(float(x) for x in compiled.qpos0),
    )
    return Model(structure, params)


def load_outline(source: Any) -> Model:
    """Loads only the joints, actuators and initial pose of a robot that MuJoCo simulates.

    Args:
        source: MJCF or URDF as a string, the path of such a file, or a `mujoco.MjModel`.

    Returns:
        The robot without contacts and constraints, with space for the readings of all its sensors.

    Raises:
        UsageError: MuJoCo is not installed or rejects the source, or the state of the robot consists of more than
            coordinates and velocities.
    """
    mujoco, compiled = compile_source(source)
    refuse_other_states(compiled)
    read = Reader(mujoco, compiled)
    structure = Structure(
        bodies=tuple(_body(read, index) for index in read.moving),
        geoms=(),
        pairs=(),
        body_equalities=(),
        joint_equalities=(),
        tendons=(),
        actuators=tuple(_actuator(read, i) for i in range(compiled.nu)),
        sensors=(),
        force_readings=(),
        time_step=float(compiled.opt.timestep),
        implicit="none",
        iterations=1,
        line_search_iterations=1,
        has_springs=False,
        has_dampers=False,
        has_servos=False,
        frictional_dofs=(),
        initial_positions=tuple(float(x) for x in compiled.qpos0),
        other_readings=int(compiled.nsensordata),
    )
    return Model(structure, _params(read, []))


def scalar_dofs(compiled: Any) -> tuple[int, ...]:
    """Returns the indices of the degrees of freedom that belong to hinge and slide joints."""
    return tuple(int(dof) for dof in compiled.jnt_dofadr[compiled.jnt_type >= 2])


def _import_mujoco() -> Any:
    try:
        import mujoco
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "mujoco":
            version = ".".join(platform.python_version_tuple()[:2])
            raise UsageError(
                f"robots need the package mujoco ({error}): {install_command('robots')}. If pip finds no "
                f"version of mujoco for Python {version} on {platform.machine()}, use a Python version for "
                "which PyPI has mujoco wheels."
            ) from None
        # Importing MuJoCo also loads the renderer that MUJOCO_GL selects.
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UsageError(
            f"the package mujoco cannot be imported with MUJOCO_GL={os.environ.get('MUJOCO_GL', '')} "
            f"({reason}). hint: set MUJOCO_GL=disable to import it without OpenGL."
        ) from None
    return mujoco


def compile_source(source: Any) -> tuple[Any, Any]:
    """Returns the module `mujoco` and the compiled model of a source.

    Raises a `UsageError` in the same cases as `load`.
    """
    mujoco = _import_mujoco()
    return mujoco, _compile(mujoco, source)


def _compile(mujoco: Any, source: Any) -> Any:
    if isinstance(source, mujoco.MjModel):
        return source
    if not isinstance(source, str | Path):
        raise UsageError(f"a robot must be a string, a path or a mujoco.MjModel, got a {type(source).__name__}.")
    is_text = isinstance(source, str) and source.lstrip().startswith("<")
    if not is_text and not Path(source).is_file():
        is_relative = not Path(source).is_absolute()
        folder = f" in the directory {Path.cwd()}" if is_relative else ""
        beside = f" Path(__file__).parent / {str(source)!r} finds it beside a module." if is_relative else ""
        raise UsageError(
            f"there is no robot at {str(source)!r}{folder}. hint: give the path of an MJCF or URDF file, or the "
            f"content of such a file.{beside}"
        )
    try:
        if is_text:
            return mujoco.MjModel.from_xml_string(source)
        return mujoco.MjModel.from_xml_path(str(source))
    except ValueError as error:
        raise UsageError(f"MuJoCo cannot load the robot: {error}") from None


def _body(read: Reader, index: int) -> Body:
    m = read.compiled
    parent = int(m.body_parentid[index])
    position, rotation = read.pose_in_owner(parent, m.body_pos[index], m.body_quat[index])
    return Body(
        name=read.name("BODY", index),
        parent=read.owner(parent),
        position=as_triple(position),
        rotation=as_rows(rotation),
        center=as_triple(read.composite(index)[1]),
        joints=tuple(_joint(read, int(m.body_jntadr[index]) + k) for k in range(m.body_jntnum[index])),
        weightless=bool(m.body_gravcomp[index]) and read.compensates_gravity,
    )


def _joint(read: Reader, index: int) -> Joint:
    m = read.compiled
    dof, coordinate = int(m.jnt_dofadr[index]), int(m.jnt_qposadr[index])
    return Joint(
        name=read.name("JOINT", index),
        kind=("free", "ball", "slide", "hinge")[m.jnt_type[index]],
        position=coordinate,
        velocity=dof,
        anchor=as_triple(m.jnt_pos[index]),
        axis=as_triple(m.jnt_axis[index]),
        reference=float(m.qpos0[coordinate]),
        spring_reference=float(m.qpos_spring[coordinate]),
        range=_range(bool(m.jnt_limited[index]) and read.limits, m.jnt_range[index]),
        margin=float(m.jnt_margin[index]),
        softness=read.softness(m.jnt_solref[index], m.jnt_solimp[index]),
        friction_softness=read.softness(m.dof_solref[dof], m.dof_solimp[dof]),
        inverse_weight=float(m.dof_invweight0[dof]),
        force_range=_range(m.jnt_actfrclimited[index] and read.actuation, m.jnt_actfrcrange[index]),
    )


def _tendon(read: Reader, index: int) -> Tendon:
    m = read.compiled
    places = range(m.tendon_adr[index], m.tendon_adr[index] + m.tendon_num[index])
    joints = [int(m.wrap_objid[place]) for place in places]
    low, high = (float(length) for length in m.tendon_lengthspring[index])
    return Tendon(
        name=read.name("TENDON", index),
        velocities=tuple(int(m.jnt_dofadr[joint]) for joint in joints),
        positions=tuple(int(m.jnt_qposadr[joint]) for joint in joints),
        coefficients=tuple(float(m.wrap_prm[place]) for place in places),
        range=_range(m.tendon_limited[index] and read.limits, m.tendon_range[index]),
        margin=float(m.tendon_margin[index]),
        softness=read.softness(m.tendon_solref_lim[index], m.tendon_solimp_lim[index]),
        inverse_weight=float(m.tendon_invweight0[index]),
        stiffness=float(np.ravel(m.tendon_stiffness[index])[0]) if read.springs else 0.0,
        spring_range=(low, high),
        damping=float(np.ravel(m.tendon_damping[index])[0]) if read.dampers else 0.0,
    )


def _actuator(read: Reader, index: int) -> Actuator:
    m = read.compiled
    kinds = read.mujoco.mjtTrn
    at_site = m.actuator_trntype[index] == kinds.mjTRN_SITE
    at_joint = m.actuator_trntype[index] == kinds.mjTRN_JOINT
    target = int(m.actuator_trnid[index, 0])
    body, place, rotation = read.site(target) if at_site else (WORLD, np.zeros(3), np.eye(3))
    gear = m.actuator_gear[index]
    x, y, z, a, b, c = (float(value) for value in (gear if at_site else np.zeros(6)))
    return Actuator(
        name=read.name("ACTUATOR", index),
        velocity=int(m.jnt_dofadr[target]) if at_joint else -1,
        position=int(m.jnt_qposadr[target]) if at_joint else -1,
        tendon=target if m.actuator_trntype[index] == kinds.mjTRN_TENDON else -1,
        body=body,
        place=as_triple(place),
        rotation=as_rows(rotation),
        direction=(x, y, z, a, b, c),
        control_range=_range(m.actuator_ctrllimited[index] and read.clamps_controls, m.actuator_ctrlrange[index]),
        force_range=_range(m.actuator_forcelimited[index] and read.actuation, m.actuator_forcerange[index]),
    )


def _sensor(read: Reader, index: int) -> Sensor:
    m = read.compiled
    is_force = m.sensor_type[index] == read.mujoco.mjtSensor.mjSENS_FORCE
    body, place, rotation = read.site(int(m.sensor_objid[index]))
    return Sensor(
        name=read.name("SENSOR", index),
        kind="force" if is_force else "torque",
        body=body,
        place=as_triple(place),
        rotation=as_rows(rotation),
    )


def _params(read: Reader, friction: list[float]) -> Params:
    m = read.compiled
    composites = [read.composite(index) for index in read.moving]
    stiffness = np.zeros(m.nv)
    for joint in range(m.njnt):
        stiffness[m.jnt_dofadr[joint]] = np.ravel(m.jnt_stiffness[joint])[0] if read.springs else 0.0
    is_driven = np.array([read.is_driven(i) for i in range(m.nu)], bool)
    is_affine = (m.actuator_biastype == read.mujoco.mjtBias.mjBIAS_AFFINE) & is_driven
    at_site = m.actuator_trntype == read.mujoco.mjtTrn.mjTRN_SITE
    return Params(
        gravity=np.array(m.opt.gravity if read.gravity else np.zeros(3), float),
        mass=np.array([mass for mass, _, _ in composites], float),
        inertia=np.array([inertia for _, _, inertia in composites], float).reshape(-1, 6),
        armature=np.array(m.dof_armature, float),
        damping=np.array(m.dof_damping, float).reshape(m.nv, -1)[:, 0] * read.dampers,
        stiffness=stiffness,
        friction_loss=np.array(m.dof_frictionloss, float) * read.friction_loss,
        friction=np.array(friction, float),
        gear=np.where(at_site, 1.0, m.actuator_gear[:, 0]),
        gain=np.array(m.actuator_gainprm[:, 0], float) * is_driven,
        bias=np.array(m.actuator_biasprm[:, :3], float) * is_affine[:, None],
    )


def _range(limited: Any, bounds: np.ndarray) -> tuple[float, float] | None:
    return (float(bounds[0]), float(bounds[1])) if limited else None
