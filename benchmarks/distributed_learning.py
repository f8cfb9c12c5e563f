"""Algorithms that learn with workers: returns, policy lag and wall time, three seeds each.

    python benchmarks/distributed_learning.py [half-cheetah a3c-cartpole impala-cartpole]

Every training is a run of the command line in processes of this host. The final return is the mean over the last
hundred episodes of the training; `greedy` that of a hundred episodes with the most likely action. Writes
results/distributed-learning.json and docs/figures/distributed-learning.png. Needs matplotlib, and MuJoCo for
HalfCheetah-v5 (`rollmill[mujoco]`).
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from measure import RESULTS, write_result

import rollmill
from rollmill.recipes import RECIPES

DOCS = Path(__file__).parent.parent / "docs"
SEEDS = (0, 1, 2)
POINTS = 50


class Study(NamedTuple):
    """A recipe under a distribution policy, and the return that it should reach."""

    recipe: str
    placement: tuple[str, ...]
    target: float
    every_seed: bool
    """Whether each seed must reach the target with the most likely action, or their mean in training."""


STUDIES = {
    "half-cheetah": Study("half-cheetah", ("--distribution", "single-learner-coarse"), 1400.0, every_seed=False),
    "a3c-cartpole": Study(
        "a3c-cartpole", ("--distribution", "central", "--asynchronous", "--actors", "2"), 475.0, every_seed=True
    ),
    "impala-cartpole": Study(
        "impala-cartpole",
        ("--distribution", "single-learner-coarse", "--asynchronous", "--actors", "2"),
        475.0,
        every_seed=True,
    ),
}


def train(study: Study, seed: int, run: Path) -> dict:
    recipe = RECIPES[study.recipe]()
    command = [sys.executable, "-m", "rollmill", "train", recipe.algorithm, recipe.environment]
    command += ["--recipe", study.recipe, "--seed", str(seed), "--run-dir", str(run), "--quiet", *study.placement]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{study.recipe}, seed {seed}: {done.stdout}{done.stderr}")
    summary = json.loads((run / "summary.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lags = [line["policy_lag/mean"] for line in lines if "policy_lag/mean" in line]
    return {
        "seed": seed,
        "final_return": summary["final_return"],
        "greedy": float(rollmill.evaluate(run, episodes=100).returns.mean()) if study.every_seed else None,
        "policy_lag_mean": mean(lags) if lags else None,
        "policy_lag_max": max((line.get("policy_lag/max", 0.0) for line in lines), default=None),
        "seconds": summary["seconds"],
        "env_steps": summary["env_steps"],
        "curve": [(line["env_steps"], line["episode/return"]) for line in lines[:: max(len(lines) // POINTS, 1)]],
    }


def follow(name: str) -> dict:
    study, runs = STUDIES[name], []
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            runs.append(train(study, seed, Path(folder) / "run"))
        shown = {key: value for key, value in runs[-1].items() if key != "curve"}
        print(name, shown, flush=True)
    in_training = mean(run["final_return"] for run in runs)
    reached = min(run["greedy"] for run in runs) if study.every_seed else in_training
    return {
        "recipe": study.recipe,
        "placement": list(study.placement),
        "target": study.target,
        "reached": reached,
        "runs": runs,
    }


def draw(results: dict[str, dict]) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(results), figsize=(4 * len(results), 3), squeeze=False)
    for axis, (name, result) in zip(axes[0], results.items(), strict=True):
        for run in result["runs"]:
            points = [point for point in run["curve"] if point[1] is not None]
            axis.plot(*zip(*points, strict=True), label=f"seed {run['seed']}")
        axis.axhline(result["target"], color="grey", linestyle=":")
        axis.set(title=name, xlabel="environment steps", ylabel="mean return")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(DOCS / "figures" / "distributed-learning.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", default=list(STUDIES), help="which ones; all if left out")
    parser.add_argument("--output", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    file = chosen.output / "distributed-learning.json"
    earlier = json.loads(file.read_text())["result"] if file.exists() else {}
    results = {**earlier, **{name: follow(name) for name in chosen.studies}}
    write_result("distributed-learning", results, directory=chosen.output)
    draw(results)


if __name__ == "__main__":
    main()
