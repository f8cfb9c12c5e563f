"""Environments with large arrays in their state: rollouts by kernels that keep them in memory, beside XLA.

    PYTHONPATH=tests/fusion:tests python benchmarks/fusion_large.py [NAMES] [--num-envs 4096] [--seconds 1] [--add]

The environments are those of tests/fusion/large_environments.py. First two rollouts of 64 copies are compared:
integers and flags have to be those of XLA, and floats to agree to 1e-4. Products are exact on both sides, and a
copy whose policy decides otherwise in a close case counts as different. Rates are of rollouts of 64 steps with a
policy of two layers of 64, in turns. Launches are given and not sought. With `--lock` several processes compile
side by side, and measure one after the other. Writes results/fusion-large.json.

`--auto` measures something else: whole iterations of PPO by XLA, and as `--fusion auto` chooses them for a run of
two billion steps, with its notes. It adds the ratio of the two rates to the result. `--parts` makes one result of
several, so that environments can be measured in processes of their own.
"""

import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from large_environments import LARGE
from measure import (
    alone,
    compiled,
    in_turns,
    merged_results,
    options,
    platform,
    read_result,
    some_of,
    spreads,
    training_turns,
    write_result,
)

import rollmill
from rollmill.core.errors import CannotFuse
from rollmill.dataflow import Graph, collect, init_state
from rollmill.fusion import backend_for, estimate_pressure, fused_collect, lower_rollout
from rollmill.programs.compiled import lower, unroll_for

COPIES, STEPS, ROUNDS = 64, 64, 3
LONG = 2_000_000_000
"""Environment steps of a run whose kernels `auto` looks for."""
GPU_LAUNCHES = {"16 environments": (16, 1, 0), "32 environments": (32, 2, 0), "64 environments": (64, 4, 0)}


def graph_of(env: Any, num_envs: int, **settings: Any) -> Graph:
    network = rollmill.NetworkConfig(hidden_sizes=(64, 64))
    return rollmill.ppo(env, num_envs=num_envs, num_steps=STEPS, num_minibatches=1, network=network, **settings)


def begun(graph: Graph) -> Any:
    index = jnp.arange(graph.loops.num_envs, dtype=jnp.int32)
    return jax.jit(partial(init_state, graph))(jax.random.key(0), index)


def launches(num_envs: int) -> dict[str, Any]:
    if platform() == "cpu":
        return {"16 environments": backend_for(jax.devices()[0], "float32").rollouts.launches(num_envs, 0)[0]}
    return GPU_LAUNCHES


def differing_copies(env: Any) -> int:
    """Returns in how many of the copies anything differs after two rollouts."""
    graph = graph_of(env, COPIES)
    step, state = lower_rollout(graph), begun(graph)
    weights = graph.weights(state.learner)
    kind = backend_for(jax.devices()[0], "float32").rollouts
    run = kind.run(next(iter(launches(COPIES).values())))
    by_kernel = jax.jit(partial(fused_collect, graph, run=run, step=step))
    with jax.default_matmul_precision("highest"):
        by_xla = jax.jit(partial(collect, graph))
        unequal, one, other = np.zeros(COPIES, bool), state.collector, state.collector
        for turn in range(2):
            key = jax.random.key(turn)
            (one, mine), (other, right) = by_kernel(weights, one, key), by_xla(weights, other, key)
            for axis, pair in ((0, (one, other)), (1, (mine.steps, right.steps))):
                for a, b in zip(*map(jax.tree.leaves, pair), strict=True):
                    a, b = (np.moveaxis(np.asarray(x), axis, 0).reshape(COPIES, -1) for x in (a, b))
                    is_float = jnp.issubdtype(a.dtype, jnp.floating)
                    same = np.isclose(a, b, rtol=1e-4, atol=1e-4, equal_nan=True) if is_float else a == b
                    unequal |= ~same.all(axis=1)
    return int(unequal.sum())


