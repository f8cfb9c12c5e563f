"""Steps a second of all robots' tasks by each back end: XLA, the rollout kernel and C MuJoCo, and PPO by kernels.

    python benchmarks/robots_backends.py [Ant Cartpole ...] [--envs 4096] [--launch 32x1] [--deadline 240]

Each task is a process of its own. All compile side by side at low priority until the deadline (s), and what has
been compiled by then is timed one task after the other: rollouts of a 64-64 policy with the trajectory stored, C
MuJoCo with random actions on all cores of this process, and PPO by the task's recipe. A launch is environments of
a block and its warps, on CPUs environments alone. Memory is what XLA allots for the arguments, results and
intermediate values of a program, divided by its environments. Writes results/robots-backends-DEVICE.json.
"""

import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from measure import options, platform, some_of, timed_in_turns, training_turns, write_result
from robots_learning import TASKS as RECIPE_TASKS
from robots_rollouts import begun, graph_of, rollout

import rollmill
from rollmill.core.machine import usable_cores
from rollmill.envs.robots import MODELS, TASKS
from rollmill.envs.robots.in_mujoco import MujocoBatch
from rollmill.fusion import rollouts_in_a_row
from rollmill.programs.compiled import CompiledProgram, lower
from rollmill.programs.kernels import device_name
from rollmill.recipes import RECIPES

ROLLOUTS = 2
"""Rollouts in a row of a timed call."""

HOST_STEPS = 20
"""Steps of C MuJoCo's robots that are timed, after as many that are not."""


def numbers_of(launch: str) -> tuple[int, ...]:
    """Returns the numbers of a launch such as 32x1."""
    return tuple(map(int, launch.split("x")))


def compiled_rollouts(graph: Any, side: str, arguments: Any) -> tuple[Any, dict[str, Any]]:
    """Compiles rollouts by XLA or by a kernel; returns them, and what is known before they run."""
    began = time.perf_counter()
    run = jax.jit(partial(rollouts_in_a_row, ROLLOUTS, rollout(graph, side, "tf32")))
    program = run.lower(*arguments).compile()
    memory = program.memory_analysis()
    parts = ("argument", "output", "temp")
    total = sum(getattr(memory, f"{part}_size_in_bytes") for part in parts) if memory else None
    seconds = time.perf_counter() - began
    return program, {"compile_seconds": seconds, "bytes_a_copy": total and total / graph.loops.num_envs}


def compiled_training(name: str, chosen: Any) -> tuple[CompiledProgram, dict[str, Any]]:
    """Compiles PPO by a task's recipe with the rollout kernel; returns it, and what is known before it runs."""
    config = RECIPES[RECIPE_TASKS[name].recipe]().config
    graph = rollmill.ppo(rollmill.make(f"robots:{name}"), config)
    launches = {"rollouts": numbers_of(chosen.launch), "device": device_name(jax.devices()[0])}
    program = lower(graph, fusion="rollout", launches=launches, unroll=1)
    known = {"compile_seconds": program.compile_seconds, "notes": list(program.notes)}
    return program, known | {
        "environments": config.num_envs,
        "steps_of_an_iteration": config.num_envs * config.num_steps,
    }


class InMujoco:
    """C MuJoCo with random actions, the task's own functions included."""

    def __init__(self, name: str, count: int):
        self._env = rollmill.make(f"robots:{name}")
        self._batch = MujocoBatch(self._env, MODELS[name](), count)
        self._random = np.random.default_rng(0)
        self._batch.reset(seed=0)
        self.advance(2)

    def advance(self, steps: int) -> None:
        """Makes some steps of all robots; episodes that end begin anew."""
        count, size = self._batch.num_envs, self._env.action_space.shape
        for _ in range(steps):
            actions = self._random.uniform(-1, 1, (count, *size)).astype(np.float32)  # type: ignore[misc]
            _, _, terminated, truncated, _ = self._batch.step(actions)
            if (ended := terminated | truncated).any():
                self._batch.reset(options={"reset_mask": ended})

    def rate(self) -> dict[str, Any]:
        """Returns steps a second."""
        self.advance(HOST_STEPS)
        began = time.perf_counter()
        self.advance(HOST_STEPS)
        rate = self._batch.num_envs * HOST_STEPS / (time.perf_counter() - began)
        return {"steps_per_second": rate, "cores": usable_cores(), "environments": self._batch.num_envs}


