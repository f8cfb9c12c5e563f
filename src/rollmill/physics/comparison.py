"""Compares the physics of a robot with C MuJoCo, step by step, from states that MuJoCo visits."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rollmill.core.errors import UsageError
from rollmill.physics.loading import compile_source
from rollmill.physics.model import Model, RobotState
from rollmill.physics.stepping import step

AGREES = 1e-3
"""Maximum difference between accelerations in agreement, relative to the largest acceleration, or to 1."""


class PhysicsComparison(NamedTuple):
    """Differences between steps of `rollmill.physics` and of C MuJoCo."""

    num_steps: int
    num_agreeing: int
    """Number of steps whose accelerations agree."""
    max_difference: float
    """Largest relative difference of a step's accelerations."""
    worst_joint: str
    """Joint whose acceleration differs most in the step with the largest difference."""
    num_contacts: int
    """Contacts of MuJoCo in the step with the largest difference."""
    unstable_step: int | None
    """Step at which MuJoCo reset the robot because a value was huge or not finite."""

    def __str__(self) -> str:
        """Returns a sentence for people."""
        sentence = f"{self.num_agreeing} of {self.num_steps} steps under random controls agree with C MuJoCo"
        if self.num_agreeing < self.num_steps:
            at = f"in joint {self.worst_joint!r}, with {self.num_contacts} contacts"
            sentence += f"; accelerations differ by up to {self.max_difference:.1g} {at}"
        if self.unstable_step is not None:
            sentence += f"; MuJoCo itself becomes unstable at step {self.unstable_step}"
            sentence += ": use a smaller timestep or more damping"
        return sentence + "."


def compare(source: Any, model: Model, *, steps: int = 100, seed: int = 0) -> PhysicsComparison:
    """Compares single steps of a robot with C MuJoCo, from states that MuJoCo visits under random controls.

    Args:
        source: the source that the robot was loaded from.
        model: the robot.
        steps: number of steps.
        seed: seed of the controls and of the noise in the initial state.

    Raises:
        UsageError: MuJoCo rejects the source, or `steps` is less than 1.
    """
    if steps < 1:
        raise UsageError(f"steps must be at least 1, got {steps}.")
    mujoco, compiled = compile_source(source)
    # otherwise MuJoCo writes warnings to a file in the working directory
    mujoco.set_mju_user_warning(lambda message: None)
    try:
        before, accelerations, contacts, unstable = _visit_states(mujoco, compiled, steps, seed)
    finally:
        mujoco.set_mju_user_warning(None)

    def ours(q: Any, v: Any, w: Any, u: Any) -> jax.Array:
        state = RobotState(q, v, w, jnp.zeros(model.structure.num_readings))
        return step(model, state, u).accelerations

    found = jax.jit(jax.vmap(ours))(*(jnp.asarray(values, jnp.float32) for values in before))
    differences = np.abs(np.asarray(found, float) - accelerations)
    differences = differences / (1.0 + np.abs(accelerations).max(axis=1, keepdims=True))
    differences = np.where(np.isfinite(differences), differences, np.inf)
    worst = int(differences.max(axis=1).argmax())
    owners = [joint.name for joint in model.structure.joints for _ in range(joint.size)]
    return PhysicsComparison(
        num_steps=len(differences),
        num_agreeing=int(np.sum(differences.max(axis=1) <= AGREES)),
        max_difference=float(differences[worst].max()),
        worst_joint=owners[int(differences[worst].argmax())],
        num_contacts=contacts[worst],
        unstable_step=unstable,
    )


def _visit_states(
    mujoco: Any, compiled: Any, steps: int, seed: int
) -> tuple[list[np.ndarray], np.ndarray, list[int], int | None]:
    """Returns states and controls, and the accelerations and contacts that MuJoCo computes for them."""
    random, data = np.random.default_rng(seed), mujoco.MjData(compiled)
    limited = compiled.actuator_ctrllimited.astype(bool)
    low, high = np.where(limited[:, None], compiled.actuator_ctrlrange, [[-1.0, 1.0]]).T
    data.qvel[:] = 0.05 * random.normal(size=compiled.nv)
    seen: list[list[np.ndarray]] = [[], [], [], []]
    after: list[np.ndarray] = []
    contacts: list[int] = []
    unstable = None
    for count in range(steps):
        data.ctrl[:] = random.uniform(low, high)
        now = [np.array(values) for values in (data.qpos, data.qvel, data.qacc_warmstart, data.ctrl)]
        mujoco.mj_step(compiled, data)
        if any(warning.number for warning in data.warning):
            unstable = count
            break
        for values, value in zip(seen, now, strict=True):
            values.append(value)
        after.append(np.array(data.qacc))
        contacts.append(int(data.ncon))
    if not after:
        raise UsageError(
            "MuJoCo becomes unstable in the first step of the robot. hint: use a smaller timestep or more damping."
        )
    return [np.array(values) for values in seen], np.array(after), contacts, unstable
