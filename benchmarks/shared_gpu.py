"""Programs that share one GPU without knowing of each other: what each ended with, and the memory that it took.

    python benchmarks/shared_gpu.py [PART ...] [--trials 200] [--output FOLDER]

Parts, all of them by default, in this order:

- `targets`: the library calls in the compiled programs of four trainings: none is of a solver or of cuDNN, so that
  no handle of them is needed before the first iteration.
- `one`: the GPU's memory before, during and after one training with default options.
- `two`, `three`, `four`: PPO, SAC, AlphaZero and fused PPO, as typed, started within a second.
- `large`: three trainings started within a second, each of which needs about half of the GPU: what
  does not fit is refused before its first iteration.
- `little`: a training beside a program that leaves 3 GiB, and beside one that leaves 0.7 GiB, which is refused.
- `beside`: a sweep of 24 short trials beside a training that goes on meanwhile.
- `trials`: a sweep of the other trials, so that there are `--trials` in all.

Each ended as `finished`, or `refused`: by exit code 3 and a sentence that names a process and bytes. Anything else
is `failed`. Results are written after each part to FOLDER/shared-gpu.json, beside those of other parts.
"""

import argparse
import collections
import csv
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from measure import RESULTS, write_result

from rollmill.gpus.memory import ask_gpu_memory

MINE = dict(os.environ)
LIMIT_SECONDS = 240.0
APART_SECONDS = 0.2
BESIDE = 24
SENTENCE = re.compile(r"process(es)?\b.*\bGiB\b", re.S)
TRAININGS = {
    "ppo": ["ppo", "CartPole-v1", "--total-timesteps", "4000000"],
    "sac": ["sac", "Pendulum-v1", "--total-timesteps", "20000"],
    "alphazero": ["alphazero", "ConnectFour-v0", "--total-timesteps", "400000"],
    "ppo fused": [
        *("ppo", "CartPole-v1", "--fusion", "full", "--num-envs", "4096", "--num-steps", "128"),
        *("--network.shared-torso", "--total-timesteps", "200000000"),
    ],
}
"""Options beyond the algorithm's own say how long each goes on, and how it is fused."""
SHORT = ["ppo", "CartPole-v1", "--num-envs", "64", "--num-steps", "64", "--fusion", "off"]
LONG = ["ppo", "CartPole-v1", "--num-envs", "1024", "--num-steps", "64", "--total-timesteps", "100000000000"]
TARGETS = """
import re, sys
from rollmill.training.request import prepare_request
from rollmill.cli.requests import parse_training
program = prepare_request(parse_training(sys.argv[1:]).request).program
for name in ("start", "step"):
    text = getattr(program, name).as_text()
    print(name, *sorted(set(re.findall(r'custom_call_target="([^"]+)"', text))))
"""
HOLDER = """
import os, sys, time
os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
import jax, jax.numpy as jnp
from rollmill.gpus.memory import ask_gpu_memory
jax.block_until_ready(jnp.zeros(1024))
leave, held = int(float(sys.argv[1]) * 2**30), []
for size in (2**31, 2**28, 2**25):
    while ask_gpu_memory()[0].free - size >= leave:
        try:
            held.append(jax.block_until_ready(jnp.zeros(size // 4)))
        except Exception:
            break
print(ask_gpu_memory()[0].free, flush=True)
time.sleep(600)
"""


