"""CPU seconds from the shell to a return: PPO of Rollmill, Stable-Baselines3 and Rejax, in turns.

    python benchmarks/seconds_to_return.py [--sb3 PYTHON] [--rejax PYTHON] [--seeds 0 1 2]
    python benchmarks/seconds_to_return.py --merge FOLDER ...

A training counts until the first evaluation that reaches the threshold: the mean return of 20 episodes with the
most likely action, at regular steps. Evaluations themselves do not count on any side. Rollmill and Rejax train
a first time to show at which step they reach the threshold, and a second time, without evaluations, to be timed
up to there. Stable-Baselines3 tells how long its evaluations took. CPU seconds are user and system time of the
whole process with its children, start and compilation included, as other programs may share the cores. Rollmill
trains by the plain command's defaults. It and Rejax train cold, with an empty cache of compiled programs, and
warm, with what the cold training left there. Rejax gets the persistent cache of JAX, which is off by default.
Stable-Baselines3 has the hyperparameters of RL Zoo, and Rejax those that it publishes. A side without its Python
is left out. Writes results/seconds-to-return.json, to which `--merge` adds trainings that were written to other
folders.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from learning import rejax_settings
from measure import HERE, REJAX, Failed, foreign, lines_of, options, read_result, this_commit, write_result

from rollmill.core.machine import hardware
from rollmill.recipes.classic import RECIPES

EPISODES = 20


class Case(NamedTuple):
    """An environment with its threshold, and the settings of the peers."""

    environment: str
    threshold: float
    every: int
    recipe: str
    """The recipe with Rejax's settings."""
    zoo: dict[str, Any]
    """Settings of Stable-Baselines3's PPO by RL Zoo (hyperparams/ppo.yml)."""
    num_envs: int
    total_timesteps: int


CASES = [
    Case(
        *("CartPole-v1", 475.0, 5_000, "rejax-cartpole"),
        {
            **{"n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98, "n_epochs": 20},
            **{"ent_coef": 0.0, "learning_rate": "lin_0.001", "clip_range": "lin_0.2"},
        },
        *(8, 100_000),
    ),
    Case(
        *("Pendulum-v1", -200.0, 10_000, "rejax-pendulum"),
        {
            **{"n_steps": 1024, "gae_lambda": 0.95, "gamma": 0.9, "n_epochs": 10, "ent_coef": 0.0},
            **{"learning_rate": 1e-3, "clip_range": 0.2, "use_sde": True, "sde_sample_freq": 4},
        },
        *(4, 300_000),
    ),
]
"""RL Zoo trains Pendulum-v1 for 100,000 steps; more are left here to reach the threshold."""


def timed(command: Sequence[str], **variables: str) -> dict[str, Any]:
    """Runs a command; returns the JSON object that it prints last, its CPU seconds and wall-clock seconds."""
    with tempfile.TemporaryFile("w+") as output:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, env=os.environ | variables, cwd=HERE)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        printed = output.read()
    if process.returncode:
        raise Failed(f"{' '.join(command[:3])}: exit code {process.returncode}\n{printed[-2000:]}")
    found = json.loads(printed.splitlines()[-1])
    return found | {"cpu": usage.ru_utime + usage.ru_stime, "wall": wall}


def of_rollmill(case: Case, folder: Path, seed: int) -> dict[str, dict[str, Any]]:
    """Returns the cold and the warm training of a seed."""
    order = {"environment": case.environment, "threshold": case.threshold, "every": case.every, "seed": seed}
    run = lambda cache, **more: timed(
        [sys.executable, __file__, "train", json.dumps(order | more)], ROLLMILL_CACHE_DIR=str(folder / cache)
    )
    solved = run("evaluated")
    steps = {name: solved[name] for name in ("steps", "return")}
    return {f"Rollmill, {name}": run(str(seed), until=steps["steps"]) | steps for name in ("cold", "warm")}


def train(order: dict[str, Any]) -> None:
    """Trains by the defaults `until` so many steps, or until an evaluation reaches the threshold; prints both."""
    import rollmill

    until = order.get("until")
    evaluated = {"evaluate_every": order["every"], "evaluate_episodes": EPISODES}
    reached = rollmill.hooks.stop_at_return(order["threshold"], evaluated=True)
    with tempfile.TemporaryDirectory() as folder:
        rollmill.train(
            rollmill.ppo(order["environment"]),
            seed=order["seed"],
            run_dir=Path(folder, "run"),
            hooks=[_stop_after(until) if until else reached],
            tensorboard=False,
            quiet=True,
            **({} if until else evaluated),
        )
        rows = lines_of(Path(folder, "run"))
    # The iteration that was begun before the evaluation ended is computed and evaluated, too.
    solved = (row for row in rows if row.get("evaluation/return", -math.inf) >= order["threshold"])
    row = next(solved, rows[-1])
    print(json.dumps({"steps": row["env_steps"], "return": row.get("evaluation/return")}))


