"""Every option of MuJoCo is honoured, refused by name, or without effect on a step."""

from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

from physics.robots import relative
from rollmill import physics
from rollmill.core.errors import UsageError
from rollmill.physics.forces import actuation
from rollmill.physics.kinematics import frames

ROBOT = """
<mujoco>
  <option timestep="0.004" iterations="100" tolerance="1e-12"/>
  <worldbody>
    <geom type="plane" size="0 0 1" contype="1" conaffinity="0"/>
    <body name="held" gravcomp="1" pos="0 0 2"><joint name="held" axis="0 1 0" armature="0.1" range="-3.04 3.04"
        solreflimit="0.003 1"/>
      <geom type="capsule" fromto="0 0 0 0.3 0 0" size="0.05" contype="0" conaffinity="0"/></body>
    <body pos="0.5 0 0.29">
      <joint name="slide" type="slide" axis="0 0 1" stiffness="30" damping="2" range="-0.05 0.1"/>
      <geom size="0.1" contype="0" conaffinity="2"/>
      <body pos="0 0 -0.1"><joint name="hip" axis="0 1 0" frictionloss="0.3" damping="0.5"/>
        <geom size="0.06" pos="0 0 0.02" contype="2" conaffinity="0"/>
        <geom size="0.05" pos="0.02 0 -0.1" conaffinity="1" solref="0.005 1"/>
        <site name="foot" pos="0 0 -0.05"/></body></body>
  </worldbody>
  <equality><joint joint1="held" joint2="hip" polycoef="2.9 0.5 0 0 0"/></equality>
  <actuator>
    <position joint="hip" kp="8" kv="0.2" ctrllimited="true" ctrlrange="-0.3 0.3"/>
    <motor joint="slide" gear="5" forcelimited="true" forcerange="0.5 2" group="2"/>
  </actuator>
  <sensor><force site="foot"/></sensor>
</mujoco>
"""
"""A robot that every part of MuJoCo acts on which may be disabled."""

WITHOUT_EFFECT = {"WARMSTART", "MIDPHASE", "NATIVECCD", "ISLAND", "MULTICCD", "AUTORESET"}
FLAGS = [
    (kind, member.partition("_")[2])
    for kind, bits in (("disable", mujoco.mjtDisableBit), ("enable", mujoco.mjtEnableBit))
    for member in bits.__members__
    if "_" in member
]


def compiled_robot() -> Any:
    return mujoco.MjModel.from_xml_string(ROBOT)


