"""What algorithms learn at their defaults, as a user types them.

    python benchmarks/defaults.py [ppo a3c impala dqn ...] [--environments NAME ...] [--cores 16 --gpu 6]
    python benchmarks/defaults.py --merge FOLDER ...

Each row is one command, which trains all its seeds in one program; on environments of the host there is a command
for each seed. At twenty points of a training (five on the host) the policy of each seed plays some episodes with
its most likely action. The row is solved from the first point on at which the mean over seeds reaches the
threshold, and its return is that of the last point. Of several agents it is the mean return of the taggers, whose
actions are drawn as those of the runners that learned with them. CPU seconds are those of all processes and
threads, with compilation and evaluations.

By default commands run one after the other. `--cores` runs them side by side, each bound to one core of those that
the script may use. `--gpu` leaves so many of these cores to commands on the GPU, until all of them have begun:
those of replay memories, of several agents and of MinAtar, which take too long on a core. Rows of other commands
stay in results/defaults.json, each with its commit, versions and hardware; `--merge` adds those that were written
to other folders.
"""

import argparse
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import jax
from measure import Failed, gpu_name, lines_of, options, read_result, some_of, this_commit, words, write_result

from rollmill.core.machine import hardware, versions

POINTS, EPISODES = 20, 50
HOST_POINTS, HOST_EPISODES = 5, 10
QUANTILES = {3: 4.303, 5: 2.776, 10: 2.262}
"""Student's t for an interval of 95 %, by the number of seeds."""

THRESHOLDS = {
    "CartPole-v1": 475.0,
    "Acrobot-v1": -100.0,
    "Pendulum-v1": -250.0,
    "MountainCar-v0": -110.0,
    "MountainCarContinuous-v0": 90.0,
    "TMaze-v0": 0.95,
    "TwoStepGame-v0": 7.0,
    "TagGridWorld-Small-v0": 5.0,
    "TagContinuous-Small-v0": 10.0,
    "gymnax:Breakout-MinAtar": 15.0,
    "gymnax:Asterix-MinAtar": 10.0,
    "gymnax:Freeway-MinAtar": 40.0,
    "gymnax:SpaceInvaders-MinAtar": 100.0,
    "gymnasium:HalfCheetah-v5": 1_442.6,
    "gymnasium:Hopper-v5": 2_382.9,
    "gymnasium:Walker2d-v5": 2_288.0,
    "gymnasium:LunarLander-v3": 200.0,
}
"""Returns by which an environment counts as learned. Those of MuJoCo are CleanRL's on v4 by a million steps."""

ON_A_GPU = ("dqn", "r2d2", "sac", "td3", "ddpg", "mappo", "ippo")
"""Algorithms whose rows take minutes of a core."""


class Row(NamedTuple):
    """One training, as a user types it."""

    algorithm: str
    environment: str
    steps: int
    """Environment steps, those of the algorithm by default unless `options` have others."""
    seeds: int = 10
    options: str = ""

    @property
    def name(self) -> str:
        """The command without evaluations."""
        given = [self.algorithm, self.environment, self.options, "" if self.apart else self.of_seeds]
        return " ".join(["rollmill train", *filter(None, given)])

    @property
    def of_seeds(self) -> str:
        """The option that trains all seeds."""
        return f"--num-seeds {self.seeds}"

    @property
    def apart(self) -> bool:
        """Whether each seed is a command: where the environment runs on the host.

        R2D2 and RSAC have a command for each seed, too, because their programs of ten seeds compile for minutes on
        a CPU.
        """
        on_host = self.environment.startswith("gymnasium:")
        return on_host or self.seeds == 1 or self.algorithm in ("r2d2", "rsac")

    @property
    def several(self) -> bool:
        """Whether there are several agents."""
        return self.algorithm in ("mappo", "ippo")

    @property
    def on_gpu(self) -> bool:
        """Whether its commands run on the GPU, if there is one."""
        return self.algorithm in ON_A_GPU or self.environment.startswith("gymnax:")

    @property
    def commands(self) -> list[str]:
        """The options of seeds of each command that the row takes."""
        return [f"--seed={seed}" for seed in range(self.seeds)] if self.apart else [self.of_seeds]


class Command(NamedTuple):
    """One command of a row."""

    row: Row
    seeds: str


class Trained(NamedTuple):
    """Steps and return of each seed's points, and the time that they took."""

    curves: list[list[tuple[int, float]]]
    cpu_seconds: float
    seconds: float
    gpu: str | None
    """The GPU that trained, if one did."""


