"""Algorithms that learn with workers: returns, policy lag and wall time, three seeds each.

    python benchmarks/distributed_learning.py [half-cheetah a3c-cartpole impala-cartpole]

Every training is a run of the command line in processes of this host. The final return is the mean over the last
hundred episodes of the training, and `greedy` that of a hundred episodes with the most likely action. Writes
results/distributed-learning.json. HalfCheetah-v5 needs MuJoCo (`rollmill[mujoco]`).
"""

import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from measure import lines_of, options, read_result, rollmill, some_of, summary_of, words, write_result

from rollmill import evaluate
from rollmill.recipes import RECIPES

SEEDS, POINTS = (0, 1, 2), 50
COARSE, ASYNCHRONOUS = "--distribution single-learner-coarse", "--asynchronous --actors 2"
STUDIES = {
    "half-cheetah": (COARSE, 1400.0, False),
    "a3c-cartpole": (f"--distribution central {ASYNCHRONOUS}", 475.0, True),
    "impala-cartpole": (f"{COARSE} {ASYNCHRONOUS}", 475.0, True),
}
"""Placement of a recipe, the return that it should reach, and whether each seed must reach it with the most likely
action, or their mean in training."""


def train(name: str, seed: int, run: Path) -> dict[str, Any]:
    (placement, _, greedy), recipe = STUDIES[name], RECIPES[name]()
    command = words(f"train {recipe.algorithm} {recipe.environment} {placement} --quiet", recipe=name, seed=seed)
    rollmill(*command, "--run-dir", run)
    summary, lines = summary_of(run), lines_of(run)
    lags = [line["policy_lag/mean"] for line in lines if "policy_lag/mean" in line]
    found = {
        "seed": seed,
        "final_return": summary["final_return"],
        "greedy": float(evaluate(run, episodes=100).returns.mean()) if greedy else None,
        "policy_lag_mean": mean(lags) if lags else None,
        "policy_lag_max": max((line.get("policy_lag/max", 0.0) for line in lines), default=None),
        "seconds": summary["seconds"],
        "env_steps": summary["env_steps"],
    }
    print(name, found, flush=True)
    sampled = lines[:: max(len(lines) // POINTS, 1)]
    return found | {"curve": [(line["env_steps"], line["episode/return"]) for line in sampled]}


def follow(name: str) -> dict[str, Any]:
    (placement, target, greedy), runs = STUDIES[name], []
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            runs.append(train(name, seed, Path(folder) / "run"))
    reached = min(run["greedy"] for run in runs) if greedy else mean(run["final_return"] for run in runs)
    return {"recipe": name, "placement": placement.split(), "target": target, "reached": reached, "runs": runs}


def main() -> None:
    chosen = options(__doc__, {"studies": some_of(STUDIES)})
    earlier = read_result("distributed-learning", chosen.output)
    write_result("distributed-learning", earlier | {name: follow(name) for name in chosen.studies}, chosen.output)


if __name__ == "__main__":
    main()
