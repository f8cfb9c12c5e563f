"""Distribution policies beside each other, and PPO and IMPALA beside RLlib's, on one machine.

    python benchmarks/distribution.py policies
    python benchmarks/distribution.py kernels
    python benchmarks/distribution.py kernels --layouts single-learner-coarse --num-envs 16384
    python benchmarks/distribution.py rllib --rllib .rllib/bin/python

`policies`: every distribution policy, synchronous and asynchronous, on a light environment (CartPole-v1,
Rollmill's own and Gymnasium's) and a heavy one (HalfCheetah-v5, which needs MuJoCo).

`kernels`: plans of several groups with kernels in all of them and by XLA alone, in pairs: the one that comes first
changes from pair to pair, and a ratio is the median over pairs.

`rllib`: RLlib 2.60 in a Python of its own, with `ray[rllib]==2.60.0`, PyTorch for CPUs and `gymnasium[mujoco]`.
Both sides have the same network, batch, minibatches, epochs and number of environments. First a few layouts of
each side are tried for a short time. Then the best of each trains to the end, in turns.

Figures are environment steps a second, sampled and learned from, in the steady state of whole trainings by the
commands of users, on the clock of `metrics.jsonl`. Start-up, which is imports, compilation and starting workers,
ends with its first line and is reported apart. `--quick` only shows that everything runs.
"""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from measure import (
    HERE,
    Failed,
    count_lines,
    lines_of,
    one_of,
    options,
    rate,
    some_of,
    spread,
    words,
    write_result,
)

MAX_STARTUP_SECONDS = 600.0


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
        return self.num_envs * self.num_steps

    @property
    def homes(self) -> list[str]:
        """Names of the environment in Gymnasium and, where there is one, of Rollmill's own."""
        own = [self.environment] if self.environment == "CartPole-v1" else []
        return [*own, f"gymnasium:{self.environment}"]


WORKS = (
    Work("ppo", "CartPole-v1", 16, 128, 4, 4, 1e-3, 400_000),
    Work("ppo", "HalfCheetah-v5", 8, 256, 10, 32, 3e-4, 200_000, ent_coef=0.0, continuous=True),
    Work("impala", "CartPole-v1", 16, 32, 1, 1, 1e-3, 400_000),
    Work("impala", "HalfCheetah-v5", 8, 64, 1, 1, 3e-4, 200_000, ent_coef=0.0, continuous=True),
)
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
LAYOUTS = POLICIES | ASYNCHRONOUS
FUSED = ("gpu-only, 2 processes", "single-learner-coarse", "central", "multi-learner")
"""Policies that are measured with kernels."""
FUSED_WORK = Work("ppo", "CartPole-v1", 1024, 64, 4, 4, 1e-3, 10**9)
"""Work for kernels: rollouts and minibatches so large that processes compute more than they wait."""
TRIED = ("gpu-only", "gpu-only, 2 processes", "single-learner-fine", "single-learner-coarse")
"""Layouts that compete with RLlib; asynchronous ones too where the algorithm corrects for the lag."""


class RLlibLayout(NamedTuple):
    """Where RLlib samples and learns."""

    num_env_runners: int = 0
    vectorize_mode: str = "sync"
    num_learners: int = 0
    torch_threads: int = 1


ONE, TWO = RLlibLayout(num_env_runners=1), RLlibLayout(num_env_runners=2)
LAYOUTS_OF_RLLIB = {
    "ppo": (
        *(RLlibLayout(), RLlibLayout(torch_threads=2), RLlibLayout(vectorize_mode="async"), ONE),
        *(ONE._replace(torch_threads=2), TWO, TWO._replace(torch_threads=2), TWO._replace(num_learners=1)),
    ),
    "impala": (
        *(RLlibLayout(), ONE, ONE._replace(num_learners=1)),
        *(TWO, TWO._replace(torch_threads=2), TWO._replace(num_learners=1)),
    ),
}