class Program:
    """A program that runs, its output in a file."""

    def __init__(self, name: str, words: Sequence[str], folder: Path) -> None:
        self.name, self.began = name, time.monotonic()
        self._log = folder / f"{name.replace(' ', '-')}-{time.monotonic_ns()}.log"
        self.metrics = None
        if "--run-dir" in words:
            self.metrics = Path(words[words.index("--run-dir") + 1]) / "metrics.jsonl"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *words], stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=MINE
            )

    def wait(self, seconds: float) -> dict[str, Any]:
        """How it ended; it is killed where it takes longer."""
        try:
            code = self.process.wait(max(1.0, self.began + seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        said = self._log.read_text(errors="replace").strip()
        outcome = "finished" if code == 0 else "failed"
        if code == 3 and "Traceback" not in said and SENTENCE.search(said):
            outcome = "refused"
        found = {
            "name": self.name,
            "outcome": outcome,
            "exit_code": code,
            "seconds": round(time.monotonic() - self.began, 1),
            "compiled": "compiled in" in said,
            "said": said.splitlines()[-1][:700] if said else "",
        }
        if outcome == "failed":
            found["log"] = said[-4000:]
        return found


def training(name: str, words: Sequence[str], folder: Path) -> Program:
    run = folder / f"run-{time.monotonic_ns()}"
    return Program(name, ["-m", "rollmill", "train", *words, "--run-dir", str(run)], folder)


def side_by_side(chosen: dict[str, list[str]], folder: Path) -> dict[str, Any]:
    """Trainings that start one right after the other."""
    began, programs = time.monotonic(), []
    for name, words in chosen.items():
        programs.append(training(name, words, folder))
        time.sleep(APART_SECONDS)
    started = programs[-1].began - began
    with Memory() as memory:
        ended = [program.wait(LIMIT_SECONDS) for program in programs]
    return {"started_within_seconds": round(started, 2), "most_gib": memory.most, "programs": ended}


class Memory:
    """The most memory of the GPU that was in use meanwhile, in GiB."""

    def __init__(self) -> None:
        self.most, self._ended = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.2):
            self.most = max(self.most, used_gib())


def used_gib() -> float:
    """Memory of the first GPU that is in use, in GiB."""
    return round(sum(one.total - one.free for one in ask_gpu_memory()[:1]) / 2**30, 3)


def targets(folder: Path) -> dict[str, Any]:
    found = {}
    for name, words in TRAININGS.items():
        command = [sys.executable, "-c", TARGETS, *words, "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True, env=MINE, timeout=LIMIT_SECONDS)
        lines = [line.split(" ") for line in done.stdout.splitlines() if line.split(" ")[0] in ("start", "step")]
        calls = {line[0]: line[1:] for line in lines}
        bad = [call for each in calls.values() for call in each if re.search("solver|cudnn|fft", call, re.I)]
        found[name] = {"calls": calls, "of_solvers_and_cudnn": bad, "exit_code": done.returncode}
        if done.returncode:
            found[name]["said"] = done.stderr[-2000:]
    return found


def one(folder: Path) -> dict[str, Any]:
    before = used_gib()
    program = training("ppo", TRAININGS["ppo"], folder)
    with Memory() as memory:
        ended = program.wait(LIMIT_SECONDS)
    time.sleep(1.0)
    first = first_rates(program.metrics)
    return {"before_gib": before, "most_gib": memory.most, "after_gib": used_gib(), "rates": first, **ended}


def first_rates(metrics: Path | None) -> list[dict[str, float]]:
    """Steps a second between lines of the first ten seconds."""
    if metrics is None or not metrics.exists():
        return []
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    points = [(line["seconds"], line["env_steps"]) for line in lines if "seconds" in line]
    found, last = [], points[0] if points else (0.0, 0)
    for seconds, steps in points[1:]:
        if seconds - last[0] >= 0.5:
            found.append(
                {"until": round(seconds, 2), "steps_per_second": round((steps - last[1]) / (seconds - last[0]))}
            )
            last = (seconds, steps)
    return found[:20]


def some(count: int) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: side_by_side(dict(list(TRAININGS.items())[:count]), folder)


def large(folder: Path) -> dict[str, Any]:
    """Trainings that need half of the GPU: a step takes 60 bytes, and its values several times that."""
    total, envs = ask_gpu_memory()[0].total, 2**18
    steps = int(total * 0.02 / 60 / envs)
    words = [*("ppo", "CartPole-v1", "--fusion", "off", "--num-minibatches", "64", "--update-epochs", "1")]
    words += ["--num-envs", str(envs), "--num-steps", str(steps), "--total-timesteps", str(envs * steps * 3)]
    return {"words": words, **side_by_side({f"large {number}": words for number in range(3)}, folder)}


def little(folder: Path) -> dict[str, Any]:
    found = {}
    for leave in ("3.0", "0.7"):
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, leave], stdout=subprocess.PIPE, env=MINE, text=True
        )
        try:
            assert holder.stdout is not None
            free = int(holder.stdout.readline()) / 2**30
            ended = training("ppo", TRAININGS["ppo"], folder).wait(LIMIT_SECONDS)
        finally:
            holder.kill()
            holder.wait()
        found[leave] = {"free_gib": round(free, 2), **ended}
    return found


def sweep(trials: int, folder: Path, *, steps: int = 2_000_000, first_seed: int = 0) -> dict[str, Any]:
    where = folder / f"sweep-{time.monotonic_ns()}"
    words = [*SHORT, "--total-timesteps", str(steps), "--over", f"seed={first_seed}..{first_seed + trials - 1}"]
    program = Program(f"sweep of {trials}", ["-m", "rollmill", "sweep", *words, "--sweep-dir", str(where)], folder)
    with Memory() as memory:
        ended = program.wait(570.0)
    rows = []
    if (where / "table.csv").exists():
        with (where / "table.csv").open() as file:
            rows = list(csv.DictReader(file))
    said = program._log.read_text(errors="replace").splitlines()
    return {
        **ended,
        "trials": trials,
        "statuses": dict(collections.Counter(row["status"] for row in rows)),
        "how": next((line for line in said if "at a time" in line), ""),
        "for_want_of_memory": [line[:300] for line in said if "want of" in line][-6:],
        "resumed": sum("it is resumed" in line for line in said),
        "failures": [line[:400] for line in said if "failed with" in line][:6],
        "most_gib": memory.most,
    }


def beside(folder: Path) -> dict[str, Any]:
    other = training("long", LONG, folder)
    deadline = time.monotonic() + 120.0
    while time.monotonic() < deadline and not (other.metrics and other.metrics.exists()):
        time.sleep(0.5)
    found = sweep(BESIDE, folder)
    running = other.process.poll() is None
    other.process.send_signal(signal.SIGTERM)
    ended = other.wait(time.monotonic() - other.began + 60.0)
    return {"sweep": found, "other_ran_all_the_time": running, "other": ended}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*")
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--output", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # this process leaves the GPU to others
    rest = lambda folder: sweep(chosen.trials - BESIDE, folder, steps=500_000, first_seed=BESIDE)
    parts = {"targets": targets, "one": one, "two": some(2), "three": some(3), "four": some(4)}
    parts |= {"large": large, "little": little, "beside": beside, "trials": rest}
    file = chosen.output / "shared-gpu.json"
    result: dict[str, Any] = json.loads(file.read_text())["result"] if file.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        MINE.setdefault("ROLLMILL_CACHE_DIR", f"{name}/cache")
        for part in chosen.parts or parts:
            began = time.monotonic()
            try:
                result[part] = parts[part](Path(name))
            except Exception as error:  # what was measured before is kept
                result[part] = {"error": repr(error)}
            result[part]["part_seconds"] = round(time.monotonic() - began, 1)
            print(part, json.dumps(result[part], indent=1), flush=True)
            write_result("shared-gpu", result, directory=chosen.output)


if __name__ == "__main__":
    main()
