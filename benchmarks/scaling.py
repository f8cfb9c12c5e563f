"""PPO on CartPole-v1 on one GPU and on several, in one process and in one for each: weak scaling.

    python benchmarks/scaling.py --gpus 2 4 --sizes 4096x128 65536x64 [--fusion full] [--reductions flat one-shot]

Every GPU has as many environments, so that two do twice the work of one. Figures are environment steps per
second between a third of the training and its end, as its own metrics say; compilation and start-up are left
out. One GPU is measured on each of them, side by side, since GPUs of one kind differ. Kinds take turns, and ratios
are of medians. Results are written after each round.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from measure import RESULTS, spread, write_result

from rollmill.core.machine import visible_gpus

ONE = "one GPU"


def kinds(gpus: Sequence[int], reductions: Sequence[str]) -> dict[str, tuple[int, list[str]]]:
    """Number of GPUs, and options of the command, by the name of a kind."""
    found: dict[str, tuple[int, list[str]]] = {ONE: (1, [])}
    for number in gpus:
        for processes, place in (("one process", "program"), (f"{number} processes", "mesh")):
            for way in reductions:
                name = f"{number} GPUs, {processes}" + ("" if way == "auto" else f", means {way}")
                found[name] = number, ["--learners", str(number), "--place", place, "--reduction", way]
    return found


class Training(NamedTuple):
    """A training that was measured."""

    steps_per_second: float
    reduction: str
    """How it took means; `auto` if there was nothing to choose."""
    launches: dict[str, Any] | None
    """Launches of its kernels, which are chosen by timing and may differ between trainings of one size."""


def measured(
    gpus: int, options: Sequence[str], size: tuple[int, int], fusion: str, iterations: int, *, on: str = ""
) -> Training:
    """One training, on the GPU of that name in CUDA_VISIBLE_DEVICES, or on the first ones."""
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
        environment = os.environ | ({"CUDA_VISIBLE_DEVICES": on} if on else {})
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        config = json.loads((run / "config.json").read_text())
    first, last = lines[len(lines) // 3], lines[-1]
    speed = (last["env_steps"] - first["env_steps"]) / (last["seconds"] - first["seconds"])
    return Training(speed, config["options"]["reduction"], config["launches"])


def on_each_gpu(size: tuple[int, int], fusion: str, iterations: int) -> list[Training]:
    """Trainings on one GPU each, side by side."""
    gpus = visible_gpus()
    with ThreadPoolExecutor(len(gpus)) as threads:
        return list(threads.map(lambda on: measured(1, [], size, fusion, iterations, on=on), gpus))


def compare(
    size: tuple[int, int],
    compared: Mapping[str, tuple[int, list[str]]],
    *,
    fusion: str,
    iterations: int,
    rounds: int,
) -> Iterator[dict[str, Any]]:
    """The figures of one size, after each round."""
    trainings: dict[str, list[Training]] = {kind: [] for kind in compared}
    for _ in range(rounds):
        for kind, (number, options) in compared.items():
            if kind == ONE:
                found = on_each_gpu(size, fusion, iterations)
            else:
                found = [measured(number, options, size, fusion, iterations)]
            trainings[kind] += found
            text = ", ".join(f"{each.steps_per_second / 1e6:.1f} ({each.reduction})" for each in found)
            print(f"{size[0]} x {size[1]} each, {kind}: {text} M steps/s", flush=True)
        yield {
            **{"envs_per_gpu": size[0], "num_steps": size[1], "fusion": fusion},
            **described(
                {kind: spread([each.steps_per_second for each in found]) for kind, found in trainings.items()}
            ),
            "reductions": {kind: [each.reduction for each in found] for kind, found in trainings.items()},
            "launches": {kind: [each.launches for each in found] for kind, found in trainings.items()},
        }


def described(each: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Figures of all kinds, and their ratios to that of one GPU."""
    return {
        "steps_per_second": each,
        "over_one_gpu": {kind: value["median"] / each[ONE]["median"] for kind, value in each.items()},
    }


def size_of(text: str) -> tuple[int, int]:
    """Environments and steps, from text such as `4096x128`."""
    envs, _, steps = text.partition("x")
    return int(envs), int(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = parser.add_argument("--sizes", type=size_of, nargs="+", default=[(4096, 128), (16384, 128)])
    sizes.help = "environments of each GPU, and steps"
    parser.add_argument("--gpus", type=int, nargs="+", default=[2], help="numbers of GPUs beside one")
    parser.add_argument("--reductions", nargs="+", default=["auto"], help="ways to take means")
    parser.add_argument("--fusion", choices=("off", "rollout", "full", "auto"), default="off")
    parser.add_argument("--iterations", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    name = "scaling-gpu" if chosen.fusion == "off" else "scaling-fused-gpu"
    how = {"fusion": chosen.fusion, "iterations": chosen.iterations, "rounds": chosen.rounds}
    results: dict[tuple[int, int], dict[str, Any]] = {}
    for size in chosen.sizes:
        for result in compare(size, kinds(chosen.gpus, chosen.reductions), **how):
            results[size] = result
            write_result(name, {"weak_scaling": list(results.values())}, directory=chosen.output)


if __name__ == "__main__":
    main()
