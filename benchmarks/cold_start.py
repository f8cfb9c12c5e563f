"""Seconds from a command to a fused training, with all caches empty.

    python benchmarks/cold_start.py [--source NAME=FOLDER ...] [--sizes 4096x128] [--turns 2]

Each turn trains CartPole-v1 for a few iterations by a fresh process with folders of its own for caches, once for
each source: a folder with the package `rollmill`, such as `src` of another checkout. Sources take turns. Noted are
the seconds of the whole process, and those that the run calls compiling, which hold the choice of the kernels.
Writes results/cold-start.json, or on a CPU cold-start-cpu.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import jax
from measure import RESULTS, write_result

ITERATIONS = 100
CACHES = ("ROLLMILL_CACHE_DIR", "ROLLMILL_STATE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", nargs="+", default=[f"here={RESULTS.parents[1] / 'src'}"])
    parser.add_argument("--sizes", nargs="+", default=["4096x128"], help="environments x steps")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    sources = dict(source.split("=", 1) for source in options.source)
    result = {size: compare(sources, *map(int, size.split("x")), options.turns) for size in options.sizes}
    name = "cold-start" if jax.default_backend() == "gpu" else "cold-start-cpu"
    write_result(name, result, directory=options.output)


def compare(sources: dict[str, str], num_envs: int, num_steps: int, turns: int) -> dict[str, dict]:
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in sources}
    for _ in range(turns):
        for name, source in sources.items():
            runs[name].append(start(source, num_envs, num_steps))
            print(
                f"{num_envs} x {num_steps} {name}: %.1f s, of which compiling %.1f s" % runs[name][-1], flush=True
            )
    return {
        name: {
            "process_seconds": median(whole for whole, _ in measured),
            "compile_seconds": median(compiling for _, compiling in measured),
            "runs": measured,
        }
        for name, measured in runs.items()
    }


def start(source: str, num_envs: int, num_steps: int) -> tuple[float, float]:
    """Seconds of a training by a process of its own, and of its compilation."""
    with tempfile.TemporaryDirectory() as folder:
        paths = os.pathsep.join([str(Path(source).resolve()), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {name: f"{folder}/{name}" for name in CACHES} | {"PYTHONPATH": paths}
        steps = num_envs * num_steps * ITERATIONS
        options = [
            "--num-envs",
            num_envs,
            "--num-steps",
            num_steps,
            "--total-timesteps",
            steps,
            "--fusion",
            "full",
        ]
        command = [sys.executable, "-m", "rollmill", "train", "ppo", "CartPole-v1", *map(str, options), "--quiet"]
        began = time.perf_counter()
        subprocess.run(
            [*command, "--run-dir", "run"], cwd=folder, env=environment, check=True, capture_output=True
        )
        seconds = time.perf_counter() - began
        return seconds, compile_seconds(Path(folder, "run"))


def compile_seconds(run: Path) -> float:
    return json.loads((run / "summary.json").read_text())["compile_seconds"]


if __name__ == "__main__":
    main()
