"""Population-based training beside random search, from the same draws and with equal steps.

    python benchmarks/populations.py [--seeds 10] [--trials 10] [--steps-cartpole 60000] [--steps-pendulum 120000]
        [--processes 1]

Both train the trials of one sweep, with learning rates and weights of the entropy that a seed draws, in one
program of a process. With several processes each has one core and some of the seeds. Random search keeps the
numbers that were drawn. In population-based training the worst fifth takes over from the best fifth at nine rungs.
Writes results/populations-cpu.json or results/populations-gpu.json after each seed, with the best and the mean
final return of each.
"""

import os
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
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


def on_one_core(free: Any) -> None:
    """Gives this process a core of its own, before JAX makes as many threads as there are cores."""
    os.sched_setaffinity(0, {free.get()})


def result_of(each: Mapping[int, dict[str, list[float]]]) -> dict[str, Any]:
    """Returns the best and the mean final return of each seed, by both ways."""
    seeds = sorted(each)
    ways = each[seeds[0]]
    best, means = ({way: [take(each[seed][way]) for seed in seeds] for way in ways} for take in (max, mean))
    better = lambda found: sum(a > b for a, b in zip(found["population"], found["random"], strict=True))
    return {
        "seeds": seeds,
        "best": spreads(best),
        "mean": spreads(means),
        "seeds_with_a_better_best": better(best),
        "seeds_with_a_better_mean": better(means),
    }


def main() -> None:
    """Runs all seeds of both environments, and writes the result."""
    chosen = options(__doc__, seeds=10, trials=10, steps_cartpole=60_000, steps_pendulum=120_000, processes=1)
    steps = {"CartPole-v1": chosen.steps_cartpole, "Pendulum-v1": chosen.steps_pendulum}
    result: dict[str, Any] = {"trials": chosen.trials, "steps_of_a_trial": steps, "rungs": RUNGS}
    each: dict[str, dict[int, dict[str, list[float]]]] = {environment: {} for environment in steps}
    context, cores = get_context("spawn"), sorted(os.sched_getaffinity(0))
    free = context.Queue()
    for number in range(chosen.processes):
        free.put(cores[number % len(cores)])
    with ProcessPoolExecutor(chosen.processes, context, on_one_core, (free,)) as pool:
        began = time.monotonic()
        jobs = {  # the longer ones first
            pool.submit(returns_of, environment, length, chosen.trials, seed): (environment, seed)
            for environment, length in sorted(steps.items(), key=lambda pair: -pair[1])
            for seed in range(chosen.seeds)
        }
        for job in as_completed(jobs):
            environment, seed = jobs[job]
            each[environment][seed] = job.result()
            told = {way: (round(max(r), 1), round(mean(r), 1)) for way, r in job.result().items()}
            print(environment, seed, told, f"{time.monotonic() - began:.0f} s", flush=True)
            result[environment] = result_of(each[environment])
            write_result(f"populations-{platform()}", result, chosen.output)


if __name__ == "__main__":
    main()
