"""PPO with fused rollouts and gradients beside the same compiled by XLA, on one GPU.

    python benchmarks/fusion_training.py gradients [--samples 131072 1048576]
    python benchmarks/fusion_training.py training [--sizes 4096x128 65536x64]

`gradients`: of one minibatch, samples gathered in the order of a shuffle, by the kernel with each of its launches
and by XLA; and how far they are from those by XLA with exact products, relative to the largest of each leaf.

`training`: whole iterations of 4 epochs of 4 minibatches on CartPole-v1, actor and critic 64-64 tanh, with one
torso or two: left to XLA, with fused rollouts, and with fused rollouts and gradients. Every training is done twice
from the same seed, and says whether the weights were the same bit for bit. Sides take turns; figures are medians.
"""

import argparse
import itertools
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measure import RESULTS, compiled, spread, timed_in_turns, write_result

import rollmill
from rollmill.core.errors import RollmillError
from rollmill.dataflow import gradients_of_rows, identity, start
from rollmill.fusion import GradientLaunch, first_batch, fused_gradients, run_gradients_kernel
from rollmill.programs.compiled import lower
from rollmill.programs.dispatch import dispatch_ahead

REPEATS = 9
LAUNCHES = ((132, 128, 8), (264, 64, 4), (528, 64, 4))
EXACT = (264, 64, 4)
"""Launch of the exact kernel, which is there to be compared number by number."""


def graph_of(num_envs: int, num_steps: int, *, shared: bool, num_minibatches: int = 4, iterations: int = 1):
    return rollmill.ppo(
        rollmill.make("CartPole-v1"),
        num_envs=num_envs,
        num_steps=num_steps,
        total_timesteps=num_envs * num_steps * iterations,
        num_minibatches=num_minibatches,
        update_epochs=4,
        learning_rate=2.5e-4,
        network=rollmill.NetworkConfig(shared_torso=shared),
    )


# --- gradients -----------------------------------------------------------------------------------------


def gradients(num_samples: int, *, shared: bool, numerics: list[str]) -> dict[str, Any]:
    graph = graph_of(num_samples // 32, 128, shared=shared)  # four minibatches of as many samples
    index = jnp.arange(graph.loops.num_envs, dtype=jnp.int32)
    begin = jax.jit(lambda key, index: first_batch(graph, start(graph, key, index)))
    learner, batch = begin(jax.random.key(0), index)
    rows = jax.jit(lambda key: jax.random.permutation(key, graph.loops.batch_size)[:num_samples])(
        jax.random.key(1)
    )
    arguments = learner, batch, rows.astype(jnp.uint32)
    plain = lambda learner, batch, rows: gradients_of_rows(graph, batch, identity)(learner, rows)
    functions = {("xla", ""): plain, ("xla, exact products", ""): jax.default_matmul_precision("highest")(plain)}
    launches = [(name, launch) for name in numerics for launch in LAUNCHES if name != "float32"]
    for name, launch in [*launches, ("float32", EXACT)]:
        run = partial(run_gradients_kernel, launch=GradientLaunch(*launch), numerics=name)
        functions[name, str(launch)] = lambda learner, batch, rows, run=run: fused_gradients(
            graph, batch, identity, run=run
        )(learner, rows)
    functions = compiled(functions, arguments)
    seconds = timed_in_turns(functions, arguments)
    results = {name: jax.device_get(function(*arguments)) for name, function in functions.items()}
    right = results["xla, exact products", ""][0]
    found: dict[str, Any] = {}
    for side in dict.fromkeys(name for name, _ in seconds):
        times = {variant: spread(runs)["median"] for (name, variant), runs in seconds.items() if name == side}
        best = min(times, key=lambda variant: times[variant])
        found[side] = {"microseconds": 1e6 * times[best], "variant": best, "all": times}
        found[side]["error"] = error(results[side, best][0], right)
        found[side]["times_xla"] = found["xla"]["microseconds"] / found[side]["microseconds"]
        print(
            f"{num_samples} shared={shared} {side}: {1e6 * times[best]:.0f} us ({best})", found[side], flush=True
        )
    return found


def error(mine, right) -> float:
    """The greatest difference of a leaf, by that leaf's greatest number."""
    pairs = zip(jax.tree.leaves(mine), jax.tree.leaves(right), strict=True)
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-12)) for a, b in pairs)


# --- training ------------------------------------------------------------------------------------------


def training(
    num_envs: int, num_steps: int, *, shared: bool, numerics: list[str], iterations: int
) -> dict[str, Any]:
    graph = graph_of(num_envs, num_steps, shared=shared, iterations=iterations * (REPEATS + 1))
    sides = {"xla": {"fusion": "off"}}
    sides["rollout"] = {"fusion": "rollout", "numerics": numerics[0]}
    sides |= {f"full, {name}": {"fusion": "full", "numerics": name} for name in numerics}
    programs = {}
    for name, options in sides.items():
        began = time.perf_counter()
        try:
            programs[name] = lower(graph, **options)
        except RollmillError as failure:
            print(f"{name}: {failure}", flush=True)
            continue
        print(f"{name}: compiled in {time.perf_counter() - began:.1f} s", *programs[name].notes, flush=True)
    rates, states = {name: [] for name in programs}, {name: p.start() for name, p in programs.items()}
    for turn in range(REPEATS + 1):
        for name, program in programs.items():
            began = time.perf_counter()
            states[name] = trained(program, states[name], turn * iterations, (turn + 1) * iterations)
            rates[name].append(iterations * graph.loops.batch_size / (time.perf_counter() - began))
    found = {name: spread(runs[1:]) for name, runs in rates.items()}
    for name, program in programs.items():
        found[name]["times_xla"] = found[name]["median"] / found["xla"]["median"]
        found[name]["same_twice"] = same_twice(program, iterations)
        print(
            f"{num_envs} x {num_steps} shared={shared} {name}: {found[name]['median'] / 1e6:.1f} M/s", found[name]
        )
    return found


def trained(program, state, first: int, until: int):
    for window in dispatch_ahead(program, state, first=first, until=until):
        state = window.after
    return jax.block_until_ready(state)


def same_twice(program, iterations: int) -> bool:
    ends = [jax.device_get(trained(program, program.start(), 0, iterations).learner) for _ in range(2)]
    pairs = zip(*map(jax.tree.leaves, ends), strict=True)
    return all(np.array_equal(one, other) for one, other in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("gradients", "training"))
    parser.add_argument("--samples", nargs="+", type=int, default=[131_072, 1_048_576])
    parser.add_argument("--sizes", nargs="+", default=["4096x128", "65536x64"])
    parser.add_argument("--torsos", nargs="+", choices=("shared", "separate"), default=["shared", "separate"])
    parser.add_argument("--numerics", nargs="+", default=["tf32", "bfloat16"])
    parser.add_argument("--iterations", type=int, default=20, help="of each turn")
    parser.add_argument("--name", help="of the result; fusion-gradients or fusion-training if left out")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    cases = options.samples if options.what == "gradients" else options.sizes
    for case, torso in itertools.product(cases, options.torsos):
        shared = torso == "shared"
        if options.what == "gradients":
            result = gradients(case, shared=shared, numerics=options.numerics)
        else:
            num_envs, num_steps = map(int, case.split("x"))
            sizes = {"num_envs": num_envs, "num_steps": num_steps}
            result = training(**sizes, shared=shared, numerics=options.numerics, iterations=options.iterations)
        found[f"{case} {torso}"] = result
        write_result(options.name or f"fusion-{options.what}", found, directory=options.output)


if __name__ == "__main__":
    main()
