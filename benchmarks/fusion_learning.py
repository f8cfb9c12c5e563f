"""Learning curves with fused kernels beside those of the same training left to XLA.

    python benchmarks/fusion_learning.py train     # on a GPU: results/fusion-learning.json
    python benchmarks/fusion_learning.py draw      # docs/figures/fusion-learning.png; needs matplotlib

PPO with its default settings on CartPole-v1, ten seeds on each side. The curves are the mean return of the
episodes that ended in an iteration, over environment steps; the band is the range of the seeds.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measure import RESULTS, write_result

import rollmill
from rollmill.dataflow import start
from rollmill.programs.compiled import lower
from rollmill.programs.dispatch import dispatch_ahead

SEEDS = 10
LAUNCHES = {"rollouts": (16, 1), "gradients": (132, 32, 2)}
SIDES = {
    "xla": {"fusion": "off"},
    "full, tf32": {"fusion": "full", "numerics": "tf32"},
    "full, bfloat16": {"fusion": "full", "numerics": "bfloat16"},
}


def curves(graph: Any, options: dict[str, str]) -> list[list[float | None]]:
    """Mean returns, seed by seed and iteration by iteration; None where no episode ended."""
    program = lower(graph, **options, launches={"device": jax.devices()[0].device_kind, **LAUNCHES})
    index = jnp.arange(graph.loops.num_envs, dtype=jnp.int32)
    begin = jax.jit(partial(start, graph))
    return [curve(program, begin(jax.random.key(seed), index), graph.loops.iterations) for seed in range(SEEDS)]


def curve(program: Any, state: Any, iterations: int) -> list[float | None]:
    rows = [row for window in dispatch_ahead(program, state, first=0, until=iterations) for row in window.metrics]
    return [mean_return(row) for row in rows]


def mean_return(row: dict[str, np.ndarray]) -> float | None:
    ended = float(row["episodes/ended"])
    return float(row["episodes/return_sum"]) / ended if ended else None


def train(directory: Path) -> None:
    graph = rollmill.ppo(rollmill.make("CartPole-v1"), network=rollmill.NetworkConfig(shared_torso=True))
    found = {}
    for name, options in SIDES.items():
        found[name] = curves(graph, options)
        last = [np.mean([x for x in seed[-10:] if x is not None]) for seed in found[name]]
        print(name, "return of the last ten iterations, each seed:", np.round(last, 1), flush=True)
    steps = graph.loops.batch_size
    write_result("fusion-learning", {"steps_an_iteration": steps, "curves": found}, directory=directory)


def draw(directory: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    result = json.loads((directory / "fusion-learning.json").read_text())["result"]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, seeds in result["curves"].items():
        returns = np.array(seeds, float)
        steps = np.arange(1, returns.shape[1] + 1) * result["steps_an_iteration"]
        (line,) = axes.plot(steps, np.nanmean(returns, axis=0), label=name)
        axes.fill_between(
            steps, np.nanmin(returns, axis=0), np.nanmax(returns, axis=0), alpha=0.15, color=line.get_color()
        )
    axes.set(xlabel="environment steps", ylabel="return", title="PPO on CartPole-v1, mean and range of ten seeds")
    axes.legend()
    figure.savefig(Path(__file__).parent.parent / "docs" / "figures" / "fusion-learning.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "draw"))
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    (train if options.what == "train" else draw)(options.output)


if __name__ == "__main__":
    main()
