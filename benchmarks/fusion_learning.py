"""Learning curves with fused kernels beside those of the same training by XLA, on one GPU.

    python benchmarks/fusion_learning.py

PPO with its default settings on CartPole-v1, ten seeds on each side. The curves are the mean return of the
episodes that ended in an iteration. Writes results/fusion-learning.json.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measure import advance, options, write_result

import rollmill
from rollmill.dataflow import start
from rollmill.programs.compiled import lower

SEEDS = 10
LAUNCHES = {"rollouts": (16, 1), "gradients": (132, 32, 2)}
SIDES = {
    "xla": {"fusion": "off"},
    "full, tf32": {"fusion": "full", "numerics": "tf32"},
    "full, bfloat16": {"fusion": "full", "numerics": "bfloat16"},
}


def curves(graph: Any, how: dict[str, str]) -> list[list[float | None]]:
    """Returns mean returns, seed by seed and iteration by iteration; None where no episode ended."""
    program = lower(graph, **how, launches={"device": jax.devices()[0].device_kind, **LAUNCHES})
    index, begin = jnp.arange(graph.loops.num_envs, dtype=jnp.int32), jax.jit(partial(start, graph))
    states = (begin(jax.random.key(seed), index) for seed in range(SEEDS))
    return [list(map(mean_return, advance(program, state, 0, graph.loops.iterations)[1])) for state in states]


def mean_return(row: dict[str, np.ndarray]) -> float | None:
    ended = float(row["episodes/ended"])
    return float(row["episodes/return_sum"]) / ended if ended else None


def main() -> None:
    chosen, found = options(__doc__), {}
    graph = rollmill.ppo(rollmill.make("CartPole-v1"), network=rollmill.NetworkConfig(shared_torso=True))
    for name, how in SIDES.items():
        found[name] = curves(graph, how)
        last = [np.mean([x for x in seed[-10:] if x is not None]) for seed in found[name]]
        print(name, "return of the last ten iterations, each seed:", np.round(last, 1), flush=True)
    result = {"steps_an_iteration": graph.loops.batch_size, "curves": found}
    write_result("fusion-learning", result, chosen.output)


if __name__ == "__main__":
    main()