def _stop_after(steps: int) -> Any:
    from rollmill.hooks import MetricsLogged, Stop

    def stop(event: Any) -> Any:
        return Stop("enough") if isinstance(event, MetricsLogged) and event.row["env_steps"] >= steps else None

    return stop


def of_sb3(case: Case, python: str, seed: int) -> dict[str, Any]:
    same = ("environment", "threshold", "every", "num_envs", "total_timesteps")
    order = {name: getattr(case, name) for name in same}
    order |= {"settings": case.zoo, "seed": seed, "episodes": EPISODES}
    found = timed([python, str(HERE / "sb3_side.py"), json.dumps(order)])
    return found | {"cpu": found["cpu"] - found["evaluations"]}


def of_rejax(case: Case, python: str, seed: int, cache: Path) -> dict[str, dict[str, Any]]:
    """Returns the cold and the warm training of a seed. `cache` is an empty folder for compiled programs."""
    settings = rejax_settings(RECIPES[case.recipe]()) | {"eval_freq": case.every}
    order: dict[str, Any] = {"algorithm": "PPO", "settings": settings, "seeds": [seed], "episodes": EPISODES}
    returns = foreign(python, "rejax_side.py", order)["returns"][0]
    solved = next((i for i, each in enumerate(returns) if each >= case.threshold), None)
    if solved is None:
        missed = {"steps": settings["total_timesteps"], "return": max(returns), "cpu": None, "wall": None}
        return {"Rejax, cold": missed, "Rejax, warm": missed.copy()}
    short = settings | {"total_timesteps": solved * case.every, "eval_freq": solved * case.every}
    order = {"algorithm": "PPO", "settings": short, "repeats": 0, "seed": seed}
    kept = {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    sides = {}
    for name in ("Rejax, cold", "Rejax, warm"):
        found = timed([python, str(HERE / "rejax_side.py"), json.dumps(order)], **kept)
        cost = {each: found[each] for each in ("cpu", "wall")}
        sides[name] = {"steps": solved * case.every, "return": returns[solved], **cost}
    return sides


def measure(case: Case, sb3: str | None, rejax: str | None, seed: int) -> dict[str, dict[str, Any]]:
    """Returns what every side took with a seed, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        sides = of_rollmill(case, Path(folder), seed)
    if sb3:
        sides["Stable-Baselines3"] = of_sb3(case, sb3, seed)
    if rejax:
        with tempfile.TemporaryDirectory() as folder:
            sides |= of_rejax(case, rejax, seed, Path(folder))
    conditions = {
        "seed": seed,
        "commit": this_commit(),
        "processor": hardware()["cpu"],
        "cores": len(os.sched_getaffinity(0)),
    }
    for name, side in sides.items():
        side |= conditions
        print(f"{case.environment}, {name}: {side}", flush=True)
    return sides


def keep(case: Case, sides: dict[str, dict[str, Any]], folder: Path) -> None:
    """Adds the trainings of a seed to the result, in place of earlier ones of the same seed."""
    every = read_result("seconds-to-return", folder).get("environments", {})
    row = every.get(case.environment, {"threshold": case.threshold, "every": case.every, "sides": {}})
    for name, side in sides.items():
        others = [each for each in row["sides"].get(name, []) if each["seed"] != side["seed"]]
        row["sides"][name] = sorted([*others, side], key=lambda each: each["seed"])
    every |= {case.environment: row}
    kept = {each.environment: every[each.environment] for each in CASES if each.environment in every}
    write_result("seconds-to-return", {"episodes": EPISODES, "environments": kept}, folder)


def merge(folder: Path, output: Path) -> None:
    """Adds the trainings in a folder to the result."""
    for case in CASES:
        row = read_result("seconds-to-return", folder).get("environments", {}).get(case.environment, {"sides": {}})
        by_seed: dict[int, dict[str, dict[str, Any]]] = {}
        for name, trainings in row["sides"].items():
            for each in trainings:
                by_seed.setdefault(each["seed"], {})[name] = each
        for sides in by_seed.values():
            keep(case, sides, output)


def main() -> None:
    names = [case.environment for case in CASES]
    sides = {"sb3": (str, "a Python with stable-baselines3"), "rejax": (str, REJAX)}
    chosen = options(__doc__, None, seeds=[0, 1, 2], environments=names, merge=[Path], **sides)
    if chosen.merge:
        for folder in chosen.merge:
            merge(folder, chosen.output)
        return
    for seed in chosen.seeds:
        for case in CASES:
            if case.environment in chosen.environments:
                keep(case, measure(case, chosen.sb3, chosen.rejax, seed), chosen.output)


if __name__ == "__main__":
    train(json.loads(sys.argv[2])) if sys.argv[1:2] == ["train"] else main()
