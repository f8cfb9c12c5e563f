"""Stable-Baselines3's PPO on `rollmill.to_gymnasium("CartPole-v1")`, beside Gymnasium's own CartPole-v1.

    python benchmarks/offered.py --sb3 .sb3/bin/python     # a Python with Rollmill and stable-baselines3==2.7.0

Sides take turns, seed by seed, each training in a process of its own (offered_sb3.py).
"""

import os
import sys
from statistics import fmean
from typing import Any

from measure import foreign, options, spread, write_result

SIDES = ("gymnasium", "single", "vector")
STEPS = 61_440


def main() -> None:
    chosen = options(__doc__, sb3=sys.executable, seeds=3, copies=8)
    rows: list[dict[str, Any]] = []
    for seed in range(1, chosen.seeds + 1):
        for side in SIDES:
            order = {"side": side, "seed": seed, "copies": chosen.copies, "steps": STEPS}
            rows.append(foreign(chosen.sb3, "offered_sb3.py", order, env={**os.environ, "OMP_NUM_THREADS": "1"}))
            write_result("offered", summary(rows), chosen.output)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the steps a second and the returns of each side, over its seeds."""
    sides = {side: [row for row in rows if row["side"] == side] for side in SIDES}
    return {
        side: {
            "steps_per_second": spread([row["steps_per_second"] for row in each]),
            **{name: [row[name] for row in each] for name in ("last_100_episodes", "greedy_return")},
            "mean_greedy_return": fmean(row["greedy_return"] for row in each),
        }
        for side, each in sides.items()
        if each
    }


if __name__ == "__main__":
    main()
