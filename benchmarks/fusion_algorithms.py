"""Trainings of every algorithm with kernels of rollouts and gradients beside the same by XLA.

    python benchmarks/fusion_algorithms.py [CASES] [--seconds 2]
    python benchmarks/fusion_algorithms.py [CASES] --checks

The first measures steps a second in turns. Launches are given and not sought, so figures are lower bounds for
kernels. `--checks` compares the gradients of one minibatch, by a kernel with exact products, with those of XLA,
and trains twice from one seed. It also fills the caches of compilers, and several cases may run side by side.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measure import in_turns, options, platform, some_of, spreads, training_turns, write_result

import rollmill
from rollmill.core.errors import RollmillError
from rollmill.dataflow import Graph, gradients_of_rows, identity, start
from rollmill.fusion import GradientLaunch, first_batch, fused_gradients, lower_gradients, run_gradients_kernel
from rollmill.programs.cache import enable_compilation_cache
from rollmill.programs.compiled import lower
from rollmill.programs.kernels import device_name

ROUNDS = 3
MLP = rollmill.NetworkConfig(hidden_sizes=(64, 64))
WIDE = rollmill.NetworkConfig(hidden_sizes=(256, 256), activation="relu")
GRU = rollmill.NetworkConfig(torso="gru", hidden_sizes=(64,), recurrent_size=64)
LSTM = rollmill.NetworkConfig(torso="lstm", hidden_sizes=(64,), recurrent_size=64)
PPO = {"num_minibatches": 4, "update_epochs": 4}
REPLAY = {
    "num_steps": 8,
    "gradient_steps": 8,
    "batch_size": 8_192,
    "buffer_size": 1_048_576,
    "learning_starts": 32_768,
}
CASES: dict[str, tuple[Callable[..., Graph], str, dict[str, Any]]] = {
    "gru": (rollmill.ppo, "CartPole-v1", {**PPO, "num_steps": 128, "network": GRU}),
    "lstm": (rollmill.ppo, "CartPole-v1", {**PPO, "num_steps": 128, "network": LSTM}),
    "impala": (rollmill.impala, "CartPole-v1", {"num_steps": 64, "network": MLP}),
    "impala-gru": (rollmill.impala, "CartPole-v1", {"num_steps": 64, "network": GRU}),
    "mappo": (rollmill.mappo, "TagGridWorld-v0", {**PPO, "num_steps": 32, "network": MLP}),
    "ippo": (rollmill.ippo, "TagGridWorld-v0", {**PPO, "num_steps": 32, "network": MLP}),
    "dqn": (rollmill.dqn, "CartPole-v1", {**REPLAY, "network": MLP}),
    "sac": (rollmill.sac, "Pendulum-v1", {**REPLAY, "network": MLP}),
    "td3": (rollmill.td3, "Pendulum-v1", {**REPLAY, "network": MLP}),
    "sac-wide": (rollmill.sac, "Pendulum-v1", {**REPLAY, "network": WIDE}),
}
GPU_LAUNCHES = {"rollouts": (16, 1), "gradients": (264, 64, 4)}
OTHER_GRADIENTS = {
    "gru": (264, 16, 4, 1),
    "lstm": (264, 16, 4, 1),
    "impala-gru": (264, 16, 4, 1),
    "sac-wide": (132, 64, 8),
}
"""Launches of cases with large sums, or with few rows."""
EXACT = {"sac-wide": (132, 32, 8)}


def graph_of(case: str, num_envs: int) -> Graph:
    make, environment, settings = CASES[case]
    steps = num_envs * settings["num_steps"] * 100_000
    return make(environment, num_envs=num_envs, total_timesteps=steps, **settings)


def launches_of(case: str) -> dict[str, Any] | None:
    if platform() == "cpu":
        return None
    gradients = OTHER_GRADIENTS.get(case, GPU_LAUNCHES["gradients"])
    return {**GPU_LAUNCHES, "gradients": gradients, "device": device_name(jax.devices()[0])}


def gradient_error(case: str, graph: Graph) -> float:
    """Returns the greatest difference from XLA's gradients, relative to the greatest number of each leaf."""
    launch = GradientLaunch(*EXACT.get(case, OTHER_GRADIENTS.get(case, (264, 32, 4))))
    if platform() == "cpu":
        from rollmill.fusion.backends.cpu.launches import machine_code

        code = machine_code().gradients
        run = code.run(code.launches(64, None)[0])
    else:
        run = partial(run_gradients_kernel, launch=launch, numerics="float32")
    step = lower_gradients(graph)
    index = jnp.arange(graph.loops.num_envs, dtype=jnp.int32)

    def both(key: Any) -> Any:
        learner, batch = first_batch(graph, start(graph, key, index))
        leaf = jax.tree.leaves(batch.samples)[0]
        count = leaf.shape[1] if graph.loops.cut == "sequences" else leaf.shape[0] * leaf.shape[1]
        rows = jax.random.permutation(key, count)[: max(64, count // 4)].astype(jnp.uint32)
        with jax.default_matmul_precision("highest"):
            plain = gradients_of_rows(graph, batch, identity)(learner, rows)
            return fused_gradients(graph, batch, identity, run=run, step=step)(learner, rows), plain

    mine, right = jax.device_get(jax.jit(both)(jax.random.key(1)))
    pairs = zip(jax.tree.leaves(mine[0]), jax.tree.leaves(right[0]), strict=True)
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-12)) for a, b in pairs)