def rates(env: Any, num_envs: int, seconds: float, lock: Path | None) -> dict[str, Any]:
    """Returns steps a second by XLA and by kernels, in turns, with the ratios of medians."""
    graph = graph_of(env, num_envs)
    step, state = lower_rollout(graph), begun(graph)
    weights = graph.weights(state.learner)
    kind = backend_for(jax.devices()[0], "float32" if platform() == "cpu" else "tf32").rollouts
    sides = {"XLA": partial(collect, graph, unroll=unroll_for(platform()))}
    for name, launch in launches(num_envs).items():
        sides[name] = partial(fused_collect, graph, run=kind.run(launch), step=step)
    programs = compiled(sides, (weights, state.collector, jax.random.key(0)))
    timed = {name: partial(rate, run, weights, state.collector, seconds) for name, run in programs.items()}
    with alone(lock):
        measured = in_turns(timed, ROUNDS)
    figures = spreads({name: [each * num_envs * STEPS for each in runs] for name, runs in measured.items()})
    medians = {name: figure["median"] for name, figure in figures.items()}
    ratio = max(each for name, each in medians.items() if name != "XLA") / medians["XLA"]
    print(f"  {ratio:.2f} x: {medians}", flush=True)
    return {"steps per second": figures, "ratio": ratio}


def automatic(env: Any, num_envs: int, seconds: float, lock: Path | None) -> dict[str, Any]:
    """Returns what `auto` chooses for a long run, and steps a second of whole iterations beside XLA, in turns."""
    graph = graph_of(env, num_envs, total_timesteps=LONG)
    batch, began = graph.loops.batch_size, time.perf_counter()
    programs = {"XLA": lower(graph), "auto": lower(graph, fusion="auto")}
    found = {"notes": list(programs["auto"].notes), "seconds to choose": time.perf_counter() - began}
    print(f"  {found}", flush=True)
    with alone(lock):
        own = seconds_of_iterations(programs["XLA"], batch)
        count = max(1, round(seconds / own))
        turns = {name: training_turns(program, batch, count) for name, program in programs.items()}
        figures = spreads(in_turns(turns, ROUNDS, warm_up=1))
    found |= {"steps per second": figures, "ratio": figures["auto"]["median"] / figures["XLA"]["median"]}
    print(f"  auto {found['ratio']:.2f} x", flush=True)
    return found


def seconds_of_iterations(program: Any, batch: int) -> float:
    """Returns the seconds of an iteration of a program."""
    turn = training_turns(program, batch, 2)
    turn()
    return batch / turn()


def rate(run: Any, weights: Any, collector: Any, seconds: float) -> float:
    """Returns rollouts a second, one after the other."""
    now, count, began = collector, 0, time.perf_counter()
    while count == 0 or time.perf_counter() - began < seconds:
        for _ in range(4):
            now, count = run(weights, now, jax.random.key(count))[0], count + 1
        jax.block_until_ready(now)
    return count / (time.perf_counter() - began)


def main() -> None:
    chosen = options(
        __doc__,
        {"names": some_of(LARGE)},
        num_envs=4096,
        seconds=1.0,
        lock=(Path, "a file, which one process after the other locks while it measures"),
        auto=(False, "measure what auto chooses"),
        add=False,
        parts=([str], "other results, which become this one"),
        name=("fusion-large", "of the result"),
    )
    if chosen.lock:
        chosen.lock.touch()
    if chosen.parts:
        merged = merged_results(chosen.parts, chosen.output)
        write_result(chosen.name, merged, chosen.output, measured_with=chosen.parts[-1])
        return
    found: dict[str, Any] = read_result(chosen.name, chosen.output) if chosen.add else {}
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    for name in chosen.names:
        env = LARGE[name]()
        if chosen.auto:
            auto = automatic(env, chosen.num_envs, chosen.seconds, chosen.lock)
            found[name] = {**found.get(name, {}), "auto": auto}
            write_result(chosen.name, found, chosen.output)
            continue
        try:
            pressure = estimate_pressure(lower_rollout(graph_of(env, COPIES)).program)
        except CannotFuse as refusal:
            found[name] = {"refused": str(refusal)}
            continue
        own: dict[str, Any] = {"operations": pressure.num_operations, "copies": COPIES}
        own["different copies"] = differing_copies(env)
        print(name, own, flush=True)
        found[name] = {**own, "environments": chosen.num_envs}
        write_result(chosen.name, found, chosen.output)
        found[name] |= rates(env, chosen.num_envs, chosen.seconds, chosen.lock)
        write_result(chosen.name, found, chosen.output)


if __name__ == "__main__":
    main()
