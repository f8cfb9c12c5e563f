"""Creates a task on your own robot, given its MJCF or URDF model and functions of its state."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Bool, Float

from rollmill.core.contracts import Call, check_signature
from rollmill.core.errors import UsageError
from rollmill.core.types import Environment, HostEnvironment, Key, Timestep
from rollmill.core.user_frame import attribute_to_user_code
from rollmill.envs.physics import Scalar
from rollmill.envs.robots.mujoco_batch import to_mujoco
from rollmill.envs.robots.pictures import drawing_of
from rollmill.envs.robots.stability import end_unstable, itself
from rollmill.envs.robots.substeps import PHYSICS, advance, checked_count, in_float32, uniform
from rollmill.envs.transforms import time_limit
from rollmill.physics import (
    ITERATIONS,
    Model,
    Params,
    RobotState,
    Structure,
    UnsupportedModel,
    compare,
    initial_state,
    load,
    load_outline,
)

Observe = Callable[[RobotState], Float[Array, " numbers"]]
Reward = Callable[[RobotState, Float[Array, " actuators"], RobotState], Float[Array, ""]]
Terminated = Callable[[RobotState], Bool[Array, ""]]

_CALLS = {
    "observe": Call(("state",)),
    "reward": Call(("before", "action", "after")),
    "terminated": Call(("state",)),
}
"""Arguments of the functions of a task."""


class RobotParams(eqx.Module):
    """Parameters of a robot and its initial states. Each leaf may hold one value per environment."""

    robot: Params
    reset_angle: Scalar
    reset_speed: Scalar


def robot(
    model: Any,
    *,
    reward: Reward,
    observe: Observe | None = None,
    terminated: Terminated | None = None,
    substeps: int = 1,
    max_steps: int = 1000,
    reset_angle: float = 0.05,
    reset_speed: float = 0.05,
    max_speed: float = 1e4,
    iterations: int = ITERATIONS,
    physics: str = "jax",
    contacts: int | None = None,
    rows: int | None = None,
    name: str = "robot",
) -> Environment | HostEnvironment:
    """Creates an environment from the model of a robot.

    Actions lie between -1 and 1, and are scaled to the control range of each actuator. Without a range, the action
    is the control itself. The functions use JAX, and each call concerns a single robot.

    Args:
        model: MJCF or URDF as a string, the path of such a file, a `mujoco.MjModel`, or a `rollmill.Model`.
        reward: computes the reward of a step: `(state before, action, state after) -> number`.
        observe: `(state) -> vector`. By default, it returns all coordinates (except x and y of free bodies), all
            velocities, and `state.sensors`: the readings of force and torque sensors, or of all sensors if
            `physics` is not `jax`.
        terminated: `(state) -> bool`: whether the episode ends, for example by a fall. By default, it never does.
        substeps: number of model time steps per step of the task.
        max_steps: time limit of an episode, in steps of the task.
        reset_angle: bound of the noise on initial hinge and slide positions (rad or m), which stay within their
            limits. Without noise, they equal the model's pose. Keyframes are ignored.
        reset_speed: bound of the initial velocities (m/s or rad/s).
        max_speed: maximum velocity (m/s or rad/s). If a velocity exceeds it, the episode ends as unstable, with a
            reward of 0.
        iterations: Newton iterations in each time step, unless `physics` is `mujoco`.
        physics: `jax` for `rollmill.physics`. MuJoCo Warp (`warp`) and C MuJoCo on the host CPU (`mujoco`) support
            more elements.
        contacts: number of contacts per robot, averaged over a batch, that MuJoCo Warp has room for. Default: at
            least four times the largest number in C MuJoCo under random controls.
        rows: number of constraint rows per robot that MuJoCo Warp has room for. Default: as for `contacts`.
        name: environment name in messages and runs.

    Raises:
        UsageError: MuJoCo is not installed or rejects the model, a part of it is not supported, it has no
            actuator, or a function does not return what it should.
        ContractError: a function takes other arguments, or raises an exception.

    Examples:
        >>> forwards = lambda before, action, after: after.positions[0] - before.positions[0]
        >>> env = rollmill.robot("walker.xml", reward=forwards)
    """
    own = _load_model(model, physics, iterations)
    _check_sizes(name, own.structure, physics, max_speed, contacts=contacts, rows=rows)
    count = checked_count("substeps", substeps)
    task = _OwnTask(own.structure, reward, observe or partial(_all_of, own.structure), terminated or _never, count)
    size = task.check(in_float32(own.params))
    env = Environment(
        name=name,
        reset=task.reset,
        step=task.step,
        observation_space=spaces.Box(-np.inf, np.inf, (size,), np.float32),
        action_space=spaces.Box(-1.0, 1.0, (len(own.structure.actuators),), np.float32),
        params=RobotParams(in_float32(own.params), reset_angle, reset_speed),
        draw=None if isinstance(model, Model) else drawing_of(model),
        compare=None if isinstance(model, Model) else _comparing(model, own),
    )
    limited = time_limit(end_unstable(env, itself, max_speed=max_speed), max_steps)
    if physics == "warp":
        from rollmill.envs.robots.warp_task import to_warp  # imports a large package

        solver = {"iterations": checked_count("iterations", iterations), "line_search_iterations": ITERATIONS}
        return to_warp(limited, model, **solver, contacts=contacts, rows=rows)._replace(options=limited.options)
    return to_mujoco(limited, model) if physics == "mujoco" else limited


def _check_sizes(
    name: str, structure: Structure, physics: str, max_speed: float, *, contacts: int | None, rows: int | None
) -> None:
    """Raises a `UsageError` for a robot without actuators, for a bound of 0, and for sizes that have no effect."""
    for option, size in (("contacts", contacts), ("rows", rows)):
        if physics != "warp" and size is not None:
            raise UsageError(
                f"{option}={size} needs physics='warp', because it is the size of a buffer of MuJoCo Warp."
            )
    if not structure.actuators:
        raise UsageError(f"{name} has no actuators. hint: add some to its model, such as <motor joint=...>.")
    if not max_speed > 0:
        raise UsageError(f"max_speed must be greater than 0, got {max_speed}.")


def _load_model(model: Any, physics: str, iterations: int) -> Model:
    """Returns a robot's model, or only its structure for another physics engine."""
    if physics not in PHYSICS:
        raise UsageError(
            f"physics={physics!r} must be 'jax' (Rollmill's physics), 'warp' (MuJoCo Warp) or 'mujoco' (C MuJoCo)."
        )
    if physics != "jax":
        if isinstance(model, Model):
            raise UsageError(
                f"physics={physics!r} takes the robot as MJCF, URDF or mujoco.MjModel, not as a loaded Model."
            )
        return load_outline(model)
    try:
        return model if isinstance(model, Model) else load(model, iterations=iterations)
    except UnsupportedModel as error:
        raise UnsupportedModel(
            f"{error} hint: use physics='mujoco' (C MuJoCo on the host) or physics='warp' (MuJoCo Warp) for "
            "such a robot."
        ) from None


