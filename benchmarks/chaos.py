"""Kills processes of trainings at random, and checks that the trainings recover and nothing is left.

    python benchmarks/chaos.py --kills 50

Distribution policies take turns, each with an environment of Gymnasium and checksums on all packages; on processes
of this host, and every third time on a Ray cluster that the training starts. While a training runs, processes are
killed with SIGKILL: actors, environment workers, learners, and the coordinator, after which the run is resumed.
What must hold: the training ends with exit code 0 in bounded time, its metrics have every iteration once, no
package was damaged or out of order (the run would have failed), and nothing is left: no process (Ray's included),
no file in shared memory, no socket (those in Ray's session folder excepted, which Ray keeps). Writes
results/chaos.json.
"""

import contextlib
import glob
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from measure import count_lines, lines_of, options, some_of, words, write_result

ITERATIONS, ENVS, STEPS = 300, 8, 16
HANG_SECONDS = 900
ORPHAN_SECONDS = 30.0
"""Time for workers to end after their coordinator, on a machine that is busy with other work."""
MARK = "ROLLMILL_CHAOS"
"""Environment variable whose value marks the processes of one training."""
SAID = {"replaced": "was replaced", "begun again": "all workers restart"}
"""Words of a training's notices, whose lines are counted."""
MAX_FAILURES = 50
"""Failures of a worker in a row: kills follow each other faster than failures of a healthy environment."""

POLICIES = {
    "multi-learner": "--learners 2",
    "single-learner-coarse": "",
    "single-learner-fine": "",
    "environments": "",
    "central": "",
    "single-learner-coarse, asynchronous": "--asynchronous",
    "environments, asynchronous": "--asynchronous",
    "central, asynchronous": "--asynchronous",
    "gpu-only": "--learners 2",
}


class Training:
    """A training in processes, and what it says."""

    def __init__(self, command: list[str], mark: str, scratch: Path) -> None:
        self.workers: dict[str, int] = {}
        self.lines: list[str] = []
        self.mark = mark
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen(command, env=os.environ | {MARK: mark, "TMPDIR": str(scratch)}, **streams)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if found := re.match(r"(\S+/\d+) is process (\d+)", line):
                self.workers[found[1]] = int(found[2])

    def alive(self) -> bool:
        """Returns whether the coordinator runs."""
        return self.process.poll() is None

    def kill(self, name: str) -> bool:
        """Returns whether the process was there to be killed: its number may belong to another by now."""
        pid = self.process.pid if name == "coordinator" else self.workers[name]
        if not carries(pid, self.mark):
            return False
        os.kill(pid, signal.SIGKILL)
        return True


def kill_some(training: Training, run: Path, left: int, rng: random.Random) -> list[str]:
    """Kills until the training ends, the coordinator is dead, or enough were killed; returns their names."""
    killed = []
    began, seen = time.monotonic(), count_lines(run)
    while training.alive() and time.monotonic() - began < HANG_SECONDS and len(killed) < left:
        if count_lines(run) <= seen:
            time.sleep(0.1)
            continue  # kill nothing before the training has made progress since the last kill
        time.sleep(rng.uniform(0, 2))
        seen = count_lines(run)
        names = sorted(training.workers)
        name = rng.choice([*names, "coordinator"] if rng.random() < 0.5 else names)
        if not training.alive():
            break
        if not training.kill(name):
            continue
        killed.append(name)
        began = time.monotonic()
        if name == "coordinator":
            break
    return killed


def carries(pid: int, mark: str) -> bool:
    """Returns whether the process lives and belongs to the training with this mark."""
    try:
        return f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def left_behind(mark: str) -> list[str]:
    """Returns number and command of a training's processes that outlive their coordinator by some seconds."""
    deadline = time.monotonic() + ORPHAN_SECONDS
    while True:
        pids = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
        left = [pid for pid in pids if carries(pid, mark)]
        if not left or time.monotonic() > deadline:
            return [f"{pid} {command_line(pid)}" for pid in left]
        time.sleep(0.05)


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return ""


