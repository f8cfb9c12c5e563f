"""Where a rollout in one kernel stops being faster than XLA, and what says so before it is compiled, on one GPU.

    python benchmarks/fusion_limits.py [--only Bodies-20 Held-256] [--launches 16x1 32x1]

Three kinds of environments, each of which grows in one respect:

    Bodies-N      N bodies that attract each other in pairs, on a plane: operations grow as the square of N, and
                  numbers that are needed at a time as N
    Held-N        N numbers, each of which is mixed with its neighbour: numbers grow, with three operations each
    Substeps-N    a driven pendulum that is integrated in N short steps: operations grow, and numbers do not

A rollout is 128 steps of 4,096 copies under a 64-64 tanh policy with a shared torso, products in tf32. For each
environment the result says what is known before compiling (operations of a step, the peak of live registers, and
instructions of every step and those behind branches, by `rollmill.fusion.pressure_of`), what the compiled kernels
hold (registers, spilled bytes, bytes of code), how long they compile, and steps a second by XLA and in the kernel,
both sides in turns. For what is known before, no GPU is needed: `--model-only`.
Writes results/fusion-limits.json.
"""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from measure import RESULTS, compiled, timed_in_turns, write_result

import rollmill
from rollmill.dataflow import Graph, collect, start
from rollmill.fusion import (
    CHIPS,
    Launch,
    compiled_resources,
    explain,
    fused_collect,
    pressure_of_rollout,
    rollouts_in_a_row,
    run_kernel,
)

STEPS, ROLLOUTS, ENVS, MOST_STEPS = 128, 2, 4_096, 200
SIZES = {"Bodies": (4, 8, 12, 16, 20), "Held": (64, 128, 256, 384), "Substeps": (50, 200, 400, 800)}
PUSHES = np.array([[1, 0], [-1, 0], [0, 1], [0, -1]], np.float32)
TIME_STEP, SOFTENING = 0.02, 0.05


def bodies(count: int) -> rollmill.Environment:
    """Bodies on a plane; the action pushes the first, the reward is its closeness to the origin."""

    def reset(key, params):
        scale = jnp.array([1.0, 0.1])[:, None, None]
        state = jax.random.uniform(key, (2, count, 2), minval=-1.0, maxval=1.0) * scale
        return state.reshape(-1), state

    def step(key, state, action, params):
        position, velocity = state[0], state[1]
        apart = position[:, None] - position[None]
        squared = jnp.sum(apart**2, axis=-1) + SOFTENING
        pull = -jnp.sum(apart / (squared * jnp.sqrt(squared))[..., None], axis=1) / count
        velocity = velocity + TIME_STEP * pull.at[0].add(jnp.asarray(PUSHES)[action])
        position = position + TIME_STEP * velocity
        state = jnp.stack([position, velocity])
        away = jnp.max(jnp.abs(position[0]))
        return rollmill.Timestep(
            state.reshape(-1), state, -jnp.sum(position[0] ** 2), away > 2.0, jnp.asarray(False), {}
        )

    return _environment(f"Bodies-{count}", reset, step, 4 * count, 4)


