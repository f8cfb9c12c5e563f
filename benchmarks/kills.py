"""Kills trainings that keep a memory at random moments, and compares what they learn with undisturbed ones.

    python benchmarks/kills.py --kills 100 --processes 8 --minutes 5
    python benchmarks/kills.py --kills 100 --processes 8 --minutes 5 --add

DQN, SAC, TD3 and AlphaZero train in one program, on a mesh of two processes and under single-learner-coarse, all
tiny. While one trains, processes are killed with SIGKILL: the one that trains, which its own command starts again
(`--resume-if-exists`), or one of its workers. At the end the digest of its weights has to be that of an
undisturbed training. Actors of single-learner-coarse are killed in trainings of their own, which only have to
finish, because their replacements begin new episodes; name the place "single-learner-coarse, actors" for them.
`--processes` trainings run side by side. Trainings are forked from processes that have imported everything, and
find their programs in one compilation cache. Writes results/kills.json whenever a training has ended; `--add`
keeps the trainings that are in it, and kills until there are `--kills` in all.
"""

import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from measure import count_lines, options, read_result, some_of, summary_of, this_commit, words, write_result

ITERATIONS, OTHER_ITERATIONS = {"program": 4000, "mesh": 400}, 400
"""Iterations by place, such that they take some seconds: one program makes hundreds a second."""
START_SECONDS = 10.0
"""About how long a training starts up; a quarter of the kills come in that time."""
STUCK_SECONDS = 240.0
DRIVER = "driver"
SIZES = "--num-envs 4 --num-steps 4 --num-shards 4 --network.hidden-sizes 8"
MEMORY = "--buffer-size 1600 --batch-size 16 --learning-starts 256"
ALGORITHMS = {
    "dqn": f"CartPole-v1 {MEMORY} --priority-exponent 0.6",
    "sac": f"Pendulum-v1 {MEMORY}",
    "td3": f"Pendulum-v1 {MEMORY}",
    "alphazero": "TicTacToe-v0 --num-simulations 4 --num-minibatches 2",
}
COARSE = "--distribution single-learner-coarse --actors 2"
PLACES = {
    "program": "",
    "mesh": "--place mesh --learners 2",
    "single-learner-coarse": COARSE,
    "single-learner-coarse, actors": COARSE,
}
EXACT = tuple(PLACES)[:-1]
RECORDED = "--resume-if-exists --checkpoint-iterations 10 --no-tensorboard --fusion off --log-every 1"
PRELOADED = ("gymnasium", "rollmill.training", "rollmill.hooks", "rollmill.recipes", "rollmill.cli.train")


class Case(NamedTuple):
    """A training of the table."""

    algorithm: str
    place: str

    @property
    def iterations(self) -> int:
        return ITERATIONS.get(self.place, OTHER_ITERATIONS)

    def command(self, run: Path) -> list[str]:
        """Returns the words after `rollmill`."""
        patience = "--max-failures 50" if PLACES[self.place] else ""
        train = f"train {self.algorithm} {ALGORITHMS[self.algorithm]} {SIZES} {PLACES[self.place]} {patience}"
        return words(f"{train} {RECORDED}", total_timesteps=self.iterations * 4 * 4, run_dir=run)


