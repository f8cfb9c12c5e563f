"""What algorithms learn at their defaults on small environments.

    python benchmarks/defaults.py [ppo a3c impala dqn sac td3]

All seeds of a row train in one program. The return is that of the last policy with its most likely action, as the
mean of 100 episodes. Rows of other algorithms stay in results/defaults.json, each with its commit.
"""

import math
import time
from statistics import fmean, stdev
from typing import Any, NamedTuple

import jax
from measure import advance, options, read_result, some_of, this_commit, write_result

import rollmill
from rollmill.programs.cache import enable_compilation_cache
from rollmill.programs.compiled import lower
from rollmill.programs.evaluation.compiled import evaluate

EPISODES = 100
QUANTILES = {3: 4.303, 5: 2.776}
"""Student's t for an interval of 95 %, by the number of seeds."""

THRESHOLDS = {
    "CartPole-v1": 475.0,
    "Acrobot-v1": -100.0,
    "Pendulum-v1": -250.0,
    "MountainCarContinuous-v0": 90.0,
}
"""Returns by which an environment counts as learned."""


class Row(NamedTuple):
    """One training, as a user types it."""

    algorithm: str
    environment: str
    seeds: int = 3
    options: dict[str, Any] = {}
    network: dict[str, Any] = {}

    @property
    def command(self) -> str:
        """The command that trains the same."""
        given = [
            *(f"--{name.replace('_', '-')} {value}" for name, value in self.options.items()),
            *(f"--network.{name.replace('_', '-')}" for name in self.network),
        ]
        seeds = f"--num-seeds {self.seeds}"
        return " ".join(["rollmill train", self.algorithm, self.environment, *given, seeds])


CLASSIC = ("CartPole-v1", "Acrobot-v1", "Pendulum-v1")
ROWS = [
    *(Row(algorithm, environment) for algorithm in ("ppo", "a3c", "impala") for environment in CLASSIC),
    Row("ppo", "CartPole-v1", network={"shared_torso": True}),
    Row("ppo", "MountainCarContinuous-v0"),
    Row("dqn", "CartPole-v1", options={"total_timesteps": 200_000}),
    Row("dqn", "Acrobot-v1", options={"total_timesteps": 200_000}),
    Row("sac", "Pendulum-v1", options={"total_timesteps": 20_000}),
    Row("td3", "Pendulum-v1", options={"total_timesteps": 40_000}),
]


def trained(row: Row) -> dict[str, Any]:
    """Returns what a row learned, and how long it took."""
    algorithm, began = getattr(rollmill, row.algorithm), time.perf_counter()
    chosen = {"network": rollmill.NetworkConfig(**row.network)} if row.network else {}
    graph = algorithm(rollmill.make(row.environment), **row.options, **chosen)
    program = lower(graph, seeds=tuple(range(row.seeds)))
    state, _ = advance(program, program.start(), 0, graph.loops.iterations)
    seconds, returns = time.perf_counter() - began, []
    for seed in range(row.seeds):
        weights = jax.tree.map(lambda leaf, seed=seed: leaf[seed], graph.weights(state.learner))
        returns.append(float(evaluate(graph, weights, episodes=EPISODES, seed=1).returns.mean()))
    half, threshold = QUANTILES[row.seeds] * stdev(returns) / math.sqrt(row.seeds), THRESHOLDS[row.environment]
    found = {"returns": returns, "mean": fmean(returns), "half_interval": half, "threshold": threshold}
    print(f"{row.command}: {fmean(returns):.1f} +- {half:.1f}, {seconds:.0f} s", flush=True)
    return {
        **{"algorithm": row.algorithm, "environment": row.environment, "command": row.command},
        **{"steps": graph.loops.iterations * graph.loops.batch_size, "seeds": row.seeds, **found},
        **{"met": fmean(returns) >= threshold, "seconds": seconds, "commit": this_commit()},
    }


def main() -> None:
    names = dict.fromkeys(row.algorithm for row in ROWS)
    chosen = options(__doc__, {"algorithms": some_of(names)})
    enable_compilation_cache()
    rows = {row["command"]: row for row in read_result("defaults", chosen.output).get("rows", [])}
    for row in ROWS:
        if row.algorithm in chosen.algorithms:
            rows[row.command] = trained(row)
            kept = [rows[each.command] for each in ROWS if each.command in rows]
            write_result("defaults", {"episodes": EPISODES, "rows": kept}, chosen.output)


if __name__ == "__main__":
    main()
