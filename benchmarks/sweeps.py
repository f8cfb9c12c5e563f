"""A sweep of PPO trials on one machine: one after the other, side by side in processes, and in shared programs.

    python benchmarks/sweeps.py [--trials 24] [--one-by-one 8] [--steps 8000000]

Times are of the whole command `rollmill sweep`, from its start to its table, with a compilation cache that one
trial has filled before. Of the trials one after the other only some run, and their time counts as many times over
as there are more. On a machine without a GPU the trials share its cores; on a GPU processes run under MPS, and in
turns. Trials differ in learning rates, four of them, and seeds. Writes results/sweeps-gpu.json or sweeps-cpu.json.
"""

import csv
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import jax
from measure import options, rollmill, words, write_result

APART = ("--together", "off")
RATES = ("1e-3", "2e-3", "3e-3", "4e-3")


def sweep(trials: int, steps: int, *how: str) -> dict[str, Any]:
    """Returns the seconds of a sweep over learning rates and seeds, and its trials' steps a second."""
    command = words("sweep ppo CartPole-v1 --num-envs 64 --num-steps 64 --fusion off", total_timesteps=steps)
    rates = RATES if trials % len(RATES) == 0 else RATES[:1]
    command += words("", over=f"learning-rate={','.join(rates)}")
    command += words("", over=f"seed=0..{trials // len(rates) - 1}")
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        said = rollmill(*command, "--sweep-dir", f"{folder}/sweep", *how)
        seconds = time.monotonic() - began
        with Path(folder, "sweep", "table.csv").open() as file:
            rows = list(csv.DictReader(file))
    assert len(rows) == trials and all(row["status"] == "finished" for row in rows)
    ran = next(line for line in said.splitlines() if "at a time" in line)
    print(f"{' '.join(how) or 'default'}: {trials} trials in {seconds:.1f} s ({ran})", flush=True)
    speed = median(float(row["steps_per_second"]) for row in rows)
    return {"trials": trials, "seconds": seconds, "how": ran, "median_steps_per_second_of_a_trial": speed}


def main() -> None:
    chosen = options(__doc__, trials=24, one_by_one=8, steps=8_000_000, rounds=1)
    probe = [sys.executable, "-c", "import jax; print(jax.default_backend())"]
    platform = subprocess.run(probe, capture_output=True, text=True, check=True).stdout.strip()
    jax.config.update("jax_platforms", "cpu")  # this process leaves the GPU's memory to the trials
    sweep(1, chosen.steps // 8)
    rounds = []
    for _ in range(chosen.rounds):
        found = {"one after the other": sweep(chosen.one_by_one, chosen.steps, *APART, "--at-once", "1")}
        found["side by side"] = sweep(chosen.trials, chosen.steps, *APART)
        found["shared programs"] = sweep(chosen.trials, chosen.steps)
        if platform == "gpu":
            at_once = found["side by side"]["how"].split(";")[1].split()[0]
            how = ("--gpu-sharing", "turns", "--at-once", at_once)
            found["in turns"] = sweep(chosen.trials, chosen.steps, *APART, *how)
        alone = found["one after the other"]["seconds"] * chosen.trials / chosen.one_by_one
        side_by_side = found["side by side"]["seconds"]
        found["ratios"] = {
            "over one after the other": alone / side_by_side,
            "of shared programs over side by side": side_by_side / found["shared programs"]["seconds"],
        }
        if "in turns" in found:
            found["ratios"]["over turns"] = found["in turns"]["seconds"] / side_by_side
        print(found["ratios"], flush=True)
        rounds.append(found)
    write_result(f"sweeps-{platform}", {"steps_of_a_trial": chosen.steps, "rounds": rounds}, chosen.output)


if __name__ == "__main__":
    main()