class Training:
    """A training in a process forked from this one, and its output."""

    def __init__(self, case: Case, run: Path) -> None:
        self.run, self.log = run, run.with_suffix(".log")
        self._begins = self.log.stat().st_size if self.log.exists() else 0
        self._status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _become_training(case.command(run), self.log)

    def code(self) -> int | None:
        """Returns the exit code, or minus the signal; None while it runs."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def said(self) -> str:
        """What it has printed since it was started."""
        return self.log.read_bytes()[self._begins :].decode(errors="replace") if self.log.exists() else ""

    def workers(self) -> dict[str, int]:
        """Returns the numbers of the newest processes of its workers."""
        return {name: int(pid) for name, pid in re.findall(r"(\w+/\d+) is process (\d+)", self.said())}

    def iterations(self) -> int:
        """Returns the number of iterations in the log."""
        return count_lines(self.run)

    def wait(self, until=lambda: False, seconds: float = STUCK_SECONDS) -> bool:
        """Waits until it ends or something holds; whether that was in time."""
        deadline = time.monotonic() + seconds
        while self.code() is None and not until():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True


def _become_training(command: list[str], log: Path) -> None:
    """In the child: prints to the log, trains, and ends."""
    code = 70
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        from rollmill.cli import main

        code = main(command) or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def endure(case: Case, run: Path, kills: int, seed: int) -> dict:
    """Trains to the end while processes are killed so many times, and returns the outcome."""
    rng, killed, starts, faults, began = random.Random(seed), [], 1, [], time.monotonic()
    moments = iter(sorted(rng.uniform(0, case.iterations) for _ in range(kills)))
    training, moment = Training(case, run), next(moments, None)
    while moment is not None and training.code() is None:
        await_moment(training, moment, rng)
        victim, pid = choose_victim(case, training, rng)
        if training.code() is not None or pid is None or not _kill(pid):
            continue
        killed.append({"victim": victim, "iteration": training.iterations()})
        moment = next(moments, None)
        if victim == DRIVER:
            training.wait()
            training, starts = Training(case, run), starts + 1
    if not training.wait():
        faults.append(f"it hangs: {training.said()[-500:]}")
        os.killpg(training.pid, signal.SIGKILL)
        training.wait()
    if training.code() != 0:
        faults.append(f"exit code {training.code()}: {training.said()[-800:]}")
    digest = summary_of(run).get("weights_sha256")
    if not faults:
        shutil.rmtree(run)
    outcome = {"weights": digest, "seconds": round(time.monotonic() - began, 1), "faults": faults}
    return {**case._asdict(), "seed": seed, "killed": killed, "starts": starts, **outcome}


def await_moment(training: Training, iteration: float, rng: random.Random) -> None:
    """Waits for a random moment: of the start-up, or after an iteration."""
    if rng.random() < 0.25:
        training.wait(seconds=rng.uniform(0, START_SECONDS))
        return
    training.wait(lambda: training.iterations() >= iteration)
    training.wait(seconds=rng.uniform(0, 0.1))


def choose_victim(case: Case, training: Training, rng: random.Random) -> tuple[str, int | None]:
    """Returns a process of a training: its name and its number."""
    workers = training.workers()
    if case.place.endswith("actors"):
        workers = {name: pid for name, pid in workers.items() if name.startswith("actor")}
    elif case.place == "single-learner-coarse":
        workers = {name: pid for name, pid in workers.items() if name.startswith("learner")}
    names = sorted(workers) if case.place.endswith("actors") else [DRIVER, *sorted(workers)]
    if not names:
        time.sleep(0.1)
        return "", None
    victim = rng.choice(names)
    return victim, training.pid if victim == DRIVER else workers[victim]


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def preload() -> None:
    """Imports what a training needs, so that those that are forked begin at once."""
    for name in PRELOADED:
        import_module(name)


def variables(folder: str) -> dict[str, str]:
    """Returns the variables of trainings on a CPU, which keep their programs and their state in a folder."""
    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": f"{folder}/cache",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "ROLLMILL_STATE_DIR": f"{folder}/state",
    }


class Plan:
    """The next trainings: all cases take turns, until enough was killed or the time is over."""

    def __init__(self, chosen: Any, earlier: list[dict]) -> None:
        self.cases = [
            Case(algorithm, place) for place, algorithm in itertools.product(chosen.places, chosen.algorithms)
        ]
        self.chosen, self._number = chosen, len(earlier)
        self._deadline = time.monotonic() + 60 * chosen.minutes
        self._missing = chosen.kills - sum(len(training["killed"]) for training in earlier)
        self._turns = Counter(Case(training["algorithm"], training["place"]) for training in earlier)

    def next(self) -> tuple[Case, int, int] | None:
        """Returns case, kills and seed of the next training; None where no more are needed or no time is left."""
        kills = min(self.chosen.each, self._missing)
        if kills <= 0 or time.monotonic() > self._deadline:
            return None
        case = min(self.cases, key=lambda case: self._turns[case])
        self._turns[case] += 1
        self._missing -= kills
        self._number += 1
        return case, kills, self.chosen.seed + self._number

    def ended(self, kills: int, done: dict) -> None:
        """Plans the kills again for which a training ended too early."""
        self._missing += kills - len(done["killed"])


def trainings(chosen: Any, folder: Path, earlier: list[dict]) -> Iterator[dict]:
    """Yields the outcome of each training as it ends; the exact ones only once the undisturbed one has ended."""
    plan, running, right, waiting = Plan(chosen, earlier), {}, {}, []
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(chosen.processes, mp_context=context) as pool:
        for number, case in enumerate(case for case in plan.cases if case.place in EXACT):
            running[pool.submit(endure, case, folder / f"undisturbed-{number}", 0, chosen.seed)] = (case, None)
        while True:
            while len(running) < chosen.processes and (following := plan.next()):
                case, kills, seed = following
                running[pool.submit(endure, case, folder / f"run{seed}", kills, seed)] = (case, kills)
            if not running:
                return
            for case, kills, done in _ended(running):
                if kills is None:
                    right[case] = done
                    continue
                plan.ended(kills, done)
                waiting.append((case, done))
            known = [pair for pair in waiting if pair[0] in right or pair[0].place not in EXACT]
            waiting = [pair for pair in waiting if pair not in known]
            yield from (compared(done, right.get(case)) for case, done in known)


def _ended(running: dict[Future, tuple[Case, int | None]]) -> list[tuple[Case, int | None, dict]]:
    """Waits until one ends; takes those that have ended out."""
    done = wait(running, return_when=FIRST_COMPLETED).done
    return [(*running.pop(future), future.result()) for future in done]


def compared(done: dict, right: dict | None) -> dict:
    """Returns a training with its comparison to the undisturbed one, where weights have to be equal."""
    done |= {"equal": None, "commit": this_commit()}
    if right is None:
        return done
    done |= {"equal": done["weights"] == right["weights"] is not None, "undisturbed": right["weights"]}
    done["faults"] += [f"undisturbed: {fault}" for fault in right["faults"]]
    if not done["equal"]:
        done["faults"].append(
            f"weights {done['weights']} are not those of the undisturbed run, {right['weights']}"
        )
    return done


def counted(done: list[dict]) -> dict:
    """Returns kills and trainings in all and by case, and each training."""
    exact = [training for training in done if training["equal"] is not None]
    by_case = Counter()
    for training in done:
        by_case[f"{training['algorithm']}, {training['place']}"] += len(training["killed"])
    return {
        "kills": by_case.total(),
        "kills_in_compared": sum(len(training["killed"]) for training in exact),
        "kills_by_case": dict(sorted(by_case.items())),
        "trainings": len(done),
        "compared": len(exact),
        "equal": sum(training["equal"] for training in exact),
        "faults": [fault for training in done for fault in training["faults"]],
        "each": done,
    }


def main() -> None:
    chosen = options(
        __doc__,
        kills=(100, "processes to kill in all"),
        each=(4, "limit of one training"),
        processes=(1, "trainings side by side"),
        minutes=(25.0, "no training begins after this time"),
        algorithms=some_of(ALGORITHMS),
        places=some_of(PLACES, EXACT),
        seed=0,
        add=(False, "keep the trainings that are in the result"),
    )
    done = read_result("kills", chosen.output).get("each", []) if chosen.add else []
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= variables(folder)
        preload()
        for training in trainings(chosen, Path(folder), list(done)):
            done.append(training)
            print(json.dumps(training), flush=True)
            write_result("kills", counted(done), chosen.output)
    sys.exit(1 if counted(done)["faults"] else 0)


if __name__ == "__main__":
    main()
