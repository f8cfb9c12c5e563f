"""Steps a second of all robots' tasks by each back end: XLA, the rollout kernel, MuJoCo Warp and C MuJoCo.

    python benchmarks/robots_backends.py [Ant Cartpole ...] [--envs 4096] [--launch 32x1] [--deadline 200]

Each task is a process of its own. All compile side by side at low priority until the deadline (s), and what has
been compiled by then is timed one task after the other: rollouts of the policy of the task's recipe with the
trajectory stored, and PPO by that recipe with `--envs` environments. Of C MuJoCo, environments are timed with
random actions on all cores of this process, and no training. A launch is environments of a block and its warps, on
CPUs environments alone. `auto` says which of XLA and the kernel `--fusion auto` takes, and why, in a run that is
long enough for it to time both. Memory is what XLA allots for the arguments, results and
intermediate values of rollouts, and what MuJoCo Warp holds besides, divided by the environments. Writes
results/robots-backends-DEVICE.json.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from measure import alone, options, platform, some_of, timed_in_turns, training_turns, write_result
from robots_learning import TASKS as RECIPE_TASKS
from robots_rollouts import begun, rollout

import rollmill
from rollmill.core.errors import CannotFuse
from rollmill.core.machine import usable_cores
from rollmill.dataflow import Graph
from rollmill.envs.robots import MODELS, TASKS
from rollmill.envs.robots.mujoco_batch import MujocoBatch
from rollmill.fusion import consecutive_rollouts, estimate_step_pressure, lower_rollout, many_products
from rollmill.programs.compiled import CompiledProgram, lower
from rollmill.programs.kernels import device_name
from rollmill.programs.search_cost import MIN_GAIN
from rollmill.recipes import RECIPES

ROLLOUTS = 2
"""Rollouts in a row of a timed call."""

HOST_STEPS = 20
"""Steps of C MuJoCo's robots that are timed, after as many that are not."""


def numbers_of(launch: str) -> tuple[int, ...]:
    """Returns the numbers of a launch such as 32x1."""
    return tuple(map(int, launch.split("x")))


class Side(NamedTuple):
    """Rollouts and a training by one back end, compiled."""

    rollouts: Callable[[], Any]
    training: CompiledProgram
    batch: int
    """Environment steps of an iteration of the training."""


def graph_of(name: str, physics: str, envs: int) -> Graph:
    """Returns PPO by a task's recipe, with a number of environments."""
    config = replace(RECIPES[RECIPE_TASKS[name].recipe]().config, num_envs=envs)
    return rollmill.ppo(rollmill.make(f"robots:{name}", physics=physics), config)


def compiled_side(graph: Graph, side: str, row: dict[str, Any]) -> Side:
    """Compiles rollouts and the training by XLA or by a kernel, and notes seconds and memory in a row."""
    arguments = begun(graph)
    began = time.perf_counter()
    run = jax.jit(partial(consecutive_rollouts, ROLLOUTS, rollout(graph, side, "tf32")))
    program = run.lower(*arguments).compile()
    row["compile_seconds"] = time.perf_counter() - began
    memory = program.memory_analysis()
    parts = ("argument", "output", "temp")
    total = sum(getattr(memory, f"{part}_size_in_bytes") for part in parts) if memory else None
    row["bytes_a_copy"] = total and total / graph.loops.num_envs
    launches = {"rollouts": numbers_of(side), "device": device_name(jax.devices()[0])} if side != "xla" else None
    training = lower(graph, fusion="rollout" if launches else "off", launches=launches, unroll=1)
    row |= {"compile_seconds_of_training": training.compile_seconds, "notes": list(training.notes)}
    return Side(partial(program, *arguments), training, graph.loops.batch_size)


def in_warp(name: str, envs: int, row: dict[str, Any]) -> Side:
    """Compiles rollouts and the training in MuJoCo Warp."""
    return compiled_side(graph_of(name, "warp", envs), "xla", row)


def warp_bytes() -> int | None:
    """Returns the bytes that MuJoCo Warp holds on the GPU."""
    if jax.default_backend() != "gpu":
        return None
    import warp

    return warp.get_mempool_used_mem_current(warp.device_from_jax(jax.devices()[0]))


