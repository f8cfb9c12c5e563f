"""Stable-Baselines3's PPO on environments of `rollmill.to_gymnasium`, beside the same ones made for Gymnasium.

    python benchmarks/offered.py --sb3 .sb3/bin/python     # a Python with Rollmill and stable-baselines3==2.7.0

CartPole-v1, and an environment of one's own: each is a side made for Gymnasium, and one or two of Rollmill. All
sides of an environment train in one process (offered_sb3.py), in turns of one rollout and its updates, so that
a machine that is busy with other work slows all of them alike. Wall and CPU seconds of each turn are measured, and
the ratios are medians over turns. `steps` without learning are measured likewise, by random actions.
"""

import os
import sys
from statistics import fmean, median
from typing import Any

from measure import foreign, options, write_result

SIDES = {"cartpole": ("gymnasium", "single", "vector"), "own": ("gymnasium", "single", "vector")}
STEPS = {"cartpole": 61_440, "own": 20_480}
CLOCKS = ("wall", "cpu")


def main() -> None:
    chosen = options(__doc__, sb3=sys.executable, seeds=2, copies=8)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    found: dict[str, Any] = {}
    for name, sides in SIDES.items():
        processes = []
        for seed in range(1, chosen.seeds + 1):
            order = {
                "environment": name,
                "sides": sides,
                "seed": seed,
                "copies": chosen.copies,
                "steps": STEPS[name],
            }
            processes.append(foreign(chosen.sb3, "offered_sb3.py", order, env=environment))
            found[name] = {"steps": STEPS[name], "copies": chosen.copies, "sides": summary(processes)}
            write_result("offered", {"versions_of_sb3": processes[0]["versions"], **found}, chosen.output)


def summary(processes: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns steps a second, ratios to Gymnasium's side, and returns of each side, over the seeds."""
    return {
        side: {
            **{what: rates(processes, side, what) for what in ("training", "stepping")},
            **{name: [each["sides"][side][name] for each in processes] for name in ("before", "last", "greedy")},
            "mean_greedy": fmean(each["sides"][side]["greedy"] for each in processes),
        }
        for side in processes[0]["sides"]
    }


def rates(processes: list[dict[str, Any]], side: str, what: str) -> dict[str, Any]:
    """Returns medians over turns: of steps a wall and a CPU second, and of their ratios to Gymnasium's side."""
    turns = [turn for each in processes for turn in each["sides"][side][what]]
    others = [turn for each in processes for turn in each["sides"]["gymnasium"][what]]
    return {
        f"{name}_{clock}": median(
            turn["steps"] / turn[clock] / (other["steps"] / other[clock] if name == "ratio" else 1.0)
            for turn, other in zip(turns, others, strict=True)
        )
        for clock in CLOCKS
        for name in ("steps_per_second", "ratio")
    }


if __name__ == "__main__":
    main()
