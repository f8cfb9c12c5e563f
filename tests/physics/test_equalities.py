"""Equality constraints by value against C MuJoCo."""

import mujoco
import numpy as np
import pytest

from physics.robots import relative, stepped, visited
from rollmill import physics
from wordings import raises

HELD = """
<mujoco>
  <option timestep="0.004" integrator="{integrator}" iterations="100" tolerance="1e-12">
    <flag island="disable" contact="disable" {flags}/></option>
  <default><geom type="box" size="0.1 0.05 0.08"/></default>
  <worldbody>
    <body name="trunk" pos="0 0 0.5"><freejoint/><geom/><site name="hook" pos="0 0.1 0" euler="10 0 0"/>
      <body name="arm" pos="0.2 0 0"><joint name="shoulder" axis="0 1 0" range="-20 20"/><site name="arm"/><geom/>
        <body name="hand" pos="0.3 0 0"><joint name="wrist" axis="0 1 0"/><geom/></body></body></body>
    <body name="bar" pos="0.5 0.1 0.4"><freejoint/><geom/>
      <body name="knob" pos="0.1 0.1 0" euler="30 0 0"><geom/></body></body>
    <body name="rail"><joint name="rail" type="slide" axis="0 0 1"/><geom/></body>
  </worldbody>
  <equality>{equalities}</equality>
  <sensor><force site="arm"/><torque site="arm"/></sensor>
</mujoco>
"""
LINKAGE = """
<mujoco><option timestep="0.004" iterations="100" tolerance="1e-12"/>
  <default><geom type="box" size="0.1 0.05 0.08" contype="0" conaffinity="0"/><joint axis="0 1 0"/></default>
  <worldbody>
    <body name="crank"><joint name="crank" range="-40 40"/><geom/></body>
    <body name="rod" pos="0.4 0 0"><joint name="rod"/><geom/></body>
  </worldbody>
  <equality>
    <connect body1="crank" body2="rod" anchor="0.2 0 0"/>
    <joint joint1="crank" joint2="rod" polycoef="0 -1 0.2 0 0"/>
  </equality>
</mujoco>
"""
ALL = """
<connect body1="hand" body2="knob" anchor="0.2 0 0" solimp="0.8 0.95 0.01"/>
<connect body1="world" body2="rail" anchor="0.1 0 0"/>
<weld site1="hook" site2="world" torquescale="0.7"/>
<weld body1="trunk" body2="knob" anchor="0.1 0.2 0.3" torquescale="1.3"/>
<joint joint1="shoulder" joint2="wrist" polycoef="0.1 0.5 0.3 0.1 0"/><joint joint1="rail" polycoef="0.2 0 0 0 0"/>
<connect body1="arm" body2="bar" anchor="0 0 0" active="false"/>
"""


def held(equalities: str, flags: str = "", integrator: str = "Euler"):
    """MuJoCo's model of bodies with equality constraints; `world` is a site of the world."""
    text = HELD.format(equalities=equalities, flags=flags, integrator=integrator)
    return mujoco.MjModel.from_xml_string(
        text.replace(
            "<worldbody>", '<worldbody><site name="post"/><site name="world" pos="0 0 0.5" euler="0 20 0"/>'
        )
    )


def test_steps_of_a_linkage():
    compiled = mujoco.MjModel.from_xml_string(LINKAGE)
    seen = visited(compiled, 40)
    ours = stepped(physics.load(compiled), *(seen[name] for name in "qvwu"))
    for part, name in ((ours.accelerations, "a"), (ours.velocities, "v1"), (ours.positions, "q1")):
        assert np.quantile(relative(part, seen[name]), 0.95) < 1e-3, name
        assert relative(part, seen[name]).max() < 1e-2, name


@pytest.mark.slow
@pytest.mark.parametrize(
    "equalities",
    [
        '<weld site1="hook" site2="world" torquescale="0.7"/><weld body1="knob" body2="hand" anchor="0.1 0 0"/>',
        ALL,
    ],
)
def test_steps_with_equality_constraints(equalities):
    compiled = held(equalities, integrator="implicitfast")
    seen = visited(compiled, 80, starts=8)
    ours = stepped(physics.load(compiled), *(seen[name] for name in "qvwu"))
    for part, name in ((ours.accelerations, "a"), (ours.positions, "q1"), (ours.sensors, "s")):
        assert np.mean(relative(part, seen[name]) < 1e-3) >= 0.97, name
    of_trunk = slice(0, 8)  # MuJoCo 4 takes gyroscopic forces of lone bodies at the end of a step
    assert np.mean(relative(ours.velocities[:, of_trunk], seen["v1"][:, of_trunk]) < 1e-3) >= 0.97


def test_constraints_that_are_switched_off():
    kinds = physics.load(held(ALL, 'equality="disable"')).structure
    assert not kinds.body_equalities and not kinds.joint_equalities
    kinds = physics.load(held(ALL)).structure
    assert [len(kinds.body_equalities), len(kinds.joint_equalities)] == [4, 2]  # and one that is not active


@pytest.mark.parametrize(
    ("equalities", "message"),
    [
        ('<weld name="still" site1="world" site2="post"/>', ("equality-constraint-is-between-two", "'still'")),
    ],
)
def test_equality_constraints_that_are_not_covered(equalities, message):
    with raises(*message):
        physics.load(held(equalities))