def left_to_xla(graph: Graph) -> str | None:
    """Returns why `--fusion auto` does not try a kernel of rollouts; None if it does."""
    try:
        return many_products(estimate_step_pressure(lower_rollout(graph)))
    except CannotFuse as reason:
        return str(reason)


def chosen_by_auto(reason: str | None, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Returns what `--fusion auto` takes, and why."""
    if reason is not None:
        return {"takes": "xla", "because": reason}
    rates = [rows[side].get("steps_per_second") for side in ("kernel", "xla")]
    if not all(rates):
        return {"takes": "unknown", "because": "not both were compiled"}
    gain = np.divide(*rates)
    takes = "kernel" if gain >= MIN_GAIN else "xla"
    return {"takes": takes, "because": f"rollouts by the kernel are {gain:.1f} times as fast as by XLA"}


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


def why_not(future: Future) -> dict[str, str]:
    """Returns why a back end is not compiled; empty if it is."""
    if not future.done():
        return {"not_compiled": "not within the deadline"}
    if (error := future.exception()) is not None:
        return {"refused": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:400]}"}
    return {}


def timed(name: str, chosen: Any, folder: Path) -> None:
    """Compiles all back ends of a task, waits for its turn, and times and writes those that were compiled."""
    graph = graph_of(name, "jax", chosen.envs)
    sides: dict[str, dict[str, Any]] = {"kernel": {}, "warp": {}, "xla": {}}
    pool = ThreadPoolExecutor(len(sides))
    futures = {
        "kernel": pool.submit(compiled_side, graph, chosen.launch, sides["kernel"]),
        "warp": pool.submit(in_warp, name, chosen.envs, sides["warp"]),
        "xla": pool.submit(compiled_side, graph, "xla", sides["xla"]),
    }
    reason, in_mujoco = left_to_xla(graph), InMujoco(name, chosen.host_envs)
    while not (folder / "go").exists():
        if all(future.done() for future in futures.values()):
            (folder / f"{name}.compiled").touch()
        time.sleep(0.5)
    rows: dict[str, Any] = {"environments": chosen.envs, "steps_of_a_rollout": graph.loops.num_steps}
    rows |= {side: {**row, **why_not(futures[side])} for side, row in sides.items()}

    def write() -> None:
        (folder / f"{name}.json").write_text(json.dumps(rows))

    with alone(chosen.lock):
        rows["mujoco"] = in_mujoco.rate()
        write()
        ready = {side: future.result() for side, future in futures.items() if not why_not(future)}
        steps = chosen.envs * graph.loops.num_steps * ROLLOUTS
        for side, each in sorted(ready.items(), key=lambda item: item[0] == "warp"):  # after all others
            seconds = timed_in_turns({side: each.rollouts}, (), repeats=chosen.repeats, calls=1)[side]
            rows[side]["steps_per_second"] = steps / float(np.median(seconds))
            rate = training_rate(each.training, each.batch, chosen.iterations)
            rows[side]["steps_per_second_of_training"] = rate
            if side == "warp" and (held := warp_bytes()):
                rows[side]["bytes_a_copy_in_warp"] = held / chosen.envs
            write()
        rows["auto"] = chosen_by_auto(reason, rows)
        write()


def training_rate(program: CompiledProgram, batch: int, iterations: int) -> float:
    """Returns the steps a second of a training, after its first iterations."""
    turn = training_turns(program, batch, iterations)
    return float(np.median([turn() for _ in range(3)][1:]))


def main() -> None:
    """Starts a process for each task, or times one if this is such a process."""
    chosen = options(
        __doc__,
        {"tasks": some_of(TASKS)},
        envs=4_096,
        launch="32x1",
        repeats=4,
        iterations=8,
        host_envs=1_024,
        deadline=200.0,
        lock=(Path, "a file for which processes of the tasks wait for their turn"),
        folder=Path,
    )
    if chosen.folder:
        (name,) = chosen.tasks
        os.nice(10)
        timed(name, chosen, chosen.folder)
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
    names = ("envs", "launch", "repeats", "iterations", "host_envs")
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
                result[name] = json.loads(file.read_text()) if file.exists() else {}
                result[name] |= {"failed": code} if (code := future.result()) else {}
                print(name, json.dumps(result[name]), flush=True)
                write_result(f"robots-backends-{platform()}", result, chosen.output)
    return result


if __name__ == "__main__":
    main()
