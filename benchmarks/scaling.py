"""PPO on CartPole-v1 on one and two GPUs, in one process and in one for each: weak scaling.

    python benchmarks/scaling.py --sizes 4096x128 65536x64 [--fusion full]

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

KINDS = {
    "one GPU": (1, []),
    "two GPUs, one process": (2, ["--learners", "2", "--place", "program"]),
    "two GPUs, two processes": (2, ["--learners", "2", "--place", "mesh"]),
}


def steps_per_second(kind: str, size: tuple[int, int], fusion: str, iterations: int) -> float:
    gpus, options = KINDS[kind]
    envs, steps = size[0] * gpus, size[1]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        sizes = {
            "num-envs": envs,
            "num-steps": steps,
            "total-timesteps": envs * steps * iterations,
            "fusion": fusion,
        }
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


def compare(size: tuple[int, int], *, fusion: str, iterations: int, rounds: int) -> dict:
    figures: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind in KINDS:
            figures[kind].append(steps_per_second(kind, size, fusion, iterations))
            print(f"{size[0]} x {size[1]} each, {kind}: {figures[kind][-1] / 1e6:.1f} M steps/s", flush=True)
    each = {kind: spread(values) for kind, values in figures.items()}
    one = each["one GPU"]["median"]
    ratios = {kind: value["median"] / one for kind, value in each.items()}
    envs, steps = size
    return {
        **{"envs_per_gpu": envs, "num_steps": steps, "fusion": fusion},
        **{"steps_per_second": each, "over_one_gpu": ratios},
    }


def size_of(text: str) -> tuple[int, int]:
    """Environments and steps, from text such as `4096x128`."""
    envs, _, steps = text.partition("x")
    return int(envs), int(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = parser.add_argument("--sizes", type=size_of, nargs="+", default=[(4096, 128), (16384, 128)])
    sizes.help = "environments of each GPU, and steps"
    parser.add_argument("--fusion", choices=("off", "rollout", "full", "auto"), default="off")
    parser.add_argument("--iterations", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    how = {"fusion": chosen.fusion, "iterations": chosen.iterations, "rounds": chosen.rounds}
    results = [compare(size, **how) for size in chosen.sizes]
    name = "scaling-gpu" if chosen.fusion == "off" else "scaling-fused-gpu"
    write_result(name, {"weak_scaling": results}, directory=chosen.output)


if __name__ == "__main__":
    main()
