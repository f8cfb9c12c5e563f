"""Environments as users write them: whether they become kernels, compute what XLA computes, and are faster.

    PYTHONPATH=tests/fusion:tests python benchmarks/fusion_users.py [NAMES] [--no-rates] [--add]

The environments are those of tests/fusion/user_*.py and game_environments.py. Steps are compared in
episodes of random actions: integers and flags have to be those of XLA, and floats to agree to their last digits. A
rate is of a rollout of 32 steps with a policy of two layers of 64, by a kernel over XLA, as `auto` measures it: of
64 copies on a CPU, and of 4,096 on a GPU.

On a GPU kernels are Triton's, and are compared with XLA on the CPU, whose elementary functions differ in more
digits. Writes results/fusion-users.json.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from drawn_compare import WAYS
from game_environments import GAMES
from game_runs import EVERY, differing, unfused_steps
from measure import options, platform, read_result, some_of, write_result

import rollmill
from rollmill.core.errors import CannotFuse
from rollmill.dataflow import init_state
from rollmill.fusion import (
    backend_for,
    compile_candidates,
    estimate_pressure,
    find_fastest_launch,
    lower_rollout,
    many_products,
    rollout_search,
)
from rollmill.programs.compiled import unroll_for
from rollmill.programs.search_cost import MIN_GAIN

STEPS, COPIES = 60, 8
ENVS, ROLLOUT = {"cpu": 64, "gpu": 4096}, 32


def parity(name: str) -> dict[str, Any]:
    """Returns how many steps differ, or why there are none."""
    try:
        played = unfused_steps(name, steps=STEPS, copies=COPIES)
    except CannotFuse as refusal:
        return {"refused": str(refusal)}
    if platform() == "cpu":
        return {"steps": STEPS * COPIES, "different": differing(played, WAYS["machine code"])}
    return {
        "steps": STEPS * COPIES,
        "different": differing(played, by_kernel),
        "device": jax.devices()[0].device_kind,
    }


def by_kernel(program: Any, inputs: Any, uniforms: Any, *, block: int) -> Any:
    """Evaluates a program by a kernel on the GPU."""
    from kernel_runs import evaluate_by_kernel

    arrays = lambda values: list(map(jnp.asarray, values))
    return evaluate_by_kernel(program, arrays(inputs), arrays(uniforms), block=block)


def rate(name: str) -> dict[str, Any]:
    """Returns the model of a step, and the seconds of a rollout in a kernel and by XLA."""
    num_envs = ENVS[platform()]
    graph = rollmill.ppo(EVERY[name](), num_envs=num_envs, num_steps=ROLLOUT, num_minibatches=1)
    begin = partial(init_state, graph, jax.random.key(0), jnp.arange(num_envs, dtype=jnp.int32))
    device, step = jax.devices()[0], lower_rollout(graph)
    backend = backend_for(device, "float32" if platform() == "cpu" else "tf32")
    pressure = estimate_pressure(step.program)
    if (reason := many_products(pressure)) is not None:
        return {"operations": pressure.num_operations, "left": reason}
    launches = backend.rollouts.launches(num_envs, pressure.num_operations)
    unroll = unroll_for(platform())
    search = rollout_search(graph, jax.eval_shape(begin), backend, launches, device, unroll=unroll, step=step)
    state = jax.jit(begin)()
    arguments = graph.weights(state.learner), state.collector, state.key
    with search.compile_ahead() as wait_for_kernel:
        tuned = find_fastest_launch(search, compile_candidates(search, wait_for_kernel), arguments)
    figures = {"seconds": tuned.seconds, "unfused": tuned.unfused_seconds, "ratio": tuned.speedup}
    return {
        "operations": pressure.num_operations,
        "copies": num_envs,
        **figures,
        "fused by auto": (tuned.speedup or 0) >= MIN_GAIN,
    }


def main() -> None:
    chosen = options(
        __doc__, {"names": some_of(EVERY)}, rates=True, add=False, name=("fusion-users", "of the result")
    )
    found: dict[str, Any] = read_result(chosen.name, chosen.output) if chosen.add else {}
    for name in chosen.names:
        if chosen.add and name in found:
            continue
        found[name] = {"game": name in GAMES} | parity(name)
        if chosen.rates and "refused" not in found[name]:
            found[name] |= rate(name)
        print(name, found[name], flush=True)
        write_result(chosen.name, found, chosen.output)


if __name__ == "__main__":
    main()
