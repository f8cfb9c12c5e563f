"""A sweep of PPO trials on one machine: one after the other, side by side in processes, and in shared programs.

    python benchmarks/sweeps.py [--trials 24] [--one-by-one 8] [--steps 8000000] [--fusion off] [--ways shared ...]
        [--rounds 1] [--no-fill]

Times are of the whole command `rollmill sweep`, from its start to its table, with a compilation cache that one
trial has filled before, or with `--no-fill` only the sweeps before it. The times at which files were written tell
how long it took until the trials were checked, until they began, and until they ended. The result is written after
each sweep. Of the trials one after the other only some run, and their time counts as many times over
as there are more. On a machine without a GPU the trials share its cores; on a GPU processes run under MPS. Trials
differ in learning rates, six or four of them, and seeds. Writes results/sweeps-gpu.json or
results/sweeps-cpu.json, or those of another `--name`.
"""

import csv
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import jax
from measure import options, rollmill, some_of, words, write_result

APART = ("--together", "off")
RATES = ("5e-4", "1e-3", "2e-3", "3e-3", "4e-3", "6e-3")
WAYS = ("one-by-one", "side-by-side", "shared")
"""One after the other, side by side in processes, and in shared programs."""


def sweep(trials: int, steps: int, fusion: str, *how: str) -> dict[str, Any]:
    """Returns the seconds of a sweep over learning rates and seeds, and its trials' steps a second."""
    command = words("sweep ppo CartPole-v1 --num-envs 64 --num-steps 64", total_timesteps=steps, fusion=fusion)
    rates = next(rates for rates in (RATES, RATES[1:5], RATES[1:2]) if trials % len(rates) == 0)
    command += words("", over=f"learning-rate={','.join(rates)}")
    command += words("", over=f"seed=0..{trials // len(rates) - 1}")
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        said = rollmill(*command, "--sweep-dir", f"{folder}/sweep", *how)
        seconds = time.time() - began
        until = written(Path(folder, "sweep"), began)
        with Path(folder, "sweep", "table.csv").open() as file:
            rows = list(csv.DictReader(file))
    assert len(rows) == trials and all(row["status"] == "finished" for row in rows)
    ran = next(line for line in said.splitlines() if "at a time" in line)
    print(f"{' '.join(how) or 'default'}: {trials} trials in {seconds:.1f} s ({ran}), {until}", flush=True)
    return {
        "trials": trials,
        "seconds": seconds,
        "until": until,
        "how": ran,
        "median_steps_per_second_of_a_trial": median(float(row["steps_per_second"]) for row in rows),
        "final_returns": [float(row["final_return"]) for row in rows],
    }


def written(sweep: Path, began: float) -> dict[str, float]:
    """Returns the seconds until the first or the last file of a kind was written."""
    files = {
        "trials checked": sweep.glob("sweep.json"),
        "first trial begun": sweep.glob("trials/*/config.json"),
        "last trial ended": sweep.glob("trials/*/summary.json"),
        "table": sweep.glob("table.csv"),
    }
    times = {name: [each.stat().st_mtime - began for each in found] for name, found in files.items()}
    return {name: round(min(each) if "first" in name else max(each), 2) for name, each in times.items()}


def one_round(
    trials: int,
    one_by_one: int,
    steps: int,
    fusion: str,
    ways: Sequence[str],
    keep: Callable[[Mapping[str, Any]], None],
) -> dict[str, Any]:
    """Returns the sweep in each way, and the ratios of their seconds. `keep` gets what is there so far."""
    sweeps = {
        "one-by-one": lambda: sweep(one_by_one, steps, fusion, *APART, "--at-once", "1"),
        "side-by-side": lambda: sweep(trials, steps, fusion, *APART),
        "shared": lambda: sweep(trials, steps, fusion),
    }
    found: dict[str, dict[str, Any]] = {}
    for way in ways:
        found[way] = sweeps[way]()
        keep(found)
    seconds = {way: each["seconds"] * trials / each["trials"] for way, each in found.items()}
    ratios = {f"{way} / shared": each / seconds["shared"] for way, each in seconds.items() if "shared" in seconds}
    print(ratios, flush=True)
    return {**found, "ratios": ratios}


def main() -> None:
    """Runs all rounds, and writes the result."""
    chosen = options(
        __doc__,
        trials=24,
        one_by_one=8,
        steps=8_000_000,
        rounds=1,
        fusion="off",
        ways=some_of(WAYS),
        fill=True,
        name="sweeps",
    )
    probe = [sys.executable, "-c", "import jax; print(jax.default_backend())"]
    platform = subprocess.run(probe, capture_output=True, text=True, check=True).stdout.strip()
    jax.config.update("jax_platforms", "cpu")  # this process leaves the GPU's memory to the trials
    if chosen.fill:
        sweep(1, chosen.steps // 8, chosen.fusion)
    rounds: list[Mapping[str, Any]] = []

    def keep(found: Mapping[str, Any]) -> None:
        result = {"steps_of_a_trial": chosen.steps, "fusion": chosen.fusion, "rounds": [*rounds, found]}
        write_result(f"{chosen.name}-{platform}", result, chosen.output)

    for _ in range(chosen.rounds):
        done = one_round(chosen.trials, chosen.one_by_one, chosen.steps, chosen.fusion, chosen.ways, keep)
        keep(done)
        rounds.append(done)


if __name__ == "__main__":
    main()
