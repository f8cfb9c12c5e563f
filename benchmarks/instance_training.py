"""One training over several instances of GPUs: the weights that it ends with, its speed, and one that is killed.

    python benchmarks/instance_training.py weights --gpus 2 [--instances 2 4] [--hidden-sizes 64 64]
    python benchmarks/instance_training.py kill --instances 4

- `weights`: PPO on CartPole-v1 for 20 iterations in one process on one GPU, on all GPUs of one process, on a mesh
  of one process a GPU, and in several processes a GPU, as programs of their own or as a mesh, whose means are
  taken in each of the ways. The batch is the same everywhere. Differences are the largest from the weights of one
  process; `steps_per_second` is of the last ten iterations, too few to compare placements by;
- `kill`: the same training in several processes of one GPU, of which one is killed with SIGKILL. Counts what is
  left of the run afterwards: processes, MPS daemons and their directories.

On a machine without GPUs the processes share its cores.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from chaos import MARK, left_behind
from measure import RESULTS, write_result

import rollmill
from rollmill.core.machine import visible_gpus

jax.config.update("jax_platforms", "cpu")  # the GPUs are for the trainings
ITERATIONS = 20
WAIT_SECONDS = 120.0


def command_of(run: Path, options: argparse.Namespace, iterations: int, *words: str) -> list[str]:
    sizes = {
        "num-envs": options.num_envs,
        "num-steps": options.num_steps,
        "total-timesteps": options.num_envs * options.num_steps * iterations,
        "run-dir": run,
    }
    command = [sys.executable, "-m", "rollmill", "train", "ppo", "CartPole-v1", "--no-tensorboard"]
    command += ["--learning-rate", "2.5e-4"]  # rounding grows with it
    command += [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    return [*command, "--log-every", "1", "--network.hidden-sizes", *map(str, options.hidden_sizes), *words]


# --- weights ---------------------------------------------------------------------------------------------


def placements(gpus: int, instances: list[int]) -> dict[str, list[str]]:
    """Options of the command by the name of a placement."""
    ways = {"one process, one GPU": []}
    if gpus > 1:
        ways[f"one process, {gpus} GPUs"] = ["--learners", str(gpus), "--place", "program"]
        ways[f"{gpus} processes, a mesh"] = ["--learners", str(gpus), "--place", "mesh"]
    for each in instances:
        learners = ["--learners", str(each * gpus)]
        ways[f"{each} on each GPU, means in the host's memory"] = [*learners, "--place", "processes"]
        for reduction in ("flat", "hierarchical", "host") if gpus > 1 else ("flat", "host"):
            words = [*learners, "--place", "mesh", "--reduction", reduction]
            ways[f"{each} on each GPU, a mesh, means {reduction}"] = words
    return ways


def weights(options: argparse.Namespace) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    reference: list[np.ndarray] | None = None
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, words) in enumerate(placements(options.gpus, options.instances).items()):
            run = Path(folder, f"run{number}")
            command = command_of(run, options, ITERATIONS, "--quiet", *words)
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                rows[name] = {"options": words, "refused": (done.stderr or done.stdout).strip()[-600:]}
            else:
                leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(rollmill.load(run).weights)]
                reference = reference or leaves
                difference = max(float(np.abs(a - b).max()) for a, b in zip(leaves, reference, strict=True))
                rows[name] = {
                    "options": words,
                    "largest_difference": difference,
                    "steps_per_second": speed_of(run),
                    "weights_sha256": json.loads((run / "summary.json").read_text())["weights_sha256"],
                }
            print(name, {key: value for key, value in rows[name].items() if key != "options"}, flush=True)
    return rows


def speed_of(run: Path) -> float:
    """Environment steps a second between the middle of the training and its end."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, last = lines[len(lines) // 2], lines[-1]
    return (last["env_steps"] - first["env_steps"]) / (last["seconds"] - first["seconds"])


# --- an instance is killed -------------------------------------------------------------------------------


def kill(options: argparse.Namespace) -> dict[str, Any]:
    before = daemons_and_directories()
    mark = f"{os.getpid()}-{time.time_ns()}"
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        words = ["--learners", str(options.instances[0]), "--place", "processes", "--checkpoint-seconds", "2"]
        output = Path(folder, "output")
        with output.open("w") as file:
            process = subprocess.Popen(
                command_of(run, options, options.iterations, *words),
                env=os.environ | {MARK: mark},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        moved = wait_for_iteration(run, after=options.iterations // 10)
        name, worker = re.findall(r"(\S+/\d+) is process (\d+)", output.read_text())[-1]
        os.kill(int(worker), signal.SIGKILL)
        killed, at = time.monotonic(), iterations_of(run)
        wait_for_iteration(run, after=at + 1)
        back = time.monotonic() - killed
        process.wait(timeout=900)
        summary = json.loads((run / "summary.json").read_text()) if (run / "summary.json").exists() else {}
        said = output.read_text().splitlines()
    return {
        "killed": name,
        "iterations_before": moved,
        "seconds_until_it_went_on": back,
        "exit_code": process.returncode,
        "status": summary.get("status"),
        "faults": summary.get("faults"),
        "said": said[-20:],
        "left": {"processes": left_behind(mark), **difference(before, daemons_and_directories())},
    }


def iterations_of(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def wait_for_iteration(run: Path, *, after: int) -> int:
    until = time.monotonic() + WAIT_SECONDS
    while (made := iterations_of(run)) <= after:
        if time.monotonic() > until:
            raise SystemExit(f"The training has made {made} iterations in {WAIT_SECONDS:.0f} s, and stands.")
        time.sleep(0.05)
    return made


def daemons_and_directories() -> dict[str, set[str]]:
    listed = subprocess.run(["pgrep", "-f", "nvidia-cuda-mps"], capture_output=True, text=True, check=False)
    folders = {str(path) for root in ("/tmp", "/dev/shm") for path in Path(root).glob("*rollmill*")}
    return {"daemons": set(listed.stdout.split()), "directories": folders}


def difference(before: dict[str, set[str]], after: dict[str, set[str]]) -> dict[str, list[str]]:
    return {name: sorted(after[name] - before[name]) for name in before}


PARTS = {"weights": weights, "kill": kill}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--instances", type=int, nargs="+", default=[2, 4], help="on each GPU")
    parser.add_argument("--num-envs", type=int, default=1024)
    parser.add_argument("--num-steps", type=int, default=64)
    parser.add_argument("--hidden-sizes", type=int, nargs="+", default=[64, 64])
    parser.add_argument("--iterations", type=int, default=2000, help="of the training of which one is killed")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    result = {"settings": {key: value for key, value in vars(options).items() if key != "output"}}
    platform = "gpu" if visible_gpus() else "cpu"
    result["rows"] = PARTS[options.part](options)
    write_result(f"instance-training-{options.part}-{platform}", result, directory=options.output)


if __name__ == "__main__":
    main()