class Times(NamedTuple):
    """Durations of measurements."""

    warm_up: float = 3.0
    """Seconds after the first iteration that do not count, in a training of a given time."""
    seconds: float = 10.0
    """Seconds that count then."""
    warm_up_batches: int = 10
    """Iterations that do not count, in a training to the end."""
    rounds: int = 3


class Steady(NamedTuple):
    """A training in its steady state."""

    steps_per_second: float
    startup_seconds: float
    """From the command to the metrics of the first iteration."""
    seconds: float
    """Seconds that counted."""
    env_steps: int
    """Environment steps of the whole training."""
    final_return: float | None
    """Mean over the last 100 episodes."""


# --- a training of Rollmill --------------------------------------------------------------------------------


def train(arguments: Sequence[str], *, seconds: float | None, warm_up: float) -> Steady:
    """Trains to the end, or for some seconds after the warming up, and then stops as Ctrl-C does.

    The warming up is in environment steps of a training to the end, and else in seconds.
    """
    with tempfile.TemporaryDirectory() as folder, Path(folder, "said").open("w+") as said:
        run, began = Path(folder, "run"), time.perf_counter()
        command = [sys.executable, "-m", "rollmill", "train", *arguments, "--run-dir", str(run), "--quiet"]
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        while not count_lines(run) and process.poll() is None:
            if time.perf_counter() - began > MAX_STARTUP_SECONDS:
                process.terminate()
                raise Failed(f"no iteration in {MAX_STARTUP_SECONDS:g} s:\n{said.seek(0) or said.read()}")
            time.sleep(0.1)
        startup = time.perf_counter() - began
        if seconds is not None:
            try:
                process.wait(warm_up + seconds + 1)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
        if (code := process.wait()) not in (0, 128 + signal.SIGINT) or not count_lines(run):
            raise Failed(f"{' '.join(command)} ended with {code}:\n{said.seek(0) or said.read()}")
        lines = lines_of(run)
    if seconds is None:
        first, last = next(line for line in lines if line["env_steps"] >= warm_up)["seconds"], lines[-1]["seconds"]
    else:
        first = lines[0]["seconds"] + warm_up
        last = first + seconds
    begin = [line for line in lines if line["seconds"] <= first][-1]
    end = [line for line in lines if line["seconds"] <= last][-1]
    counted = end["seconds"] - begin["seconds"]
    return Steady(rate(begin, end), startup, counted, lines[-1]["env_steps"], lines[-1].get("episode/return"))


def rollmill_arguments(work: Work, environment: str, layout: str) -> list[str]:
    """Returns the command line after `rollmill train`."""
    names = ["num_envs", "num_steps", "update_epochs", "num_minibatches", "learning_rate", "total_timesteps"]
    names += ["ent_coef", "vf_coef", "max_grad_norm", "gamma", "seed"]
    names += ["gae_lambda", "clip_coef"] if work.algorithm == "ppo" else []
    same = "--no-clip-vloss" if work.algorithm == "ppo" else "--optimizer adam"
    torso = "--network.shared-torso" if work.shared_torso else ""
    found = words(f"{work.algorithm} {environment}", **{name: getattr(work, name) for name in names})
    sizes = ["--network.hidden-sizes", *map(str, work.hidden_sizes), "--network.activation", work.activation]
    return [*found, *words(f"{same} --no-anneal-lr"), *sizes, *torso.split(), *layout.split()]


def train_briefly(work: Work, environment: str, layout: str, times: Times) -> Steady:
    arguments = rollmill_arguments(replace(work, total_timesteps=10**9), environment, layout)
    return train(arguments, seconds=times.seconds, warm_up=times.warm_up)


def attempted(what: str, attempt: Callable[[], Steady]) -> list[Steady]:
    """Returns one run, or none where it failed, and prints which."""
    try:
        run = attempt()
    except Failed as error:
        print(f"{what}: {error}", flush=True)
        return []
    print(f"{what}: {run.steps_per_second:,.0f} steps/s, started in {run.startup_seconds:.1f} s", flush=True)
    return [run]


