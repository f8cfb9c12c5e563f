"""What algorithms learn at their defaults, as a user types them.

    python benchmarks/defaults.py [ppo a3c impala dqn sac td3 mappo ippo] [--environments NAME ...]

Each row is one command, which trains all its seeds in one program; on environments of the host, and with
several agents, there is a command for each seed. At twenty points of a training (five on the host) the policy
of each seed plays some episodes with its most likely action. The row is solved from the first point on at which
the mean over seeds reaches the threshold, and its return is that of the last point. Of several agents it is the
mean return of the taggers, whose actions are drawn as those of the runners that learned with them. CPU seconds
are those of all processes and threads, with compilation and evaluations. Rows of other algorithms stay in
results/defaults.json, each with its commit.
"""

import math
import resource
import tempfile
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import measure
from measure import lines_of, options, read_result, some_of, this_commit, words, write_result

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
    "TagGridWorld-Small-v0": 5.0,
    "TagContinuous-Small-v0": 10.0,
    "gymnasium:HalfCheetah-v5": 1_442.6,
}
"""Returns by which an environment counts as learned. HalfCheetah's is CleanRL's on v4 by a million steps."""


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
    def on_host(self) -> bool:
        """Whether the environment runs on the host."""
        return self.environment.startswith("gymnasium:")

    @property
    def several(self) -> bool:
        """Whether there are several agents."""
        return self.algorithm in ("mappo", "ippo")

    @property
    def apart(self) -> bool:
        """Whether seeds train one after the other."""
        return self.on_host or self.several or self.seeds == 1


CLASSIC = ("CartPole-v1", "Acrobot-v1", "Pendulum-v1")
KERNELS = "--fusion full"
"""Machine code of our own, which trains the same in less time."""
ROWS = [
    *(Row(name, env, 500_000, options=KERNELS) for name in ("ppo", "a3c", "impala") for env in CLASSIC),
    Row("ppo", "CartPole-v1", 500_000, options=f"--network.shared-torso {KERNELS}"),
    Row("ppo", "MountainCarContinuous-v0", 500_000, 3),
    *(Row("dqn", environment, 200_000, options="--total-timesteps 200000") for environment in CLASSIC[:2]),
    *(Row("sac", environment, 20_000, 3, "--total-timesteps 20000") for environment in CLASSIC),
    Row("td3", "Pendulum-v1", 40_000, 3, "--total-timesteps 40000"),
    *(Row(algorithm, "TagGridWorld-Small-v0", 1_000_000, 3) for algorithm in ("mappo", "ippo")),
    Row("mappo", "TagContinuous-Small-v0", 1_000_000, 3),
    Row("ppo", "gymnasium:HalfCheetah-v5", 500_000, 3),
]


def trained(row: Row) -> dict[str, Any]:
    """Returns what a row learned, with which steps it was solved, and how many CPU seconds it took."""
    began = _seconds_of_children()
    curves = [curve for seeds in _commands(row) for curve in _curves(row, seeds)]
    seconds = _seconds_of_children() - began
    steps, returns = [point[0] for point in curves[0]], [curve[-1][1] for curve in curves]
    means = [fmean(each[1] for each in points) for points in zip(*curves, strict=True)]
    half = QUANTILES[row.seeds] * stdev(returns) / math.sqrt(row.seeds)
    threshold = THRESHOLDS[row.environment]
    solved = next((at for at, mean in zip(steps, means, strict=True) if mean >= threshold), None)
    print(f"{row.name}: {fmean(returns):.1f} +- {half:.1f}, {seconds:.0f} CPU s, solved at {solved}", flush=True)
    return {
        **{"algorithm": row.algorithm, "environment": row.environment, "command": row.name},
        **{"steps": steps[-1], "seeds": row.seeds, "returns": returns, "mean": fmean(returns)},
        **{"half_interval": half, "threshold": threshold, "met": fmean(returns) >= threshold},
        **{"cpu_seconds": seconds, "steps_to_threshold": solved, "points": steps},
        **{"curves": [[each for _, each in curve] for curve in curves], "commit": this_commit()},
    }


def _commands(row: Row) -> list[list[str]]:
    """Returns the options of each command that a row takes."""
    return [[f"--seed={seed}"] for seed in range(row.seeds)] if row.apart else [row.of_seeds.split()]


def _curves(row: Row, seeds: list[str]) -> list[list[tuple[int, float]]]:
    """Trains by one command; returns steps and return of each seed's points."""
    points, episodes = (HOST_POINTS, HOST_EPISODES) if row.on_host else (POINTS, EPISODES)
    evaluated = words("", evaluate_every=row.steps // points, evaluate_episodes=episodes)
    evaluated += ["--evaluate-stochastic"] if row.several else []
    metric = "evaluation/returns/tagger" if row.several else "evaluation/return"
    with tempfile.TemporaryDirectory() as folder:
        quiet = ["--quiet", "--no-tensorboard", "--run-dir", str(Path(folder, "run"))]
        given = [row.algorithm, row.environment, *row.options.split(), *seeds, *evaluated, *quiet]
        measure.rollmill("train", *given)
        lines = [line for line in lines_of(Path(folder, "run")) if "evaluation/return" in line]
    names = [metric] if row.apart else [f"{metric}_seed{seed}" for seed in range(row.seeds)]
    return [[(line["env_steps"], line[name]) for line in lines] for name in names]


def _seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    names = dict.fromkeys(row.algorithm for row in ROWS)
    chosen = options(__doc__, {"algorithms": some_of(names)}, environments=[str])
    for row in ROWS:
        if row.algorithm in chosen.algorithms and row.environment in (chosen.environments or [row.environment]):
            found = trained(row)
            rows = {each["command"]: each for each in read_result("defaults", chosen.output).get("rows", [])}
            rows |= {row.name: found}
            kept = [rows[each.name] for each in ROWS if each.name in rows]
            write_result("defaults", {"episodes": EPISODES, "rows": kept}, chosen.output)


if __name__ == "__main__":
    main()
