"""Rejects MuJoCo models with unsupported parts. The error names the part."""

from itertools import pairwise
from typing import Any

import numpy as np

from rollmill.core.errors import UsageError
from rollmill.physics.reader import name_of

_COUNTS = {
    "nflex": "flexible bodies",
    "nmocap": "mocap bodies",
    "npair": "predefined pairs of geoms",
    "nplugin": "plugins",
    "na": "actuators with activations",
    "nhistory": "delays",
    "nplastic": "plastic joints",
}
"""Fields of a model that count what is not covered."""

_ZEROS = {
    "jnt_stiffnesspoly": ("JOINT", "a nonlinear spring"),
    "dof_dampingpoly": ("DOF", "a nonlinear damper"),
    "tendon_frictionloss": ("TENDON", "dry friction"),
    "tendon_armature": ("TENDON", "armature"),
    "tendon_actfrclimited": ("TENDON", "a limit on actuator force"),
    "tendon_stiffnesspoly": ("TENDON", "a nonlinear spring"),
    "tendon_dampingpoly": ("TENDON", "a nonlinear damper"),
    "actuator_armature": ("ACTUATOR", "armature"),
    "actuator_damping": ("ACTUATOR", "damping"),
    "actuator_dampingpoly": ("ACTUATOR", "a nonlinear damper"),
    "actuator_delay": ("ACTUATOR", "a delay"),
    "geom_surfacevel": ("GEOM", "a moving surface"),
    "geom_adhesion": ("GEOM", "adhesion"),
    "geom_fluid": ("GEOM", "fluid forces"),
    "jnt_springyield": ("JOINT", "a spring that yields"),
    "tendon_springyield": ("TENDON", "a spring that yields"),
    "sensor_delay": ("SENSOR", "a delay"),
    "sensor_interval": ("SENSOR", "an interval"),
}
"""Arrays that must be zero. Older versions of MuJoCo lack some of them."""


DISABLED = {
    *("CONSTRAINT", "EQUALITY", "FRICTIONLOSS", "LIMIT", "CONTACT", "PASSIVE", "SPRING", "DAMPER", "GRAVITY"),
    *("CLAMPCTRL", "FILTERPARENT", "ACTUATION", "REFSAFE", "EULERDAMP"),
    # these affect only how the accelerations are computed
    *("WARMSTART", "MIDPHASE", "NATIVECCD", "ISLAND", "MULTICCD"),
    "AUTORESET",  # resets unstable robots, whose episodes end anyway
    "SENSOR",  # checked separately
}
"""Features that a model may disable, as in `mjtDisableBit`. Rollmill disables them too, or a step needs none."""

ENABLED = {"ENERGY", "FWDINV", "INVDISCRETE", "ISLAND", "MULTICCD", "SENSORNOISE"}
"""Features that a model may enable, as in `mjtEnableBit`, because they do not affect a step."""


def refuse_uncovered(mujoco: Any, compiled: Any, *, sensors: bool) -> None:
    """Raises a `UsageError` if a model has parts that are not supported. Pairs of geoms are checked elsewhere."""
    for field, what in _COUNTS.items():
        if getattr(compiled, field, 0):
            raise UsageError(
                f"the robot has {what} ({field}={getattr(compiled, field)}), which are not supported."
            )
    for field, (kind, what) in _ZEROS.items():
        values = np.asarray(getattr(compiled, field, ()))
        if values.size and np.any(values):
            index = int(np.nonzero(values)[0][0])
            name = f"degree of freedom {index}" if kind == "DOF" else repr(name_of(mujoco, compiled, kind, index))
            raise UsageError(f"{name} has {what} ({field}), which is not supported.")
    _refuse_compensation(mujoco, compiled)
    _refuse_options(mujoco, compiled.opt)
    _refuse_joints(mujoco, compiled)
    _refuse_equalities(mujoco, compiled)
    _refuse_tendons(mujoco, compiled)
    _refuse_actuators(mujoco, compiled)
    if sensors and compiled.nsensor:
        _refuse_sensors(mujoco, compiled)


