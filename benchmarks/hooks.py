"""Cost of hooks, and of evaluations while training: steps a second of PPO on CartPole-v1.

    python benchmarks/hooks.py [--platform cpu] [--repeats 7] [--total-timesteps N] [--hooks 1] [--output FOLDER]

On a CPU in one program on two cores, on a GPU (`--platform gpu`) with fused kernels.

Trainings of one process take turns, so that a machine that slows down slows all of them: without hooks; with hooks
that do nothing; and with an evaluation of 20 episodes after each tenth of the training. None writes TensorBoard
events, and compilation is not timed. Ratios are medians over pairs of neighbours. Writes results/hooks-cpu.json or
hooks-gpu.json.
"""

import argparse
import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

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
        "evaluations": {"evaluate_every": total_timesteps // 10, "evaluate_episodes": 20},
    }


def steps_per_second(platform: str, total_timesteps: int, options: dict[str, Any]) -> tuple[float, str]:
    """Throughput of a training, evaluations included, and the digest of its weights."""
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
    return run.summary["steps_per_second"], run.summary["weights_sha256"]


def measured(platform: str, repeats: int, total_timesteps: int, hooks: int) -> dict[str, Any]:
    """Throughput of each side, and its ratio to that without hooks, by pairs."""
    compared = sides(total_timesteps, hooks)
    rates: dict[str, list[float]] = {name: [] for name in compared}
    digests = set()
    for repeat in range(repeats + 1):
        names = list(compared) if repeat % 2 else list(reversed(compared))  # none is always the first
        for name in names:
            rate, digest = steps_per_second(platform, total_timesteps, compared[name])
            digests.add(digest)
            print(f"{name}: {rate:,.0f} steps/s", flush=True)
            if repeat:  # the first turn fills the caches
                rates[name].append(rate)
    ratios = {
        name: median(one / other for one, other in zip(own, rates[WITHOUT], strict=True))
        for name, own in rates.items()
    }
    return {
        "steps_per_second": {name: spread(own) for name, own in rates.items()},
        "ratio_to_without": ratios,
        "same_weights": len(digests) == 1,
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