def figures_of(runs: list[Steady]) -> dict[str, Any]:
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
        speed, startup = row["steps_per_second"]["median"], row["startup_seconds"]["median"]
        mark = "  <- fastest" if speed == best else ""
        print(f"  {name:36} {speed:12,.0f} steps/s   start-up {startup:5.1f} s{mark}")
    print(flush=True)


def compare_policies(work: Work, environment: str, times: Times) -> dict[str, Any]:
    """Measures every distribution policy at the same work; asynchronous ones where the algorithm corrects for
    it.
    """
    policies = POLICIES | (ASYNCHRONOUS if work.algorithm == "impala" else {})
    found: dict[str, list[Steady]] = {name: [] for name in policies}
    for _ in range(times.rounds):
        for name, layout in policies.items():
            attempt = partial(train_briefly, work, environment, layout, times)
            found[name] += attempted(f"{work.algorithm} {environment} {name}", attempt)
    rows = {name: figures_of(runs) for name, runs in found.items() if runs}
    print_table(f"{work.algorithm} on {environment}, {work.num_envs} environments x {work.num_steps} steps", rows)
    endless = asdict(replace(work, total_timesteps=10**9))
    return {"work": endless, "environment": environment, "policies": policies, "figures": rows}


# --- kernels in groups ------------------------------------------------------------------------------------


def compare_kernels(name: str, work: Work, times: Times) -> dict[str, Any]:
    """Measures one policy with kernels and without, in pairs."""
    pairs: list[dict[str, Steady]] = []
    for number in range(times.rounds):
        pair: dict[str, Steady] = {}
        for fusion in ("off", "full") if number % 2 else ("full", "off"):
            layout = f"{POLICIES[name]} --fusion {fusion}"
            attempt = partial(train_briefly, work, work.environment, layout, times)
            for run in attempted(f"{name} {fusion}", attempt):
                pair[fusion] = run
        pairs += [pair] if len(pair) == 2 else []
    ratios = [pair["full"].steps_per_second / pair["off"].steps_per_second for pair in pairs]
    if not ratios:
        return {"policy": name, "layout": POLICIES[name], "failed": True}
    print(f"{name}: {median(ratios):.2f} x\n", flush=True)
    figures = {fusion: figures_of([pair[fusion] for pair in pairs]) for fusion in ("off", "full")}
    found = {"policy": name, "layout": POLICIES[name], "work": asdict(work)}
    return {**found, "figures": figures, "ratio": spread(ratios)}


# --- beside RLlib ------------------------------------------------------------------------------------------


