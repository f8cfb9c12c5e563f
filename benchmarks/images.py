"""PPO on images on a few cores: Rollmill beside Stable-Baselines3, with one network on one environment.

    python benchmarks/images.py --sb3 .sb3/bin/python     # make benchmark-images

Each figure is of a whole process (image_training.py), pinned to the same cores; the two sides take turns, so that
a machine whose speed drifts slows both alike. Images are 84 x 84 x 4 bytes, the network is that of Mnih et al.
(2015) with one torso for policy and value, and the environment costs next to nothing. Both sides have to report
the same numbers of weights, gradient steps and environment steps. The bytes of a stored step are the growth of the
largest memory of the process with the length of a rollout, for minibatches of one size.
"""

import os
import sys
import time
from typing import Any, NamedTuple

from image_training import SHAPE
from measure import check_equal_work, foreign, options, some_of, spread, write_result

SIDES = ("rollmill", "sb3")
IMAGE_BYTES = SHAPE[0] * SHAPE[1] * SHAPE[2]
WORK = ("parameters", "gradient_steps", "env_steps")
FIGURES = ("steps_per_second", "process_steps_per_second", "cpu_seconds", "peak_bytes")


class Setting(NamedTuple):
    """Sizes of a training; `warm_up` is the number of iterations that are not timed."""

    num_envs: int
    num_steps: int
    num_minibatches: int
    epochs: int
    iterations: int
    warm_up: int = 2

    @property
    def env_steps(self) -> int:
        """Of the whole training."""
        return self.num_envs * self.num_steps * self.iterations

    @property
    def gradient_steps(self) -> int:
        """Of the whole training."""
        return self.num_minibatches * self.epochs * self.iterations


SETTINGS = {
    "16 x 32": Setting(16, 32, 16, 1, iterations=11),
    "16 x 128": Setting(16, 128, 16, 1, iterations=4, warm_up=1),
    "Atari": Setting(8, 128, 4, 4, iterations=4, warm_up=1),  # as Stable-Baselines3's zoo trains Atari games
}
SHORT = Setting(16, 128, 64, 1, iterations=2, warm_up=0)
LONG = Setting(16, 384, 192, 1, iterations=2, warm_up=0)


def main() -> None:
    chosen = options(
        __doc__,
        sb3=(sys.executable, "a Python with stable-baselines3==2.7.0 and torch"),
        settings=some_of(SETTINGS),
        cores=(2, "that each process is pinned to"),
        repeats=3,
        minutes=(6.0, "after which no more repeats begin"),
        memory=(True, "the bytes of a stored step"),
    )
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: chosen.cores])
    pythons = {"rollmill": sys.executable, "sb3": chosen.sb3}
    until = time.monotonic() + 60 * chosen.minutes
    stored = {side: stored_step(pythons, side) for side in SIDES} if chosen.memory else {}
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for _ in range(chosen.repeats):
        for name in chosen.settings:
            if time.monotonic() > until:
                break
            add_turn(runs.setdefault(name, {side: [] for side in SIDES}), pythons, SETTINGS[name])
            write_result("images", summary(runs, stored, chosen.cores), directory=chosen.output)


def stored_step(pythons: dict[str, str], side: str) -> float:
    """Bytes of memory that each further step of a rollout takes, with programs that were compiled before."""
    if side == "rollmill":
        for setting in (SHORT, LONG):
            done_by(pythons, side, setting)
    peaks = {setting: done_by(pythons, side, setting)["peak_bytes"] for setting in (SHORT, LONG)}
    steps = SHORT.num_envs * (LONG.num_steps - SHORT.num_steps)
    each = (peaks[LONG] - peaks[SHORT]) / steps
    print(f"{side}: {each:,.0f} bytes a stored step, {each / IMAGE_BYTES:.2f} images", flush=True)
    return each


def add_turn(runs: dict[str, list[dict[str, Any]]], pythons: dict[str, str], setting: Setting) -> None:
    """Runs both sides, the one that was second last time first."""
    order = SIDES if len(runs["sb3"]) % 2 == 0 else SIDES[::-1]
    turn = {side: done_by(pythons, side, setting) for side in order}
    work = {side: tuple(done[name] for name in WORK) for side, done in turn.items()}
    check_equal_work(work, (work["sb3"][0], setting.gradient_steps, setting.env_steps))
    for side in SIDES:
        runs[side].append(turn[side])
        print(side, setting, {name: round(turn[side][name], 1) for name in FIGURES}, flush=True)


def done_by(pythons: dict[str, str], side: str, setting: Setting) -> dict[str, Any]:
    """What one training did and took, as a process of its own."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    began = time.perf_counter()
    done = foreign(pythons[side], "image_training.py", {"side": side, **setting._asdict()}, env=environment)
    return {**done, "process_steps_per_second": setting.env_steps / (time.perf_counter() - began)}


def summary(
    runs: dict[str, dict[str, list[dict[str, Any]]]], stored: dict[str, float], cores: int
) -> dict[str, Any]:
    """Medians of all figures, and ratios of both sides."""
    rows = [row_of(name, turns) for name, turns in runs.items()]
    images = {side: each / IMAGE_BYTES for side, each in stored.items()}
    return {"cores": cores, "rows": rows, "bytes_of_a_stored_step": stored, "images_of_a_stored_step": images}


def row_of(name: str, turns: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    figures = {
        side: {figure: spread([done[figure] for done in turns[side]]) for figure in FIGURES} for side in SIDES
    }
    facts = ("version", "engine", "threads", "parameters", "gradient_steps", "env_steps")
    medians = {side: {figure: figures[side][figure]["median"] for figure in FIGURES} for side in SIDES}
    ratios = {figure: medians["rollmill"][figure] / medians["sb3"][figure] for figure in FIGURES}
    print(f"{name}: Rollmill / Stable-Baselines3 " + ", ".join(f"{f} {r:.2f}" for f, r in ratios.items()))
    done = {side: {fact: turns[side][-1][fact] for fact in facts} for side in SIDES}
    return {"setting": name, "sizes": SETTINGS[name]._asdict(), "done": done, "figures": figures, "ratios": ratios}


if __name__ == "__main__":
    main()
