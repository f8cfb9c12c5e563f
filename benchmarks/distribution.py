"""Distribution policies beside each other, and PPO and IMPALA beside RLlib's, on one machine.

    python benchmarks/distribution.py policies
    python benchmarks/distribution.py rllib --rllib .rllib/bin/python

`policies`: every distribution policy, synchronous and asynchronous, on a light environment (CartPole-v1,
Rollmill's own and Gymnasium's) and a heavy one (HalfCheetah-v5, for which MuJoCo has to be installed).

`rllib`: RLlib 2.60 in a Python of its own, which has `ray[rllib]==2.60.0`, PyTorch for CPUs and
`gymnasium[mujoco]`. Both sides have the same network, batch, minibatches, epochs and number of environments.
First a few layouts of each side are tried for a short time; then the best of each trains to the end, in turns.

Figures are environment steps a second, sampled and learned from, in the steady state of whole trainings as users
start them. Start-up, compilation in it, is told apart. `--quick` only shows that everything runs.
"""

import argparse
import json
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from measure import RESULTS, spread, write_result
from training_command import Failed, Steady, train_for, train_through

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Work:
    """Task and hyperparameters, under the names that both sides' scripts take."""

    algorithm: str
    environment: str
    num_envs: int
    num_steps: int
    update_epochs: int
    num_minibatches: int
    learning_rate: float
    total_timesteps: int
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_coef: float = 0.2
    hidden_sizes: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    shared_torso: bool = False
    continuous: bool = False
    seed: int = 0

    @property
    def batch(self) -> int:
        """Environment steps of an iteration."""
        return self.num_envs * self.num_steps


PPO_CARTPOLE = Work("ppo", "CartPole-v1", 16, 128, 4, 4, 1e-3, 400_000)
PPO_CHEETAH = Work("ppo", "HalfCheetah-v5", 8, 256, 10, 32, 3e-4, 200_000, ent_coef=0.0, continuous=True)
IMPALA_CARTPOLE = Work("impala", "CartPole-v1", 16, 32, 1, 1, 1e-3, 400_000)
IMPALA_CHEETAH = Work("impala", "HalfCheetah-v5", 8, 64, 1, 1, 3e-4, 200_000, ent_coef=0.0, continuous=True)
WORKS = (PPO_CARTPOLE, PPO_CHEETAH, IMPALA_CARTPOLE, IMPALA_CHEETAH)

POLICIES = {
    "gpu-only": "--distribution gpu-only",
    "gpu-only, 2 processes": "--distribution gpu-only --place processes --learners 2",
    "multi-learner": "--distribution multi-learner --workers 2 --learners 2",
    "single-learner-fine": "--distribution single-learner-fine --workers 2",
    "single-learner-coarse": "--distribution single-learner-coarse --actors 2",
    "environments": "--distribution environments --workers 2 --actors 1",
    "central": "--distribution central --actors 2",
}
ASYNCHRONOUS = {
    "single-learner-coarse, asynchronous": "--distribution single-learner-coarse --actors 2 --asynchronous",
    "environments, asynchronous": "--distribution environments --workers 2 --actors 2 --asynchronous",
    "central, asynchronous": "--distribution central --actors 2 --asynchronous",
}

PPO_LAYOUTS = ("gpu-only", "gpu-only, 2 processes", "single-learner-fine", "single-learner-coarse")
IMPALA_LAYOUTS = (*PPO_LAYOUTS, *ASYNCHRONOUS)


LAYOUTS = POLICIES | ASYNCHRONOUS


class RLlibLayout(NamedTuple):
    """Where RLlib samples and learns."""

    num_env_runners: int = 0
    vectorize_mode: str = "sync"
    num_learners: int = 0
    torch_threads: int = 1


LAYOUTS_OF_RLLIB = {
    "ppo": (
        RLlibLayout(),
        RLlibLayout(torch_threads=2),
        RLlibLayout(vectorize_mode="async"),
        RLlibLayout(num_env_runners=1),
        RLlibLayout(num_env_runners=1, torch_threads=2),
        RLlibLayout(num_env_runners=2),
        RLlibLayout(num_env_runners=2, torch_threads=2),
        RLlibLayout(num_env_runners=2, num_learners=1),
    ),
    "impala": (
        RLlibLayout(),
        RLlibLayout(num_env_runners=1),
        RLlibLayout(num_env_runners=1, num_learners=1),
        RLlibLayout(num_env_runners=2),
        RLlibLayout(num_env_runners=2, torch_threads=2),
        RLlibLayout(num_env_runners=2, num_learners=1),
    ),
}


@dataclass(frozen=True)
class Times:
    """How long is measured."""

    warm_up: float = 3.0
    """Seconds after the first iteration that are not counted, of a training of a given time."""
    seconds: float = 10.0
    """Seconds that are counted then."""
    warm_up_batches: int = 10
    """Iterations that are not counted, of a training to the end."""
    rounds: int = 3


