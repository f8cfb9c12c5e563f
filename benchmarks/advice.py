"""Does what a profile advises make a training as much faster as it predicts? Profiles, follows, and measures.

    python benchmarks/advice.py [--cores 2] [--minutes 8] [--repeats 2] [--workload NAME ...] [--platform gpu]

Each workload is profiled. Each piece of advice with a prediction is followed: the training is run by `rollmill
train` as it was and with the options of the advice, in turns. Compared are seconds an environment step, of the
lines of metrics.jsonl after the first quarter of a training, so that start-up and compilation do not count. A
prediction holds if half of it is gained.

`--cores N` gives each workload N cores of those that this process may use, and as many workloads run side by side
as there are such groups of cores. Workloads that have not begun after `--minutes` are left out. Each row is
written at once, to results/advice-PLATFORM.json.
"""

import os
import queue
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from measure import HERE, Failed, in_turns, lines_of, one_of, options, rate, rollmill, some_of, words, write_result
from profiler import profiled

from rollmill.profiling.results import Advice, Profile

OWN = "--import advised_environments"
SLEEPING = f"gymnasium:Waiting-v0 {OWN} --num-envs 8"
WORKLOADS = {
    "ppo, HalfCheetah": "ppo gymnasium:HalfCheetah-v5 --num-envs 8 --num-steps 256 --num-minibatches 32 "
    "--update-epochs 10",
    "ppo, steps that sleep": f"ppo {SLEEPING} --num-steps 64",
    "ppo, steps that compute": f"ppo gymnasium:Reckoning-v0 {OWN} --num-envs 8 --num-steps 64",
    "ppo, two environments": "ppo gymnasium:CartPole-v1 --num-envs 2 --num-steps 64",
    "ppo, pictures": f"ppo gymnasium:Pictures-v0 {OWN} --num-envs 8 --num-steps 16 --num-minibatches 4 "
    "--update-epochs 1",
    "sac, Pendulum on the host": "sac gymnasium:Pendulum-v1 --num-envs 8 --learning-starts 1000",
    "ppo, CartPole": "ppo CartPole-v1 --num-envs 256 --fusion off",
    "ppo, tiny batches": "ppo CartPole-v1 --num-envs 4 --num-steps 8 --fusion off",
    "dqn, CartPole": "dqn CartPole-v1 --learning-starts 1000 --fusion off",
    "a3c, Acrobot": "a3c Acrobot-v1 --num-envs 64 --fusion off",
    "alphazero, TicTacToe": "alphazero TicTacToe-v0 --num-envs 64 --fusion off",
    "mappo, Tag": "mappo TagContinuous-Small-v0 --num-envs 16 --fusion off",
    "a3c, two actors that sleep": f"a3c {SLEEPING} --distribution single-learner-coarse --actors 2",
}
ON_GPU = {
    "ppo, CartPole": "ppo CartPole-v1 --num-envs 4096 --num-steps 128 --fusion off",
    "ppo, CartPole, rollouts fused": "ppo CartPole-v1 --num-envs 4096 --num-steps 128 --fusion rollout",
    "ppo, Acrobot": "ppo Acrobot-v1 --num-envs 1024 --fusion off",
    "ppo, steps that sleep": WORKLOADS["ppo, steps that sleep"],
    "dqn, CartPole": WORKLOADS["dqn, CartPole"],
}
FILLED = 1000
"""Steps before which algorithms with a replay memory do not learn."""
SHORT = words("--windows 2 --unread-windows 2 --window-seconds 0.5 --profiled-seconds 0.3")
SECONDS, MIN_ITERATIONS = 6.0, 12
"""Shortest duration of a measured training, and its fewest iterations."""
MAX_SECONDS = 240.0


def main() -> None:
    chosen = options(
        __doc__,
        cores=(0, "of each workload; all, one after another, if 0"),
        minutes=8.0,
        repeats=(2, "trainings of each side, in turns"),
        workload=some_of({**WORKLOADS, **ON_GPU}, []),
        platform=one_of("cpu", "gpu", default="cpu"),
    )
    until, rows = time.monotonic() + 60 * chosen.minutes, {}
    workloads = ON_GPU if chosen.platform == "gpu" else WORKLOADS
    if chosen.platform == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    slots = _slots(chosen.cores)
    with ThreadPoolExecutor(slots.qsize()) as pool:
        waiting = {
            pool.submit(_in_slot, slots, until, workloads[name].split(), chosen.repeats): name
            for name in chosen.workload or workloads
        }
        for done in as_completed(waiting):
            name, row = waiting[done], done.result()
            rows[name] = row
            print(_text(name, row), flush=True)
            result = {"cores": chosen.cores or os.cpu_count(), "summary": _summary(rows), "rows": rows}
            write_result(f"advice-{chosen.platform}", result, chosen.output)


