"""One training over several instances of GPUs: the weights that it ends with, its speed, and one that is killed.

    python benchmarks/instance_training.py weights --gpus 2 [--instances 2 4] [--hidden-sizes 64 64]
    python benchmarks/instance_training.py kill --instances 4

- `weights`: PPO on CartPole-v1 for 20 iterations in one process on one GPU, on all GPUs of one process, on a mesh
  of one process a GPU, and in several processes a GPU, as programs of their own or as a mesh, whose means are
  taken in each of the ways. The batch is the same everywhere. Differences are the largest from the weights of one
  process; `steps_per_second` is of the last ten iterations, too few to compare placements by;
- `kill`: the same training in several processes of one GPU, one of them killed with SIGKILL. Counts processes,
MPS daemons
  and directories that are left afterwards.

On a machine without GPUs the processes share its cores.
"""

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
from measure import (
    Failed,
    count_lines,
    lines_of,
    one_of,
    options,
    rate,
    rollmill as command_line,
    summary_of,
    words,
    write_result,
)

import rollmill
from rollmill.core.machine import visible_gpus

jax.config.update("jax_platforms", "cpu")  # the GPUs are for the trainings
ITERATIONS = 20
WAIT_SECONDS = 120.0


def command_of(run: Path, chosen: Any, iterations: int, *how: str) -> list[str]:
    total = chosen.num_envs * chosen.num_steps * iterations
    sizes = words("", num_envs=chosen.num_envs, num_steps=chosen.num_steps, total_timesteps=total, run_dir=run)
    train = words(
        "train ppo CartPole-v1 --no-tensorboard --log-every 1", learning_rate=2.5e-4
    )  # rounding grows with it
    return [*train, *sizes, "--network.hidden-sizes", *map(str, chosen.hidden_sizes), *how]


# --- weights ---------------------------------------------------------------------------------------------


def placements(gpus: int, instances: list[int]) -> dict[str, list[str]]:
    """Returns the options of the command by the name of a placement."""
    ways: dict[str, list[str]] = {"one process, one GPU": []}
    if gpus > 1:
        ways[f"one process, {gpus} GPUs"] = words("", learners=gpus, place="program")
        ways[f"{gpus} processes, a mesh"] = words("", learners=gpus, place="mesh")
    for each in instances:
        ways[f"{each} on each GPU, means in the host's memory"] = words(
            "", learners=each * gpus, place="processes"
        )
        for reduction in ("flat", "hierarchical", "host") if gpus > 1 else ("flat", "host"):
            mesh = words("", learners=each * gpus, place="mesh", reduction=reduction)
            ways[f"{each} on each GPU, a mesh, means {reduction}"] = mesh
    return ways


def weights(chosen: Any) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    reference: list[np.ndarray] | None = None
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, how) in enumerate(placements(chosen.gpus, chosen.instances).items()):
            run = Path(folder, f"run{number}")
            try:
                command_line(*command_of(run, chosen, ITERATIONS, "--quiet", *how))
            except Failed as error:
                rows[name] = {"options": how, "refused": str(error).strip()[-600:]}
            else:
                leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(rollmill.load(run).weights)]
                reference, lines = reference or leaves, lines_of(run)
                rows[name] = {
                    "options": how,
                    "largest_difference": max(
                        float(np.abs(a - b).max()) for a, b in zip(leaves, reference, strict=True)
                    ),
                    "steps_per_second": rate(lines[len(lines) // 2], lines[-1]),
                    "weights_sha256": summary_of(run)["weights_sha256"],
                }
            print(name, {key: value for key, value in rows[name].items() if key != "options"}, flush=True)
    return rows


# --- an instance is killed -------------------------------------------------------------------------------


def kill(chosen: Any) -> dict[str, Any]:
    before = daemons_and_directories()
    mark = f"{os.getpid()}-{time.time_ns()}"
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        how = words("--place processes --checkpoint-seconds 2", learners=chosen.instances[0])
        output = Path(folder, "output")
        with output.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "rollmill", *command_of(run, chosen, chosen.iterations, *how)],
                env=os.environ | {MARK: mark},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        moved = wait_for_iteration(run, after=chosen.iterations // 10)
        name, worker = re.findall(r"(\S+/\d+) is process (\d+)", output.read_text())[-1]
        os.kill(int(worker), signal.SIGKILL)
        killed, at = time.monotonic(), count_lines(run)
        wait_for_iteration(run, after=at + 1)
        back = time.monotonic() - killed
        process.wait(timeout=900)
        summary = summary_of(run)
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


def wait_for_iteration(run: Path, *, after: int) -> int:
    until = time.monotonic() + WAIT_SECONDS
    while (made := count_lines(run)) <= after:
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
    chosen = options(
        __doc__,
        {"part": one_of(*PARTS)},
        gpus=1,
        instances=([2, 4], "on each GPU"),
        num_envs=1024,
        num_steps=64,
        hidden_sizes=[64, 64],
        iterations=(2000, "of the training in which one process is killed"),
    )
    settings = {key: value for key, value in vars(chosen).items() if key != "output"}
    platform = "gpu" if visible_gpus() else "cpu"
    result = {"settings": settings, "rows": PARTS[chosen.part](chosen)}
    write_result(f"instance-training-{chosen.part}-{platform}", result, chosen.output)


if __name__ == "__main__":
    main()