def same_twice(program: Any, iterations: int) -> bool:
    def trained() -> list[np.ndarray]:
        state = program.start()
        for _ in range(iterations):
            state, _ = program.advance(state, 1)
        return list(map(np.asarray, jax.tree.leaves(jax.device_get(state.learner))))

    return all(np.array_equal(one, other) for one, other in zip(trained(), trained(), strict=True))


def measured(case: str, chosen: Any) -> dict[str, Any]:
    graph, programs, found = graph_of(case, chosen.envs), {}, {}
    for side in chosen.sides:
        began = time.perf_counter()
        try:
            programs[side] = lower(graph, fusion=side, launches=launches_of(case) if side != "off" else None)
        except RollmillError as failure:
            print(f"{case} {side}: {failure}", flush=True)
            found[side] = {"failure": str(failure)}
            continue
        print(f"{case} {side}: compiled in {time.perf_counter() - began:.1f} s", *programs[side].notes, flush=True)
    if chosen.checks:
        return checks(case, programs.get("full"), chosen, found)
    turns, iterations = {}, {}
    for side, program in programs.items():
        turn = training_turns(program, graph.loops.batch_size, 8)
        turn()  # what is compiled or allocated at first
        iterations[side] = max(8, round(turn() * chosen.seconds / ROUNDS / graph.loops.batch_size))
        turns[side] = training_turns(program, graph.loops.batch_size, iterations[side])
    figures = spreads(in_turns(turns, ROUNDS, warm_up=1))
    for side, figure in figures.items():
        found[side] = {**figure, "times_xla": figure["median"] / figures["off"]["median"]}
        print(f"{case} {side}: {figure['median'] / 1e6:.2f} M/s, {found[side]['times_xla']:.2f} x", flush=True)
    return found


def checks(case: str, program: Any, chosen: Any, found: dict[str, Any]) -> dict[str, Any]:
    if program is not None:
        found["same_twice"] = same_twice(program, 12)
        write_result(chosen.name, {case: found}, chosen.output)  # the exact kernel may compile for minutes
    try:
        found["gradient_error"] = gradient_error(case, graph_of(case, min(chosen.envs, 512)))
    except RollmillError as failure:
        found["gradient_error"] = str(failure)
    print(case, found, flush=True)
    return found


def main() -> None:
    chosen = options(
        __doc__,
        {"cases": some_of(CASES)},
        envs=(4_096, "environments side by side"),
        seconds=(2.0, "of each side of a case"),
        sides=some_of(("off", "rollout", "full")),
        checks=False,
        name=("fusion-algorithms", "of the result"),
    )
    enable_compilation_cache()
    found: dict[str, Any] = {}
    for case in chosen.cases:
        try:
            found[case] = measured(case, chosen)
        except Exception as failure:
            found[case] = {"failure": f"{type(failure).__name__}: {failure}"}
            print(case, found[case], flush=True)
        write_result(chosen.name, found, chosen.output)


if __name__ == "__main__":
    main()
