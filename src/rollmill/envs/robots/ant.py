"""robots:Ant: a torso on four legs of two joints that walks along the x axis.

Observation, reward, reset and termination follow Ant of Isaac Gym (Makoviychuk et al., "Isaac Gym: High
Performance GPU-Based Physics Simulation For Robot Learning", 2021; IsaacGymEnvs). MuJoCo replaces PhysX, angles
are within [-pi, pi], and force sensors measure the forces between a foot and its leg.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from rollmill import physics
from rollmill.core.types import Environment
from rollmill.envs.robots.building import load_model, robot_environment
from rollmill.envs.robots.pictures import ViewAngle
from rollmill.envs.robots.substeps import in_float32
from rollmill.envs.robots.walking import (
    SUBSTEPS,
    TIME_STEP,
    WalkerParams,
    WalkerState,
    WalkingTask,
    observe_posture,
    posture_reward,
)

_LEG = """
<geom fromto="0 0 0 {x} {y} 0"/>
<body name="leg_{i}" pos="{x} {y} 0">
  <joint name="hip_{i}" axis="0 0 1" range="-40 40"/>
  <geom fromto="0 0 0 {x} {y} 0"/>
  <geom name="knee_{i}" class="touching" pos="{x} {y} 0"/>
  <body name="foot_{i}" pos="{x} {y} 0">
    <joint name="ankle_{i}" axis="{axis} 0" range="{range}"/>
    <geom fromto="0 0 0 {xx} {yy} 0"/>
    <geom name="foot_{i}" class="touching" pos="{xx} {yy} 0"/>
    <site name="foot_{i}"/>
  </body>
</body>"""


def model_text() -> str:
    """Returns the MJCF model of the ant, with the proportions of the ant of Isaac Gym.

    Its parts do not touch each other. Only knees and feet touch the floor, because the episode ends before other
    parts could reach it. A hip is never below its knee.
    """
    legs = [
        (0.2, 0.2, "-1 1", "30 100"),
        (-0.2, 0.2, "1 1", "-100 -30"),
        (-0.2, -0.2, "-1 1", "-100 -30"),
        (0.2, -0.2, "1 1", "30 100"),
    ]
    body = "".join(
        _LEG.format(i=i, x=x, y=y, xx=2 * x, yy=2 * y, axis=axis, range=span)
        for i, (x, y, axis, span) in enumerate(legs, 1)
    )
    joints = [f"{part}_{i}" for i in range(1, 5) for part in ("hip", "ankle")]
    motors = "".join(f'<motor joint="{joint}" gear="15" ctrlrange="-1 1"/>' for joint in joints)
    sensors = "".join(f'<force site="foot_{i}"/><torque site="foot_{i}"/>' for i in range(1, 5))
    return f"""
<mujoco model="ant">
  <compiler angle="degree" autolimits="true"/>
  <option timestep="{TIME_STEP / SUBSTEPS}" integrator="implicitfast"/>
  <default>
    <joint armature="0.01" damping="0.1"/>
    <geom type="capsule" size="0.08" density="5" friction="1" margin="0.01" contype="0" conaffinity="0"/>
    <default class="touching"><geom type="sphere" mass="0" conaffinity="1"/></default>
  </default>
  <worldbody>
    <geom name="floor" type="plane" size="0 0 1" contype="1"/>
    <body name="torso" pos="0 0 0.44">
      <freejoint/>
      <geom type="sphere" size="0.25"/>{body}
    </body>
  </worldbody>
  <actuator>{motors}</actuator>
  <sensor>{sensors}</sensor>
</mujoco>"""


def ant(
    *,
    max_steps: int = 1000,
    iterations: int = physics.ITERATIONS,
    line_search_iterations: int = physics.ITERATIONS,
) -> Environment:
    """A torso on four legs that walks along the x axis, 8 continuous actions (Isaac Gym's Ant).

    Args:
        max_steps: time limit of an episode, in steps of 1/60 s.
        iterations: Newton iterations in each of the two physics steps.
        line_search_iterations: number of points tried along each search direction.
    """
    model = load_model(model_text(), iterations, line_search_iterations)
    return robot_environment(
        "robots:Ant",
        _Ant(model.structure),
        WalkerParams(in_float32(model.params)),
        observations=60,
        actions=8,
        model=model_text(),
        view=ViewAngle(3.0),
        max_steps=max_steps,
    )


class _Ant(WalkingTask):
    def observe(self, state: WalkerState, params: WalkerParams) -> Float[Array, "60"]:
        """Returns the observation: the torso's pose and motion, the joints, the feet's forces, the last action."""
        q, v = state.robot.positions, state.robot.velocities
        posture = observe_posture(q, v, params.target, 1.0)
        joints = [self.relative_angles(q), 0.2 * v[6:]]
        return jnp.concatenate([posture, *joints, 0.1 * state.robot.sensors, state.action])

    def merits(
        self, observation: Float[Array, "60"], action: Float[Array, "8"], params: WalkerParams
    ) -> Float[Array, ""]:
        """Returns the reward without the progress term, computed from the observation."""
        angles, rates = observation[12:20], observation[20:28]
        energy = jnp.sum(jnp.abs(action * rates))
        costs = params.action_cost * jnp.sum(action * action) + params.energy_cost * energy
        limits = jnp.sum(jnp.where(angles > 0.99, 1.0, 0.0))
        return params.alive + posture_reward(observation, params) - costs - params.limit_cost * limits
