"""Programs that share one GPU without knowing of each other: their outcomes, and the memory that they took.

    python benchmarks/shared_gpu.py [PART ...] [--trials 200] [--output FOLDER]

Parts, all of them by default, in this order:

- `four`: PPO, SAC, AlphaZero and fused PPO, as typed, started within a second.
- `beside`: a sweep of 24 short trials beside a training that continues meanwhile.
- `trials`: a sweep of the other trials, so that there are `--trials` in all.

Each ended as `finished`, or `refused`: by exit code 3 and a sentence that names a process and bytes. Anything
else is `failed`. Results are written after each part to FOLDER/shared-gpu.json, beside those of other parts.
"""

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
from pathlib import Path
from typing import Any

import jax
from measure import count_lines, options, read_result, some_of, words, write_result

from rollmill.gpus.claims import ask_gpu_memory

ENVIRONMENT = dict(os.environ)
LIMIT_SECONDS, APART_SECONDS, BESIDE = 240.0, 0.2, 24
SENTENCE = re.compile(r"process(es)?\b.*\bGiB\b", re.S)
TRAININGS = {
    "ppo": "ppo CartPole-v1 --total-timesteps 4000000",
    "sac": "sac Pendulum-v1 --total-timesteps 20000",
    "alphazero": "alphazero ConnectFour-v0 --total-timesteps 400000",
    "ppo fused": "ppo CartPole-v1 --fusion full --num-envs 4096 --num-steps 128 --network.shared-torso "
    "--total-timesteps 200000000",
}
"""Options beyond the algorithm's own set the length of each and its fusion."""
SHORT = "ppo CartPole-v1 --num-envs 64 --num-steps 64 --fusion off"
LONG = "ppo CartPole-v1 --num-envs 1024 --num-steps 64 --total-timesteps 100000000000"
SAID = {
    "how": "at a time",
    "for_want_of_memory": "ran out of GPU memory",
    "resumed": "It is being resumed",
    "failures": "failed with",
}
"""Words of a sweep's lines that are kept or counted."""


class Program:
    """A program that runs, with its output in a file."""

    def __init__(self, name: str, command: list[str], folder: Path) -> None:
        self.name, self.began = name, time.monotonic()
        self.log = folder / f"{name.replace(' ', '-')}-{time.monotonic_ns()}.log"
        line = [sys.executable, "-m", "rollmill", *command]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                line, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=ENVIRONMENT
            )

    def wait(self, seconds: float) -> dict[str, Any]:
        """Returns the outcome; kills the program if it takes longer."""
        try:
            code = self.process.wait(max(1.0, self.began + seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        said = self.log.read_text(errors="replace").strip()
        refused = code == 3 and "Traceback" not in said and SENTENCE.search(said)
        outcome = "finished" if code == 0 else "refused" if refused else "failed"
        return {
            "name": self.name,
            "outcome": outcome,
            "exit_code": code,
            "seconds": round(time.monotonic() - self.began, 1),
            "compiled": "compiled in" in said,
            "said": said.splitlines()[-1][:700] if said else "",
            **({"log": said[-4000:]} if outcome == "failed" else {}),
        }


def training(name: str, text: str, folder: Path) -> tuple[Program, Path]:
    """Starts a training; returns it with its run directory."""
    run = folder / f"run-{time.monotonic_ns()}"
    return Program(name, words(f"train {text}", run_dir=run), folder), run


class Memory:
    """Peak of the GPU's memory in use while the context is open, in GiB."""

    def __init__(self) -> None:
        self.peak, self._ended = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._ended.wait(0.2):
            self.peak = max(self.peak, used_gib())


def used_gib() -> float:
    """Returns the memory of the first GPU that is in use, in GiB."""
    return round(sum(one.total - one.free for one in ask_gpu_memory()[:1]) / 2**30, 3)


def four(folder: Path) -> dict[str, Any]:
    """Starts the trainings one right after the other."""
    began, programs = time.monotonic(), []
    for name, text in TRAININGS.items():
        programs.append(training(name, text, folder)[0])
        time.sleep(APART_SECONDS)
    started = programs[-1].began - began
    with Memory() as memory:
        ended = [program.wait(LIMIT_SECONDS) for program in programs]
    return {"started_within_seconds": round(started, 2), "most_gib": memory.peak, "programs": ended}


def sweep(trials: int, folder: Path, *, steps: int = 2_000_000, first_seed: int = 0) -> dict[str, Any]:
    where, seeds = folder / f"sweep-{time.monotonic_ns()}", f"seed={first_seed}..{first_seed + trials - 1}"
    command = words(f"sweep {SHORT}", total_timesteps=steps, over=seeds, sweep_dir=where)
    program = Program(f"sweep of {trials}", command, folder)
    with Memory() as memory:
        ended = program.wait(570.0)
    table, rows = where / "table.csv", []
    if table.exists():
        with table.open() as file:
            rows = list(csv.DictReader(file))
    said = program.log.read_text(errors="replace").splitlines()
    return {
        **ended,
        "trials": trials,
        "statuses": dict(collections.Counter(row["status"] for row in rows)),
        "how": next((line for line in said if SAID["how"] in line), ""),
        "for_want_of_memory": [line[:300] for line in said if SAID["for_want_of_memory"] in line][-6:],
        "resumed": sum(SAID["resumed"] in line for line in said),
        "failures": [line[:400] for line in said if SAID["failures"] in line][:6],
        "most_gib": memory.peak,
    }


def beside(folder: Path) -> dict[str, Any]:
    other, run = training("long", LONG, folder)
    deadline = time.monotonic() + 120.0
    while time.monotonic() < deadline and not count_lines(run):
        time.sleep(0.5)
    found = sweep(BESIDE, folder)
    running = other.process.poll() is None
    other.process.send_signal(signal.SIGTERM)
    ended = other.wait(time.monotonic() - other.began + 60.0)
    return {"sweep": found, "other_ran_all_the_time": running, "other": ended}


def trials(folder: Path, number: int) -> dict[str, Any]:
    return sweep(number - BESIDE, folder, steps=500_000, first_seed=BESIDE)


PARTS = {"four": four, "beside": beside, "trials": trials}


def main() -> None:
    chosen = options(__doc__, {"parts": some_of(PARTS)}, trials=200)
    jax.config.update("jax_platforms", "cpu")  # this process leaves the GPU to others
    result = read_result("shared-gpu", chosen.output)
    with tempfile.TemporaryDirectory() as name:
        ENVIRONMENT.setdefault("ROLLMILL_CACHE_DIR", f"{name}/cache")
        for part in chosen.parts:
            began, arguments = time.monotonic(), [Path(name), *([chosen.trials] if part == "trials" else [])]
            try:
                result[part] = PARTS[part](*arguments)
            except Exception as error:  # earlier measurements are kept
                result[part] = {"error": repr(error)}
            result[part]["part_seconds"] = round(time.monotonic() - began, 1)
            print(part, json.dumps(result[part], indent=1), flush=True)
            write_result("shared-gpu", result, chosen.output)


if __name__ == "__main__":
    main()
