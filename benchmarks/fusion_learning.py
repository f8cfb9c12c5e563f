"""Learning curves with fused kernels beside those of the same training by XLA, on CPU cores.

    python benchmarks/fusion_learning.py

PPO with its default settings and one torso on CartPole-v1, ten seeds on each side. The curves are the mean return
of the episodes that ended in an iteration, and `greedy` is that of 100 episodes of the last policy with its most
likely action. Writes results/fusion-learning-cpu.json.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measure import advance, options, require, write_result

import rollmill
from rollmill.dataflow import init_state
from rollmill.programs.cache import enable_compilation_cache
from rollmill.programs.compiled import lower
from rollmill.programs.evaluation.compiled import evaluate

SEEDS, EPISODES = 10, 100
SIDES = {"xla": "off", "full": "full"}


def learned(graph: Any, fusion: Any) -> tuple[list[list[float | None]], list[float]]:
    """Returns mean returns by seed and iteration, None where no episode ended, and those of the last policies."""
    program = lower(graph, fusion=fusion)
    index, begin = jnp.arange(graph.loops.num_envs, dtype=jnp.int32), jax.jit(partial(init_state, graph))
    curves, greedy = [], []
    for seed in range(SEEDS):
        state, rows = advance(program, begin(jax.random.key(seed), index), 0, graph.loops.iterations)
        curves.append([mean_return(row) for row in rows])
        played = evaluate(graph, graph.weights(state.learner), episodes=EPISODES, seed=1)
        greedy.append(float(played.returns.mean()))
    return curves, greedy


def mean_return(row: dict[str, np.ndarray]) -> float | None:
    ended = float(row["episodes/ended"])
    return float(row["episodes/return_sum"]) / ended if ended else None


def main() -> None:
    chosen = options(__doc__)
    require("cpu")
    curves: dict[str, Any] = {}
    greedy: dict[str, list[float]] = {}
    enable_compilation_cache()
    graph = rollmill.ppo(rollmill.make("CartPole-v1"), network=rollmill.NetworkConfig(shared_torso=True))
    for name, fusion in SIDES.items():
        curves[name], greedy[name] = learned(graph, fusion)
        print(name, "return of the last policy, each seed:", greedy[name], flush=True)
    result = {"steps_an_iteration": graph.loops.batch_size, "curves": curves, "greedy": greedy}
    write_result("fusion-learning-cpu", result, chosen.output)


if __name__ == "__main__":
    main()
