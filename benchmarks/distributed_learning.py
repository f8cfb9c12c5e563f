"""Algorithms that learn with workers: returns, policy lag and wall time of several seeds.

    python benchmarks/distributed_learning.py [half-cheetah a3c-cartpole impala-cartpole a3c-defaults ...]

Every training is a run of the command line in processes of this host. The final return is the mean over the last
hundred episodes of the training, and `greedy` that of a hundred episodes with the most likely action. Writes
results/distributed-learning.json. HalfCheetah-v5 needs MuJoCo (`rollmill[mujoco]`).
"""

import tempfile
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from measure import lines_of, options, read_result, rollmill, some_of, summary_of, words, write_result

from rollmill import evaluate
from rollmill.recipes import RECIPES

POINTS = 50
COARSE, ASYNCHRONOUS = "--distribution single-learner-coarse", "--asynchronous --actors 2"


class Study(NamedTuple):
    """Trainings of several seeds, with a recipe or with the defaults of an algorithm."""

    placement: str
    target: float
    greedy: bool = True
    """Whether each seed must reach the target with the most likely action, or their mean in training."""
    plain: str | None = None
    """Algorithm and environment if the study has the defaults. Otherwise, its name is that of a recipe."""
    seeds: int = 3

    def command(self, name: str) -> str:
        """Returns the command of a training, without its seed."""
        if self.plain is not None:
            return f"train {self.plain} {self.placement}"
        recipe = RECIPES[name]()
        return f"train {recipe.algorithm} {recipe.environment} --recipe {name} {self.placement}"


STUDIES = {
    "half-cheetah": Study(COARSE, 1400.0, greedy=False),
    "a3c-cartpole": Study(f"--distribution central {ASYNCHRONOUS}", 475.0),
    "impala-cartpole": Study(f"{COARSE} {ASYNCHRONOUS}", 475.0),
    "a3c-defaults": Study(f"--distribution central {ASYNCHRONOUS}", 475.0, plain="a3c CartPole-v1", seeds=5),
    "impala-defaults": Study(f"{COARSE} {ASYNCHRONOUS}", 475.0, plain="impala CartPole-v1", seeds=5),
}


def train(name: str, seed: int, run: Path) -> dict[str, Any]:
    study = STUDIES[name]
    rollmill(*words(f"{study.command(name)} --quiet", seed=seed), "--run-dir", run)
    summary, lines = summary_of(run), lines_of(run)
    lags = [line["policy_lag/mean"] for line in lines if "policy_lag/mean" in line]
    found = {
        "seed": seed,
        "final_return": summary["final_return"],
        "greedy": float(evaluate(run, episodes=100).returns.mean()) if study.greedy else None,
        "policy_lag_mean": mean(lags) if lags else None,
        "policy_lag_max": max((line.get("policy_lag/max", 0.0) for line in lines), default=None),
        "seconds": summary["seconds"],
        "env_steps": summary["env_steps"],
    }
    print(name, found, flush=True)
    sampled = lines[:: max(len(lines) // POINTS, 1)]
    return found | {"curve": [(line["env_steps"], line["episode/return"]) for line in sampled]}


def follow(name: str) -> dict[str, Any]:
    study, runs = STUDIES[name], []
    for seed in range(study.seeds):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(train(name, seed, Path(folder) / "run"))
    reached = min(run["greedy"] for run in runs) if study.greedy else mean(run["final_return"] for run in runs)
    described = {"recipe": None if study.plain else name, "command": f"rollmill {study.command(name)}"}
    return {
        **described,
        "placement": study.placement.split(),
        "target": study.target,
        "reached": reached,
        "runs": runs,
    }


def main() -> None:
    chosen = options(__doc__, {"studies": some_of(STUDIES)})
    earlier = read_result("distributed-learning", chosen.output)
    write_result("distributed-learning", earlier | {name: follow(name) for name in chosen.studies}, chosen.output)


if __name__ == "__main__":
    main()