def found_of(future: Future) -> tuple[Any, dict[str, Any]]:
    """Returns what a thread compiled, or None and why there is nothing."""
    if not future.done():
        return None, {"not_compiled": "not within the deadline"}
    if (error := future.exception()) is not None:
        return None, {"refused": f"{type(error).__name__}: {str(error).splitlines()[0][:400]}"}
    return future.result()


def timed(name: str, chosen: Any, folder: Path, go: Path) -> dict[str, Any]:
    """Compiles all back ends of a task, waits for its turn, and times those that were compiled by then."""
    graph = graph_of(name, chosen.envs, chosen.steps)
    arguments = begun(graph)
    pool = ThreadPoolExecutor(4)
    sides = {
        "xla": pool.submit(compiled_rollouts, graph, "xla", arguments),
        "kernel": pool.submit(compiled_rollouts, graph, chosen.launch, arguments),
    }
    training = pool.submit(compiled_training, name, chosen)
    in_mujoco = InMujoco(name, chosen.host_envs)
    while not go.exists():
        if all(future.done() for future in (*sides.values(), training)):
            (folder / f"{name}.compiled").touch()
        time.sleep(0.5)
    rows: dict[str, Any] = {"environments": chosen.envs, "steps_of_a_rollout": chosen.steps}
    programs: dict[str, Callable] = {}
    for side, future in sides.items():
        program, rows[side] = found_of(future)
        if program is not None:
            programs[side] = program
    with chosen.lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        seconds = timed_in_turns(programs, arguments, repeats=chosen.repeats, calls=2) if programs else {}
        for side, times in seconds.items():
            rows[side]["steps_per_second"] = chosen.envs * chosen.steps * ROLLOUTS / float(np.median(times))
        program, row = found_of(training)
        if program is not None:
            row |= {"steps_per_second": training_rate(program, row["steps_of_an_iteration"], chosen.iterations)}
        rows["training_by_kernel"] = row
        rows["mujoco"] = in_mujoco.rate()
    return rows


def training_rate(program: CompiledProgram, batch: int, iterations: int) -> float:
    """Returns the steps a second of a training, after its first iterations."""
    turn = training_turns(program, batch, iterations)
    return float(np.median([turn() for _ in range(4)][1:]))


def main() -> None:
    """Starts a process for each task, or times one if this is such a process."""
    chosen = options(
        __doc__,
        {"tasks": some_of(TASKS)},
        envs=4_096,
        steps=16,
        launch="32x1",
        repeats=5,
        iterations=20,
        host_envs=1_024,
        deadline=240.0,
        lock=(Path, "a file for which processes of the tasks wait for their turn"),
        folder=Path,
    )
    if chosen.folder:
        (name,) = chosen.tasks
        os.nice(10)
        row = timed(name, chosen, chosen.folder, chosen.folder / "go")
        (chosen.folder / f"{name}.json").write_text(json.dumps(row))
        sys.stdout.flush()
        os._exit(0)  # without waiting for what is still being compiled
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        lock = chosen.lock or folder / "lock"
        lock.touch()
        result = run_all(chosen, folder, lock)
    write_result(f"robots-backends-{platform()}", result, chosen.output)


def run_all(chosen: Any, folder: Path, lock: Path) -> dict[str, Any]:
    """Starts the tasks' processes, which time once all compiled or the deadline passed; returns all rows."""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    names = ("envs", "steps", "launch", "repeats", "iterations", "host_envs")
    sizes = [word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(chosen, name)))]
    command = [sys.executable, __file__]
    places = ["--folder", str(folder), "--lock", str(lock)]
    processes = {
        name: subprocess.Popen([*command, name, *sizes, *places], env=environment) for name in chosen.tasks
    }
    began = time.perf_counter()
    ready = lambda name: (folder / f"{name}.compiled").exists() or processes[name].poll() is not None
    while not all(map(ready, chosen.tasks)) and time.perf_counter() - began < chosen.deadline:
        time.sleep(0.5)
    print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
    (folder / "go").touch()
    result: dict[str, Any] = {}
    with ThreadPoolExecutor(len(processes)) as pool:
        ends = {pool.submit(process.wait): name for name, process in processes.items()}
        while ends:
            done, _ = wait(ends, return_when="FIRST_COMPLETED")
            for future in done:
                name = ends.pop(future)
                file = folder / f"{name}.json"
                result[name] = json.loads(file.read_text()) if file.exists() else {"failed": future.result()}
                print(name, json.dumps(result[name]), flush=True)
                write_result(f"robots-backends-{platform()}", result, chosen.output)
    return result


if __name__ == "__main__":
    main()
