"""Rollouts of a robot in one kernel beside XLA, trajectory stored, on the GPU or the CPU that is here.

    python benchmarks/robots_rollouts.py [--environment Ant] [--envs 4096 32768] [--launches 16x1 32x1]

The policy is 64-64 with a shared torso, actions are sampled, and all sides start from the same states with equal
weights and keys. In the end 20 steps with exact products are compared number by number. On a CPU the kernel is
machine code, on the cores that the process may use (`taskset`). A launch is environments of a block and its warps.
Everything is compiled first, side by side. Writes results/robots-rollouts-DEVICE.json, after each figure anew.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from measure import options, platform, timed_in_turns, write_result

import rollmill
from rollmill.dataflow import Graph, collect, init_state
from rollmill.fusion import backend_for, consecutive_rollouts, fused_collect

COMPARED, ROLLOUTS = 20, 4
"""Steps that are compared, and rollouts in a row of a timed call."""


class Program(NamedTuple):
    """A compiled program, its arguments, and the seconds that it took to compile."""

    run: Any
    arguments: Any
    seconds: float


def graph_of(environment: str, num_envs: int, steps: int) -> Graph:
    """Returns PPO with one torso of 64-64."""
    sizes = {"num_envs": num_envs, "num_steps": steps, "total_timesteps": num_envs * steps, "num_minibatches": 1}
    env = rollmill.make(f"robots:{environment}")
    return rollmill.ppo(env, **sizes, network=rollmill.NetworkConfig(shared_torso=True))


def begun(graph: Graph) -> tuple[Any, Any, Any]:
    """Returns weights, first states and a key."""
    index = jnp.arange(graph.loops.num_envs, dtype=jnp.int32)
    state = jax.jit(partial(init_state, graph))(jax.random.key(0), index)
    return graph.weights(state.learner), state.collector, jax.random.key(1)


def rollout(graph: Graph, side: str, numerics: Any) -> Any:
    """Returns the rollout by XLA, or by a kernel of a launch such as 32x1."""
    if side == "xla":
        return partial(collect, graph)
    backend = backend_for(jax.devices()[0], numerics)
    return partial(fused_collect, graph, run=backend.rollouts.run(tuple(map(int, side.split("x")))))


def compiled(function: Any, arguments: Any) -> Program:
    """Compiles a function."""
    begin = time.perf_counter()
    program = jax.jit(function).lower(*arguments).compile()
    return Program(program, arguments, time.perf_counter() - begin)


def exact(function: Any, arguments: Any) -> Program:
    """Compiles a function whose products are exact."""
    with jax.default_matmul_precision("highest"):
        return compiled(function, arguments)


def differences(mine: Program, right: Program) -> dict[str, Any]:
    """Returns for each leaf the greatest difference, by the number and 1, and the share of numbers within 1e-4."""
    sides = [side.run(*side.arguments)[1].steps for side in (mine, right)]
    found: dict[str, Any] = {}
    for name in ("observation", "action", "reward", "terminated"):
        one, other = (np.asarray(getattr(side, name), np.float64) for side in sides)
        gaps = np.abs(one - other) / (1 + np.abs(other))
        found[name] = {"greatest": float(gaps.max()), "within_1e-4": float(np.mean(gaps < 1e-4))}
    return found


def main() -> None:
    chosen = options(
        __doc__,
        environment="Ant",
        envs=[4_096, 32_768],
        steps=16,
        launches=["16x1", "32x1"],
        exact="16x2",
        compare=(True, "steps with exact products in the end"),
    )
    sides = ["xla", *chosen.launches]
    with ThreadPoolExecutor() as pool:
        programs: dict[int, dict[str, Any]] = {}
        for count in chosen.envs:
            graph = graph_of(chosen.environment, count, chosen.steps)
            arguments = begun(graph)
            row = {side: partial(consecutive_rollouts, ROLLOUTS, rollout(graph, side, "tf32")) for side in sides}
            programs[count] = {side: pool.submit(compiled, each, arguments) for side, each in row.items()}
        graph = graph_of(chosen.environment, min(*chosen.envs, 1_024), COMPARED)
        arguments = begun(graph)
        exact_sides = (chosen.exact, "xla") if chosen.compare else ()
        pair = [pool.submit(exact, rollout(graph, side, "float32"), arguments) for side in exact_sides]
    result: dict[str, Any] = {"steps": chosen.steps, "environment": chosen.environment, "rates": {}}
    for count, futures in programs.items():
        row = {side: future.result() for side, future in futures.items()}
        runs = {side: program.run for side, program in row.items()}
        seconds = timed_in_turns(runs, row["xla"].arguments, repeats=5, calls=2)
        rates = {
            side: count * chosen.steps * ROLLOUTS / float(np.median(times)) for side, times in seconds.items()
        }
        result["rates"][str(count)] = {
            side: {"steps_per_second": rate, "compile_seconds": row[side].seconds} for side, rate in rates.items()
        }
        print(chosen.environment, count, result["rates"][str(count)], flush=True)
        write_result(f"robots-rollouts-{platform()}", result, chosen.output)
    if not pair:
        return
    result["differences"] = differences(*(future.result() for future in pair))
    print(result["differences"], flush=True)
    write_result(f"robots-rollouts-{platform()}", result, chosen.output)


if __name__ == "__main__":
    main()
