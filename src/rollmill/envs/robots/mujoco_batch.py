"""Runs the tasks of robots in C MuJoCo, as batches that each process steps in threads.

The functions of the task compute observations, rewards and terminations. Each is traced twice: once up to the
controls that it passes to the physics, and once from the new state on. Shape letter: `E` robots of a batch.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from jaxtyping import Array, Float

from rollmill import physics
from rollmill.core.errors import UsageError
from rollmill.core.machine import thread_share
from rollmill.core.types import UNSTABLE, Environment, HostEnvironment
from rollmill.envs.host.batch_simulator import StartBatch
from rollmill.envs.robots.substeps import advanced_by
from rollmill.physics.loading import compile_source


def to_mujoco(env: Environment, source: Any) -> HostEnvironment:
    """Returns a robot's task as a host environment that C MuJoCo simulates in batches.

    Args:
        env: the task, with its time limit.
        source: MJCF model of the robot.
    """
    spaces = env.observation_space, env.action_space
    make = lambda count: MujocoBatch(env, source, count)
    start = StartBatch(env.name, make, *spaces, False, reports_unstable=True)
    return HostEnvironment(env.name, start, *spaces, reports_unstable=True)


class MujocoBatch(VectorEnv):
    """A batch of robots that C MuJoCo steps together. A robot whose episode ended waits for a reset."""

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}

    def __init__(self, env: Environment, source: Any, count: int):
        self.num_envs = count
        self.single_observation_space, self.single_action_space = env.observation_space, env.action_space
        self.observation_space, self.action_space = (
            batch_space(space, count) for space in (env.observation_space, env.action_space)
        )
        self._steps = _CSteps(source, count)
        self._functions = _BatchFunctions(env)
        with _on_the_host():
            self._key: Array = jax.random.key(0)
        self._now: tuple[Array, Any] | None = None

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Resets all robots, or only those that are True in `options["reset_mask"]`."""
        with _on_the_host():
            if seed is not None:
                self._key = jax.random.key(seed)
            first = self._functions.reset(self._next_keys())
            rows = (options or {}).get("reset_mask")
            if rows is not None and self._now is not None:
                first = self._functions.chosen(jnp.asarray(rows), first, self._now)
            self._now = first
            return np.asarray(first[0]), {}

    def step(self, actions: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Steps all robots of the batch with one action each."""
        assert self._now is not None
        with _on_the_host():
            keys, before, actions = self._next_keys(), self._now[1], jnp.asarray(actions)
            robots, controls = self._functions.controls(keys, before, actions)
            moved = self._steps.advanced(robots, np.asarray(controls), self._functions.substeps)
            after = self._functions.outcome(keys, before, actions, moved)
        self._now = after.observation, after.state
        reward, terminated, truncated = map(np.asarray, (after.reward, after.terminated, after.truncated))
        return (
            np.asarray(after.observation),
            reward,
            terminated,
            truncated,
            {UNSTABLE: np.asarray(after.info[UNSTABLE])},
        )

    def close_extras(self, **settings: Any) -> None:
        """Ends the threads that step the robots."""
        self._steps.close()

    def _next_keys(self) -> Array:
        self._key, own = jax.random.split(self._key)
        return jax.random.split(own, self.num_envs)


def _on_the_host() -> Any:
    return jax.default_device(jax.local_devices(backend="cpu")[0])


class _BatchFunctions:
    """The functions of a task for a batch, with its physics left out: what comes before them and after them."""

    def __init__(self, env: Environment):
        self.substeps = 1
        """Physics steps for each step of the task, known once `controls` was traced."""
        self.reset = jax.jit(jax.vmap(lambda key: env.reset(key, env.params)))
        self.chosen = jax.jit(
            jax.vmap(lambda row, new, old: jax.tree.map(lambda a, b: jnp.where(row, a, b), new, old))
        )
        self.controls = jax.jit(jax.vmap(self._controls(env)))
        self.outcome = jax.jit(jax.vmap(_outcome(env)))

    def _controls(self, env: Environment) -> Callable[..., tuple[physics.RobotState, Array]]:
        """Returns a function that returns the robot before a step, and its controls."""

        def controls(key: Array, state: Any, action: Array) -> tuple[physics.RobotState, Array]:
            seen: list[tuple[physics.RobotState, Array]] = []

            def note(robot: physics.RobotState, control: Array, count: int) -> physics.RobotState:
                seen.append((robot, control))
                self.substeps = count
                return robot

            with advanced_by(note):
                env.step(key, state, action, env.params)
            return seen[0]

        return controls


def _outcome(env: Environment) -> Callable[..., Any]:
    def outcome(key: Array, state: Any, action: Array, moved: physics.RobotState) -> Any:
        with advanced_by(lambda robot, control, count: moved):
            return env.step(key, state, action, env.params)

    return outcome


class _CSteps:
    """Steps many robots in C MuJoCo, with one thread for each core of this process's share."""

    def __init__(self, source: Any, count: int):
        self._mujoco, m = compile_source(source)
        self._compiled = m
        self._scalar = [int(m.jnt_dofadr[joint]) for joint in range(m.njnt) if m.jnt_type[joint] >= 2]
        self._mujoco.set_mju_user_warning(lambda message: None)  # otherwise MuJoCo writes warnings to a file
        warnings = self._mujoco.mjtWarning
        self._full = {"contacts": int(warnings.mjWARN_CONTACTFULL), "constraints": int(warnings.mjWARN_CNSTRFULL)}
        """Warnings of buffers that are too small: MuJoCo leaves out what does not fit."""
        threads = max(1, min(count, thread_share()))
        self._parts = np.array_split(np.arange(count), threads)
        self._data = [self._mujoco.MjData(self._compiled) for _ in self._parts]
        self._pool = ThreadPoolExecutor(threads)

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown()

    def advanced(
        self, robots: physics.RobotState, controls: Float[np.ndarray, "E actuators"], steps: int
    ) -> physics.RobotState:
        """Returns the robots after `steps` steps, with NaN as velocities if MuJoCo has reset an unstable robot."""
        before = jax.tree.map(np.asarray, robots)
        after = jax.tree.map(np.zeros_like, before)

        def run(part: np.ndarray, data: Any) -> None:
            for row in part:
                self._advance_one(data, before, controls[row], steps, after, int(row))

        list(self._pool.map(run, self._parts, self._data))
        return after

    def _overflow(self, what: str) -> UsageError:
        return UsageError(
            f"the {self._compiled.narena:,} bytes that the robot's model gives MuJoCo for contacts and "
            f"constraints are too few ({what}). hint: set a larger <size memory=...> in the model."
        )

    def _advance_one(self, data: Any, before: Any, control: np.ndarray, steps: int, after: Any, row: int) -> None:
        self._mujoco.mj_resetData(self._compiled, data)
        data.qpos[:], data.qvel[:] = before.positions[row], before.velocities[row]
        data.qacc_warmstart[:], data.ctrl[:] = before.accelerations[row], control
        try:
            self._mujoco.mj_step(self._compiled, data, steps)
        except self._mujoco.FatalError as error:
            raise self._overflow(str(error).splitlines()[0]) from None
        counts = data.warning.number  # as an array: a read of single warnings takes longer than a step
        if full := [name for name, index in self._full.items() if counts[index]]:
            raise self._overflow(" and ".join(full))
        after.positions[row], after.velocities[row], after.accelerations[row] = data.qpos, data.qvel, data.qacc
        readings = after.sensors[row]
        readings[: data.sensordata.size] = data.sensordata
        # more readings than the sensors have, because the forces on hinges and slides are included
        if readings.size > data.sensordata.size:
            readings[data.sensordata.size :] = (data.qfrc_actuator + data.qfrc_constraint)[self._scalar]
        if counts.any():
            after.velocities[row] = np.nan