def _refuse_options(mujoco: Any, option: Any) -> None:
    integrators = (int(mujoco.mjtIntegrator.mjINT_EULER), int(mujoco.mjtIntegrator.mjINT_IMPLICITFAST))
    if int(option.integrator) not in integrators:
        name = mujoco.mjtIntegrator(option.integrator).name.removeprefix("mjINT_")
        raise UsageError(f"the integrator {name} is not supported. hint: use Euler or implicitfast.")
    if option.cone != mujoco.mjtCone.mjCONE_PYRAMIDAL:
        raise UsageError("elliptic friction cones are not supported. hint: use cone='pyramidal'.")
    for name in ("density", "viscosity", "wind", "noslip_iterations"):
        if np.any(getattr(option, name)):
            raise UsageError(f"the option {name}={getattr(option, name)} is not supported. hint: set it to 0.")
    _refuse_flags(mujoco.mjtDisableBit, "disable", int(option.disableflags), DISABLED)
    _refuse_flags(mujoco.mjtEnableBit, "enable", int(option.enableflags), ENABLED)


def _refuse_flags(bits: Any, state: str, flags: int, covered: set[str]) -> None:
    for member, bit in bits.__members__.items():
        _, prefix, name = member.partition("_")
        if prefix and flags & int(bit) and name not in covered:
            raise UsageError(
                f"the option <flag {name.lower()}={state!r}/> is not supported. hint: leave it at its default."
            )


def _refuse_compensation(mujoco: Any, compiled: Any) -> None:
    """Raises a UsageError unless gravity is compensated wholly or not at all in each tree."""
    flags, bits = int(compiled.opt.disableflags), mujoco.mjtDisableBit
    if all(flags & int(getattr(bits, f"mjDSBL_{flag}", 0)) for flag in ("SPRING", "DAMPER")):
        return  # MuJoCo ignores it
    for index in np.flatnonzero(compiled.body_gravcomp):
        tree = compiled.body_treeid == compiled.body_treeid[index]
        # the value of the root applies to its tree, even if the root has no mass
        others = compiled.body_gravcomp[tree]
        if compiled.body_treeid[index] < 0 or np.all(others == 1.0):
            continue
        name = name_of(mujoco, compiled, "BODY", int(index))
        raise UsageError(
            f"the body {name!r} has gravcomp={compiled.body_gravcomp[index]:g}, but gravity compensation is "
            "supported only if all bodies in its tree have gravcomp=1."
        )
    for index in np.flatnonzero(compiled.jnt_actgravcomp):
        name = name_of(mujoco, compiled, "JOINT", int(index))
        raise UsageError(f"the joint {name!r} has actuatorgravcomp, which is not supported. hint: leave it out.")


def _refuse_joints(mujoco: Any, compiled: Any) -> None:
    for index in range(compiled.njnt):
        kind, name = int(compiled.jnt_type[index]), name_of(mujoco, compiled, "JOINT", index)
        if kind in _scalar_joints(mujoco):
            continue
        if np.any(compiled.jnt_stiffness[index]):
            raise UsageError(f"the joint {name!r} is a free or ball joint with a spring, which is not supported.")
        if compiled.jnt_limited[index]:
            raise UsageError(f"the ball joint {name!r} has limits, which are not supported.")


def _refuse_equalities(mujoco: Any, compiled: Any) -> None:
    for index in range(compiled.neq):
        kind = mujoco.mjtEq(int(compiled.eq_type[index])).name.removeprefix("mjEQ_").lower()
        name = name_of(mujoco, compiled, "EQUALITY", index)
        if kind not in ("connect", "weld", "joint"):
            raise UsageError(
                f"the equality constraint {name!r} of kind {kind} is not supported. Supported: connect, weld and "
                "joint."
            )


def _refuse_tendons(mujoco: Any, compiled: Any) -> None:
    for index in range(compiled.ntendon):
        first = compiled.tendon_adr[index]
        places = slice(first, first + compiled.tendon_num[index])
        name = name_of(mujoco, compiled, "TENDON", index)
        if np.any(compiled.wrap_type[places] != mujoco.mjtWrap.mjWRAP_JOINT):
            raise UsageError(f"the tendon {name!r} is spatial, but only fixed tendons are supported.")
        if compiled.opt.integrator != mujoco.mjtIntegrator.mjINT_IMPLICITFAST:
            continue
        bodies = sorted(int(compiled.jnt_bodyid[joint]) for joint in compiled.wrap_objid[places])
        if _is_damped(mujoco, compiled, index) and not _is_chain(compiled, bodies):
            raise UsageError(
                f"the tendon {name!r} connects two branches and has a damper or an actuator with damping, which "
                "implicitfast does not support. hint: use the integrator Euler."
            )


