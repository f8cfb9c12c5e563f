"""PPO with fused rollouts and gradients beside the same compiled by XLA, on one GPU.

    python benchmarks/fusion_training.py gradients [--samples 131072 1048576]
    python benchmarks/fusion_training.py training [--sizes 4096x128 65536x64] [--layers 64-64 256-256]

`gradients`: of one minibatch, samples gathered in the order of a shuffle, by the kernel with each of its launches
and by XLA; and how far they are from those by XLA with exact products, relative to the largest of each leaf.

`training`: whole iterations of 4 epochs of 4 minibatches on CartPole-v1, actor and critic with tanh layers of
`--layers`, with one torso or two: by XLA, with fused rollouts, and with fused rollouts and gradients. Every
training is done twice from the same seed, and the result says whether the weights were the same bit for bit.
Figures are medians.
"""

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measure import (
    advance,
    compiled,
    in_turns,
    one_of,
    options,
    some_of,
    spread,
    spreads,
    timed_in_turns,
    training_turns,
    write_result,
)

import rollmill
from rollmill.core.errors import RollmillError
from rollmill.dataflow import Graph, identity, init_state, row_gradients
from rollmill.fusion import GradientLaunch, first_batch, fused_gradients, run_gradients_kernel
from rollmill.programs.compiled import lower

REPEATS = 9
LAUNCHES = ((132, 128, 8), (264, 64, 4), (528, 64, 4))
EXACT = (264, 64, 4)
"""Launch of the exact kernel, whose numbers are compared one by one."""


def graph_of(
    num_envs: int, num_steps: int, *, shared: bool, iterations: int = 1, layers: tuple[int, ...] = (64, 64)
) -> Graph:
    return rollmill.ppo(
        rollmill.make("CartPole-v1"),
        num_envs=num_envs,
        num_steps=num_steps,
        total_timesteps=num_envs * num_steps * iterations,
        num_minibatches=4,
        update_epochs=4,
        learning_rate=2.5e-4,
        network=rollmill.NetworkConfig(hidden_sizes=layers, shared_torso=shared),
    )


def gradients(num_samples: int, shared: bool, chosen: Any) -> dict[str, Any]:
    graph = graph_of(num_samples // 32, 128, shared=shared)  # four minibatches of as many samples
    index = jnp.arange(graph.loops.num_envs, dtype=jnp.int32)
    begin = jax.jit(lambda key, index: first_batch(graph, init_state(graph, key, index)))
    learner, batch = begin(jax.random.key(0), index)
    draw = jax.jit(lambda key: jax.random.permutation(key, graph.loops.batch_size)[:num_samples])
    arguments = learner, batch, draw(jax.random.key(1)).astype(jnp.uint32)
    plain = lambda learner, batch, rows: row_gradients(graph, batch, identity)(learner, rows)
    functions: dict[Any, Callable] = {("xla", ""): plain}
    functions["xla, exact products", ""] = jax.default_matmul_precision("highest")(plain)
    launches = [(name, launch) for name in chosen.numerics for launch in LAUNCHES if name != "float32"]
    for name, launch in [*launches, ("float32", EXACT)]:
        run = partial(run_gradients_kernel, launch=GradientLaunch(*launch), numerics=name)
        fused = lambda learner, batch, rows, run=run: fused_gradients(graph, batch, identity, run=run)(
            learner, rows
        )
        functions[name, str(launch)] = fused
    functions = compiled(functions, arguments)
    seconds = timed_in_turns(functions, arguments)
    results = {name: jax.device_get(function(*arguments)) for name, function in functions.items()}
    right, found = results["xla, exact products", ""][0], {}
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


def error(mine: Any, right: Any) -> float:
    """Returns the greatest difference of a leaf, relative to that leaf's greatest number."""
    pairs = zip(jax.tree.leaves(mine), jax.tree.leaves(right), strict=True)
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-12)) for a, b in pairs)


def training(size: str, shared: bool, chosen: Any, layers: str = "64-64") -> dict[str, Any]:
    num_envs, num_steps = map(int, size.split("x"))
    iterations, widths = chosen.iterations * (REPEATS + 1), tuple(map(int, layers.split("-")))
    graph = graph_of(num_envs, num_steps, shared=shared, iterations=iterations, layers=widths)
    sides = {"xla": {"fusion": "off"}, "rollout": {"fusion": "rollout", "numerics": chosen.numerics[0]}}
    sides |= {f"full, {name}": {"fusion": "full", "numerics": name} for name in chosen.numerics}
    programs = {}
    for name, how in sides.items():
        began = time.perf_counter()
        try:
            programs[name] = lower(graph, **how)
        except RollmillError as failure:
            print(f"{name}: {failure}", flush=True)
            continue
        print(f"{name}: compiled in {time.perf_counter() - began:.1f} s", *programs[name].notes, flush=True)
    turn = lambda program: training_turns(program, graph.loops.batch_size, chosen.iterations)
    turns = {name: turn(program) for name, program in programs.items()}
    found = spreads(in_turns(turns, REPEATS, warm_up=1))
    for name, figure in found.items():
        figure["times_xla"] = figure["median"] / found["xla"]["median"]
        figure["same_twice"] = same_twice(programs[name], chosen.iterations)
        print(
            f"{num_envs} x {num_steps} {layers} shared={shared} {name}: {figure['median'] / 1e6:.1f} M/s", figure
        )
    return found


def same_twice(program: Any, iterations: int) -> bool:
    ends = [jax.device_get(advance(program, program.start(), 0, iterations)[0].learner) for _ in range(2)]
    pairs = zip(*map(jax.tree.leaves, ends), strict=True)
    return all(np.array_equal(one, other) for one, other in pairs)


def main() -> None:
    chosen = options(
        __doc__,
        {"what": one_of("gradients", "training")},
        samples=[131_072, 1_048_576],
        sizes=["4096x128", "65536x64"],
        layers=["64-64"],
        torsos=some_of(("shared", "separate")),
        numerics=["tf32", "bfloat16"],
        iterations=(20, "of each turn"),
        name=(str, "of the result; default: fusion-gradients or fusion-training"),
    )
    found: dict[str, Any] = {}
    for case, torso, layers in itertools.product(
        *(chosen.samples if chosen.what == "gradients" else chosen.sizes, chosen.torsos, chosen.layers)
    ):
        shared, name = torso == "shared", f"{case} {torso}"
        if chosen.what == "gradients":
            found[name] = gradients(case, shared, chosen)
        else:
            of_layers = name if layers == "64-64" else f"{name} {layers}"
            found[of_layers] = training(case, shared, chosen, layers)
        write_result(chosen.name or f"fusion-{chosen.what}", found, chosen.output)


if __name__ == "__main__":
    main()