def expected_step(compiled: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns a state in which the robot moves against its limit and the floor, and MuJoCo's next one."""
    data = mujoco.MjData(compiled)
    data.qpos[:], data.qvel[:], data.ctrl[:] = [3.05, -0.06, 0.3], [0.5, -0.4, 2.0], [2.0, 0.1]
    before = [np.array(part) for part in (data.qpos, data.qvel, data.qacc_warmstart, data.ctrl)]
    mujoco.mj_step(compiled, data)
    return before, [np.array(part) for part in (data.qacc, data.qvel, data.sensordata)]


def differences(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


def with_flag(kind: str, flag: str) -> Any:
    """Returns the robot with one flag turned from its default."""
    compiled, enum = compiled_robot(), f"mjt{kind.capitalize()}Bit"
    prefix = {"disable": "mjDSBL", "enable": "mjENBL"}[kind]
    setattr(compiled.opt, f"{kind}flags", int(getattr(mujoco, enum).__members__[f"{prefix}_{flag}"]))
    return compiled


@pytest.mark.parametrize(("kind", "flag"), FLAGS)
def test_flags_change_the_robot_or_are_refused_by_name(kind, flag):
    compiled, default = with_flag(kind, flag), physics.load(compiled_robot())
    try:
        model = physics.load(compiled)
    except UsageError as error:
        assert f"<flag {flag.lower()}='{kind}'/>" in str(error)
        assert kind == "enable" or flag == "SENSOR"
        return
    is_same = model.structure == default.structure and all(
        map(np.array_equal, jax.tree.leaves(model.params), jax.tree.leaves(default.params))
    )
    gap = differences(expected_step(compiled)[1], expected_step(compiled_robot())[1])
    if kind == "enable" or flag in WITHOUT_EFFECT:
        assert is_same and gap < 1e-9
    else:
        assert not is_same and gap > 1e-3


@pytest.mark.slow
def test_steps_without_a_part_are_those_of_mujoco():
    honoured = [flag for kind, flag in FLAGS if kind == "disable" and flag not in (*WITHOUT_EFFECT, "SENSOR")]
    for flag in (None, *honoured):
        assert_steps_agree(with_flag("disable", flag) if flag else compiled_robot(), flag)
    assert_steps_agree(without_springs_and_dampers(), "gravcomp")


def without_springs_and_dampers() -> Any:
    compiled, bits = compiled_robot(), mujoco.mjtDisableBit
    compiled.opt.disableflags = int(bits.mjDSBL_SPRING) | int(bits.mjDSBL_DAMPER)
    return compiled


def test_gravity_is_compensated_unless_springs_and_dampers_are_disabled():
    """As in MuJoCo, which leaves out all passive forces then."""
    assert physics.load(compiled_robot()).structure.bodies[0].weightless
    compiled = without_springs_and_dampers()
    assert not physics.load(compiled).structure.bodies[0].weightless
    data = mujoco.MjData(compiled)
    mujoco.mj_forward(compiled, data)
    assert data.qfrc_gravcomp[0] == 0 and data.qfrc_bias[0] != 0


def assert_steps_agree(compiled: Any, what: Any) -> None:
    before, theirs = expected_step(compiled)
    model = physics.load(compiled, iterations=10, line_search_iterations=10)
    q, v, w, u = (jnp.asarray(part, jnp.float32) for part in before)
    state = physics.RobotState(q, v, w, jnp.zeros(model.structure.num_readings))
    after = jax.jit(physics.step)(model, state, u)
    for mine, right in zip((after.accelerations, after.velocities, after.sensors), theirs, strict=True):
        assert relative(np.asarray(mine)[None], right[None]).max() < 1e-3, what


def test_actuators_of_disabled_groups_do_not_act():
    compiled = compiled_robot()
    compiled.opt.disableactuator = 1 << 2
    model = physics.load(compiled)
    assert model.params.gain[0] != 0 and model.params.gain[1] == 0
    data = mujoco.MjData(compiled)
    data.ctrl[:] = [0.2, 0.3]
    mujoco.mj_forward(compiled, data)
    state = physics.initial_state(model)
    placed = frames(model, state.positions)
    acted = actuation(model, placed, state.positions, state.velocities, jnp.asarray(data.ctrl, jnp.float32))
    np.testing.assert_allclose(acted.forces, data.qfrc_actuator, rtol=1e-5, atol=1e-6)
    compiled.opt.disableflags = int(mujoco.mjtDisableBit.mjDSBL_ACTUATION)
    model = physics.load(compiled)
    acted = actuation(model, placed, state.positions, state.velocities, jnp.asarray(data.ctrl, jnp.float32))
    np.testing.assert_array_equal(acted.forces, 0)


FIELDS = {
    "density": 1.2,
    "viscosity": 0.1,
    "wind": (1.0, 0.0, 0.0),
    "noslip_iterations": 3,
    "cone": int(mujoco.mjtCone.mjCONE_ELLIPTIC),
    "integrator": int(mujoco.mjtIntegrator.mjINT_RK4),
}
"""Options that are refused by name."""

READ = {"gravity", "impratio", "timestep", "disableflags", "enableflags", "disableactuator"}
OF_SOLVERS = {
    *("iterations", "tolerance", "ls_iterations", "ls_tolerance", "solver", "jacobian", "noslip_tolerance"),
    *("ccd_iterations", "ccd_tolerance", "sdf_initpoints", "sdf_iterations"),
}
OF_REFUSED_PARTS = {"magnetic", "sleep_tolerance", "o_friction", "o_margin", "o_solimp", "o_solref"}
"""Options of the magnetometer, of sleep and of overrides."""


def test_all_options_are_known():
    names = {name for name in dir(compiled_robot().opt) if not name.startswith("_")}
    assert names <= {*FIELDS, *READ, *OF_SOLVERS, *OF_REFUSED_PARTS}


@pytest.mark.parametrize("field", FIELDS)
def test_options_are_refused_by_name(field):
    compiled = compiled_robot()
    setattr(compiled.opt, field, FIELDS[field])
    with pytest.raises(UsageError, match=f"{field}"):
        physics.load(compiled)


NUMBERS = {
    *("jnt_stiffnesspoly", "jnt_springyield", "jnt_actgravcomp", "dof_dampingpoly"),
    *("actuator_armature", "actuator_damping", "actuator_dampingpoly", "actuator_delay"),
    *("geom_surfacevel", "geom_adhesion", "geom_fluid", "sensor_delay", "sensor_interval", "sensor_cutoff"),
}


@pytest.mark.parametrize("field", sorted(NUMBERS))
def test_numbers_of_parts_that_are_not_covered_are_refused_by_name(field):
    compiled = compiled_robot()
    getattr(compiled, field).reshape(-1)[0] = 1
    with pytest.raises(UsageError, match=r"not (covered|supported)"):
        physics.load(compiled)


FIELDS_OF_PARTS = [
    ("actuator", "acc0 actadr actearly actlimited actnum actrange armature biasprm biastype cranklength ctrladr"),
    ("actuator", "ctrllimited ctrlnum ctrlrange ctrlspec damping dampingpoly delay dynprm dyntype forcelimited"),
    ("actuator", "forcerange gainprm gaintype gear group history historyadr length0 lengthrange outadr outnum"),
    ("actuator", "plugin trnid trntype user"),
    ("body", "bvhadr bvhnum conaffinity contype dofadr dofnum geomadr geomnum gravcomp inertia invweight0 ipos"),
    (
        "body",
        "iquat jntadr jntnum margin mass mocapid parentid plugin pos quat rootid sameframe simple subtreemass",
    ),
    ("body", "treeid user weldid"),
    ("dof", "M0 Madr armature bodyid damping dampingpoly frictionloss invweight0 jntid length parentid simplenum"),
    ("dof", "solimp solref treeid"),
    ("eq", "active0 data obj1id obj2id objtype solimp solref type"),
    ("exclude", "signature"),
    ("geom", "aabb adhesion bodyid castshadow conaffinity condim contype dataid fluid friction gap group margin"),
    (
        "geom",
        "matid plugin pos priority quat rbound rgba sameframe size solimp solmix solref surfacevel type user",
    ),
    ("jnt", "actfrclimited actfrcrange actgravcomp actuatorid axis bodyid dofadr group limited margin plasticadr"),
    ("jnt", "pos qposadr range solimp solref springyield stiffness stiffnesspoly type user"),
    ("pair", "adhesion dim friction gap geom1 geom2 margin signature solimp solref solreffriction"),
    ("sensor", "adr cutoff datatype delay dim history historyadr interval intprm needstage noise objid objtype"),
    ("sensor", "plugin refid reftype type user"),
    ("site", "bodyid dataid group matid pos quat rgba sameframe size type user"),
    ("tendon", "actfrclimited actfrcrange actuatorid adr armature damping dampingpoly frictionloss group"),
    ("tendon", "invweight0 length0 lengthspring limited margin matid num plasticadr range rgba solimp_fri"),
    ("tendon", "solimp_lim solref_fri solref_lim springyield stiffness stiffnesspoly treeid treenum type user"),
    ("tendon", "width"),
    ("wrap", "objid prm type"),
]
"""Fields of MuJoCo 4.0. Of a newer version, a field is read, refused or without effect before it is added here."""


def test_no_field_of_a_model_is_unknown():
    known = {f"{kind}_{name}" for kind, names in FIELDS_OF_PARTS for name in names.split()}
    kinds = tuple({f"{kind}_" for kind, _ in FIELDS_OF_PARTS})
    assert {name for name in dir(compiled_robot()) if name.startswith(kinds)} <= known