def held(count: int) -> rollmill.Environment:
    """Numbers on a ring, of which the first four are observed; the action pushes the first."""

    def reset(key, params):
        state = jnp.full((count // 4, 4), jax.random.uniform(key, minval=-0.5, maxval=0.5))
        return state[0], state

    def step(key, state, action, params):
        flat = state.reshape(-1)
        flat = flat * 0.7 + jnp.roll(flat, 1) * 0.3
        flat = flat.at[0].add(0.1 * jnp.where(action == 0, -1.0, 1.0))
        state = flat.reshape(count // 4, 4)
        ended = jnp.abs(flat[0]) > 1.0
        return rollmill.Timestep(state[0], state, 1.0 - flat[0] ** 2, ended, jnp.asarray(False), {})

    return _environment(f"Held-{count}", reset, step, 4, 2)


def substeps(count: int) -> rollmill.Environment:
    """A pendulum that the action pushes, integrated by semi-implicit Euler; written out, without a loop."""

    def reset(key, params):
        state = jax.random.uniform(key, (2,), minval=-0.5, maxval=0.5)
        return state, state

    def step(key, state, action, params):
        angle, speed = state[0], state[1]
        push = jnp.where(action == 0, -1.0, 1.0)
        for _ in range(count):
            sine = angle - angle * angle * angle / 6.0
            speed = speed + 0.1 / count * (push - 9.8 * sine - 0.1 * speed)
            angle = angle + 0.1 / count * speed
        state = jnp.stack([angle, speed])
        return rollmill.Timestep(state, state, -(angle**2), jnp.abs(angle) > 1.0, jnp.asarray(False), {})

    return _environment(f"Substeps-{count}", reset, step, 2, 2)


def _environment(name: str, reset, step, observed: int, actions: int) -> rollmill.Environment:
    box = spaces.Box(-np.inf, np.inf, (observed,), np.float32)
    return rollmill.time_limit(
        rollmill.Environment(name, reset, step, box, spaces.Discrete(actions), params=()), MOST_STEPS
    )


KINDS = {"Bodies": bodies, "Held": held, "Substeps": substeps}


def graph_of(name: str) -> Graph:
    """PPO on an environment of one of these kinds, or on one that Rollmill knows."""
    kind, _, size = name.partition("-")
    sizes: dict[str, Any] = {"num_envs": ENVS, "num_steps": STEPS, "total_timesteps": ENVS * STEPS}
    env = KINDS[kind](int(size)) if kind in KINDS else rollmill.make(name)
    if isinstance(env, rollmill.HostEnvironment):
        raise SystemExit(f"{name} is stepped by Python")
    if env.agents:
        return rollmill.mappo(env, **sizes, num_minibatches=1)
    return rollmill.ppo(env, **sizes, num_minibatches=1, network=rollmill.NetworkConfig(shared_torso=True))


def model_of(graph: Graph) -> dict[str, int]:
    """Properties of a step that are known before it is compiled."""
    return pressure_of_rollout(graph)._asdict()


def kernel_of(graph: Graph, launch: Launch) -> dict[str, Any]:
    """Registers and memory of a compiled kernel; it is compiled here, for an H200."""
    began = time.perf_counter()
    resources = compiled_resources(explain(graph, CHIPS["H200"], "tf32", launch), CHIPS["H200"])
    assert resources is not None, "Triton is not installed"
    return resources._asdict() | {"compile_seconds": time.perf_counter() - began}


def rates_of(graph: Graph, launches: list[Launch]) -> dict[str, Any]:
    """Steps a second by XLA and in the kernel of each launch."""
    state = jax.jit(partial(start, graph))(jax.random.key(0), jnp.arange(ENVS, dtype=jnp.int32))
    arguments = graph.weights(state.learner), state.collector, jax.random.key(1)
    functions: dict[Any, Any] = {"xla": partial(collect, graph, unroll=4)}
    for launch in launches:
        run = partial(run_kernel, launch=launch, numerics="tf32")
        functions[tuple(launch)] = partial(fused_collect, graph, run=run)
    several = {name: partial(rollouts_in_a_row, ROLLOUTS, function) for name, function in functions.items()}
    seconds = timed_in_turns(compiled(several, arguments), arguments, repeats=5, calls=4)
    middle = {name: ENVS * STEPS * ROLLOUTS / median(times) for name, times in seconds.items()}
    kernels = {str(name): rate for name, rate in middle.items() if name != "xla"}
    best = max(kernels, key=lambda name: kernels[name], default=None)
    gain = kernels[best] / middle["xla"] if best else None
    return {"xla": middle["xla"], "kernels": kernels, "fastest": best, "gain": gain}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [f"{kind}-{size}" for kind, sizes in SIZES.items() for size in sizes]
    parser.add_argument("--only", nargs="+", default=known, help="environments; ids of Rollmill's too")
    parser.add_argument("--launches", nargs="+", default=["16x1", "32x1"], help="environments x warps of a block")
    parser.add_argument("--model-only", action="store_true", help="nothing is compiled, and nothing is written")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    launches = [Launch(*map(int, text.split("x"))) for text in options.launches]
    graphs = {name: graph_of(name) for name in options.only}
    found: dict[str, dict[str, Any]] = {}
    for name, graph in graphs.items():
        found[name] = {"model": model_of(graph)}
        print(name, found[name]["model"], flush=True)
    if options.model_only:
        return
    tasks = [(name, launch) for name in reversed(options.only) for launch in launches]
    with ThreadPoolExecutor(12) as pool:
        for task, kernel in zip(
            tasks, pool.map(lambda task: kernel_of(graphs[task[0]], task[1]), tasks), strict=True
        ):
            name, launch = task
            found[name].setdefault("kernels", {})[str(tuple(launch))] = kernel
            print(name, tuple(launch), kernel, flush=True)
    for name, graph in graphs.items():
        found[name]["rates"] = rates_of(graph, launches)
        rates = found[name]["rates"]
        print(f"{name}: XLA {rates['xla'] / 1e6:.1f} M/s, kernel {rates['gain'] or 0:.2f} x", flush=True)
        write_result("fusion-limits", {"environments": found}, directory=options.output)


if __name__ == "__main__":
    main()