def files_left(scratch: Path, shared_before: set[str]) -> list[str]:
    """Returns new files in shared memory that no process has open, and sockets in a training's own folder."""
    suspects = set(glob.glob("/dev/shm/*")) - shared_before - files_in_use()
    if suspects:
        time.sleep(1.0)  # others on this machine come and go
        suspects = suspects & set(glob.glob("/dev/shm/*")) - files_in_use()
    sockets = [path for path in scratch.rglob("*") if path.is_socket() and "ray" not in path.parts]
    return sorted(suspects) + [str(path) for path in sockets]


def files_in_use() -> set[str]:
    """Returns files that any process has open or mapped, as far as this user may see."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            maps = (folder / "maps").read_text().splitlines()
            found |= {line.split()[-1] for line in maps if "/dev/shm/" in line}
            found |= {os.readlink(descriptor) for descriptor in (folder / "fd").iterdir()}
    return found


def command_of(policy: str, place: str, run: Path, number: int) -> list[str]:
    where = "--cluster ray" if place == "ray" else "--place processes"
    sizes = words("--num-minibatches 2 --update-epochs 1", num_envs=ENVS, num_steps=STEPS, seed=number)
    recorded = words("--checkpoint-iterations 20 --checksums --no-tensorboard --start-seconds 1800", run_dir=run)
    train = words(f"train ppo gymnasium:CartPole-v1 {POLICIES[policy]} {where}", distribution=policy.split(",")[0])
    limits = words("", total_timesteps=ITERATIONS * ENVS * STEPS, max_failures=MAX_FAILURES)
    return [*train, *sizes, *recorded, *limits]


def endure(policy: str, place: str, kills: int, seed: int, folder: Path, number: int) -> dict:
    """Trains while processes are killed, and returns the outcome."""
    run, mark, rng = folder / f"run{number}", f"{os.getpid()}-{number}", random.Random(f"{seed}-{number}")
    scratch, shared_before = folder / f"tmp{number}", set(glob.glob("/dev/shm/*"))
    scratch.mkdir()
    command = [sys.executable, "-m", "rollmill"]
    train = [*command, *command_of(policy, place, run, number)]
    killed, faults, began = [], [], time.monotonic()
    trainings = [training := Training(train, mark, scratch)]
    while True:
        killed += kill_some(training, run, kills - len(killed), rng)
        try:
            code = training.process.wait(HANG_SECONDS)
        except subprocess.TimeoutExpired:
            faults.append("hang: " + " | ".join(training.lines[-5:]))
            training.process.kill()
            break
        if code == 0:
            break
        if orphans := left_behind(mark):
            faults.append(f"left behind after the coordinator was killed: {orphans}")
        if code != -signal.SIGKILL or killed[-1:] != ["coordinator"]:
            faults.append(f"exit code {code}: " + " | ".join(training.lines[-8:]))
            break
        trainings.append(training := Training([*command, "resume", str(run)], mark, scratch))
    left = (left_behind(mark), files_left(scratch, shared_before))
    faults += [f"left behind: {found}" for found in left if found]
    iterations = [line["iteration"] for line in lines_of(run)]
    if not faults and iterations != list(range(1, ITERATIONS + 1)):
        faults.append(f"metrics have {len(iterations)} lines, from {iterations[:1]} to {iterations[-1:]}")
    return {
        "policy": policy,
        "place": place,
        "killed": killed,
        "resumed": len(trainings) - 1,
        **{name: sum(words in line for each in trainings for line in each.lines) for name, words in SAID.items()},
        "seconds": time.monotonic() - began,
        "faults": faults,
    }


def main() -> None:
    chosen = options(
        __doc__,
        kills=(50, "processes to kill in all"),
        each=(10, "limit of one training"),
        places=(["processes", "processes", "ray"], "take turns"),
        seed=0,
        policies=some_of(POLICIES),
    )
    trainings: list[dict] = []
    kills = lambda: sum(len(training["killed"]) for training in trainings)
    with tempfile.TemporaryDirectory() as folder:
        while kills() < chosen.kills:
            number = len(trainings)
            policy = chosen.policies[number % len(chosen.policies)]
            place = chosen.places[(number + number // len(chosen.policies)) % len(chosen.places)]
            trainings.append(endure(policy, place, chosen.each, chosen.seed, Path(folder), number))
            print(json.dumps(trainings[-1]), flush=True)
    faults = [fault for training in trainings for fault in training["faults"]]
    write_result("chaos", {"kills": kills(), "faults": faults, "trainings": trainings}, chosen.output)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