CLASSIC = ("CartPole-v1", "Acrobot-v1", "Pendulum-v1")
MINATAR = ("Breakout", "Asterix", "Freeway", "SpaceInvaders")
KERNELS = "--fusion full"
"""Machine code of our own, which trains the same in less time."""
ROWS = [
    *(Row(name, env, 500_000, options=KERNELS) for name in ("ppo", "a3c", "a2c", "impala") for env in CLASSIC),
    Row("ppo", "CartPole-v1", 500_000, options=f"--network.shared-torso {KERNELS}"),
    *(Row("pqn", environment, 500_000) for environment in CLASSIC[:2]),
    *(Row("dqn", environment, 200_000, options="--total-timesteps 200000") for environment in CLASSIC[:2]),
    *(
        Row("dqn", "CartPole-v1", 200_000, options=f"--total-timesteps 200000 {kind}")
        for kind in ("--value-distribution c51", "--value-distribution quantiles", "--recipe rainbow")
    ),
    *(Row("sac", environment, 20_000, options="--total-timesteps 20000") for environment in CLASSIC),
    *(Row(name, "Pendulum-v1", 40_000, options="--total-timesteps 40000") for name in ("td3", "ddpg")),
    *(
        Row(name, environment, 1_000_000)
        for name in ("mappo", "ippo")
        for environment in ("TagGridWorld-Small-v0", "TagContinuous-Small-v0")
    ),
    *(
        Row(name, "TagContinuous-Small-v0", 1_000_000, options="--gamma 0.97 --ent-coef 0.001")
        for name in ("mappo", "ippo")
    ),
    Row("mappo", "TagGridWorld-Small-v0", 1_000_000, options="--network.torso gru"),
    *(
        Row(name, "TwoStepGame-v0", 30_000, options="--total-timesteps 30000 --end-epsilon 1")
        for name in ("vdn", "qmix")
    ),
    *(Row(name, "TMaze-v0", 500_000, options="--network.torso gru") for name in ("ppo", "a3c", "a2c", "impala")),
    *(
        Row(name, environment, steps, options=f"--total-timesteps {steps}{hidden}")
        for name, environment, steps, hidden in (
            ("r2d2", "TMaze-v0", 40_000, ""),
            ("dqn", "TMaze-v0", 50_000, ""),
            ("r2d2", "CartPole-v1", 100_000, " --transform keep:0,2"),
            ("dqn", "CartPole-v1", 100_000, " --transform keep:0,2"),
            ("rsac", "Pendulum-v1", 100_000, " --transform keep:0,1"),
            ("sac", "Pendulum-v1", 100_000, " --transform keep:0,1"),
        )
    ),
    *(
        Row("ppo", environment, 500_000, options=options)
        for environment in ("MountainCar-v0", "MountainCarContinuous-v0")
        for options in ("", "--rnd-coef 1")
    ),
    Row("ppo", "MountainCar-v0", 500_000, options="--recipe mountain-car"),
    Row("sac", "MountainCarContinuous-v0", 50_000, options="--total-timesteps 50000"),
    Row("dqn", "MountainCar-v0", 500_000),
    *(
        Row(name, f"gymnax:{game}-MinAtar", 3_000_000, options="--total-timesteps 3000000")
        for game in MINATAR
        for name in ("ppo", "pqn")
    ),
    *(Row("dqn", f"gymnax:{game}-MinAtar", 500_000) for game in MINATAR),
    *(
        Row("ppo", "gymnasium:HalfCheetah-v5", 1_000_000, 10, f"--total-timesteps 1000000{more}")
        for more in ("", " --no-normalize-observations")
    ),
    *(
        Row("ppo", f"gymnasium:{name}", 1_000_000, 10, "--total-timesteps 1000000")
        for name in ("Hopper-v5", "Walker2d-v5")
    ),
    *(
        Row(name, f"gymnasium:{robot}", 100_000, 10, "--total-timesteps 100000")
        for robot in ("HalfCheetah-v5", "Hopper-v5")
        for name in ("sac", "td3")
    ),
    *(Row(name, "gymnasium:LunarLander-v3", 500_000) for name in ("ppo", "dqn")),
    Row("ppo", "gymnasium:LunarLander-v3", 1_000_000, options="--recipe lunar-lander"),
]