def _slots(cores: int) -> "queue.Queue[set[int]]":
    """The groups of cores that workloads run on."""
    own = sorted(os.sched_getaffinity(0))
    size = min(cores or len(own), len(own))
    slots: queue.Queue[set[int]] = queue.Queue()
    for begin in range(0, len(own) - size + 1, size):
        slots.put(set(own[begin : begin + size]))
    return slots


def _in_slot(slots: "queue.Queue[set[int]]", until: float, command: Sequence[str], repeats: int) -> dict[str, Any]:
    slot = slots.get()
    try:
        os.sched_setaffinity(0, slot)  # of this thread, and so of the processes that it starts
        if time.monotonic() > until:
            return {"skipped": "no time was left"}
        return _checked(command, until, repeats)
    except (subprocess.SubprocessError, Failed) as error:
        return {"skipped": str(error)[-2000:]}
    finally:
        slots.put(slot)


def _checked(command: Sequence[str], until: float, repeats: int) -> dict[str, Any]:
    """A profile of a training, and what came of each piece of its advice that predicts something."""
    found = profiled([*command, *SHORT], timeout=MAX_SECONDS, env=_environment())
    row: dict[str, Any] = {
        "words": list(command),
        "iteration_seconds": found.iteration.unprofiled,
        "busy_cores": found.cores and found.cores.busy,
        "idle_cores": found.cores and found.cores.idle,
        "not_predicted": [one.title for one in found.advice if not one.saves],
        "followed": [],
    }
    for one in found.advice:
        if one.saves > 0 and time.monotonic() < until:
            row["followed"].append(_followed(command, found, one, repeats))
    return row


def _followed(command: Sequence[str], found: Profile, advice: Advice, repeats: int) -> dict[str, Any]:
    sides = [list(command), [*_without(command, advice.options), *advice.options.split()]]
    speeds = in_turns({number: partial(_speed, side, found) for number, side in enumerate(sides)}, repeats)
    before, after = (1.0 / median(each) for each in speeds.values())
    predicted = advice.saves / found.iteration.unprofiled
    saved = 1.0 - after / before
    return {
        "advice": advice.title,
        "options": advice.options,
        "predicted": predicted,
        "saved": saved,
        "holds": saved >= predicted / 2,
        "steps_per_second": list(speeds.values()),
    }


def _speed(command: Sequence[str], found: Profile) -> float:
    """Environment steps a second of a training, without its beginning."""
    iterations = max(MIN_ITERATIONS, SECONDS / found.iteration.unprofiled)
    steps = int(iterations * found.training.env_steps) + FILLED
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        ending = words("--no-tensorboard", total_timesteps=steps, run_dir=run)
        rollmill("train", *command, *ending, timeout=MAX_SECONDS, env=_environment())
        rows = lines_of(run)
    learning = [row for row in rows if row.get("losses/total") is not None]
    late = [row for row in learning if row["seconds"] >= rows[-1]["seconds"] / 4]
    return rate(late[0], late[-1])


def _environment() -> dict[str, str]:
    paths = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": paths, "ROLLMILL_TYPE_CHECKS": "0"}


def _without(command: Sequence[str], options: str) -> list[str]:
    """The words without the options that are given anew."""
    kept, names, skipping = [], {word for word in options.split() if word.startswith("--")}, False
    for word in command:
        if word.startswith("--"):
            skipping = word in names
        if not skipping:
            kept.append(word)
    return kept


def _summary(rows: dict[str, dict[str, Any]]) -> dict[str, int]:
    followed = [one for row in rows.values() for one in row.get("followed", ())]
    return {
        "workloads": len(rows),
        "predictions": len(followed),
        "hold": sum(one["holds"] for one in followed),
        "without_a_prediction": sum(not row.get("followed") for row in rows.values() if "skipped" not in row),
        "skipped": sum("skipped" in row for row in rows.values()),
    }


def _text(name: str, row: dict[str, Any]) -> str:
    if "skipped" in row:
        return f"{name}: skipped, {row['skipped']}"
    if not row["followed"]:
        return f"{name}: nothing is predicted; {row['not_predicted'] or 'no advice'}"
    each = (
        f"{one['options']} saves {one['saved']:+.0%} of {one['predicted']:.0%} predicted: "
        f"{'holds' if one['holds'] else 'DOES NOT HOLD'}"
        for one in row["followed"]
    )
    return f"{name}: {'; '.join(each)}"


if __name__ == "__main__":
    main()
