"""Where a rollout in one kernel stops being faster than XLA, and its model before it is compiled, on one GPU.

    python benchmarks/fusion_limits.py [--only Bodies-20 Held-256] [--launches 16x1 32x1]

Three kinds of environments, each of which grows in one respect:

    Bodies-N      N bodies that attract each other in pairs, on a plane: operations grow as the square of N, and
                  numbers that are needed at a time as N
    Held-N        N numbers, each mixed with its neighbour: numbers grow, with three operations each
    Substeps-N    a driven pendulum that is integrated in N short steps: operations grow, and numbers do not

A rollout is 128 steps of 4,096 copies under a 64-64 tanh policy with a shared torso, products in tf32. The result
has the model of each environment before compiling (operations of a step, the peak of live registers, and
instructions of every step and those behind branches, by `rollmill.fusion.estimate_pressure`), the resources of the
compiled kernels (registers, spilled bytes, bytes of code), the time to compile them, and steps a second by XLA
and in the kernel, in turns. `--model-only` needs no GPU. Writes results/fusion-limits.json.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from measure import compiled, options, timed_in_turns, write_result

import rollmill
from rollmill.dataflow import Graph, collect, init_state
from rollmill.fusion import (
    CHIPS,
    Launch,
    compiled_resources,
    consecutive_rollouts,
    estimate_rollout_pressure,
    explain,
    fused_collect,
    run_kernel,
)

STEPS, ROLLOUTS, ENVS, MAX_STEPS = 128, 2, 4_096, 200
SIZES = {"Bodies": (4, 8, 12, 16, 20), "Held": (64, 128, 256, 384), "Substeps": (50, 200, 400, 800)}
MODEL = ("operations", "live", "instructions", "products", "guarded")
PUSHES = np.array([[1, 0], [-1, 0], [0, 1], [0, -1]], np.float32)
TIME_STEP, SOFTENING = 0.02, 0.05


def bodies(count: int) -> rollmill.Environment:
    """Returns an environment of bodies on a plane. The action pushes the first, and the reward is its closeness
    to the origin.
    """

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
        away, state = jnp.max(jnp.abs(position[0])), jnp.stack([position, velocity])
        return _timestep(state.reshape(-1), state, -jnp.sum(position[0] ** 2), away > 2.0)

    return _environment(f"Bodies-{count}", reset, step, 4 * count, 4)


def held(count: int) -> rollmill.Environment:
    """Returns an environment of numbers on a ring, the first four of them observed. The action pushes the
    first.
    """

    def reset(key, params):
        state = jnp.full((count // 4, 4), jax.random.uniform(key, minval=-0.5, maxval=0.5))
        return state[0], state

    def step(key, state, action, params):
        flat = state.reshape(-1)
        flat = flat * 0.7 + jnp.roll(flat, 1) * 0.3
        flat = flat.at[0].add(0.1 * jnp.where(action == 0, -1.0, 1.0))
        state = flat.reshape(count // 4, 4)
        return _timestep(state[0], state, 1.0 - flat[0] ** 2, jnp.abs(flat[0]) > 1.0)

    return _environment(f"Held-{count}", reset, step, 4, 2)


def substeps(count: int) -> rollmill.Environment:
    """Returns a pendulum that the action pushes, integrated by semi-implicit Euler without a loop."""

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
        return _timestep(state, state, -(angle**2), jnp.abs(angle) > 1.0)

    return _environment(f"Substeps-{count}", reset, step, 2, 2)


def _timestep(observation, state, reward, ended) -> rollmill.Timestep:
    return rollmill.Timestep(observation, state, reward, ended, jnp.asarray(False), {})


def _environment(name: str, reset, step, observed: int, actions: int) -> rollmill.Environment:
    box = spaces.Box(-np.inf, np.inf, (observed,), np.float32)
    env = rollmill.Environment(name, reset, step, box, spaces.Discrete(actions), params=())
    return rollmill.time_limit(env, MAX_STEPS)


KINDS = {"Bodies": bodies, "Held": held, "Substeps": substeps}


def graph_of(name: str) -> Graph:
    """Returns PPO on an environment of one of these kinds, or on a registered one."""
    kind, _, size = name.partition("-")
    sizes: dict[str, Any] = {"num_envs": ENVS, "num_steps": STEPS, "total_timesteps": ENVS * STEPS}
    env = KINDS[kind](int(size)) if kind in KINDS else rollmill.make(name)
    if isinstance(env, rollmill.HostEnvironment):
        raise SystemExit(f"{name} is stepped by Python; kernels need an environment in JAX.")
    if env.agents:
        return rollmill.mappo(env, **sizes, num_minibatches=1)
    return rollmill.ppo(env, **sizes, num_minibatches=1, network=rollmill.NetworkConfig(shared_torso=True))


def kernel_of(graph: Graph, launch: Launch) -> dict[str, Any]:
    """Returns the registers and memory of a kernel that is compiled here, for an H200."""
    began = time.perf_counter()
    resources = compiled_resources(explain(graph, CHIPS["H200"], "tf32", launch), CHIPS["H200"])
    assert resources is not None, "Triton is not installed"
    used = dict(zip(("registers", "spilled", "shared", "code"), resources, strict=True))
    return used | {"compile_seconds": time.perf_counter() - began}


def rates_of(graph: Graph, launches: list[Launch]) -> dict[str, Any]:
    """Returns the steps a second by XLA and in the kernel of each launch."""
    state = jax.jit(partial(init_state, graph))(jax.random.key(0), jnp.arange(ENVS, dtype=jnp.int32))
    arguments = graph.weights(state.learner), state.collector, jax.random.key(1)
    functions: dict[Any, Any] = {"xla": partial(collect, graph, unroll=4)}
    for launch in launches:
        run = partial(run_kernel, launch=launch, numerics="tf32")
        functions[str(tuple(launch))] = partial(fused_collect, graph, run=run)
    several = {name: partial(consecutive_rollouts, ROLLOUTS, function) for name, function in functions.items()}
    seconds = timed_in_turns(compiled(several, arguments), arguments, repeats=5, calls=4)
    kernels = {name: ENVS * STEPS * ROLLOUTS / median(times) for name, times in seconds.items()}
    xla = kernels.pop("xla")
    best = max(kernels, key=lambda name: kernels[name], default=None)
    return {"xla": xla, "kernels": kernels, "fastest": best, "gain": kernels[best] / xla if best else None}


def main() -> None:
    chosen = options(
        __doc__,
        only=([f"{kind}-{size}" for kind, sizes in SIZES.items() for size in sizes], "environments"),
        launches=(["16x1", "32x1"], "environments x warps of a block"),
        model_only=(False, "nothing is compiled, and nothing is written"),
    )
    launches = [Launch(*map(int, text.split("x"))) for text in chosen.launches]
    graphs, found = {name: graph_of(name) for name in chosen.only}, {}
    for name, graph in graphs.items():
        found[name] = {"model": dict(zip(MODEL, estimate_rollout_pressure(graph), strict=True))}
        print(name, found[name]["model"], flush=True)
    if chosen.model_only:
        return
    tasks = [(name, launch) for name in reversed(chosen.only) for launch in launches]
    with ThreadPoolExecutor(12) as pool:
        kernels = pool.map(lambda task: kernel_of(graphs[task[0]], task[1]), tasks)
        for (name, launch), kernel in zip(tasks, kernels, strict=True):
            found[name].setdefault("kernels", {})[str(tuple(launch))] = kernel
            print(name, tuple(launch), kernel, flush=True)
    for name, graph in graphs.items():
        rates = found[name]["rates"] = rates_of(graph, launches)
        print(f"{name}: XLA {rates['xla'] / 1e6:.1f} M/s, kernel {rates['gain'] or 0:.2f} x", flush=True)
        write_result("fusion-limits", {"environments": found}, chosen.output)


if __name__ == "__main__":
    main()
