"""PPO on robots by the recipes of this package, with curves of the return beside published returns.

    python benchmarks/robots_learning.py [Ant Cartpole ...] [--seconds Ant=30 Humanoid=60] [--seeds 3]
        [--fusion off] [--launch 16x2] [--unroll 1] [--apart] [--physics jax warp]

Each task is a process of its own. All compile side by side, and then train one after the other, each for its
seconds or its recipe's steps. Seeds train in one program, or with `--apart` one after the other by the same
program. Of several physics the fastest trains: all are compiled, and make a few iterations. A return is the mean
over training episodes that ended since the point before, for each seed, and the last one is that over the last
tenth of the training's episodes. Seconds are those of training, after compilation. Writes
results/robots-learning-TASK-DEVICE.json, also while it trains, and robots-visited-TASK.npz: states that the
trained policy visits, for robots_physics.py. Fusion and physics other than the defaults are part of the file's
name.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from measure import alone, options, platform, some_of, training_turns, write_result

import rollmill
from rollmill.dataflow import Graph
from rollmill.dataflow.graph import Collector
from rollmill.envs.robots.shadow_hand import HandState
from rollmill.envs.robots.substeps import advanced_by
from rollmill.envs.transforms import TimeLimitState
from rollmill.programs.compiled import CompiledProgram, lower
from rollmill.programs.dispatch import dispatch_ahead
from rollmill.programs.kernels import device_name
from rollmill.programs.states import start_inputs
from rollmill.recipes import RECIPES

SKRL = "skrl (Toni-SM/skrl#41), PhysX, mean and standard deviation of seeds"
ISAAC = "Isaac Gym (arXiv 2108.10470), PhysX, one A100"

WRITE_SECONDS = 5.0
"""Seconds between two writings of a result."""

VISITED = 1_000
"""States that are written, of as many environments."""


class Task(NamedTuple):
    """What is published about a task, and for how long it trains here."""

    recipe: str
    returns: tuple[float, float]
    """skrl's mean return and its deviation."""
    levels: tuple[float, ...] = ()
    """Other returns to which times are published."""
    seconds: float = 20.0


TASKS = {
    "Cartpole": Task("robots-cartpole", (494.3, 0.9), seconds=10),
    "Ingenuity": Task("robots-ingenuity", (7067, 489), (5000,)),
    "Quadcopter": Task("robots-quadcopter", (1238, 127)),
    "BallBalance": Task("robots-ball-balance", (288, 26)),
    "Ant": Task("robots-ant", (5466, 280), (3000, 6000, 7000), seconds=35),
    "Humanoid": Task("robots-humanoid", (6474, 696), (5000, 7000), seconds=60),
    "Anymal": Task("robots-anymal", (61.9, 1.8), seconds=30),
    "FrankaCabinet": Task("robots-franka-cabinet", (3134, 183), seconds=30),
    "ShadowHand": Task("robots-shadow-hand", (7898, 181), (3000, 6000), seconds=60),
}


class Point(NamedTuple):
    """A reading of a training."""

    seconds: float
    steps: int
    """Of each seed."""
    returns: list[float]
    """Of each seed."""
    lengths: list[float]


