"""Trainings of every algorithm with kernels of rollouts and gradients beside the same by XLA.

    python benchmarks/fusion_algorithms.py [CASES] [--seconds 2]
    python benchmarks/fusion_algorithms.py [CASES] --checks

The first measures steps a second in turns. Launches are given and not sought, so figures are lower bounds for
kernels. `--checks` compares the gradients of one minibatch, by a kernel with exact products, with those of XLA,
and trains twice from one seed. It also fills the caches of compilers, and several cases may run side by side.
`--parts` makes one result of several.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measure import in_turns, merged_results, options, platform, some_of, spreads, training_turns, write_result
from oscillators import Complexity, oscillators

import rollmill
from rollmill.core.errors import RollmillError
from rollmill.dataflow import Graph, identity, init_state, row_gradients
from rollmill.fusion import GradientLaunch, first_batch, fused_gradients, lower_gradients, run_gradients_kernel
from rollmill.programs.cache import enable_compilation_cache
from rollmill.programs.compiled import lower
from rollmill.programs.kernels import device_name

ROUNDS = 3
MLP = rollmill.NetworkConfig(hidden_sizes=(64, 64))
WIDE = rollmill.NetworkConfig(hidden_sizes=(256, 256), activation="relu")
GRU = rollmill.NetworkConfig(torso="gru", hidden_sizes=(64,), recurrent_size=64)
BROAD = rollmill.NetworkConfig(hidden_sizes=(256, 256))
DEEP = rollmill.NetworkConfig(hidden_sizes=(256, 128, 64), activation="elu", shared_torso=True)
LSTM = rollmill.NetworkConfig(torso="lstm", hidden_sizes=(64,), recurrent_size=64)
CNN = rollmill.NetworkConfig(torso="cnn")
PPO = {"num_minibatches": 4, "update_epochs": 4}
REPLAY = {
    "num_steps": 8,
    "gradient_steps": 8,
    "batch_size": 8_192,
    "buffer_size": 1_048_576,
    "learning_starts": 32_768,
}
LARGE_REPLAY = {**REPLAY, "batch_size": 32_768, "gradient_steps": 16}
CASES: dict[str, tuple[Callable[..., Graph], Any, dict[str, Any]]] = {
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
    "dqn-large": (rollmill.dqn, "CartPole-v1", {**LARGE_REPLAY, "network": MLP}),
    "sac-large": (rollmill.sac, "Pendulum-v1", {**LARGE_REPLAY, "network": MLP}),
    "td3-large": (rollmill.td3, "Pendulum-v1", {**LARGE_REPLAY, "network": MLP}),
    "broad": (rollmill.ppo, "CartPole-v1", {**PPO, "num_steps": 32, "network": BROAD}),
    "deep": (rollmill.ppo, oscillators(Complexity(30, 1, 60)), {**PPO, "num_steps": 32, "network": DEEP}),
    "breakout": (rollmill.ppo, "gymnax:Breakout-MinAtar", {**PPO, "num_steps": 32, "network": CNN}),
    "craftax": (rollmill.ppo, "craftax:Craftax-Classic-Symbolic-v1", {**PPO, "num_steps": 64, "network": MLP}),
}
GPU_LAUNCHES = {"rollouts": (16, 1), "gradients": (264, 64, 4)}
OTHER_GRADIENTS = {
    "gru": (264, 16, 4, 1),
    "lstm": (264, 16, 4, 1),
    "impala-gru": (264, 16, 4, 1),
    "sac-wide": (132, 64, 8),
    "broad": (132, 64, 8),
    "deep": (132, 64, 8),
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
        from rollmill.fusion.backends.cpu.launches import cpu_backend

        code = cpu_backend().gradients
        run = code.run(code.launches(64, None)[0])
    else:
        run = partial(run_gradients_kernel, launch=launch, numerics="float32")
    step = lower_gradients(graph)
    index = jnp.arange(graph.loops.num_envs, dtype=jnp.int32)

    def both(key: Any) -> Any:
        learner, batch = first_batch(graph, init_state(graph, key, index))
        leaf = jax.tree.leaves(batch.samples)[0]
        count = leaf.shape[1] if graph.loops.minibatch_items == "sequences" else leaf.shape[0] * leaf.shape[1]
        rows = jax.random.permutation(key, count)[: max(64, count // 4)].astype(jnp.uint32)
        with jax.default_matmul_precision("highest"):
            plain = row_gradients(graph, batch, identity)(learner, rows)
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
    """Returns the steps a second of each side, or what `--checks` finds."""
    graph, found = graph_of(case, chosen.envs), {}
    programs = programs_of(case, graph, chosen.sides, found)
    if chosen.checks:
        return checks(case, programs.get("full"), chosen, found)
    for side, figure in rates(graph, programs, chosen.seconds).items():
        found.setdefault(side, {}).update(figure)
        print(case, side, f"{figure['median'] / 1e6:.2f} M/s", figure.get("times_xla"), flush=True)
    return found


def programs_of(case: str, graph: Graph, sides: list[str], found: dict[str, Any]) -> dict[str, Any]:
    """Compiles a training by each side, and notes in `found` the seconds, or why there is none."""
    programs = {}
    for side in sides:
        began = time.perf_counter()
        try:
            programs[side] = lower(graph, fusion=side, launches=launches_of(case) if side != "off" else None)
        except RollmillError as failure:
            found[side] = {"failure": str(failure)}
        else:
            found[side] = {"compile_seconds": time.perf_counter() - began, "notes": list(programs[side].notes)}
        print(case, side, found[side], flush=True)
    return programs


def rates(graph: Graph, programs: dict[str, Any], seconds: float) -> dict[str, dict[str, Any]]:
    """Returns the steps a second of each program, in turns of so many seconds of each together."""
    turns, batch = {}, graph.loops.batch_size
    for side, program in programs.items():
        turn = training_turns(program, batch, 8)
        turn()  # what is compiled or allocated at first
        turns[side] = training_turns(program, batch, max(8, round(turn() * seconds / ROUNDS / batch)))
    figures = spreads(in_turns(turns, ROUNDS, warm_up=1))
    if "off" in figures:
        for figure in figures.values():
            figure["times_xla"] = figure["median"] / figures["off"]["median"]
    return figures


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
        parts=([str], "other results, which become this one"),
        name=("fusion-algorithms", "of the result"),
    )
    if chosen.parts:
        write_result(chosen.name, merged_results(chosen.parts, chosen.output), chosen.output)
        return
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
