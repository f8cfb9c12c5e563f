"""Steps of `robots:Ant` on CPU cores beside Ant-v5 of Gymnasium in EnvPool, in turns.

    python benchmarks/robots_envpool.py [--envs 128] [--seconds 5]

The two ants are not the same: EnvPool's makes 5 substeps of C MuJoCo a step, each of four evaluations of forces
by Runge-Kutta's method, with all bodies touching the floor, and takes random actions; ours makes 2 substeps of
one evaluation by `rollmill.physics`, with knees and feet touching it, and runs a 64-64 policy as well, all as
machine code. Substeps and evaluations a second are therefore given too. Both use all cores that this process
may use (`taskset`). Needs EnvPool (extra `envpool`). Writes results/robots-envpool.json.
"""

import os
import time
from functools import partial
from typing import Any

import envpool
import jax
import numpy as np
from measure import in_turns, options, write_result
from robots_rollouts import begun, graph_of, rollout

PARTS = {"substeps": {"EnvPool": 5, "Rollmill": 2}, "evaluations": {"EnvPool": 20, "Rollmill": 2}}
"""Substeps of a step, and evaluations of forces."""


def envpool_steps(num_envs: int) -> Any:
    """Returns a function that makes one step of all of EnvPool's environments."""
    threads = len(os.sched_getaffinity(0))
    pool = envpool.make("Ant-v5", env_type="gymnasium", num_envs=num_envs, num_threads=threads)
    pool.reset()
    draw = np.random.default_rng(0)
    actions = [draw.uniform(-1, 1, (num_envs, *pool.action_space.shape)).astype(np.float64) for _ in range(64)]
    turns = iter(range(10**9))
    return lambda: pool.step(actions[next(turns) % 64])


def rollmill_steps(num_envs: int, steps: int, block: int) -> Any:
    """Returns a function that makes some steps of all of our environments, from where the last call ended."""
    graph = graph_of("Ant", num_envs, steps)
    weights, collector, key = begun(graph)
    run = jax.jit(rollout(graph, str(block), "float32"))
    held = [collector]

    def advance() -> None:
        held[0], trajectory = run(weights, held[0], key)
        jax.block_until_ready(trajectory)

    return advance


def rate(advance: Any, steps_each: int, seconds: float) -> float:
    """Returns environment steps a second."""
    begin, done = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        advance()
        done += steps_each
    return done / (time.perf_counter() - begin)


def main() -> None:
    chosen = options(__doc__, envs=128, steps=16, block=16, seconds=5.0, rounds=5)
    sides = {
        "EnvPool": partial(rate, envpool_steps(chosen.envs), chosen.envs),
        "Rollmill": partial(
            rate, rollmill_steps(chosen.envs, chosen.steps, chosen.block), chosen.envs * chosen.steps
        ),
    }
    for side in sides.values():
        side(1.0)
    runs = in_turns({name: partial(side, chosen.seconds) for name, side in sides.items()}, chosen.rounds)
    result: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "envs": chosen.envs}
    for name, rates in runs.items():
        median = float(np.median(rates))
        parts = {f"{part}_per_second": median * each[name] for part, each in PARTS.items()}
        result[name] = {"steps_per_second": median, **parts, "runs": rates}
    for unit in ("steps", *PARTS):
        name = f"{unit}_per_second"
        result[f"ratio of {unit}"] = result["Rollmill"][name] / result["EnvPool"][name]
    print(result)
    write_result("robots-envpool", result, chosen.output)


if __name__ == "__main__":
    main()
