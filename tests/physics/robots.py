"""Robots for tests, and what C MuJoCo computes of them."""

from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np

from rollmill import physics

TUMBLER = """
<mujoco>
  <compiler angle="radian" autolimits="true"/>
  <option timestep="0.004" integrator="{integrator}" iterations="100" tolerance="1e-12" impratio="1.5" {option}>
    <flag {flags}/>
  </option>
  <worldbody>
    <geom name="floor" type="plane" size="0 0 1" friction="0.8" margin="0.01" contype="1" conaffinity="0"/>
    <body name="trunk" pos="0 0 0.5">
      <freejoint/>
      <geom type="box" size="0.2 0.15 0.1" density="300" contype="0" conaffinity="1"/>
      <site name="thruster" pos="0.1 0 0.05" euler="0.2 0.1 0"/>
      <body name="hat" pos="0 0 0.2" euler="0.3 0 0">
        <geom size="0.05" pos="0.1 0 0" contype="0" conaffinity="1"/></body>
      <body name="leg" pos="0.2 0.1 0" euler="0 0.5 0.2">
        <joint name="hip" axis="0 1 0.5" pos="0.01 0 0.02" range="-0.6 0.6" armature="0.02" damping="0.3"
               stiffness="2"/>
        <joint name="twist" axis="1 0 0" damping="0.1" frictionloss="0.2"/>
        <geom type="capsule" fromto="0 0 0 0.2 0 -0.2" size="0.04" contype="0" conaffinity="1"/>
        <body name="foot" pos="0.2 0 -0.2">
          <joint name="shin" type="slide" axis="0 0 1" range="-0.1 0.1" damping="2" stiffness="50"
                 springref="0.02"/>
          <geom name="sole" size="0.06" pos="0 0 -0.1" contype="2" conaffinity="1" solref="0.03 0.8"/>
          <site name="sole" pos="0 0 -0.05" euler="0.4 0 0"/>
        </body>
      </body>
      <body name="arm" pos="-0.2 0 0.05">
        <joint name="shoulder" type="ball" damping="0.2" armature="0.01"/>
        <geom type="capsule" fromto="0 0 0 -0.3 0 -0.1" size="0.05" contype="0" conaffinity="1"/>
        <geom name="hand" size="0.07" pos="-0.3 0 -0.1" contype="4" conaffinity="3" condim="1"/>
      </body>
    </body>
    <body name="ball" pos="0.2 0.4 0.1"><freejoint/>
      <geom name="ball" size="0.1" density="400" contype="2" conaffinity="5"/></body>
    <body name="stick" pos="-0.3 -0.4 0.2"><freejoint/>
      <geom name="stick" type="capsule" size="0.05 0.2" density="400" contype="2" conaffinity="7"/></body>
  </worldbody>
  <actuator>
    <position joint="hip" kp="20" kv="1" gear="1.5" ctrlrange="-0.5 0.5" forcerange="-4 4"/>
    <motor joint="shin" gear="10" ctrlrange="-1 1"/>
    <velocity joint="twist" kv="0.5"/>
    <motor site="thruster" gear="1 0 3 0 0.2 0"/>
  </actuator>
  <sensor><force site="sole"/><torque site="sole"/></sensor>
</mujoco>
"""
"""Joints and actuators of all kinds, welded and free bodies, and geoms that touch in most covered pairs."""

CROWD = """
<mujoco>
  <option timestep="0.004" gravity="0 0 0" iterations="100" tolerance="1e-12"/>
  <default><geom friction="0.7"/><joint damping="0.1"/></default>
  <worldbody>
    <body><freejoint/><geom size="0.1"/>
      <body pos="0.2 0 0"><joint axis="0 1 0"/><geom type="capsule" fromto="0 0 0 0.3 0.05 0" size="0.05"/>
        <body pos="0.3 0.05 0"><joint axis="0 0 1"/>
          <geom type="capsule" fromto="0.1 0 0 0.3 0.05 0.1" size="0.05"/></body></body></body>
    <body pos="0.2 0.12 0.02" euler="20 30 0"><freejoint/><geom type="capsule" size="0.06 0.2"/></body>
    <body pos="0 0.05 0.25"><freejoint/><geom size="0.12" condim="1"/></body>
    <body pos="0.3 0.2 0.05"><freejoint/><geom size="0.12"/></body>
  </worldbody>
</mujoco>
"""
"""A chain and three bodies that push each other apart: contacts between spheres and capsules that move."""


def tumbler(*, integrator: str = "Euler", flags: str = "", option: str = "") -> Any:
    """MuJoCo's model of a robot that tumbles among a ball and a stick."""
    flags = flags or 'island="disable"'
    return mujoco.MjModel.from_xml_string(TUMBLER.format(integrator=integrator, flags=flags, option=option))


def states(compiled: Any, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random coordinates, velocities and controls."""
    random = np.random.default_rng(seed)
    positions = compiled.qpos0 + random.normal(size=(count, compiled.nq)) * 0.5
    for joint in range(compiled.njnt):
        kind, at = compiled.jnt_type[joint], compiled.jnt_qposadr[joint]
        if kind in (0, 1):
            at += 3 if kind == 0 else 0
            q = random.normal(size=(count, 4))
            positions[:, at : at + 4] = q / np.linalg.norm(q, axis=1, keepdims=True)
    return positions, random.normal(size=(count, compiled.nv)) * 2, random.uniform(-1.5, 1.5, (count, compiled.nu))


def visited(compiled: Any, count: int, seed: int = 0, starts: int = 4) -> dict[str, np.ndarray]:
    """States that C MuJoCo comes to under random controls, and what its step makes of each."""
    random = np.random.default_rng(seed)
    data: Any = mujoco.MjData(compiled)
    seen: dict[str, list[np.ndarray]] = {
        name: [] for name in ("q", "v", "w", "u", "a", "q1", "v1", "s", "contacts")
    }
    for i in range(count):
        if i % (count // starts) == 0:
            mujoco.mj_resetData(compiled, data)
            data.qvel[:] = random.normal(size=compiled.nv)
            data.qpos[:] += 0.05 * random.normal(size=compiled.nq)
            mujoco.mj_normalizeQuat(compiled, data.qpos)
        data.ctrl[:] = random.uniform(-1.5, 1.5, compiled.nu)
        before = [data.qpos, data.qvel, data.qacc_warmstart, data.ctrl]
        for name, values in zip("qvwu", before, strict=True):
            seen[name].append(np.array(values))
        mujoco.mj_step(compiled, data)
        after = {"a": data.qacc, "q1": data.qpos, "v1": data.qvel, "s": data.sensordata, "contacts": data.ncon}
        for name, values in after.items():
            seen[name].append(np.array(values))
    return {name: np.array(values) for name, values in seen.items()}


def stepped(
    model: physics.Model, q: np.ndarray, v: np.ndarray, w: np.ndarray, u: np.ndarray
) -> physics.RobotState:
    """Our step of many states, given the accelerations that the solver starts from."""

    def one(q: jax.Array, v: jax.Array, w: jax.Array, u: jax.Array) -> physics.RobotState:
        start = physics.initial_state(model, q, v)
        return physics.step(model, physics.RobotState(start.positions, start.velocities, w, start.sensors), u)

    return jax.jit(jax.vmap(one))(*(jnp.array(values, float) for values in (q, v, w, u)))


def relative(ours: jax.Array, theirs: np.ndarray) -> np.ndarray:
    """The greatest difference of each row, by the greatest number of that row and 1."""
    return np.abs(np.asarray(ours) - theirs).max(1) / (1 + np.abs(theirs).max(1))
