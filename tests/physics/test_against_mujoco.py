"""Physics by value against C MuJoCo, from the states that it is in."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

from physics.robots import CROWD, relative, states, stepped, tumbler, visited
from rollmill import physics
from wordings import raises


def test_accelerations_without_constraints():
    compiled = tumbler(flags='constraint="disable"')
    q, v, u = states(compiled, 100)
    data, expected = mujoco.MjData(compiled), []
    for i in range(len(q)):
        data.qpos[:], data.qvel[:], data.ctrl[:] = q[i], v[i], u[i]
        mujoco.mj_forward(compiled, data)
        expected.append(np.array(data.qacc))
    ours = stepped(physics.load(compiled), q, v, v, u)
    assert np.quantile(relative(ours.accelerations, np.array(expected)), 0.95) < 1e-5
    assert relative(ours.accelerations, np.array(expected)).max() < 1e-4


def test_fast_flight_leaves_single_precision_its_digits():
    """Products of linear velocities, which cancel, once left an error of 1e-2 at these 20 m/s."""
    text = """<mujoco><worldbody><body><freejoint/><geom type="box" size="0.1 0.1 0.01" pos="0.01 0 0.02"/>
      <body pos="0.1 0 0"><joint axis="0 1 0"/><geom size="0.03" contype="0"/></body></body>
      </worldbody></mujoco>"""
    compiled = mujoco.MjModel.from_xml_string(text)
    q, v, u = states(compiled, 100)
    v[:, :3] *= 10
    data, expected = mujoco.MjData(compiled), []
    for i in range(len(q)):
        data.qpos[:], data.qvel[:] = q[i], v[i]
        mujoco.mj_forward(compiled, data)
        expected.append(np.array(data.qacc))
    ours = stepped(physics.load(compiled), q, v, v, u)
    assert relative(ours.accelerations, np.array(expected)).max() < 1e-4


def test_constrained_steps():
    compiled = tumbler(integrator="implicitfast")
    seen = visited(compiled, 200)
    assert seen["contacts"].max() >= 3
    model = physics.load(compiled, iterations=8, line_search_iterations=8)
    ours = stepped(model, seen["q"], seen["v"], seen["w"], seen["u"])
    assert np.mean(relative(ours.accelerations, seen["a"]) < 1e-3) >= 0.99
    assert np.mean(relative(ours.positions, seen["q1"]) < 1e-3) >= 0.99
    assert np.mean(relative(ours.sensors, seen["s"]) < 1e-3) >= 0.99
    of_trunk = slice(0, 12)  # MuJoCo 4 takes gyroscopic forces of lone bodies at the end of a step
    assert np.mean(relative(ours.velocities[:, of_trunk], seen["v1"][:, of_trunk]) < 1e-3) >= 0.99


def test_forces_on_joints():
    """Those of actuators and constraints, on hinges at their limits and on a leg that pushes the floor."""
    text = """<mujoco><option timestep="0.004"/><worldbody><geom type="plane" size="0 0 1" contype="2"/>
      <body pos="0 0 0.3"><joint type="slide" axis="0 0 1"/><geom size="0.05"/>
      <body><joint name="hip" axis="0 1 0" range="-20 20"/>
      <geom type="capsule" fromto="0 0 0 0.02 0 -0.25" size="0.04" conaffinity="2"/></body></body></worldbody>
      <actuator><motor joint="hip" gear="2"/></actuator></mujoco>"""
    compiled = mujoco.MjModel.from_xml_string(text)
    model = physics.load(compiled, iterations=8, line_search_iterations=8, joint_forces=True)
    data, state = mujoco.MjData(compiled), physics.initial_state(model)
    step, largest = jax.jit(physics.step), 0.0
    for count in range(60):
        data.ctrl[:] = np.sin(count)
        state = step(model, state, jnp.asarray(data.ctrl, jnp.float32))
        mujoco.mj_step(compiled, data)
        expected = data.qfrc_actuator + data.qfrc_constraint
        np.testing.assert_allclose(state.sensors, expected, rtol=5e-3, atol=5e-2)
        largest = max(largest, np.abs(data.qfrc_constraint[1]))
    assert largest > 1


@pytest.mark.slow
def test_contacts_between_bodies_that_move():
    compiled = mujoco.MjModel.from_xml_string(CROWD)
    seen = visited(compiled, 200, starts=25)
    assert seen["contacts"].mean() > 1
    model = physics.load(compiled, iterations=12, line_search_iterations=12)
    ours = stepped(model, seen["q"], seen["v"], seen["w"], seen["u"])
    assert np.mean(relative(ours.accelerations, seen["a"]) < 1e-3) >= 0.99


SHARP = """
import sys; sys.path.insert(0, {tests!r})
import jax; jax.config.update("jax_enable_x64", True)
from physics.robots import relative, stepped, tumbler, visited
from rollmill import physics
compiled = tumbler()
seen = visited(compiled, 200)
ours = stepped(physics.load(compiled, iterations=8, line_search_iterations=8), *(seen[k] for k in "qvwu"))
parts = ours.accelerations, ours.velocities, ours.positions, ours.sensors
print(*(relative(part, seen[k]).max() for part, k in zip(parts, ("a", "v1", "q1", "s"))))
"""


@pytest.mark.slow
def test_constrained_steps_in_double_precision():
    code = SHARP.format(tests=str(Path(__file__).parents[1]))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert max(float(x) for x in done.stdout.split()) < 1e-11


def test_energy_and_momentum_of_a_free_tree():
    """Ten seconds of two bodies that turn about each other; a step changes their energy in its second order."""
    free = '<flag gravity="disable" contact="disable"/>'
    text = f"""<mujoco><option timestep="0.001">{free}</option><worldbody><body><freejoint/>
      <geom type="box" size="0.2 0.1 0.05"/><body pos="0.2 0 0"><joint axis="0 1 0"/>
      <geom type="capsule" fromto="0 0 0 0.3 0 0" size="0.03"/></body></body></worldbody></mujoco>"""
    drift, momentum = _drift(text)
    assert drift < 2e-2
    assert momentum < 2e-2


def _drift(text: str) -> tuple[float, float]:
    compiled = mujoco.MjModel.from_xml_string(text)
    model = physics.load(compiled)
    rates = np.array([0.3, -0.2, 0.5, 1.0, 2.0, -0.5, 1.5])
    start = physics.initial_state(model, None, rates)
    end = jax.jit(lambda s: jax.lax.fori_loop(0, 10_000, lambda _, s: physics.step(model, s, jnp.zeros(0)), s))(
        start
    )
    values = []
    for state in (start, end):
        data = mujoco.MjData(compiled)
        data.qpos[:], data.qvel[:] = np.asarray(state.positions), np.asarray(state.velocities)
        compiled.opt.enableflags |= int(mujoco.mjtEnableBit.mjENBL_ENERGY)
        mujoco.mj_forward(compiled, data)
        mujoco.mj_subtreeVel(compiled, data)
        values.append((data.energy[1], np.concatenate([data.subtree_linvel[0], data.subtree_angmom[0]])))
    (energy0, moment0), (energy1, moment1) = values
    return abs(energy1 / energy0 - 1), float(np.abs(moment1 - moment0).max() / np.abs(moment0).max())


def test_parameters_may_differ_between_copies():
    text = """<mujoco><option timestep="0.01"/><worldbody><body><joint axis="0 1 0" damping="0.3" armature="0.1"/>
      <geom type="capsule" fromto="0 0 0 0.5 0 0.1" size="0.1"/></body></worldbody></mujoco>"""
    compiled = mujoco.MjModel.from_xml_string(text)
    model = physics.load(compiled)
    factors = jnp.array([1.0, 2.0])

    def speed(factor: jax.Array) -> jax.Array:
        params = dataclasses.replace(
            model.params, mass=model.params.mass * factor, inertia=model.params.inertia * factor
        )
        return physics.step(
            physics.Model(model.structure, params), physics.initial_state(model), jnp.zeros(0)
        ).velocities

    ours, data = jax.vmap(speed)(factors), mujoco.MjData(compiled)
    for mine in np.asarray(ours):
        mujoco.mj_resetData(compiled, data)
        mujoco.mj_step(compiled, data)
        np.testing.assert_allclose(mine, data.qvel, rtol=1e-5)
        compiled.body_mass[:] *= 2
        compiled.body_inertia[:] *= 2


BOX = '<body><freejoint/><geom name="{}" type="{}" size="1 1 1"/></body>'


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            BOX.format("one", "box") + BOX.format("two", "box"),
            ("contacts-geoms-are-not-covered", "'one' and 'two'", "box and a box"),
        ),
        (
            '<body><joint name="j"/><geom name="g" size="1" condim="6"/></body><geom name="h" size="1"/>',
            ("contacts-geoms-have-condim-torsional", "6"),
        ),
        (
            '<body gravcomp="1" name="floats"><joint/><geom size="1"/><body><geom size="1"/></body></body>',
            ("body-has-gravcomp-is-covered", "'floats'"),
        ),
        (
            '<body name="light"><joint/><body gravcomp="1" name="heavy"><geom size="1"/></body></body>',
            ("body-has-gravcomp-is-covered", "'heavy'"),
        ),
    ],
)
def test_parts_that_are_not_covered_are_refused_by_name(parts, message):
    with raises(*message):
        physics.load(f"<mujoco><worldbody>{parts}</worldbody></mujoco>")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("<mujoco><nothing/></mujoco>", ("mujoco-refuses-robot",)),
        ("none.xml", ("no-robot-at-give-path", "in the directory /", "Path(__file__).parent / 'none.xml'")),
        ("/none.xml", ("no-robot-at-give-path", "there is no robot at '/none.xml'. hint")),
        (3, ("robot-is-given-as-text", "int")),
    ],
)
def test_sources_that_are_no_robots_are_refused(source, message):
    with raises(*message):
        physics.load(source)


def test_a_missing_wheel_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mujoco", None)
    monkeypatch.setattr("platform.python_version_tuple", lambda: ("3", "19", "0"))
    with raises("robots-need-package-mujoco-if", "robots", "Python 3.19"):
        physics.load("<mujoco/>")


def test_a_renderer_that_is_missing_is_told(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "mujoco"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("MUJOCO_GL", "nothing")
    with raises("package-mujoco-cannot-be-imported", "MUJOCO_GL=nothing", "RuntimeError"):
        physics.load("<mujoco/>")


def test_states_of_another_size_are_refused():
    model = physics.load('<mujoco><worldbody><body><joint/><geom size="1"/></body></worldbody></mujoco>')
    with raises("robot-has-array-shape-was", "1", "positions"):
        physics.initial_state(model, np.zeros(2))