def train_with_rllib(work: Work, python: str, layout: RLlibLayout, warm_up: int, seconds: float | None) -> dict:
    """Trains in a Python that has RLlib; to the end without `seconds`."""
    order = {**asdict(work), **layout._asdict(), "warm_up": warm_up, "seconds": seconds}
    command = [python, str(HERE / "rllib_training.py"), json.dumps(order)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


class Contestant(NamedTuple):
    """One side of a comparison, whose layouts compete with each other first."""

    layouts: dict[str, Any]
    try_briefly: Callable[[Any], Steady]
    train_to_the_end: Callable[[Any], Steady]


def rollmill_side(work: Work, environment: str, times: Times) -> Contestant:
    names = TRIED if work.algorithm == "ppo" else (*TRIED, *ASYNCHRONOUS)
    warm_up = times.warm_up_batches * work.batch
    return Contestant(
        {name: LAYOUTS[name] for name in names},
        lambda layout: train_briefly(work, environment, layout, times),
        lambda layout: train(rollmill_arguments(work, environment, layout), seconds=None, warm_up=warm_up),
    )


def rllib_side(work: Work, python: str, times: Times, details: list[dict]) -> Contestant:
    """Returns RLlib's side, which adds all that a training to the end printed to `details`."""

    def run(layout: RLlibLayout, seconds: float | None) -> Steady:
        found = train_with_rllib(work, python, layout, times.warm_up_batches * work.batch, seconds)
        details.extend([found] if seconds is None else [])
        return Steady(*(found[name] for name in Steady._fields))

    layouts = {str(layout): layout for layout in LAYOUTS_OF_RLLIB[work.algorithm]}
    return Contestant(layouts, lambda layout: run(layout, times.seconds), lambda layout: run(layout, None))


def compare_with_rllib(work: Work, python: str, times: Times) -> dict[str, Any]:
    """Trains the best layout of each side to the end in turns."""
    print(f"\n{work.algorithm} on {work.environment}: trying layouts", flush=True)
    details: list[dict] = []
    sides = {"rllib": rllib_side(work, python, times, details)}
    sides |= {f"rollmill {home}": rollmill_side(work, home, times) for home in work.homes}
    tried: dict[str, dict[str, float | None]] = {}
    for name, side in sides.items():
        runs = {
            one: attempted(f"  {name}, {one}", partial(side.try_briefly, it)) for one, it in side.layouts.items()
        }
        tried[name] = {layout: run[0].steps_per_second if run else None for layout, run in runs.items()}
        if not any(tried[name].values()):
            raise SystemExit(f"no layout of {name} ran.")
    chosen = {name: max(rates, key=lambda layout: rates[layout] or 0.0) for name, rates in tried.items()}
    trained: dict[str, list[Steady]] = {name: [] for name in sides}
    for _ in range(times.rounds):
        for name, side in sides.items():
            attempt = partial(side.train_to_the_end, side.layouts[chosen[name]])
            trained[name] += attempted(f"  {name}, {chosen[name]}", attempt)
    figures = {name: figures_of(runs) for name, runs in trained.items() if runs}
    rates = {name: row["steps_per_second"]["median"] for name, row in figures.items()}
    ratios = {name: speed / rates["rllib"] for name, speed in rates.items() if name != "rllib"}
    print_table(f"{work.algorithm} on {work.environment}", figures)
    print("  " + ", ".join(f"{name} / rllib {ratio:.2f}" for name, ratio in ratios.items()), flush=True)
    found = {"work": asdict(work), "tried": tried, "chosen": chosen, "figures": figures}
    return {**found, "ratios": ratios, "rllib": details}


def main() -> None:
    chosen = options(
        __doc__,
        {"what": one_of("policies", "kernels", "rllib")},
        rllib=(str, "a Python with ray[rllib]==2.60.0"),
        algorithms=["ppo", "impala"],
        environments=["CartPole-v1", "HalfCheetah-v5"],
        rounds=3,
        layouts=some_of(POLICIES, FUSED),
        num_envs=FUSED_WORK.num_envs,
        seconds=(10.0, "that count, of each training of a given time"),
        name=(str, "of the result, by default distribution- and what is measured"),
        quick=(False, "very short runs, whose figures mean nothing"),
    )
    if chosen.what == "rllib" and not chosen.rllib:
        raise SystemExit("rllib needs --rllib PYTHON.")
    quick = Times(warm_up=0.5, seconds=1.0, warm_up_batches=2, rounds=1)
    times = quick if chosen.quick else Times(rounds=chosen.rounds, seconds=chosen.seconds)
    works = [w for w in WORKS if w.algorithm in chosen.algorithms and w.environment in chosen.environments]
    name = chosen.name or f"distribution-{chosen.what}"
    if chosen.what == "policies":
        rows = [compare_policies(work, name, times) for work in works for name in work.homes]
    elif chosen.what == "kernels":
        work, rows = replace(FUSED_WORK, num_envs=chosen.num_envs), []
        for layout in chosen.layouts:
            rows.append(compare_kernels(layout, work, times))
            write_result(name, {"quick": chosen.quick, "rows": rows}, chosen.output)
    else:
        short = [replace(work, total_timesteps=6 * work.batch) for work in works]
        rows = [compare_with_rllib(work, chosen.rllib, times) for work in (short if chosen.quick else works)]
    write_result(name, {"quick": chosen.quick, "rows": rows}, chosen.output)


if __name__ == "__main__":
    main()