QUICK = Times(warm_up=0.5, seconds=1.0, warm_up_batches=2, rounds=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("policies", "rllib"))
    parser.add_argument("--rllib", help="a Python with ray[rllib]==2.60.0")
    parser.add_argument("--algorithms", nargs="+", default=["ppo", "impala"])
    parser.add_argument("--environments", nargs="+", default=["CartPole-v1", "HalfCheetah-v5"])
    parser.add_argument("--rounds", type=int, default=Times.rounds)
    parser.add_argument("--quick", action="store_true", help="very short runs, whose figures mean nothing")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.what == "rllib" and not options.rllib:
        raise SystemExit("rllib needs --rllib PYTHON.")
    times = QUICK if options.quick else Times(rounds=options.rounds)
    works = [w for w in WORKS if w.algorithm in options.algorithms and w.environment in options.environments]
    if options.what == "policies":
        rows = [compare_policies(work, name, times) for work in works for name in homes(work)]
    else:
        short = [replace(work, total_timesteps=6 * work.batch) for work in works]
        rows = [compare_with_rllib(work, options.rllib, times) for work in (short if options.quick else works)]
    name = {"policies": "distribution-policies", "rllib": "distribution-rllib"}[options.what]
    write_result(name, {"quick": options.quick, "rows": rows}, directory=options.output)


def homes(work: Work) -> list[str]:
    """The environment in Gymnasium and, where there is one, Rollmill's own."""
    own = [work.environment] if work.environment == "CartPole-v1" else []
    return [*own, f"gymnasium:{work.environment}"]


# --- policies -----------------------------------------------------------------------------------------


def compare_policies(work: Work, environment: str, times: Times) -> dict[str, Any]:
    """Every distribution policy at the same work; asynchronous ones where the algorithm corrects for it."""
    policies = POLICIES | (ASYNCHRONOUS if work.algorithm == "impala" else {})
    endless = replace(work, total_timesteps=10**9)
    found: dict[str, list[Steady]] = {name: [] for name in policies}
    for _ in range(times.rounds):
        for name in policies:
            train = lambda name=name: train_for(
                rollmill_arguments(endless, environment, policies[name]),
                warm_up=times.warm_up,
                seconds=times.seconds,
            )
            found[name] += attempted(f"{work.algorithm} {environment} {name}", train)
    rows = {name: told(runs) for name, runs in found.items() if runs}
    print_table(f"{work.algorithm} on {environment}, {work.num_envs} environments x {work.num_steps} steps", rows)
    return {"work": asdict(endless), "environment": environment, "policies": policies, "figures": rows}


def rollmill_arguments(work: Work, environment: str, layout: str) -> list[str]:
    """The command line after `rollmill train`."""
    names = ["num_envs", "num_steps", "update_epochs", "num_minibatches", "learning_rate", "total_timesteps"]
    names += ["ent_coef", "vf_coef", "max_grad_norm", "gamma", "seed"]
    names += ["gae_lambda", "clip_coef"] if work.algorithm == "ppo" else []
    values = [word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(work, name)))]
    same = ["--no-clip-vloss"] if work.algorithm == "ppo" else ["--optimizer", "adam"]
    torso = ["--network.shared-torso"] if work.shared_torso else []
    sizes = ["--network.hidden-sizes", *map(str, work.hidden_sizes), "--network.activation", work.activation]
    return [work.algorithm, environment, *values, *same, "--no-anneal-lr", *sizes, *torso, *layout.split()]


def attempted(what: str, train: Callable[[], Steady]) -> list[Steady]:
    """One run, or none where it failed, which is said."""
    try:
        run = train()
    except Failed as error:
        print(f"{what}: {error}", flush=True)
        return []
    print(f"{what}: {run.steps_per_second:,.0f} steps/s, started in {run.startup_seconds:.1f} s", flush=True)
    return [run]


def told(runs: list[Steady]) -> dict[str, Any]:
    """Runs of the same kind as JSON."""
    return {
        "steps_per_second": spread([run.steps_per_second for run in runs]),
        "startup_seconds": spread([run.startup_seconds for run in runs]),
        "final_returns": [run.final_return for run in runs],
        "env_steps": [run.env_steps for run in runs],
        "counted_seconds": [run.seconds for run in runs],
    }


def print_table(title: str, rows: dict[str, dict[str, Any]]) -> None:
    best = max((row["steps_per_second"]["median"] for row in rows.values()), default=0.0)
    print(f"\n{title}")
    for name, row in rows.items():
        rate, startup = row["steps_per_second"]["median"], row["startup_seconds"]["median"]
        mark = "  <- fastest" if rate == best else ""
        print(f"  {name:36} {rate:12,.0f} steps/s   start-up {startup:5.1f} s{mark}")
    print(flush=True)


