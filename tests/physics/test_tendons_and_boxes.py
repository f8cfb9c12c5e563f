"""Fixed tendons, and contacts of spheres and capsules with boxes, by value against C MuJoCo."""

from typing import Any

import mujoco
import numpy as np
import pytest

from physics.robots import relative, stepped, visited
from rollmill import physics
from wordings import raises

GRASP = """
<mujoco>
  <option timestep="0.004" integrator="{integrator}" iterations="100" tolerance="1e-12">
    <flag island="disable"/></option>
  <default><joint damping="0.05" armature="0.001"/><geom friction="0.8" contype="1" conaffinity="0"/></default>
  <worldbody>
    <geom name="shelf" type="box" size="0.3 0.3 0.05" pos="0 0 -0.15" euler="0 4 0" contype="2"/>
    <body name="finger" pos="0 0 0.1">
      <joint name="near" axis="0 1 0" range="-90 90"/>
      <geom type="capsule" fromto="0 0 0 0.12 0 0" size="0.02"/>
      <body name="tip" pos="0.12 0 0">
        <joint name="far" axis="0 1 0"/>
        <geom type="capsule" fromto="0 0 0 0.08 0 0.01" size="0.015" contype="3" conaffinity="2"/>
      </body>
    </body>
    <body name="thumb" pos="0 0.05 0.1">
      <joint name="lever" axis="0 1 0" range="-60 60"/>
      <geom type="capsule" fromto="0 0 0 0.1 0.02 0" size="0.02"/>
      <geom name="pad" size="0.03" pos="0.12 0.02 0"/>
    </body>
    <body name="block" pos="0.1 0.02 0.14"><freejoint/>
      <geom name="block" type="box" size="0.05 0.04 0.03" density="500" contype="0" conaffinity="1"/>
      <geom size="0.02" pos="0.08 0 0" contype="0" conaffinity="2" mass="0.01"/></body>
  </worldbody>
  <tendon>
    <fixed name="coupling" range="-0.02 0.03">
      <joint joint="near" coef="0.7"/><joint joint="far" coef="-0.8"/></fixed>
    <fixed name="across" stiffness="3" springlength="-0.1 0.05" damping="0.02">
      <joint joint="near" coef="0.5"/><joint joint="{other}" coef="1"/></fixed>
  </tendon>
  <actuator>
    <position joint="near" kp="4" ctrlrange="-1 1"/>
    <position tendon="across" kp="3" kv="0.03" gear="1.5" ctrlrange="-1 1" forcerange="-2 2"/>
    <motor tendon="coupling" gear="0.5"/>
    <motor joint="lever" gear="0.4"/>
  </actuator>
</mujoco>
"""
"""Two fingers that toss a block above a shelf, with a tendon along one of them and one from it to the other."""


@pytest.mark.parametrize(
    ("integrator", "other"),
    [("implicitfast", "far"), pytest.param("Euler", "lever", marks=pytest.mark.slow)],
)
def test_tendons_and_boxes(integrator, other):
    compiled: Any = mujoco.MjModel.from_xml_string(GRASP.format(integrator=integrator, other=other))
    seen = visited(compiled, 200, starts=8)
    assert seen["contacts"].mean() > 1
    model = physics.load(compiled, iterations=12, line_search_iterations=12)
    ours = stepped(model, seen["q"], seen["v"], seen["w"], seen["u"])
    assert np.mean(relative(ours.accelerations, seen["a"]) < 1e-3) >= 0.99
    of_fingers = slice(0, 3)  # MuJoCo 4 takes gyroscopic forces of lone bodies at the end of a step
    assert np.mean(relative(ours.velocities[:, of_fingers], seen["v1"][:, of_fingers]) < 1e-3) >= 0.99


@pytest.mark.parametrize(
    ("tendon", "message"),
    [
        (
            '<fixed name="t" frictionloss="1"><joint joint="a" coef="1"/></fixed>',
            ("has-is-not-covered", "'t'", "dry friction"),
        ),
        (
            '<spatial name="t"><site site="s"/><site site="e"/></spatial>',
            ("tendon-is-spatial-is-not", "'t'"),
        ),
        (
            '<fixed name="t" damping="1"><joint joint="a" coef="1"/><joint joint="b" coef="1"/></fixed>',
            ("tendon-joins-two-branches-and", "'t'", "Euler"),
        ),
    ],
)
def test_tendons_that_are_not_covered_are_refused_by_name(tendon, message):
    arm = '<body><joint name="{0}"/><geom size="1" contype="0" conaffinity="0"/><site name="{1}"/></body>'
    with raises(*message):
        physics.load(
            f"""<mujoco><option integrator="implicitfast"/><worldbody>{arm.format("a", "s")}{arm.format("b", "e")}
            </worldbody><tendon>{tendon}</tendon></mujoco>"""
        )