class Curve:
    """The points of a training, each over at least a quarter as many episodes as there are environments."""

    def __init__(self, num_envs: int, num_seeds: int):
        self.points: list[Point] = []
        self.unstable, self.overflows = np.zeros(num_seeds), np.zeros(num_seeds)
        """Of each seed, episodes that ended because the simulation became unstable, and steps in which a buffer
        of MuJoCo Warp was too small."""
        self._enough = num_envs / 4
        self._sums = np.zeros((3, num_seeds))

    def add(self, seconds: float, steps: int, metrics: list[dict[str, Any]]) -> None:
        """Takes the metrics of some iterations."""
        for name, total in zip(("ended", "return_sum", "length_sum"), self._sums, strict=True):
            total += sum(np.reshape(row[f"episodes/{name}"], -1) for row in metrics)
        self.unstable += sum(np.reshape(row["episodes/unstable"], -1) for row in metrics)
        self.overflows += sum(np.reshape(row.get("episodes/overflows", 0), -1) for row in metrics)
        ended, returns, lengths = self._sums
        if ended.min() >= self._enough:
            self.points.append(Point(seconds, steps, (returns / ended).tolist(), (lengths / ended).tolist()))
            self._sums[:] = 0

    def final(self) -> list[float]:
        """Returns the mean return of each seed in the last tenth of the points."""
        last = self.points[-max(1, len(self.points) // 10) :]
        return np.mean([point.returns for point in last], axis=0).tolist() if last else []

    def reached(self, level: float) -> dict[str, Any]:
        """Returns when each seed first came to a return; None where it did not."""
        found: dict[str, Any] = {"seconds": [], "steps": []}
        for seed in range(self._sums.shape[1]):
            first = next((point for point in self.points if point.returns[seed] >= level), None)
            found["seconds"].append(first and first.seconds)
            found["steps"].append(first and first.steps)
        return found

    def thinned(self, count: int = 150) -> list[Point]:
        """Returns about so many of the points, the last among them."""
        every = max(1, len(self.points) // count)
        return self.points[::-1][::every][::-1]


def trained(
    program: CompiledProgram, state: Any, batch: int, until: int, seconds: float, curve: Curve
) -> Iterator[tuple[float, Any]]:
    """Trains for some seconds; yields after each window the steps a second of each seed, and the state if kept."""
    began = time.perf_counter()
    for window in dispatch_ahead(program, state, first=0, until=until):
        took = time.perf_counter() - began
        curve.add(took, window.last * batch, window.metrics)
        yield window.last * batch / took, window.after if window.kept else None
        if took > seconds:
            return


def lowered(graph: Graph, seeds: Sequence[int], chosen: Any) -> CompiledProgram:
    """Compiles a training."""
    launches = {"rollouts": tuple(map(int, chosen.launch.split("x")))} if chosen.launch else None
    launches = launches and {**launches, "device": device_name(jax.devices()[0])}
    return lower(graph, seeds=seeds, fusion=chosen.fusion, launches=launches, unroll=chosen.unroll or None)


class Candidate(NamedTuple):
    """A compiled training, and the steps a second that it makes if it was timed beside others."""

    graph: Graph
    program: CompiledProgram
    steps_per_second: float | None = None


def compiled_with(
    name: str, config: Any, physics: Sequence[str], seeds: Sequence[int], chosen: Any
) -> dict[str, Candidate]:
    """Compiles a task with each of the physics, side by side; returns those that compile within the deadline."""
    graphs = {each: rollmill.ppo(rollmill.make(f"robots:{name}", physics=each), config) for each in physics}
    pool = ThreadPoolExecutor(len(graphs))
    futures = {each: pool.submit(lowered, graph, seeds, chosen) for each, graph in graphs.items()}
    wait(futures.values(), timeout=chosen.deadline or None)
    if not any(future.done() and not future.exception() for future in futures.values()):
        wait(futures.values())
    found = {}
    for each, future in futures.items():
        if not future.done():
            print(f"{name}: {each} is not compiled after {chosen.deadline:.0f} s", flush=True)
        elif (error := future.exception()) is not None:
            print(f"{name}: {each}: {type(error).__name__}: {str(error)[:400]}", flush=True)
        else:
            found[each] = Candidate(graphs[each], future.result())
            print(f"{name}: {each}: compiled in {future.result().compile_seconds:.1f} s", flush=True)
    if not found:
        raise SystemExit(f"{name}: none of {', '.join(physics)} compiles.")
    return found


def timed(candidates: dict[str, Candidate], batch: int) -> dict[str, Candidate]:
    """Times some iterations of each of several candidates, the fastest last."""
    if len(candidates) == 1:
        return candidates
    rates = {}
    for physics, candidate in candidates.items():
        turn = training_turns(candidate.program, batch, 2)
        turn()
        rates[physics] = turn()
        print(f"{physics}: {rates[physics]:,.0f} steps/s", flush=True)
    return {each: candidates[each]._replace(steps_per_second=rates[each]) for each in sorted(rates, key=rates.get)}  # type: ignore[arg-type]


def train(name: str, chosen: Any, seconds: float, lock: Path) -> None:
    """Compiles a task, waits for its turn, trains it, and writes the result."""
    task = TASKS[name]
    config = RECIPES[task.recipe]().config
    if chosen.envs:
        steps = config.total_timesteps * chosen.envs // config.num_envs
        config = replace(config, num_envs=chosen.envs, total_timesteps=steps)
    seeds = tuple(range(chosen.seeds))
    together = (0,) if chosen.apart else seeds
    candidates = compiled_with(name, config, chosen.physics, together, chosen)
    batch = config.num_envs * config.num_steps
    until = -(-config.total_timesteps // batch)
    with alone(lock):
        candidates = timed(candidates, batch * len(together))
        physics, (graph, program, _) = list(candidates.items())[-1]
        told: dict[str, Any] = {
            "recipe": task.recipe,
            "environments": config.num_envs,
            "steps_of_the_recipe": config.total_timesteps,
            "physics": physics,
            "candidates": {
                each: {"compile_seconds": program.compile_seconds, "steps_per_second": rate}
                for each, (_, program, rate) in candidates.items()
            },
            "fusion": chosen.fusion,
            "launch": chosen.launch,
            "unroll": chosen.unroll,
            "notes": list(program.notes),
            "seeds_in_one_program": len(together),
            "compile_seconds": program.compile_seconds,
            "published": {SKRL: task.returns},
            "trainings": [],
        }
        for group in [(seed,) for seed in seeds] if chosen.apart else [seeds]:
            state = program.start.func(*start_inputs(graph, group))  # type: ignore[attr-defined]
            began = time.perf_counter()
            row: dict[str, Any] = {"seeds": group}
            told["trainings"].append(row)
            curve, written = Curve(config.num_envs, len(group)), time.perf_counter()
            last = None
            successes: list[tuple[float, list[float]]] = []
            for rate, after in trained(program, state, batch, until, seconds, curve):
                last = after
                row |= {"steps_per_second_of_each_seed": rate, "steps_per_second": rate * len(group)}
                if last is not None and (counted := successes_of(last, len(group))):
                    successes.append((time.perf_counter() - began, counted))
                    row["successes_in_600_steps"] = {"columns": ["seconds", "of_each_seed"], "points": successes}
                if time.perf_counter() - written > WRITE_SECONDS:
                    written = time.perf_counter()
                    _write(name, told, row, curve, chosen)
                    said = f"{name}: {written - began:.0f} s, {rate * len(group) / 1e6:.2f} M steps/s"
                    print(said, row["returns"], successes[-1][1] if successes else "", flush=True)
            _write(name, told, row, curve, chosen)
            rate = f"{row['steps_per_second'] / 1e6:.2f} M steps/s"
            print(f"{name}: {rate}, {row['returns']}, unstable {row['unstable_episodes']}", flush=True)
    if last is not None:
        write_visited(name, graph, last, chosen.output)
    sys.stdout.flush()
    os._exit(0)  # without waiting for physics that are still being compiled


def task_of(state: Any) -> TimeLimitState:
    """Returns the state of the task within that of a collector's environments."""
    is_task = lambda node: isinstance(node, TimeLimitState)
    (task,) = filter(is_task, jax.tree.leaves(state.environment, is_leaf=is_task))
    return task


def successes_of(state: Any, num_seeds: int) -> list[float]:
    """Returns the orientations that the hand of each seed reaches in 600 steps, over the episodes that run.

    Empty for other tasks.
    """
    task = task_of(state.collector)
    if not isinstance(task.inner, HandState):
        return []
    reached, steps = (np.asarray(part).reshape(num_seeds, -1) for part in (task.inner.successes, task.elapsed))
    return (600.0 * reached.sum(axis=1) / np.maximum(steps.sum(axis=1), 1)).tolist()


def write_visited(name: str, graph: Graph, state: Any, output: Path) -> None:
    """Writes the robots at the end of a training, and the controls of the trained policy: states it visits."""
    first = jax.tree.map(lambda leaf: leaf[0], state) if state.iteration.ndim else state
    weights, env = graph.weights(first.learner), rollmill.make(f"robots:{name}")

    def one(key: jax.Array, now: Collector) -> tuple[Any, jax.Array]:
        decision = graph.policy(weights, key, now.memory, now.observation, now.action_mask)
        seen: list[tuple[Any, jax.Array]] = []

        def note(robot: Any, control: jax.Array, count: int) -> Any:
            seen.append((robot, control))
            return robot

        with advanced_by(note):
            env.step(key, task_of(now), decision.action, env.params)
        return seen[0]

    every = max(1, graph.loops.num_envs // VISITED)
    chosen = jax.tree.map(lambda leaf: leaf[::every], first.collector)
    keys = jax.random.split(jax.random.key(0), len(chosen.index))
    robots, controls = jax.device_get(jax.jit(jax.vmap(one))(keys, chosen))
    rows = {"positions": robots.positions, "velocities": robots.velocities, "accelerations": robots.accelerations}
    np.savez(output / f"robots-visited-{name.lower()}.npz", **rows, controls=controls)


def _write(name: str, told: dict[str, Any], row: dict[str, Any], curve: Curve, chosen: Any) -> None:
    levels = sorted({*TASKS[name].levels, TASKS[name].returns[0]})
    last = curve.points[-1] if curve.points else None
    row |= {
        "returns": curve.final(),
        "seconds": last and last.seconds,
        "steps": last and last.steps,
        "unstable_episodes": curve.unstable.tolist(),
        "steps_with_overflow": curve.overflows.tolist(),
        "reached": {f"{level:g}": curve.reached(level) for level in levels},
        "curve": {"columns": Point._fields, "points": curve.thinned()},
    }
    memory = jax.devices()[0].memory_stats() or {}
    told["peak_bytes_on_the_device"] = memory.get("peak_bytes_in_use")
    ways = "".join(f"-{way}" for way in (chosen.fusion, told["physics"]) if way not in ("off", "jax"))
    write_result(f"robots-learning-{name.lower()}{ways}-{platform()}", told, chosen.output)


def main() -> None:
    """Starts a process for each task, or trains one if this is such a process."""
    chosen = options(
        __doc__,
        {"tasks": some_of(TASKS)},
        seconds=([str], "TASK=SECONDS, or a number for all"),
        seeds=3,
        fusion="off",
        unroll=(1, "steps that are compiled as one; 0: the default of the platform"),
        envs=(0, "environments instead of the recipe's"),
        launch=(str, "environments of a block and its warps, as 16x2, of the kernel of rollouts"),
        apart=False,
        physics=(["jax"], "jax or warp; of both the faster trains"),
        deadline=(0.0, "seconds after which physics that are not compiled are left out; 0: never"),
        lock=(Path, "a file for which processes of one task wait for their turn"),
    )
    given = dict(word.split("=") if "=" in word else ("", word) for word in chosen.seconds or [])
    seconds = {name: float(given.get(name, given.get("", TASKS[name].seconds))) for name in chosen.tasks}
    if chosen.lock:
        (name,) = chosen.tasks
        train(name, chosen, seconds[name], chosen.lock)
        return
    with tempfile.NamedTemporaryFile() as file:
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        at = next((i for i, word in enumerate(sys.argv) if word.startswith("--")), len(sys.argv))
        command = [sys.executable, __file__]
        processes = [
            subprocess.Popen([*command, name, *sys.argv[at:], "--lock", file.name], env=environment)
            for name in chosen.tasks
        ]
        codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"exit codes {dict(zip(chosen.tasks, codes, strict=True))}")


if __name__ == "__main__":
    main()