def _comparing(source: Any, own: Model) -> Callable[[int, int], str]:
    """Returns a function that compares a robot with C MuJoCo and describes the differences."""
    return lambda steps, seed: str(compare(source, own, steps=steps, seed=seed))


class _OwnTask:
    """The functions of the task, for the structure of its robot."""

    def __init__(
        self, structure: Structure, reward: Reward, observe: Observe, terminated: Terminated, substeps: int
    ):
        self.structure, self.substeps = structure, substeps
        self.reward, self.observe, self.terminated = reward, observe, terminated
        ranges = [actuator.control_range or (-1.0, 1.0) for actuator in structure.actuators]
        self.low, self.high = np.array(ranges, np.float32).T

    def check(self, params: Params) -> int:
        """Returns the length of observations. Raises a `UsageError` if a function returns something else."""
        state = jax.eval_shape(lambda: initial_state(Model(self.structure, params)))
        action = jax.ShapeDtypeStruct(self.low.shape, jnp.float32)
        found = {
            "observe": _trace_result("observe", self.observe, state),
            "reward": _trace_result("reward", self.reward, state, action, state),
            "terminated": _trace_result("terminated", self.terminated, state),
        }
        wanted = {"observe": "a vector of floats", "reward": "a number", "terminated": "a boolean"}
        is_right = {
            "observe": lambda out: len(out.shape) == 1 and jnp.issubdtype(out.dtype, jnp.floating),
            "reward": lambda out: out.shape == () and jnp.issubdtype(out.dtype, jnp.number),
            "terminated": lambda out: out.shape == () and out.dtype == jnp.bool_,
        }
        for name, out in found.items():
            if not hasattr(out, "shape") or not is_right[name](out):
                kind = f"{out.dtype.name}{list(out.shape)}" if hasattr(out, "shape") else type(out).__name__
                raise UsageError(f"{name} must return {wanted[name]} for one robot, got {kind}.")
        return found["observe"].shape[0]

    def reset(self, key: Key, params: RobotParams) -> tuple[Float[Array, " numbers"], RobotState]:
        """Starts in the model's initial pose, with noise."""
        for_angles, for_rates = jax.random.split(key)
        positions = jnp.asarray(self.structure.initial_positions, jnp.float32)
        noise = uniform(for_angles, len(positions), params.reset_angle)
        parts: list[Array] = []
        for joint in self.structure.joints:
            at, size = joint.position, {"free": 7, "ball": 4}.get(joint.kind, 1)
            own = positions[at : at + size]
            if size == 1:
                own = own + noise[at : at + 1]
                own = own if joint.range is None else jnp.clip(own, *joint.range)
            parts.append(own)
        rates = uniform(for_rates, self.structure.num_velocities, params.reset_speed)
        readings = jnp.zeros(self.structure.num_readings)
        state = RobotState(jnp.concatenate(parts), rates, jnp.zeros_like(rates), readings)
        return self._observe(state), state

    def step(self, key: Key, state: RobotState, action: Float[Array, " n"], params: RobotParams) -> Timestep:
        """Advances the physics."""
        action = jnp.clip(action, -1.0, 1.0)
        control = 0.5 * (self.high + self.low) + 0.5 * (self.high - self.low) * action
        moved = advance(Model(self.structure, params.robot), state, control, self.substeps)
        return Timestep(
            observation=self._observe(moved),
            state=moved,
            reward=jnp.asarray(self.reward(state, action, moved), jnp.float32),
            terminated=jnp.asarray(self.terminated(moved)),
            truncated=jnp.zeros((), bool),
            info={},
        )

    def _observe(self, state: RobotState) -> Float[Array, " numbers"]:
        return jnp.asarray(self.observe(state), jnp.float32)


def _trace_result(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    if not callable(function):
        raise UsageError(f"{name} must be a function, got a {type(function).__name__}.")
    check_signature(name, function, _CALLS[name])
    with attribute_to_user_code(name):
        return jax.eval_shape(function, *arguments)


def _all_of(structure: Structure, state: RobotState) -> Float[Array, " numbers"]:
    skipped = {joint.position + k for joint in structure.joints if joint.kind == "free" for k in range(2)}
    kept = [i for i in range(len(structure.initial_positions)) if i not in skipped]
    return jnp.concatenate([state.positions[np.array(kept)], state.velocities, state.sensors])


def _never(state: RobotState) -> Bool[Array, ""]:
    return jnp.zeros((), bool)
