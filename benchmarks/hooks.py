"""Cost of hooks, and of evaluations while training: steps a second of PPO on CartPole-v1.

    python benchmarks/hooks.py [--platform cpu] [--repeats 7] [--total-timesteps N] [--hooks 1] [--output FOLDER]

On a CPU in one program on two cores, on a GPU (`--platform gpu`) with fused kernels.

Trainings of one process take turns, so that a machine that slows down slows all of them: without hooks; with hooks
that do nothing; and with an evaluation of 20 episodes after each tenth of the training, and after each hundredth.
None writes TensorBoard events, and compilation is not timed. Ratios are medians over pairs of neighbours. Where
pairs differ by more than ten evaluations cost, a tenth of what the hundred cost says more. Writes
results/hooks-cpu.json or hooks-gpu.json.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from measure import RESULTS, spread, write_result

import rollmill

CORES = 2
SIZES: dict[str, dict[str, Any]] = {
    "cpu": {"num_envs": 64, "num_steps": 32},
    "gpu": {"num_envs": 8192, "num_steps": 128},
}
FUSION: dict[str, Any] = {"cpu": "off", "gpu": "full"}
TOTAL_TIMESTEPS = {"cpu": 8_000_000, "gpu": 2_000_000_000}
WITHOUT = "without hooks"


def do_nothing(event: Any) -> None:
    """A hook."""


def sides(total_timesteps: int, hooks: int) -> dict[str, dict[str, Any]]:
    """Options of the trainings that are compared."""
    return {
        WITHOUT: {},
        "hooks that do nothing": {"hooks": [do_nothing] * hooks},
        "10 evaluations": {"evaluate_every": total_timesteps // 10, "evaluate_episodes": 20},
        "100 evaluations": {"evaluate_every": total_timesteps // 100, "evaluate_episodes": 20},
    }


class Measured(NamedTuple):
    """A training."""

    steps_per_second: float
    """Evaluations included."""
    weights_sha256: str
    evaluation_seconds: list[float]
    """Seconds of each evaluation alone."""


def train(platform: str, total_timesteps: int, options: dict[str, Any]) -> Measured:
    algorithm = rollmill.ppo("CartPole-v1", total_timesteps=total_timesteps, **SIZES[platform])
    with tempfile.TemporaryDirectory() as folder:
        run = rollmill.train(
            algorithm,
            run_dir=Path(folder, "run"),
            quiet=True,
            tensorboard=False,
            fusion=FUSION[platform],
            log_every=1,
            checkpoint_seconds=1e6,
            **options,
        )
        lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    seconds = [line["evaluation/seconds"] for line in lines if "evaluation/seconds" in line]
    return Measured(run.summary["steps_per_second"], run.summary["weights_sha256"], seconds)


def measured(platform: str, repeats: int, total_timesteps: int, hooks: int) -> dict[str, Any]:
    """Throughput of each side, and its ratio to that without hooks, by pairs."""
    compared = sides(total_timesteps, hooks)
    runs: dict[str, list[Measured]] = {name: [] for name in compared}
    for repeat in range(repeats + 1):
        names = list(compared) if repeat % 2 else list(reversed(compared))  # none is always the first
        for name in names:
            run = train(platform, total_timesteps, compared[name])
            print(f"{name}: {run.steps_per_second:,.0f} steps/s", flush=True)
            if repeat:  # the first turn fills the caches
                runs[name].append(run)
    rates = {name: [run.steps_per_second for run in own] for name, own in runs.items()}
    seconds = {name: [each for run in own for each in run.evaluation_seconds] for name, own in runs.items()}
    digests = {name: {run.weights_sha256 for run in own} for name, own in runs.items()}
    ratios = {
        name: median(one / other for one, other in zip(own, rates[WITHOUT], strict=True))
        for name, own in rates.items()
    }
    return {
        "steps_per_second": {name: spread(own) for name, own in rates.items()},
        "ratio_to_without": ratios,
        "evaluation_seconds": {name: median(own) for name, own in seconds.items() if own},
        "same_weights": len(set.union(*digests.values())) == 1,
        "weights_sha256": {name: sorted(each) for name, each in digests.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", choices=SIZES, default="cpu")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--total-timesteps", type=int, help="8 M on a CPU, 2 G on a GPU if left out")
    parser.add_argument("--hooks", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    platform, total_timesteps = options.platform, options.total_timesteps or TOTAL_TIMESTEPS[options.platform]
    if platform == "cpu":
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    result = measured(platform, options.repeats, total_timesteps, options.hooks)
    settings = {
        "cores": len(os.sched_getaffinity(0)),
        "fusion": FUSION[platform],
        "hooks": options.hooks,
        "total_timesteps": total_timesteps,
        **SIZES[platform],
    }
    write_result(f"hooks-{platform}", {"settings": settings, **result}, directory=options.output)


if __name__ == "__main__":
    main()
