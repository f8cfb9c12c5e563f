"""A sweep of PPO trials on one machine: one after the other, side by side in turns, and side by side under MPS.

    python benchmarks/sweeps.py [--trials 24] [--one-by-one 8] [--steps 8000000]

Times are of the whole command `rollmill sweep`, from its start to its table, with a compilation cache that one
trial has filled before. Of the trials one after the other only some are run; their time counts as many times over
as there are more. On a machine without a GPU the trials share its cores. Writes results/sweeps-gpu.json or
results/sweeps-cpu.json.
"""

import argparse
import csv
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import jax
from measure import RESULTS, write_result


def sweep(trials: int, steps: int, *options: str) -> dict:
    """Seconds of a sweep over seeds, and its trials' steps a second."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["ppo", "CartPole-v1", "--num-envs", "64", "--num-steps", "64", "--fusion", "off"]
        words += ["--total-timesteps", str(steps), "--over", f"seed=0..{trials - 1}"]
        command = [sys.executable, "-m", "rollmill", "sweep", *words, "--sweep-dir", f"{folder}/sweep", *options]
        began = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True)
        seconds = time.monotonic() - began
        if done.returncode:
            raise SystemExit(f"{' '.join(options)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        with Path(folder, "sweep", "table.csv").open() as file:
            rows = list(csv.DictReader(file))
    assert len(rows) == trials and all(row["status"] == "finished" for row in rows)
    how = next(line for line in done.stdout.splitlines() if "at a time" in line)
    rate = median(float(row["steps_per_second"]) for row in rows)
    print(f"{' '.join(options) or 'default'}: {trials} trials in {seconds:.1f} s ({how})", flush=True)
    return {"trials": trials, "seconds": seconds, "how": how, "median_steps_per_second_of_a_trial": rate}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--one-by-one", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8_000_000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    probe = [sys.executable, "-c", "import jax; print(jax.default_backend())"]
    platform = subprocess.run(probe, capture_output=True, text=True, check=True).stdout.strip()
    jax.config.update("jax_platforms", "cpu")  # this process leaves the GPU's memory to the trials
    sweep(1, chosen.steps // 8)
    rounds = []
    for _ in range(chosen.rounds):
        found = {"one after the other": sweep(chosen.one_by_one, chosen.steps, "--at-once", "1")}
        found["side by side"] = sweep(chosen.trials, chosen.steps)
        if platform == "gpu":
            at_once = found["side by side"]["how"].split(";")[1].split()[0]
            found["in turns"] = sweep(chosen.trials, chosen.steps, "--gpu-sharing", "turns", "--at-once", at_once)
        alone = found["one after the other"]["seconds"] * chosen.trials / chosen.one_by_one
        side_by_side = found["side by side"]["seconds"]
        found["ratios"] = {"over one after the other": alone / side_by_side}
        if "in turns" in found:
            found["ratios"]["over turns"] = found["in turns"]["seconds"] / side_by_side
        print(found["ratios"], flush=True)
        rounds.append(found)
    write_result(
        f"sweeps-{platform}", {"steps_of_a_trial": chosen.steps, "rounds": rounds}, directory=chosen.output
    )


if __name__ == "__main__":
    main()