def _is_damped(mujoco: Any, compiled: Any, tendon: int) -> bool:
    """Returns whether the force along a tendon depends on the rate of its length."""
    pulls = compiled.actuator_trntype == mujoco.mjtTrn.mjTRN_TENDON
    pulls &= compiled.actuator_trnid[:, 0] == tendon
    return bool(np.any(compiled.tendon_damping[tendon]) or np.any(compiled.actuator_biasprm[pulls, 2]))


def _is_chain(compiled: Any, bodies: list[int]) -> bool:
    """Returns whether each of the sorted bodies is carried by the one before."""
    for lower, upper in pairwise(bodies):
        while upper > lower:
            upper = int(compiled.body_parentid[upper])
        if upper != lower:
            return False
    return True


def _scalar_joints(mujoco: Any) -> tuple[int, ...]:
    return int(mujoco.mjtJoint.mjJNT_HINGE), int(mujoco.mjtJoint.mjJNT_SLIDE)


def _refuse_actuators(mujoco: Any, compiled: Any) -> None:
    covered = {
        "GAIN": ("FIXED",),
        "BIAS": ("NONE", "AFFINE"),
        "DYN": ("NONE",),
        "TRN": ("JOINT", "TENDON", "SITE"),
    }
    fields = {"GAIN": "gaintype", "BIAS": "biastype", "DYN": "dyntype", "TRN": "trntype"}
    for index in range(compiled.nu):
        name = name_of(mujoco, compiled, "ACTUATOR", index)
        for kind, field in fields.items():
            value = getattr(compiled, f"actuator_{field}")[index]
            members = getattr(mujoco, f"mjt{kind.capitalize()}")
            if all(int(value) != int(getattr(members, f"mj{kind}_{one}")) for one in covered[kind]):
                found = members(int(value)).name.partition("_")[2].lower()
                raise UsageError(f"the actuator {name!r} has {field} {found}, which is not supported.")
        _refuse_transmission(mujoco, compiled, index, name)


def _refuse_transmission(mujoco: Any, compiled: Any, index: int, name: str) -> None:
    target, reference = compiled.actuator_trnid[index]
    if compiled.actuator_trntype[index] == mujoco.mjtTrn.mjTRN_SITE:
        if reference >= 0 or np.any(compiled.actuator_biasprm[index, :3]):
            raise UsageError(f"the actuator {name!r} of a site must be a motor without a reference site.")
    elif compiled.actuator_trntype[index] == mujoco.mjtTrn.mjTRN_TENDON:
        return
    elif int(compiled.jnt_type[target]) not in _scalar_joints(mujoco):
        raise UsageError(f"the actuator {name!r} drives a free or ball joint, which is not supported.")


def _refuse_sensors(mujoco: Any, compiled: Any) -> None:
    if int(compiled.opt.disableflags) & int(mujoco.mjtDisableBit.mjDSBL_SENSOR):
        raise UsageError(
            "the option <flag sensor='disable'/> is not supported with sensors. hint: delete the sensors from the "
            "model, or delete the flag."
        )
    covered = (int(mujoco.mjtSensor.mjSENS_FORCE), int(mujoco.mjtSensor.mjSENS_TORQUE))
    for index in range(compiled.nsensor):
        name = name_of(mujoco, compiled, "SENSOR", index)
        if int(compiled.sensor_type[index]) not in covered:
            raise UsageError(
                f"the sensor {name!r} is not supported, only force and torque sensors are. hint: delete it from "
                "the model."
            )
        if compiled.sensor_cutoff[index] > 0:
            raise UsageError(f"the sensor {name!r} has a cutoff, which is not supported.")
        if compiled.body_jntnum[compiled.site_bodyid[compiled.sensor_objid[index]]] == 0:
            raise UsageError(f"the sensor {name!r} is on a body without joints, which is not supported.")


_CARRIED = {
    "na": "actuators with activations",
    "nmocap": "mocap bodies",
    "nplugin": "plugins",
    "nhistory": "delays",
    "nplastic": "plastic joints",
}
"""Fields of a model that count parts with a state besides coordinates and velocities."""


def refuse_other_states(compiled: Any) -> None:
    """Raises a `UsageError` if the state of a model consists of more than coordinates and velocities."""
    for field, what in _CARRIED.items():
        if getattr(compiled, field, 0):
            raise UsageError(
                f"the robot has {what} ({field}={getattr(compiled, field)}), whose state is not kept between "
                "steps. hint: leave them out, or write a gymnasium.Env of your own."
            )
