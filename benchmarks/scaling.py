"""PPO on CartPole-v1 on one and two GPUs, in one process and in one for each: weak scaling.

    python benchmarks/scaling.py --envs 4096 16384

Every GPU has as many environments, so that two do twice the work of one. Figures are environment steps per
second between a third of the training and its end, as its own metrics say; compilation and start-up are left
out. Kinds take turns, and ratios are of medians.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import RESULTS, spread, write_result

NUM_STEPS = 128

KINDS = {
    "one GPU": (1, []),
    "two GPUs, one process": (2, ["--learners", "2", "--place", "program"]),
    "two GPUs, two processes": (2, ["--learners", "2", "--place", "mesh"]),
}


def steps_per_second(kind: str, envs_each: int, iterations: int) -> float:
    gpus, options = KINDS[kind]
    envs = envs_each * gpus
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        sizes = {"num-envs": envs, "num-steps": NUM_STEPS, "total-timesteps": envs * NUM_STEPS * iterations}
        command = [sys.executable, "-m", "rollmill", "train", "ppo", "CartPole-v1", "--no-tensorboard", "--quiet"]
        command += ["--learning-rate", "2.5e-4", "--run-dir", str(run), *options]
        for name, value in sizes.items():
            command += [f"--{name}", str(value)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{kind}: {done.stdout}{done.stderr}")
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, last = lines[len(lines) // 3], lines[-1]
    return (last["env_steps"] - first["env_steps"]) / (last["seconds"] - first["seconds"])


def compare(envs_each: int, *, iterations: int, rounds: int) -> dict:
    figures: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind in KINDS:
            figures[kind].append(steps_per_second(kind, envs_each, iterations))
            print(f"{envs_each} each, {kind}: {figures[kind][-1] / 1e6:.1f} M steps/s", flush=True)
    each = {kind: spread(values) for kind, values in figures.items()}
    one = each["one GPU"]["median"]
    ratios = {kind: value["median"] / one for kind, value in each.items()}
    return {"envs_per_gpu": envs_each, "num_steps": NUM_STEPS, "steps_per_second": each, "over_one_gpu": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=int, nargs="+", default=[4096, 16384], help="environments of each GPU")
    parser.add_argument("--iterations", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    results = [compare(envs, iterations=chosen.iterations, rounds=chosen.rounds) for envs in chosen.envs]
    write_result("scaling-gpu", {"weak_scaling": results}, directory=chosen.output)


if __name__ == "__main__":
    main()
