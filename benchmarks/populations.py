"""Population-based training beside random search, from the same draws and with equal steps.

    python benchmarks/populations.py [--seeds 10] [--trials 10] [--steps-cartpole 60000] [--steps-pendulum 120000]

Both train the trials of one sweep, with learning rates and weights of the entropy that a seed draws, in one
program of this process. Random search keeps the numbers that were drawn. In population-based training the worst
fifth takes over from the best fifth at nine rungs. Writes results/populations-cpu.json or
results/populations-gpu.json, with the best and the mean final return of each seed.
"""

import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

from measure import options, platform, spreads, write_result

from rollmill.sweeps.creation import NewSweep, create_sweep
from rollmill.sweeps.search_space import Axis
from rollmill.training.population import Population, train_population
from rollmill.training.request import TrainingRequest

AXES = (Axis("learning-rate", (), 1e-5, 3e-2, True), Axis("ent-coef", (), 0.0, 0.05))
SETTINGS: dict[str, Any] = {"num_envs": 8, "num_steps": 64, "network.hidden_sizes": (32, 32)}
ENVIRONMENTS = {"CartPole-v1": {}, "Pendulum-v1": {"gamma": 0.9, "update_epochs": 10}}
RUNGS = 9


def returns_of(environment: str, steps: int, trials: int, seed: int) -> dict[str, list[float]]:
    """Returns the final returns of all trials, by random search and in population-based training."""
    settings = {**SETTINGS, **ENVIRONMENTS[environment], "total_timesteps": steps}
    request = TrainingRequest("ppo", environment, settings)
    with tempfile.TemporaryDirectory() as folder:
        asked = NewSweep(request, AXES, random=trials, seed=seed, pbt_every=steps // (RUNGS + 1))
        sweep = create_sweep(NewSweep(**{**vars(asked), "directory": Path(folder, "sweep")}))
        rule = sweep.spec.evolution
        assert rule is not None
        ways = {"random": None, "population": Population(rule, Path(folder))}
        found: dict[str, list[float]] = {}
        for way, population in ways.items():
            requests = [
                trial.request.changed(
                    {"run_dir": str(Path(folder, way, trial.name)), "seed": seed * trials + number}
                )
                for number, trial in enumerate(sweep.trials())
            ]
            runs = train_population(requests, population)
            found[way] = [run.summary["final_return"] for run in runs]
    return found


def main() -> None:
    """Runs all seeds of both environments, and writes the result."""
    chosen = options(__doc__, seeds=10, trials=10, steps_cartpole=60_000, steps_pendulum=120_000)
    steps = {"CartPole-v1": chosen.steps_cartpole, "Pendulum-v1": chosen.steps_pendulum}
    result: dict[str, Any] = {"trials": chosen.trials, "steps_of_a_trial": steps, "rungs": RUNGS}
    for environment, length in steps.items():
        began, each = time.monotonic(), []
        for seed in range(chosen.seeds):
            each.append(returns_of(environment, length, chosen.trials, seed))
            told = {way: (round(max(r), 1), round(mean(r), 1)) for way, r in each[-1].items()}
            print(environment, seed, told, f"{time.monotonic() - began:.0f} s", flush=True)
        best, means = ({way: [take(found[way]) for found in each] for way in each[0]} for take in (max, mean))
        better = sum(found > other for found, other in zip(best["population"], best["random"], strict=True))
        result[environment] = {"best": spreads(best), "mean": spreads(means), "seeds_with_a_better_best": better}
        write_result(f"populations-{platform()}", result, chosen.output)


if __name__ == "__main__":
    main()