def trained(command: Command, core: int | None, *, without_gpu: bool) -> Trained:
    """Trains by one command, on one core if any is named; returns the points of each of its seeds."""
    row, began = command.row, time.perf_counter()
    points, episodes = (HOST_POINTS, HOST_EPISODES) if row.apart else (POINTS, EPISODES)
    evaluated = words("", evaluate_every=row.steps // points, evaluate_episodes=episodes)
    evaluated += ["--evaluate-stochastic"] if row.several else []
    metric = "evaluation/returns/tagger" if row.several else "evaluation/return"
    bound = [] if core is None else ["taskset", "-c", str(core)]
    variables = os.environ | ({"JAX_PLATFORMS": "cpu"} if without_gpu else {})
    with tempfile.TemporaryDirectory() as folder:
        given = [row.algorithm, row.environment, *row.options.split(), *command.seeds.split(), *evaluated]
        given += ["--quiet", "--no-tensorboard", "--run-dir", str(Path(folder, "run"))]
        line = [*bound, sys.executable, "-m", "rollmill", "train", *given]
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(line, stdout=output, stderr=subprocess.STDOUT, env=variables)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            output.seek(0)
            printed = output.read()
        if process.returncode:
            raise Failed(f"{' '.join(line)}: exit code {process.returncode}\n{printed[-2000:]}")
        lines = [each for each in lines_of(Path(folder, "run")) if "evaluation/return" in each]
    names = [metric] if row.apart else [f"{metric}_seed{seed}" for seed in range(row.seeds)]
    curves = [[(each["env_steps"], each[name]) for each in lines] for name in names]
    seconds = time.perf_counter() - began
    return Trained(curves, usage.ru_utime + usage.ru_stime, seconds, None if without_gpu else gpu_name())


def result_of(row: Row, parts: list[Trained]) -> dict[str, Any]:
    """Returns what a row learned, with which steps it was solved, and how long its commands took."""
    curves = [curve for part in parts for curve in part.curves]
    steps, returns = [point[0] for point in curves[0]], [curve[-1][1] for curve in curves]
    means = [fmean(each[1] for each in points) for points in zip(*curves, strict=True)]
    half = QUANTILES[row.seeds] * stdev(returns) / math.sqrt(row.seeds)
    threshold, seconds = THRESHOLDS[row.environment], sum(part.cpu_seconds for part in parts)
    solved = next((at for at, mean in zip(steps, means, strict=True) if mean >= threshold), None)
    print(f"{row.name}: {fmean(returns):.1f} +- {half:.1f}, {seconds:.0f} CPU s, solved at {solved}", flush=True)
    return {
        **{"algorithm": row.algorithm, "environment": row.environment, "command": row.name},
        **{"steps": steps[-1], "seeds": row.seeds, "returns": returns, "mean": fmean(returns)},
        **{"half_interval": half, "threshold": threshold, "met": fmean(returns) >= threshold},
        **{"cpu_seconds": seconds, "seconds": sum(part.seconds for part in parts), "steps_to_threshold": solved},
        **{"points": steps, "curves": [[each for _, each in curve] for curve in curves]},
        **{"gpu": parts[0].gpu, "commit": this_commit()},
        **{"versions": versions(), "cpu": hardware()["cpu"]},
    }


class Rows:
    """Rows that are being trained; a row is written as soon as its last command has ended."""

    def __init__(self, rows: list[Row], output: Path) -> None:
        self._output, self._lock = output, threading.Lock()
        self._parts: dict[Row, dict[str, Trained]] = {row: {} for row in rows}
        self.failed: list[str] = []

    def run(self, queue: deque[Command], core: int | None, *, without_gpu: bool) -> None:
        """Trains by commands of a queue, one after the other, until none is left."""
        while True:
            try:
                command = queue.popleft()
            except IndexError:
                return
            try:
                self._add(command, trained(command, core, without_gpu=without_gpu))
            except Failed as error:
                print(error, flush=True)
                self.failed.append(command.row.name)

    def _add(self, command: Command, part: Trained) -> None:
        with self._lock:
            parts = self._parts[command.row]
            parts[command.seeds] = part
            if len(parts) == len(command.row.commands):
                write([result_of(command.row, [parts[each] for each in command.row.commands])], self._output)


def write(rows: list[dict[str, Any]], output: Path) -> None:
    """Adds rows to those of the result, in place of earlier ones of the same commands."""
    every = {each["command"]: each for each in read_result("defaults", output).get("rows", [])}
    every |= {each["command"]: each for each in rows}
    kept = [every[each.name] for each in ROWS if each.name in every]
    write_result("defaults", {"episodes": EPISODES, "rows": kept}, output)


def main() -> None:
    names = dict.fromkeys(row.algorithm for row in ROWS)
    of = {"cores": (0, "commands side by side, each on one core"), "gpu": (0, "how many of them have the GPU")}
    chosen = options(__doc__, {"algorithms": some_of(names)}, environments=[str], merge=[Path], **of)
    if chosen.merge:
        write([row for each in chosen.merge for row in read_result("defaults", each)["rows"]], chosen.output)
    else:
        train(chosen)


def _work(trainings: Rows, queues: tuple[deque[Command], deque[Command]], core: int | None, *, gpu: bool) -> None:
    """Trains by the commands on the GPU, if the core is left to them, and then by those without it."""
    if gpu:
        trainings.run(queues[True], core, without_gpu=False)
    trainings.run(queues[False], core, without_gpu=core is not None)


def train(chosen: argparse.Namespace) -> None:
    """Trains the rows that were chosen, side by side if there are cores for it."""
    rows = [
        row
        for row in ROWS
        if row.algorithm in chosen.algorithms and row.environment in (chosen.environments or [row.environment])
    ]
    if chosen.gpu:
        jax.config.update("jax_platforms", "cpu")  # of this process alone, which computes nothing
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    queues: tuple[deque[Command], deque[Command]] = deque(), deque()
    for row in rows:
        queues[bool(chosen.gpu) and row.on_gpu].extend(Command(row, each) for each in row.commands)
    trainings, threads = Rows(rows, chosen.output), []
    cores = sorted(os.sched_getaffinity(0))[: chosen.cores] if chosen.cores else [None]
    for i, core in enumerate(cores):
        with_gpu = core is not None and i < chosen.gpu
        threads.append(threading.Thread(target=_work, args=(trainings, queues, core), kwargs={"gpu": with_gpu}))
        threads[-1].start()
    for thread in threads:
        thread.join()
    if trainings.failed:
        raise SystemExit(f"failed: {', '.join(trainings.failed)}")


if __name__ == "__main__":
    main()
