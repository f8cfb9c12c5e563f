"""Cost of hooks, and of evaluations while training: steps a second of PPO on CartPole-v1.

    python benchmarks/hooks.py [--platform cpu] [--repeats 7] [--total-timesteps N] [--hooks 1] [--output FOLDER]

On a CPU in one program on two cores, on a GPU (`--platform gpu`) with fused kernels. Trainings of one process take
turns: without hooks; with hooks that do nothing; and with an evaluation of 20 episodes after each tenth of the
training, and after each hundredth. None writes TensorBoard events, and compilation is not timed. Ratios are
medians over pairs of neighbours. Where pairs differ by more than the cost of ten evaluations, a tenth of the cost
of the hundred is more precise. Writes results/hooks-cpu.json or hooks-gpu.json.
"""

import os
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from measure import in_turns, lines_of, one_of, options, spreads, write_result

import rollmill

CORES = 2
SIZES = {"cpu": {"num_envs": 64, "num_steps": 32}, "gpu": {"num_envs": 8192, "num_steps": 128}}
FUSION: dict[str, Any] = {"cpu": "off", "gpu": "full"}
TOTAL_TIMESTEPS = {"cpu": 8_000_000, "gpu": 2_000_000_000}
WITHOUT = "without hooks"


def sides(total_timesteps: int, hooks: int) -> dict[str, dict[str, Any]]:
    """Returns the options of the trainings that are compared."""
    return {
        WITHOUT: {},
        "hooks that do nothing": {"hooks": [lambda event: None] * hooks},
        "10 evaluations": {"evaluate_every": total_timesteps // 10, "evaluate_episodes": 20},
        "100 evaluations": {"evaluate_every": total_timesteps // 100, "evaluate_episodes": 20},
    }


class Measured(NamedTuple):
    steps_per_second: float
    """Evaluations included."""
    weights_sha256: str
    evaluation_seconds: list[float]
    """Seconds of each evaluation alone."""


def train(name: str, platform: str, total_timesteps: int, how: dict[str, Any]) -> Measured:
    algorithm = rollmill.ppo("CartPole-v1", total_timesteps=total_timesteps, **SIZES[platform])
    plain = {"quiet": True, "tensorboard": False, "fusion": FUSION[platform], "log_every": 1}
    with tempfile.TemporaryDirectory() as folder:
        run = rollmill.train(algorithm, run_dir=Path(folder, "run"), checkpoint_seconds=1e6, **plain, **how)
        lines = lines_of(run.directory)
    print(f"{name}: {run.summary['steps_per_second']:,.0f} steps/s", flush=True)
    seconds = [line["evaluation/seconds"] for line in lines if "evaluation/seconds" in line]
    return Measured(run.summary["steps_per_second"], run.summary["weights_sha256"], seconds)


def measured(platform: str, repeats: int, total_timesteps: int, hooks: int) -> dict[str, Any]:
    """Returns the throughput of each side, and its ratio to that without hooks, by pairs."""
    compared = sides(total_timesteps, hooks)
    turns = {name: partial(train, name, platform, total_timesteps, how) for name, how in compared.items()}
    runs = in_turns(turns, repeats, warm_up=1)
    rates = {name: [run.steps_per_second for run in own] for name, own in runs.items()}
    seconds = {name: [each for run in own for each in run.evaluation_seconds] for name, own in runs.items()}
    digests = {name: {run.weights_sha256 for run in own} for name, own in runs.items()}
    over = lambda own: median(one / other for one, other in zip(own, rates[WITHOUT], strict=True))
    return {
        "steps_per_second": spreads(rates),
        "ratio_to_without": {name: over(own) for name, own in rates.items()},
        "evaluation_seconds": {name: median(own) for name, own in seconds.items() if own},
        "same_weights": len(set.union(*digests.values())) == 1,
        "weights_sha256": {name: sorted(each) for name, each in digests.items()},
    }


def main() -> None:
    total = (int, "8 M on a CPU and 2 G on a GPU by default")
    chosen = options(__doc__, platform=one_of(*SIZES, default="cpu"), repeats=7, total_timesteps=total, hooks=1)
    platform, total_timesteps = chosen.platform, chosen.total_timesteps or TOTAL_TIMESTEPS[chosen.platform]
    if platform == "cpu":
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    result = measured(platform, chosen.repeats, total_timesteps, chosen.hooks)
    settings = {"cores": len(os.sched_getaffinity(0)), "fusion": FUSION[platform], "hooks": chosen.hooks}
    settings |= {"total_timesteps": total_timesteps, **SIZES[platform]}
    write_result(f"hooks-{platform}", {"settings": settings, **result}, chosen.output)


if __name__ == "__main__":
    main()
