"""PPO on CartPole-v1 on one GPU and on several, in one process and in one for each: weak scaling.

    python benchmarks/scaling.py --gpus 2 4 --sizes 4096x128 65536x64 [--fusion full] [--reductions flat one-shot]

Every GPU has as many environments, so that two do twice the work of one. Figures are environment steps per second
between a third of the training and its end, by its own metrics. One GPU is measured on each of them, side by side,
since GPUs of one kind differ. Kinds take turns, and ratios are of medians. Writes results/scaling-gpu.json or
scaling-fused-gpu.json after each round.
"""

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from measure import lines_of, one_of, options, rate, rollmill, spreads, words, write_result

from rollmill.core.machine import visible_gpus

ONE = "one GPU"


def kinds(gpus: Sequence[int], reductions: Sequence[str]) -> dict[str, tuple[int, list[str]]]:
    """Returns the number of GPUs and the options of the command by the name of a kind."""
    found: dict[str, tuple[int, list[str]]] = {ONE: (1, [])}
    for number in gpus:
        for processes, place in (("one process", "program"), (f"{number} processes", "mesh")):
            for way in reductions:
                name = f"{number} GPUs, {processes}" + ("" if way == "auto" else f", means {way}")
                found[name] = number, words("", learners=number, place=place, reduction=way)
    return found


class Training(NamedTuple):
    steps_per_second: float
    reduction: str
    """How it took means; `auto` if there was nothing to choose."""
    launches: dict[str, Any] | None
    """Launches of its kernels, which are chosen by timing and may differ between trainings of one size."""


def measured(gpus: int, placement: list[str], size: tuple[int, int], chosen: Any, on: str = "") -> Training:
    """Trains once, on the GPU of that name in CUDA_VISIBLE_DEVICES or on the first ones."""
    envs, steps = size[0] * gpus, size[1]
    sizes = words("", num_envs=envs, num_steps=steps, total_timesteps=envs * steps * chosen.iterations)
    own = words("--no-tensorboard --quiet", learning_rate=2.5e-4, fusion=chosen.fusion)
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": on} if on else {})
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = ("train", "ppo", "CartPole-v1", *own, *placement, *sizes)
        rollmill(*command, "--run-dir", run, env=environment)
        lines, config = lines_of(run), json.loads((run / "config.json").read_text())
    speed = rate(lines[len(lines) // 3], lines[-1])
    return Training(speed, config["options"]["reduction"], config["launches"])


def on_each_gpu(size: tuple[int, int], chosen: Any) -> list[Training]:
    """Trains on one GPU each, side by side."""
    gpus = visible_gpus()
    with ThreadPoolExecutor(len(gpus)) as threads:
        return list(threads.map(lambda on: measured(1, [], size, chosen, on), gpus))


def compare(size: tuple[int, int], chosen: Any) -> Iterator[dict[str, Any]]:
    """Yields the figures of one size after each round."""
    compared = kinds(chosen.gpus, chosen.reductions)
    trainings: dict[str, list[Training]] = {kind: [] for kind in compared}
    for _ in range(chosen.rounds):
        for kind, (number, placement) in compared.items():
            found = on_each_gpu(size, chosen) if kind == ONE else [measured(number, placement, size, chosen)]
            trainings[kind] += found
            text = ", ".join(f"{each.steps_per_second / 1e6:.1f} ({each.reduction})" for each in found)
            print(f"{size[0]} x {size[1]} each, {kind}: {text} M steps/s", flush=True)
        figures = spreads({kind: [each.steps_per_second for each in own] for kind, own in trainings.items()})
        yield {
            **{"envs_per_gpu": size[0], "num_steps": size[1], "fusion": chosen.fusion},
            "steps_per_second": figures,
            "over_one_gpu": {kind: each["median"] / figures[ONE]["median"] for kind, each in figures.items()},
            "reductions": {kind: [each.reduction for each in own] for kind, own in trainings.items()},
            "launches": {kind: [each.launches for each in own] for kind, own in trainings.items()},
        }


def main() -> None:
    chosen = options(
        __doc__,
        sizes=(["4096x128", "16384x128"], "environments of each GPU, and steps"),
        gpus=([2], "numbers of GPUs beside one"),
        reductions=(["auto"], "ways to take means"),
        fusion=one_of("off", "rollout", "full", "auto", default="off"),
        iterations=400,
        rounds=3,
    )
    name = "scaling-gpu" if chosen.fusion == "off" else "scaling-fused-gpu"
    results: dict[str, dict[str, Any]] = {}
    for size in chosen.sizes:
        envs, steps = map(int, size.split("x"))
        for results[size] in compare((envs, steps), chosen):
            write_result(name, {"weak_scaling": list(results.values())}, chosen.output)


if __name__ == "__main__":
    main()