# --- RLlib --------------------------------------------------------------------------------------------


def compare_with_rllib(work: Work, python: str, times: Times) -> dict[str, Any]:
    """The best layout of each side, training to the end in turns."""
    print(f"\n{work.algorithm} on {work.environment}: trying layouts", flush=True)
    peer = RLlib(work, python, times)
    contestants: dict[str, Contestant] = {"rllib": peer}
    contestants |= {f"rollmill {home}": Rollmill(work, home, times) for home in homes(work)}
    tried = {name: contestant.choose() for name, contestant in contestants.items()}
    runs: dict[str, list[Steady]] = {name: [] for name in contestants}
    for _ in range(times.rounds):
        for name, contestant in contestants.items():
            runs[name] += attempted(f"  {name}, {contestant.chosen}", contestant.train)
    figures = {name: told(side) for name, side in runs.items() if side}
    rates = {name: row["steps_per_second"]["median"] for name, row in figures.items()}
    ratios = {name: rate / rates["rllib"] for name, rate in rates.items() if name != "rllib"}
    print_table(f"{work.algorithm} on {work.environment}", figures)
    print("  " + ", ".join(f"{name} / rllib {ratio:.2f}" for name, ratio in ratios.items()), flush=True)
    chosen = {name: contestant.chosen for name, contestant in contestants.items()}
    return {
        "work": asdict(work),
        "tried": tried,
        "chosen": chosen,
        "figures": figures,
        "ratios": ratios,
        "rllib": peer.details,
    }


class Contestant(Protocol):
    """One side of a comparison."""

    chosen: str
    """Its best layout."""

    def choose(self) -> dict[str, float | None]:
        """Tries layouts for a short time and chooses one; steps a second of each, None where it failed."""
        ...

    def train(self) -> Steady:
        """Trains to the end with that layout."""
        ...


class Rollmill:
    """Rollmill on the environment of one name."""

    def __init__(self, work: Work, environment: str, times: Times) -> None:
        self._work, self._environment, self._times = work, environment, times
        self.chosen = ""

    def choose(self) -> dict[str, float | None]:
        """See `Contestant`."""
        names = PPO_LAYOUTS if self._work.algorithm == "ppo" else IMPALA_LAYOUTS
        tries = {
            name: rate_of(attempted(f"  rollmill {self._environment}, {name}", partial(self._try, name)))
            for name in names
        }
        self.chosen = best_of(tries)
        return tries

    def _try(self, name: str) -> Steady:
        endless = replace(self._work, total_timesteps=10**9)
        arguments = rollmill_arguments(endless, self._environment, LAYOUTS[name])
        return train_for(arguments, warm_up=self._times.warm_up, seconds=self._times.seconds)

    def train(self) -> Steady:
        """See `Contestant`."""
        arguments = rollmill_arguments(self._work, self._environment, LAYOUTS[self.chosen])
        return train_through(arguments, warm_up=self._times.warm_up_batches * self._work.batch)


class RLlib:
    """RLlib in a Python of its own."""

    def __init__(self, work: Work, python: str, times: Times) -> None:
        self._work, self._python, self._times = work, python, times
        self._layouts = {str(layout): layout for layout in LAYOUTS_OF_RLLIB[work.algorithm]}
        self.chosen = ""
        self.details: list[dict[str, Any]] = []
        """All that the script of each training to the end printed."""

    def choose(self) -> dict[str, float | None]:
        """See `Contestant`."""
        seconds = self._times.seconds
        tries = {
            name: rate_of(attempted(f"  rllib, {name}", lambda layout=layout: self._run(layout, seconds)))
            for name, layout in self._layouts.items()
        }
        self.chosen = best_of(tries)
        return tries

    def train(self) -> Steady:
        """See `Contestant`."""
        return self._run(self._layouts[self.chosen], None)

    def _run(self, layout: RLlibLayout, seconds: float | None) -> Steady:
        warm_up = self._times.warm_up_batches * self._work.batch
        settings = {**asdict(self._work), **layout._asdict(), "warm_up": warm_up, "seconds": seconds}
        command = [self._python, str(HERE / "rllib_training.py"), json.dumps(settings)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Failed(done.stderr[-2000:])
        found = json.loads(done.stdout.splitlines()[-1])
        if seconds is None:
            self.details.append(found)
        return Steady(*(found[name] for name in Steady._fields))


def rate_of(runs: list[Steady]) -> float | None:
    return runs[0].steps_per_second if runs else None


def best_of(tries: dict[str, float | None]) -> str:
    known = {name: rate for name, rate in tries.items() if rate is not None}
    if not known:
        raise SystemExit("no layout ran.")
    return max(known, key=lambda name: known[name])


if __name__ == "__main__":
    main()
